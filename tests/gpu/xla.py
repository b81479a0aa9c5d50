"""Checks with JAX."""

from client import client, needs_modules, past_one_gpu, printed, share
from machine import GIB
from running import NotRun, same


def training(lab):
    """A jitted training step, with JAX's preallocation and without it."""
    needs_modules("jax")
    gpus = lab.machine.gpus
    base = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}
    gradual = {**base, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    cases = [("preallocating for all GPUs", base), ("allocating as needed", gradual)]
    if len(gpus) > 1:
        cases.insert(0, ("one GPU visible, preallocating", {**base, "CUDA_VISIBLE_DEVICES": gpus[0].selector or "0"}))
    reference = lab.bare(client("jax_train.py"), 90, base).succeeded()
    if reference.measured()["platform"] != "gpu":
        raise NotRun(f"JAX runs on {reference.measured()['platform']} here")
    same(reference, lab.bare(client("jax_train.py"), 90, gradual))
    limits = []
    for name, env in cases:
        shim = same(reference, lab.shim(client("jax_train.py"), 90, {"HOST_LIMIT": "0"}, env))
        limits.append(f"{name}: limit {(shim.measured()['limit'] or 0) / GIB:.0f} GiB")
    return f"losses the same as bare; {'; '.join(limits)}"


def growing(lab):
    """Arrays that together are 1.3 times GPU 0, on one device of JAX's, which takes memory as it needs it."""
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return _past_one_gpu(lab, env)


def preallocating(lab):
    """The same where JAX takes three quarters of what it is told there is, more than a GPU has, in one piece at its start."""
    return _past_one_gpu(lab, {})


def _past_one_gpu(lab, env):
    needs_modules("jax")
    bare, shim, used = past_one_gpu(lab, client("jax_grow.py", share(lab, 0.05), 26), "26 arrays", env)
    printed(shim, ["26 arrays", "wrong words: 0", "arrays that were made anew: 0 wrong words"])
    return f"bare: {bare.lines()[0]}; shim: 26 of 26 right; GiB in use: {used}"
