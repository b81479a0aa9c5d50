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
    cases = [("preallocating", base), ("allocating as needed", gradual)]
    if len(gpus) > 1:
        cases.insert(0, ("one GPU visible, preallocating", {**base, "CUDA_VISIBLE_DEVICES": gpus[0].selector or "0"}))
        fraction = {"XLA_PYTHON_CLIENT_MEM_FRACTION": _first_fit(len(gpus))}
        cases[1] = ("all GPUs visible, preallocating", {**base, **fraction})
    reference = lab.bare(client("jax_train.py"), 90, base).succeeded()
    if reference.measured()["platform"] != "gpu":
        raise NotRun(f"JAX runs on {reference.measured()['platform']} here")
    same(reference, lab.bare(client("jax_train.py"), 90, gradual))
    limits = []
    for name, env in cases:
        shim = same(reference, lab.shim(client("jax_train.py"), 90, env=env))
        limits.append(f"{name}: limit {(shim.measured()['limit'] or 0) / GIB:.0f} GiB")
    return f"losses the same as bare; {'; '.join(limits)}"


def _first_fit(gpus):
    """XLA_PYTHON_CLIENT_MEM_FRACTION for a program that preallocates. JAX sizes itself by what it is told a GPU has, which
    is the pool, and shrinks by a tenth at a time until the driver agrees: the first size that fits must leave some of the
    GPU to others, so it is 0.93 of it, with the one before it too large."""
    fraction = 0.93 / gpus
    while fraction / 0.9 <= 0.75:
        fraction /= 0.9
    return f"{fraction:.4f}"


def growing(lab):
    """Arrays that together are 1.3 times GPU 0, on one device of JAX's, which takes memory as it needs it."""
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return _past_one_gpu(lab, env)


def preallocating(lab):
    """The same where JAX takes most of what it is told there is at its start."""
    return _past_one_gpu(lab, {"XLA_PYTHON_CLIENT_MEM_FRACTION": _first_fit(len(lab.machine.gpus))})


def _past_one_gpu(lab, env):
    needs_modules("jax")
    bare, shim, used = past_one_gpu(lab, client("jax_grow.py", share(lab, 0.05), 26), "26 arrays", env)
    printed(shim, ["26 arrays", "wrong words: 0", "arrays that were made anew: 0 wrong words"])
    return f"bare: {bare.lines()[0]}; shim: 26 of 26 right; GiB in use: {used}"
