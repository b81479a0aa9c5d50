"""Checks with Python programs as people run them: CuPy, PyTorch, JAX, Numba, and a job of two ranks."""

import importlib.util
import pathlib
import socket
import statistics
import sys

from machine import GIB, MIB
from running import MEASURED, BelowGoal, Failed, NotRun, same

HERE = pathlib.Path(__file__).resolve().parent
# A context without memory in it costs several hundred MiB on a data-centre GPU; this is what may come from elsewhere.
NO_CONTEXT = 100 * MIB
PEER_GOAL = 0.97
STEP_GOAL = 1.01


def client(name, *arguments):
    return [sys.executable, HERE / name, *arguments]


def needs_modules(*modules):
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise NotRun(f"no {', '.join(missing)} in {sys.executable}")


def needs_two_gpus(lab):
    if len(lab.machine.gpus) < 2:
        raise NotRun("needs two GPUs")


def _share(lab, share):
    return int(lab.machine.gpus[0].total * share)


def _held_by(lab):
    """The pool run of cupy_two.py, stopped while both arrays live: nvidia-smi's bytes before and then, and the run."""
    if "cupy_two" not in lab.kept:
        smi = lab.machine.has_smi
        before = lab.machine.used() if smi else None
        child = lab.start(client("cupy_two.py", "pool", _share(lab, 0.7), "hold"), None, {"HOST_LIMIT": "0"})
        said = child.read_until(MEASURED, 120)
        during = lab.machine.used() if smi and MEASURED in said else None
        lab.kept["cupy_two"] = before, during, child.finish(120, said)
    return lab.kept["cupy_two"]


def cupy_two(lab):
    """Two arrays of 70 % of a GPU on device 0; the part on the peer is as fast as a program's own peer memory."""
    needs_modules("cupy")
    needs_two_gpus(lab)
    size = _share(lab, 0.7)
    bare = lab.bare(client("cupy_two.py", "overflow", size), 90).succeeded()
    if bare.lines()[-1:] != ["second array: OutOfMemoryError"]:
        raise Failed(f"bare, the second array should not fit: {bare.lines()}")
    _, _, held = _held_by(lab)
    printed(held.succeeded(), ["a: right", "b: right", "a += b: right"])
    if not held.events("pool.spill"):
        raise Failed("no pool.spill in the log, so both arrays would have fitted")

    # One peer lends, as in the native run; more of them could only be faster.
    pairs = []
    for _ in range(5):
        shim = lab.shim(client("cupy_two.py", "pool", size), 90, {"HOST_LIMIT": "0", "DEVICES": "0,1"})
        printed(shim.succeeded(), ["a: right", "b: right", "a += b: right"])
        native = lab.bare(client("cupy_two.py", "native", size), 90)
        printed(native.succeeded(), ["a += b: right"])
        measured = shim.measured()
        on_peer = measured["held"].get("gpu1", 0)
        if on_peer < measured["quarter"]:
            raise Failed(f"{on_peer} bytes are on GPU 1, fewer than the {measured['quarter']} of the second operand")
        pairs.append((measured["rate"], native.measured()["rate"]))
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    ours, theirs = (statistics.median(column) for column in zip(*pairs))
    detail = (
        f"bare: second array OutOfMemoryError; shim: 2 x {size / GIB:.0f} GiB, sums right; a += b with b on the peer "
        f"{ours:.0f} GB/s, native peer memory {theirs:.0f} GB/s, ratio {ratio:.3f} (goal {PEER_GOAL})"
    )
    lines = [f"a += b: shim {one:7.1f} GB/s, native {other:7.1f} GB/s, ratio {one / other:.3f}" for one, other in pairs]
    if ratio < PEER_GOAL:
        raise BelowGoal(detail, lines)
    return detail, lines


def printed(finished, expected):
    if finished.lines() != expected:
        raise Failed(f"{finished.command}: printed {finished.lines()}, expected {expected}")


def _on_peers(held):
    return sum(size for place, size in held.items() if place.startswith("gpu") and place != "gpu0")


