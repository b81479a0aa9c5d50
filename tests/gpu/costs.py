"""Checks of what the shim costs a program that fits on one GPU and has nothing wrong."""

import gzip
import importlib.util
import os
import pathlib
import time

import building
import machine
from client import client, needs_modules
from machine import GIB, MIB
from paired import Pairs, in_turn
from running import BelowGoal, Failed, NotRun, same

LOG_GOAL = 1.005
# Of a loop that fits, in the modes that it is for. The others are for programs that have a reason to be slower.
LOOP_GOAL = 1.005
OTHER_LOOP_GOAL = 1.01
FOR_LOOPS = ("pool", "lazy")
GROWTH_GOAL = 2
# Seconds from the free of most of what a program had until others see it, where the program then rests.
HOME_GOAL = 1
ROUNDS = 3
# MiB, as far as the GPU has room.
SIZES = (64, 512, 4096, 40960)
# Every way in which the shim can serve. Managed memory is bounded, since too much of it can take a GPU down.
MODES = {
    "pool": {},
    "lazy": {"FREE": "lazy"},
    "spill": {"MODE": "spill"},
    "trace": {"MODE": "trace"},
    "managed": {"MODE": "managed", "LIMIT": "2GiB", "HOST_LIMIT": "0"},
}


def launches(lab):
    """A kernel launch, bare and counted, in one process; and where its arguments are looked at for blocks to prefetch. What the gate costs a call, and what
    noting what a launch uses costs the launch, while all is near and while a fifth lies elsewhere."""
    binary = building.bench(lab, "launches")
    scanned = {"MODE": "managed", "PREFETCH": "launch", "LIMIT": "1GiB", "HOST_LIMIT": "0"}
    lines = []
    for name, settings in (("counted", {}), ("scanned", scanned)):
        finished = lab.shim([binary], 90, settings).succeeded()
        lines += [f"{name} {line}" for line in finished.stdout.splitlines()]
    # In a cycle of 1000 launches, each on another array, a fifth of which lie elsewhere in the last two rows.
    for move, limit in (("off", None), ("auto", None), ("off", "0:1600MiB"), ("auto", "0:1600MiB")):
        finished = lab.shim([binary, "1000"], 90, {"MOVE": move, "LIMIT": limit}).succeeded()
        where = "a fifth far" if limit else "all near"
        lines += [f"MOVE={move}, {where} {line}" for line in finished.stdout.splitlines()]
    if not lines or any("NOT HOOKED" in line for line in lines):
        raise Failed(f"expected lines about hooked calls, found {lines}", lines)
    # Four ways, each in a process a turn, which takes some 14 s on a GPU; seven turns if there is time.
    turns = max(1, min(7, int(lab.left() // 65)))
    told = lab.shim([building.bench(lab, "gate"), str(turns)], 420, {}).succeeded().stdout.splitlines()
    judged = [line for line in told if "within" in line or "OVER" in line]
    if len(judged) != 3:
        raise Failed(f"expected the goals of the gate and of launches by two settings, found {told}", lines + told)
    detail = "; ".join(" ".join(line.split()) for line in lines + judged)
    lines += told
    if "OVER" in detail:
        raise BelowGoal(detail, lines)
    return detail, lines


def moves(lab):
    """A block of the pool moved by hand to another GPU, to the host and back, beside a plain copy; and whether its data came along."""
    if len(lab.machine.gpus) < 2:
        raise NotRun("needs two GPUs")
    finished = lab.shim([building.bench(lab, "moves")], 120, {}).succeeded()
    lines = finished.stdout.splitlines()
    if len(lines) != 8 or not all(line.endswith("data right") for line in lines):
        raise Failed(f"expected eight moves with right data, found {lines}", lines)
    return f"{len(lines)} lines below", lines


def private_tables(lab):
    """Which functions of the driver's private tables the frameworks call, as they start and in a loop; bare."""
    counting = building.preloaded(lab, "private_tables")
    lines = []
    for module in ("torch", "cupy", "jax"):
        if importlib.util.find_spec(module):
            finished = lab.bare(client("private_tables.py", module), 120, {"LD_PRELOAD": counting}).succeeded()
            lines += [f"{module} {line}" for line in finished.stdout.splitlines() if ": table " in line]
    if not lines:
        raise NotRun("none of torch, cupy, jax took a table")
    return f"{len(lines)} lines below", lines


def before(lab):
    """Hooked calls and warm pairs with an earlier build of the library and with this one, in turn."""
    earlier = os.environ.get("GPUPOOL_BEFORE")
    if not earlier:
        raise NotRun("GPUPOOL_BEFORE is not set; it names the folder of an earlier build's libgpupool.so")
    allocations, passed_on = building.bench(lab, "allocations"), building.bench(lab, "passed_on")
    launches = building.bench(lab, "launches")
    runs = [
        ("strict", [allocations, "warm", "2MiB", "64MiB"], {"FREE": "strict"}),
        ("lazy", [allocations, "warm", "2MiB", "64MiB"], {"FREE": "lazy"}),
        ("strict", [allocations, "threads", "8"], {"FREE": "strict"}),
        ("lazy", [allocations, "threads", "8"], {"FREE": "lazy"}),
        ("passed on", [passed_on], {}),
        ("launch", [launches], {}),
    ]
    if len(lab.machine.gpus) > 1:
        one_gpu = {"CUDA_VISIBLE_DEVICES": lab.machine.gpus[0].selector or "0"}
        runs += [(f"{label}, one GPU", command, {**settings, **one_gpu}) for label, command, settings in runs[:4]]
    lines = []
    for label, command, settings in runs:
        env = {name: value for name, value in settings.items() if name.startswith("CUDA_")}
        ours = {name: value for name, value in settings.items() if name not in env}
        # Eight threads with the earlier build take longest; on one GPU once is enough to see whether it differs from two.
        for _ in range(1 if "threads" in command and env else 2):
            for when, folder in (("before", earlier), ("now", None)):
                library = f"{folder}/libgpupool.so" if folder else None
                finished = lab.shim(command, 90, ours, env, library).succeeded()
                lines += [f"{label:<16} {when:<7} {line}" for line in finished.stdout.splitlines()]
    return f"{len(lines)} lines below", lines


def traces(lab):
    """Recorded allocations of PyTorch, CuPy and JAX: bytes held in use, bare and under the shim."""
    binary = building.bench(lab, "replay")
    lines = []
    for packed in sorted((building.TESTS / "bench" / "traces").glob("*.txt.gz")):
        trace = pathlib.Path(lab.folder.name) / packed.name.removesuffix(".gz")
        trace.write_bytes(gzip.decompress(packed.read_bytes()))
        runs = [("bare", None, []), ("strict", {}, []), ("lazy", {"FREE": "lazy"}, [])]
        # In the recorded time memory goes home as it would have.
        runs.append(("paced", {"IDLE": "1s"}, ["pace=1", "hours=0.001"]))
        for label, settings, words in runs:
            command = [binary, trace, "seconds=4", *words]
            run = lab.bare(command, 90) if settings is None else lab.shim(command, 90, settings)
            lines += [f"{label:<7}{line}" for line in run.succeeded().stdout.splitlines()]
    if not lines:
        raise Failed("there are no traces in tests/bench/traces")
    return f"{len(lines)} lines below", lines


def steady(lab):
    """A loop that rests shorter than half a second pays for growth once; one that rests longer, and shorter than GPUPOOL_IDLE, once more at
    most: in its first pause nothing tells it from a program that has ended its work."""
    binary = building.bench(lab, "steady")
    lines = lab.bare([binary, "400", "10"], 60).succeeded().stdout.splitlines()
    lazy = {"FREE": "lazy"}
    # Milliseconds between two rounds, rounds, and the most blocks that may be made anew: a round's, or none.
    runs = [(400, 20, 0, {"IDLE": "1s"}), (400, 20, 0, {"IDLE": "1s", **lazy}), (400, 10, 0, {}), (1000, 6, 48, {})]
    runs += [(400, 10, 0, {"IDLE": "off"}), (400, 10, 0, {"IDLE": "off", **lazy})]
    for pause, rounds, most, settings in runs:
        told = lab.shim([binary, str(pause), str(rounds)], 60, settings).succeeded().stdout.splitlines()
        lines += told
        grown = [line for line in told if int(line.split(" grown=")[1].split()[0]) > most]
        if grown:
            raise Failed(f"a steady loop grew: {grown[0]}", lines)
    return "loops that rest for 400 ms grew nothing after their first round, one that rests for a second at most one round more", lines


def growth(lab):
    """Memory that the process does not have yet: the driver where its cache was emptied, its cache, and the pool, from 2 MiB to most of the GPU."""
    finished = lab.shim([building.bench(lab, "growth")], 60, {}).succeeded()
    lines = finished.stdout.splitlines()
    rows = [dict(word.split("=", 1) for word in line.split()[1:]) for line in lines if line.startswith("growth ")]
    if not rows or any(row["by"] != "gpupool" for row in rows):
        raise Failed(f"expected rows of gpupool's growth, found {lines}", lines)
    detail = "pool to driver, both from released memory: " + ", ".join(f"{row['mib']} MiB {row['ratio']}" for row in rows)
    if any(float(row["ratio"]) > GROWTH_GOAL for row in rows):
        raise BelowGoal(detail, lines)
    return detail, lines


def fresh(lab):
    """The first growth of a process, in a process of its own each time: the driver and the pool, and what opening the pool takes before."""
    binary = building.bench(lab, "growth")
    lines, missed, told = [], [], []
    for mib in _that_fit(lab):
        rows = {"driver": [], "gpupool": []}
        for shim, bare in in_turn(
            ROUNDS, lambda mib=mib: lab.shim([binary, f"first={mib}"], 60, {}), lambda mib=mib: lab.bare([binary, f"first={mib}"], 60)
        ):
            for run in (shim, bare):
                line = run.succeeded().stdout.splitlines()[0]
                row = dict(word.split("=", 1) for word in line.split()[1:])
                rows[row["by"]].append(row)
        if [len(row) for row in rows.values()] != [ROUNDS, ROUNDS]:
            raise Failed(f"expected {ROUNDS} rows by the driver and by gpupool, found {rows}")
        least = {by: sorted(float(row["first_ms"]) for row in found) for by, found in rows.items()}
        opened = {by: sorted(float(row["opened_ms"]) for row in found)[ROUNDS // 2] for by, found in rows.items()}
        driver, pool = least["driver"][ROUNDS // 2], least["gpupool"][ROUNDS // 2]
        ratio = pool / driver
        spread = ", ".join(f"{by} {found[0]:.3f} to {found[-1]:.3f}" for by, found in least.items())
        lines.append(
            f"{mib:>6} MiB: driver {driver:.3f} ms, pool {pool:.3f}, ratio {ratio:.2f} ({spread}); "
            f"the first 2 MiB before: {opened['driver']:.3f} and {opened['gpupool']:.3f} ms"
        )
        told.append(f"{mib} MiB {ratio:.2f}")
        missed += [mib] * (ratio > GROWTH_GOAL)
    detail = f"pool to driver, in a process that begins: {', '.join(told)}"
    if missed:
        raise BelowGoal(detail, lines)
    return detail, lines


def _that_fit(lab):
    """With what a context and the reserve take."""
    return [mib for mib in SIZES if mib * MIB + 5 * GIB <= lab.machine.gpus[0].total] or SIZES[:1]


def home(lab):
    """How soon what a program frees is free for others, as NVML tells another process: bare and under the shim, by size."""
    used = machine.watch(lab.machine.gpus[0])
    if not used:
        raise NotRun("NVML does not answer here")
    program = building.program(lab, "home")
    ways = {"bare": None, "strict": {}, "lazy": {"FREE": "lazy"}}
    lines, longest = [], 0
    for mib in _that_fit(lab):
        told = []
        for name, settings in ways.items():
            call, seconds = _goes_home(lab, program, settings, mib, used)
            told.append(f"{name} {seconds * 1e3:.1f} ms (its call {call * 1e3:.1f})")
            longest = max(longest, 0 if settings is None else seconds)
        lines.append(f"{mib:>6} MiB seen free by others after: {', '.join(told)}")
    detail = f"free for others after {longest:.2f} s at most"
    if longest > HOME_GOAL:
        raise BelowGoal(f"{detail}; goal {HOME_GOAL} s", lines)
    return detail, lines


def _goes_home(lab, program, settings, mib, used):
    """Seconds that the free took, and until NVML does not show the memory any more. A process of its own, since one that allocates as much
    again is believed to need its memory."""
    child = lab.start([program], None, settings)

    _done(child, "init")
    # What the driver keeps of a first block for itself is there before.
    _done(child, "allocate 2")
    before = used()
    _done(child, f"allocate {mib}")
    held = used() - before
    since = time.monotonic()
    _done(child, "free")
    call = time.monotonic() - since
    while used() > before + mib * MIB // 8 and time.monotonic() - since < 15:
        time.sleep(0.001)
    seconds = time.monotonic() - since
    child.finish(30).succeeded()
    if held < mib * MIB:
        raise Failed(f"{child.title}: NVML saw {held // MIB} MiB more, expected {mib}; is somebody else at work on this GPU?")
    return call, seconds


def home_for_others(lab):
    """What a program keeps for itself (GPUPOOL_IDLE=10min) is free for others as soon as its GPU is nearly full and they use it, too."""
    gpu = lab.machine.gpus[0]
    used = machine.watch(gpu)
    if not used:
        raise NotRun("NVML does not answer here")
    program, block = building.program(lab, "home"), gpu.total // 12 // MIB
    keeper = lab.start([program], None, {"IDLE": "10min"})
    _done(keeper, "init")
    for _ in range(5):
        _done(keeper, f"allocate {block}")
    _done(keeper, "free")
    held = used()
    time.sleep(3)
    if used() < held - block * MIB // 2:
        raise Failed(f"{keeper.title}: what it freed was gone by itself, so that this shows nothing")
    other = lab.start([program])
    _done(other, "init")
    since = time.monotonic()
    # A sixteenth is what a GPU has that is not nearly full.
    _done(other, f"allocate {(gpu.total - used() - gpu.total // 32) // MIB}")
    full = used()
    while used() > full - block * MIB * 7 // 8 and time.monotonic() - since < 15:
        time.sleep(0.01)
    seconds, gone = time.monotonic() - since, (full - used()) // MIB
    for child in (other, keeper):
        child.finish(30).succeeded()
    if gone < block * 7 // 8:
        raise Failed(f"{keeper.title}: of {block} MiB that it had freed {gone} were free for others after {seconds:.1f} s")
    return f"{gone} MiB that were kept freed were free for others {seconds:.2f} s after they began to take what the GPU had left"


def _done(child, line):
    """Has the program `home` do this."""
    child.process.stdin.write(f"{line}\n")
    child.process.stdin.flush()
    if child.read_until("", 60).strip() != "done":
        raise Failed(f"{child.title}: no answer to {line!r}")


def log(lab):
    """PyTorch's training loop with the log at its default level in a file, and with errors only and no file."""
    needs_modules("torch")
    quiet = {"LOG": "error", "LOG_FILE": None}
    pairs = Pairs("ms", ("log", "none"))
    reference = None
    command = client("torch_train.py")
    runs = in_turn(ROUNDS, lambda: lab.shim(command, 90, {}), lambda: lab.shim(command, 90, quiet))
    for logged, silent in runs:
        for run in (logged, silent):
            reference = same(reference, run) if reference else run.succeeded()
        if silent.logs or not logged.events("context.create"):
            raise Failed(f"{len(silent.logs)} logs where none was asked for; contexts in the other: {len(logged.logs)}")
        for name in ("eager", "graph"):
            pairs.add(name, logged.measured()["milliseconds"][name], silent.measured()["milliseconds"][name])
    return pairs.judged("step with the log ", at_most=LOG_GOAL)


def torch_modes(lab):
    """PyTorch's training loop in every mode."""
    needs_modules("torch")
    return _modes(lab, client("torch_train.py", "small"))


def cupy_modes(lab):
    """A loop of CuPy kernels, matrix products and temporaries in every mode."""
    needs_modules("cupy")
    return _modes(lab, client("cupy_loop.py"))


def jax_modes(lab):
    """JAX's training loop in every mode."""
    needs_modules("jax")
    env = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return _modes(lab, client("jax_train.py"), env)


def _modes(lab, command, env=None):
    """Rounds of bare and every mode, the second round backwards, so that a GPU that warms up favours none."""
    pairs = Pairs("ms")
    reference = None
    for number in range(2):
        order = ["bare", *MODES]
        runs = {}
        for mode in order[::-1] if number % 2 else order:
            settings = MODES.get(mode)
            run = lab.bare(command, 90, env) if settings is None else lab.shim(command, 90, settings, env)
            reference = same(reference, run) if reference else run.succeeded()
            wanted = (settings or {}).get("MODE", "pool")
            if settings is not None and {record["mode"] for record in run.events("process.start")} != {wanted}:
                raise Failed(f"{run.command}: the log does not say that the mode is {wanted}")
            runs[mode] = run.measured()["milliseconds"]
        for mode in MODES:
            for name, ours in runs[mode].items():
                pairs.add(f"{mode} {name}", ours, runs["bare"][name])
    # What differs by more between two bare runs decides nothing about a half per cent.
    spread = max(pairs.spread(what) for what in pairs.measured())
    return pairs.judged(f"results the same; bare runs differ by {100 * spread:.1f} %; ", at_most=_loop_goal)


def _loop_goal(what):
    return LOOP_GOAL if what.split()[0] in FOR_LOOPS else OTHER_LOOP_GOAL
