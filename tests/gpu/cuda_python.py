"""Checks with programs that are written for CUDA by others: CuPy, Numba, RMM, cuda.core."""

import os
import re
import sys

import building
from client import client, needs_modules, needs_two_gpus, on_peers, past_one_gpu, printed, served, share, site
from machine import GIB, MIB
from paired import Pairs, in_turn
from running import MEASURED, BelowGoal, Failed, NotRun, same, side_by_side

# A context without memory in it costs several hundred MiB on a data-centre GPU; this is what may come from elsewhere.
NO_CONTEXT = 100 * MIB
PEER_GOAL = 0.97
# The least that cuCtxSynchronize took where nothing was submitted, over all machines of tests/bench/RESULTS.md.
WAIT_US = 0.26


def _held_by(lab):
    """The pool run of cupy_two.py, stopped while both arrays live: nvidia-smi's bytes before and then, and the run."""
    if "cupy_two" not in lab.kept:
        smi = lab.machine.has_smi
        before = lab.machine.used() if smi else None
        child = lab.start(client("cupy_two.py", "pool", share(lab, 0.7), "hold"), None, {"HOST_LIMIT": "0"})
        said = child.read_until(MEASURED, 120)
        during = lab.machine.used() if smi and MEASURED in said else None
        lab.kept["cupy_two"] = before, during, child.finish(120, said)
    return lab.kept["cupy_two"]


def cupy_two(lab):
    """Two arrays of 70 % of a GPU on device 0; the part on the peer is as fast as a program's own peer memory."""
    needs_modules("cupy")
    needs_two_gpus(lab)
    size = share(lab, 0.7)
    bare = lab.bare(client("cupy_two.py", "overflow", size), 90).succeeded()
    if bare.lines()[-1:] != ["second array: OutOfMemoryError"]:
        raise Failed(f"bare, the second array should not fit: {bare.lines()}")
    _, _, held = _held_by(lab)
    printed(held.succeeded(), ["a: right", "b: right", "a += b: right"])
    if not held.events("pool.spill"):
        raise Failed("no pool.spill in the log, so both arrays would have fitted")

    # One peer lends, as in the native run; more of them could only be faster.
    pairs, cold = Pairs("GB/s", ("shim", "native"), digits=1), []
    pooled = client("cupy_two.py", "pool", size)
    runs = in_turn(
        5,
        lambda: lab.shim(pooled, 90, {"HOST_LIMIT": "0", "DEVICES": "0,1"}),
        lambda: lab.bare(client("cupy_two.py", "native", size), 90),
    )
    for shim, native in runs:
        printed(shim.succeeded(), ["a: right", "b: right", "a += b: right"])
        printed(native.succeeded(), ["a += b: right"])
        measured = shim.measured()
        on_peer = measured["held"].get("gpu1", 0)
        if on_peer < measured["quarter"]:
            raise Failed(f"{on_peer} bytes are on GPU 1, fewer than the {measured['quarter']} of the second operand")
        pairs.add("a += b with b on the peer", measured["rate"], native.measured()["rate"])
        cold.append(measured["cold"] / native.measured()["cold"])
    first = f"first half second {min(cold):.3f} to {max(cold):.3f} of native; "
    before = f"bare: second array OutOfMemoryError; shim: 2 x {size / GIB:.0f} GiB, sums right; {first}"
    return pairs.judged(before, at_least=PEER_GOAL)


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
    if not on_peers(held):
        raise Failed(f"{detail}; no other GPU lends, so this shows nothing")
    return detail, lines


@side_by_side
def numba(lab):
    """A Numba kernel."""
    # What is installed need not go together: Numba is particular about its NumPy.
    env = {}
    alone = lab.bare(client("numba_add.py"), 90)
    if alone.status != 0:
        env = site("NUMBA_SITE")
        alone = lab.bare(client("numba_add.py"), 90, env)
    if alone.status != 0:
        raise NotRun(f"Numba fails without us too: {alone.stderr.strip().splitlines()[-1]}")
    served(same(alone, lab.shim(client("numba_add.py"), 90, env=env)))
    if len(lab.machine.gpus) < 2:
        return "same lines as bare"
    limited = {"LIMIT": "0:256MiB", "HOST_LIMIT": "0"}
    shim = same(alone, lab.shim(client("numba_add.py"), 90, limited, env))
    if not on_peers(shim.peaks()):
        raise Failed(f"{shim.command}: nothing lay on another GPU: {shim.peaks()}")
    return "same lines as bare, also with GPU 0 limited to 256 MiB and the rest on others"


@side_by_side
def rmm(lab):
    """RMM's pool of device memory over ours, with CuPy's arrays in it."""
    needs_modules("cupy")
    env = site("RMM_SITE")
    command = client("rmm_pool.py", 700 * MIB, 6)
    bare = lab.bare(command, 90, env).succeeded()
    served(same(bare, lab.shim(command, 90, env=env)))
    if len(lab.machine.gpus) < 2:
        return f"same {len(bare.lines())} lines as bare"
    limited = {"LIMIT": "0:2GiB", "HOST_LIMIT": "0", "SOFT_OOM": "off"}
    held = same(bare, lab.shim(command, 90, limited, env)).measured()["held"]
    if not on_peers(held):
        raise Failed(f"with GPU 0 limited to 2 GiB nothing lay on another GPU: {held}")
    return f"same {len(bare.lines())} lines as bare, also with GPU 0 limited to 2 GiB and the rest on others"