def contexts(lab):
    """nvidia-smi's memory per GPU while the pool holds both arrays: a context only where the program works."""
    needs_modules("cupy")
    needs_two_gpus(lab)
    if not lab.machine.has_smi:
        raise NotRun("no nvidia-smi")
    before, during, finished = _held_by(lab)
    finished.succeeded()
    if during is None:
        raise Failed("the CuPy client ended before it held both arrays")
    held = finished.measured(0)["held"]
    beyond = [now - was - held.get(f"gpu{gpu}", 0) for gpu, (was, now) in enumerate(zip(before, during))]
    lines = [
        f"gpu{gpu}: {during[gpu] // MIB} MiB in use, {held.get(f'gpu{gpu}', 0) // MIB} MiB of them the pool's, "
        f"{before[gpu] // MIB} MiB before, {beyond[gpu] // MIB} MiB beyond"
        for gpu in range(len(during))
    ]
    created = sorted({record["device"] for record in finished.events("context.create")})
    detail = "MiB beyond the pool's memory: " + ", ".join(f"gpu{gpu} {size // MIB}" for gpu, size in enumerate(beyond))
    detail += f"; context.create in the log for GPU {', '.join(map(str, created)) or 'none'}"
    if created != [0] or any(abs(size) >= NO_CONTEXT for size in beyond[1:]):
        raise Failed(f"{detail}; expected a context on GPU 0 only, and under {NO_CONTEXT // MIB} MiB elsewhere")
    if not _on_peers(held):
        raise Failed(f"{detail}; no other GPU lends, so this shows nothing")
    return detail, lines


def torch(lab):
    """A training loop, eager and as a CUDA graph: the same losses, and the time of a step."""
    needs_modules("torch")
    times = {"eager": [], "graph": []}
    reference = None
    for _ in range(3):
        bare = lab.bare(client("torch_train.py"), 90).succeeded()
        reference = same(reference, bare) if reference else bare
        shim = same(reference, lab.shim(client("torch_train.py"), 90))
        exits = shim.events("process.exit")
        if not exits or not exits[-1]["allocations"]:
            raise Failed("the pool served nothing, so this compares bare with bare")
        for name, pairs in times.items():
            pairs.append((shim.measured()["milliseconds"][name], bare.measured()["milliseconds"][name]))
    medians = {name: [statistics.median(column) for column in zip(*pairs)] for name, pairs in times.items()}
    ratios = {name: ours / theirs for name, (ours, theirs) in medians.items()}
    steps = [
        f"{name} {ours:.3f} ms, bare {theirs:.3f} ms, ratio {ratios[name]:.4f}"
        for name, (ours, theirs) in medians.items()
    ]
    detail = f"losses the same in 6 runs; step {', '.join(steps)} (goal {STEP_GOAL})"
    lines = [f"{name}: shim {one:.3f} ms, bare {other:.3f} ms" for name, pairs in times.items() for one, other in pairs]
    if max(ratios.values()) > STEP_GOAL:
        raise BelowGoal(detail, lines)
    return detail, lines


def torch_oversize(lab):
    """Tensors of 1.3 times GPU 0; PyTorch must be told to return its cache before the GPU overflows."""
    needs_modules("torch")
    needs_two_gpus(lab)
    command = client("torch_oversize.py", _share(lab, 0.1), 13)
    bare = lab.bare(command, 90).succeeded(3)
    shim = lab.shim(command, 120, {"HOST_LIMIT": "0"}).succeeded()
    expected = [
        "13 tensors, wrong: []",
        "sums: right",
        "after empty_cache: 0 bytes reserved",
        "a tensor made afterwards: right",
    ]
    printed(shim, expected)
    measured = shim.measured()
    soft = [record for record in shim.events("pool.refuse") if record["why"] == "soft"]
    if not soft or measured["retries"] < 1:
        raise Failed(f"{len(soft)} soft refusals in the log, {measured['retries']} retries of PyTorch, expected both")
    if not _on_peers(measured["held"]):
        raise Failed(f"nothing lay on another GPU: {measured['held']}")
    held = ", ".join(f"{place} {size / GIB:.1f}" for place, size in measured["held"].items())
    return f"bare: {bare.lines()[0]}; shim: 13 of 13, sums right; GiB held: {held}; soft refusals: {len(soft)}"