@side_by_side
def green_contexts(lab):
    """NVIDIA's own tests of green contexts in cuda.core, bare and under the shim, three times: a context that ended must
    never be waited for."""
    env = site("CUDA_CORE_SITE")
    tests = os.environ.get("CUDA_CORE_TESTS")
    if not tests:
        raise NotRun("CUDA_CORE_TESTS is not set; it names cuda_core/tests of NVIDIA/cuda-python")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{tests}/test_green_context.py"]

    def verdict(run):
        """pytest's last line without the seconds; what a crash leaves instead is not like it."""
        last = (run.stdout.strip().splitlines() or ["nothing"])[-1]
        return run.status, re.sub(r" in [0-9.]+s.*", "", last)

    bare = verdict(lab.bare(command, 90, env))
    if bare[0] != 0:
        raise NotRun(f"they do not pass without us: {bare[1]}")
    for settings in ({}, {"FREE": "lazy"}, {"LOG": "debug"}):
        run = lab.shim(command, 90, settings, env)
        if verdict(run) != bare:
            raise Failed(f"{run.command}: exit code {run.status}, {verdict(run)[1]!r}, bare {bare[1]!r}")
    return f"bare and three times under the shim: {bare[1]}"


def rmm_threads(lab):
    """The same mix on one thread and on several: cudaMalloc under the shim, beside RMM's pool and arena, in one process."""
    folder = os.environ.get("RMM_SITE")
    if not folder:
        raise NotRun("RMM_SITE is not set; it names a folder with the wheels librmm-cu13 and rapids-logger, by pip --target")
    binary = building.rmm_program(lab, "rmm_threads", folder)
    lines, missed = [], []
    runs = [("bare", None), ("strict", {"FREE": "strict"}), ("lazy", {"FREE": "lazy"})]
    for label, settings in runs:
        command = [binary, *((2, 4, 8) if settings else (8,))]
        run = lab.bare(command, 120) if settings is None else lab.shim(command, 120, settings)
        told = run.succeeded().stdout.splitlines()
        lines += [f"{label:<7}{line}" for line in told]
        eight = {line.split("  ")[0].strip(): float(line.rsplit(" ", 1)[1]) for line in told if " 8 threads" in line}
        if settings and eight["cudaMalloc"] < eight["RMM arena"]:
            missed.append(f"{label}: eight threads {eight['cudaMalloc']} of one, RMM's arena {eight['RMM arena']}")
    if missed:
        raise BelowGoal("; ".join(missed), lines)
    return "eight threads gain at least what RMM's arena gains", lines


def rmm_mix(lab):
    """RMM's random mix by cudaMalloc, cudaMallocAsync, RMM's pool and its arena, bare and under the shim: lazy no slower than
    the better of RMM's two in any row, strict by no more than a wait for an idle GPU."""
    folder = os.environ.get("RMM_SITE")
    if not folder:
        raise NotRun("RMM_SITE is not set; it names a folder with the wheels librmm-cu13 and rapids-logger, by pip --target")
    binary = building.rmm_program(lab, "rmm_mix", folder)
    lines, missed = [], []
    # The program's own sizes are for more than 120 GiB.
    sizes = [] if lab.machine.gpus[0].total > 120 * GIB else ["slab=20480", "live=10000"]
    for label, settings in (("bare", None), ("strict", {"FREE": "strict"}), ("lazy", {"FREE": "lazy"})):
        # The driver's own rounds take seconds; they are cut short sooner.
        command = [binary, label, "seconds=1", *sizes]
        run = lab.bare(command, 150) if settings is None else lab.shim(command, 100, settings)
        told = run.succeeded().stdout.splitlines()
        lines += told
        if settings is not None:
            missed += _slower_than_rmm(told, label, WAIT_US if label == "strict" else 0)
    if missed:
        raise BelowGoal("; ".join(missed), lines)
    return "lazy is no slower than RMM's pool and arena in any row, strict by no more than a wait", lines


def _slower_than_rmm(told, label, more):
    """The rows in which cudaMalloc takes so many microseconds more than the better of RMM's two in the same process."""
    rows = {}
    for line in told:
        kind, *words = line.split()
        row = dict(word.split("=", 1) for word in words)
        where = f"{label} {kind} to {row['mib']} MiB, {row['count']} by {row['threads']}"
        rows.setdefault(where, {})[row["way"]] = float(row["median_us"])
    missed = []
    for where, ways in rows.items():
        best = min(ways["rmm-pool"], ways["rmm-arena"])
        if ways["cudaMalloc"] > best + more:
            missed.append(f"{where}: {ways['cudaMalloc']:.3f} us, RMM {best:.3f}")
    return missed


@side_by_side
def cupy_managed(lab):
    """CuPy with managed memory, which stays with the driver; in a small size."""
    needs_modules("cupy")
    command = client("cupy_pools.py", "managed", 256 * MIB, 3)
    bare, _ = lab.both(command, 60)
    return f"same lines as bare: {'; '.join(bare.succeeded().lines())}"


def cupy_default(lab):
    """CuPy's own pool with arrays of 1.3 times GPU 0."""
    return _past_one_gpu(lab, "default")


def cupy_async(lab):
    """The same with stream-ordered memory."""
    return _past_one_gpu(lab, "async")


def _past_one_gpu(lab, kind):
    needs_modules("cupy")
    bare, shim, used = past_one_gpu(lab, client("cupy_pools.py", kind, share(lab, 0.1), 13), "13 arrays")
    printed(shim, ["13 arrays", "wrong: []", "wrong of the remaining and the new: [] 13"])
    return f"bare: {bare.lines()[0]}; shim: 13 of 13 right, and again after half were made anew; GiB in use: {used}"