def _two_ranks():
    """By number, since a machine without a network need not resolve its own name."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"]
    return [*launcher, "--master-addr=127.0.0.1", f"--master-port={port}", HERE / "ddp.py"]


def nccl(lab):
    """Two ranks of data-parallel training: the same losses, each rank on its own GPU."""
    needs_modules("torch")
    needs_two_gpus(lab)
    bare, shim = lab.bare(_two_ranks(), 120).succeeded(), lab.shim(_two_ranks(), 120).succeeded()
    if len(bare.lines()) != 2 or sorted(bare.lines()) != sorted(shim.lines()):
        raise Failed(f"losses differ: shim {sorted(shim.lines())}, bare {sorted(bare.lines())}"[:500])
    ranks = [log for log in shim.logs if any(record["event"] == "pool.open" for record in log)]
    homes = []
    for log in ranks:
        if not any(record["event"] == "note" and record.get("about") == "home_only" for record in log):
            raise Failed(f"process {log[0]['pid']}: the log does not say that the rank keeps to its own GPU")
        peaks = [peak for record in log if record["event"] == "process.exit" for peak in record["peak"]]
        homes.append(sorted(peak["place"] for peak in peaks if peak["peak_used"] and peak["place"].startswith("gpu")))
    if sorted(homes) != [["gpu0"], ["gpu1"]]:
        raise Failed(f"pooled memory of the {len(ranks)} ranks lay on {homes}, expected each on its own GPU")
    return "losses the same; the log of each rank says that it keeps to its own GPU, and it did"


def jax(lab):
    """A jitted training step, with JAX's preallocation and without it."""
    needs_modules("jax")
    gpus = lab.machine.gpus
    base = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}
    gradual = {**base, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    cases = [("preallocating", base), ("allocating as needed", gradual)]
    if len(gpus) > 1:
        cases.insert(0, ("one GPU visible, preallocating", {**base, "CUDA_VISIBLE_DEVICES": gpus[0].selector or "0"}))
        # It sizes itself by what it is told a GPU has, which is now the pool, and shrinks until the driver agrees. The
        # first size that fits must leave some of the GPU to others: 0.93 of it, with the one before it too large.
        fraction = 0.93 / len(gpus)
        while fraction / 0.9 <= 0.75:
            fraction /= 0.9
        cases[1] = ("all GPUs visible, preallocating", {**base, "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{fraction:.4f}"})
    reference = lab.bare(client("jax_train.py"), 90, base).succeeded()
    if reference.measured()["platform"] != "gpu":
        raise NotRun(f"JAX runs on {reference.measured()['platform']} here")
    same(reference, lab.bare(client("jax_train.py"), 90, gradual))
    limits = []
    for name, env in cases:
        shim = same(reference, lab.shim(client("jax_train.py"), 90, env=env))
        limits.append(f"{name}: limit {(shim.measured()['limit'] or 0) / GIB:.0f} GiB")
    return f"losses the same as bare; {'; '.join(limits)}"


def numba(lab):
    """A Numba kernel."""
    needs_modules("numba")
    # Numba is particular about its NumPy; where the two do not go together there is nothing to compare.
    alone = lab.bare(client("numba_add.py"), 90)
    if alone.status != 0:
        raise NotRun(f"Numba fails without us too: {alone.stderr.strip().splitlines()[-1]}")
    bare, shim = lab.both(client("numba_add.py"), 90)
    bare.succeeded()
    if not shim.events("pool.grow"):
        raise Failed("the pool served nothing, so this compares bare with bare")
    return f"same lines as bare; the pool grew {len(shim.events('pool.grow'))} times"
