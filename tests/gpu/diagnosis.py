"""Checks that the log tells who made which context, what it cost, and what is wrong with it."""

import collections
import concurrent.futures
import json

import building
from client import CLIENTS, client, marked, needs_modules, needs_two_gpus, printed
from machine import MIB
from running import Failed, NotRun, side_by_side

# After a call in a fresh process: which GPUs have a primary context, and by which function of the runtime. Managed memory
# makes one too, but is not for GPUs that others share.
NO_CONTEXT = (
    "cudaGetDeviceCount",
    "cudaGetDeviceProperties(1)",
    "cudaDeviceGetAttribute",
    "cudaDeviceCanAccessPeer",
    "cudaPointerGetAttributes(host)",
    "cudaGetDriverEntryPoint",
    "cudaDeviceGetDefaultMemPool(1)",
    "cuInit",
    "cudaRuntimeGetVersion",
)
ON_CURRENT = (
    "cudaFree(0)",
    "cudaMemGetInfo",
    "cudaMalloc",
    "cudaMallocHost",
    "cudaHostAlloc",
    "cudaStreamCreate",
    "cudaEventCreate",
    "cudaDeviceSetLimit",
    "cudaFuncGetAttributes",
    "cudaIpcGetMemHandle",
    "cudaDeviceSynchronize",
)
CONTEXTS = {
    **{call: {} for call in NO_CONTEXT},
    **{call: {0: call.split("(")[0]} for call in ON_CURRENT},
    "cudaSetDevice(1)": {1: "cudaSetDevice"},
    "cudaInitDevice(1)": {1: "cudaInitDevice"},
    "cudaDeviceEnablePeerAccess(1)": {0: "cudaDeviceEnablePeerAccess", 1: "cudaDeviceEnablePeerAccess"},
    "cudaMemcpyPeer": {0: "cudaMalloc", 1: "cudaSetDevice"},
}
# The only one of them that does not even initialise the driver.
NOT_INITIALISED = "cudaRuntimeGetVersion"
COST_GOAL = 0.05


def ctx_table(lab):
    """Every call that makes a context or might: the log's contexts are the driver's and those of the table."""
    needs_two_gpus(lab)
    kinds = collections.Counter()

    def row(runtime, call):
        finished = lab.shim([building.cuda_program(lab, "ctx_rows", runtime), call], 60, {})
        logged = finished.events("context.create")
        kinds.update(record["kind"] for record in logged)
        return _row_differs(finished, call, logged, runtime == "shared")

    for runtime in ("shared", "static"):
        building.cuda_program(lab, "ctx_rows", runtime)
    rows = [(runtime, call) for runtime in ("shared", "static") for call in CONTEXTS]
    with concurrent.futures.ThreadPoolExecutor(6) as workers:
        wrong = [
            f"{runtime}: {difference}"
            for (runtime, _), difference in zip(rows, workers.map(lambda named: row(*named), rows))
            if difference
        ]
    if wrong:
        raise Failed(f"{len(wrong)} of {len(rows)} rows differ, as listed below", wrong)
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return f"{len(CONTEXTS)} calls with a shared and a static runtime: log, driver and table agree; logged: {told}"


def _row_differs(finished, call, logged, shared):
    """What is wrong with one row; empty where nothing is."""
    expected = CONTEXTS[call]
    devices = " ".join(map(str, sorted(expected)))
    said = f"{call}: driver not initialised" if call == NOT_INITIALISED else f"{call}: context on {devices or 'none'}"
    if finished.status or finished.lines() != [said]:
        last = (finished.stderr.strip().splitlines() or [""])[-1]
        return f"printed {finished.lines()}, exit code {finished.status} {last}; expected {said!r}"
    # One record a context: twice the same would count it twice.
    found = sorted(record["device"] for record in logged)
    if found != sorted(expected):
        how = ", ".join(f"GPU {record['device']} {record['kind']} {record['call']}" for record in logged)
        return f"{call}: the log has contexts on {found or 'none'} ({how or 'no record'}); expected {sorted(expected)}"
    calls = {record["device"]: record.get("runtime_call") for record in logged}
    if shared and calls != expected:
        return f"{call}: runtime_call by GPU is {calls}, expected {expected}"
    return ""


def _findings(finished, expected):
    """The findings of a run, if their codes are the expected ones."""
    made = finished.events("finding")
    codes = [finding["code"] for finding in made]
    if codes != expected:
        what = "; ".join(f"{finding['code']} {finding['what']}" for finding in made)
        raise Failed(f"{finished.command}: findings {codes} ({what or 'none'}), expected {expected}")
    return made


def _contexts_on(finished, expected):
    """The records of contexts, if there is one on each of these GPUs and no other."""
    records = sorted(finished.events("context.create"), key=lambda record: record["device"])
    if [record["device"] for record in records] != expected:
        made = [(record["device"], record["kind"], record["call"]) for record in records]
        raise Failed(f"{finished.command}: contexts {made}, expected one on each of GPU {expected}")
    return records


def _stray(lab, script, output):
    """A client that computes on GPU 1 and touches GPU 0 on one line: the finding names that line."""
    finished = lab.shim(client(script), 90, {}).succeeded()
    printed(finished, output)
    records = _contexts_on(finished, [0, 1])
    (finding,) = _findings(finished, ["GP001"])
    where = f"where: {marked(script, 'the stray')} in "
    if finding["device"] != 0 or where not in finding["message"] or where not in finished.stderr:
        raise Failed(f"GP001 is about GPU {finding['device']}: {finding['message']!r}; expected GPU 0 and {where!r}")
    named = where.removeprefix("where: ").removesuffix(" in ").rsplit("/", 1)[-1]
    call = records[0].get("runtime_call") or records[0]["call"]
    return f"GP001 for GPU 0 names {named}; made by {call}, {_mib(records[0])}"


def _mib(record):
    cost = record.get("cost")
    return "cost unknown" if cost is None else f"{'≈' if record['approximate'] else ''}{cost / MIB:.0f} MiB"


@side_by_side
def stray_torch(lab):
    """PyTorch on GPU 1, and `torch.cuda.synchronize(0)`."""
    needs_modules("torch")
    needs_two_gpus(lab)
    return _stray(lab, "stray_torch.py", ["4294967296.0", "4194304.0"])


@side_by_side
def stray_cupy(lab):
    """A kernel of CuPy on GPU 1, and `cupy.cuda.Device(0).synchronize()`."""
    needs_modules("cupy")
    needs_two_gpus(lab)
    return _stray(lab, "stray_cupy.py", ["3145728.0"])


@side_by_side
def jax_ctx(lab):
    """JAX on two GPUs: both contexts come with the program's line, and neither is called a stray."""
    needs_modules("jax")
    needs_two_gpus(lab)
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    finished = lab.shim(client("jax_both.py"), 90, env=env).succeeded()
    printed(finished, ["0 2097152.0", "1 2097152.0"])
    records = _contexts_on(finished, list(range(len(lab.machine.gpus))))[:2]
    # With more GPUs JAX makes contexts that this program does not use.
    if len(lab.machine.gpus) == 2:
        _findings(finished, [])
    places = []
    for record in records:
        frames = record.get("site", {}).get("python", [])
        line = next((frame["line"] for frame in frames if frame["file"] == str(CLIENTS / "jax_both.py")), None)
        # XLA makes its contexts on threads of its own, which run no Python; the library is all there is to name.
        native = [frame["object"] for frame in record.get("site", {}).get("native", [])]
        if line is None and not any("xla_cuda" in path for path in native):
            raise Failed(f"context on GPU {record['device']}: neither a frame of jax_both.py nor of XLA; native: {native[:8]}")
        where = f"line {line}" if line is not None else f"thread of {record['caller']}"
        places.append(f"GPU {record['device']} {where} ({record['kind']}, {_mib(record)})")
    strays = [finding["what"] for finding in finished.events("finding") if finding["device"] in (0, 1)]
    if strays:
        raise Failed(f"findings about GPUs that the program uses: {strays}")
    return f"contexts: {', '.join(places)}; no finding about them"


def ranks(lab):
    """Two ranks that both take the first GPU: the report of their logs says so, and where."""
    needs_modules("torch")
    needs_two_gpus(lab)
    started = []
    for rank in ("0", "1"):
        env = {"LOCAL_RANK": rank, "RANK": rank, "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
        started.append(lab.start(client("rank.py"), env, {}))
    finished = [child.finish(90).succeeded() for child in started]
    logs = []
    for rank in finished:
        printed(rank, ["1048576.0"])
        _contexts_on(rank, [0])
        logs += rank.log_files
    report = lab.start([lab.gpupool, "report", "--json", *logs]).finish(30).succeeded()
    found = json.loads(report.stdout)["findings"]
    if [finding["code"] for finding in found] != ["GP002"]:
        raise Failed(f"the report of both logs has {[finding['code'] for finding in found]}, expected GP002 alone")
    where = marked("rank.py", "every rank on GPU 0")
    text = lab.start([lab.gpupool, "report", *logs]).finish(30).succeeded().stdout
    frames = [f"{frame['file']}:{frame['line']}" for frame in (found[0]["site"] or {}).get("python", [])]
    if where not in frames or "GP002" not in text:
        raise Failed(f"GP002 names {frames or 'no line'}, expected {where}; in the text: {'GP002' in text}")
    return f"gpupool report: {found[0]['what']}; names {where.rsplit('/', 1)[-1]}", text.rstrip().splitlines()


def ctx_cost(lab):
    """What the log says a context costs, and what nvidia-smi shows of it."""
    if not lab.machine.has_smi:
        raise NotRun("no nvidia-smi")
    binary = building.cuda_program(lab, "ctx_rows")
    lines, worst = [], 0.0
    for gpu, call in list(enumerate(("cudaFree(0)", "cudaSetDevice(1)")))[: len(lab.machine.gpus)]:
        _, bare, _ = _held(lab, [binary, call, "hold"], gpu, None)
        finished, beyond, before = _held(lab, [binary, call, "hold"], gpu, {})
        (record,) = _contexts_on(finished, [gpu])
        if not record.get("cost"):
            raise Failed(f"GPU {gpu}: context.create has no cost")
        off = record["cost"] / beyond - 1
        worst = max(worst, abs(off))
        lines.append(
            f"gpu{gpu}: log {_mib(record)}, nvidia-smi {beyond // MIB} MiB ({off:+.1%}), bare {bare // MIB} MiB, "
            f"{before // MIB} MiB in use before"
        )
    if worst > COST_GOAL:
        raise Failed(f"off by {worst:.1%}, expected within {COST_GOAL:.0%}; {'; '.join(lines)}", lines)
    return f"within {COST_GOAL:.0%}: {'; '.join(lines)}"


def _held(lab, command, gpu, settings):
    """A child that waits with its context: the run, the bytes that nvidia-smi shows more with it, and before it."""
    before = lab.machine.used()[gpu]
    child = lab.start(command, None, settings)
    said = child.read_until(command[1], 60)
    during = lab.machine.used()[gpu]
    finished = child.finish(30, said).succeeded()
    if f"{command[1]}: context on {gpu}" not in finished.lines():
        raise Failed(f"{finished.command}: printed {finished.lines()}, expected a context on GPU {gpu}")
    if during <= before:
        raise Failed(f"nvidia-smi shows {before // MIB} MiB before and {during // MIB} MiB with a context on GPU {gpu}")
    return finished, during - before, before


@side_by_side
def heap(lab):
    """100 MiB of device malloc: too much for the default heap, enough with the setting."""
    binary = building.cuda_program(lab, "heap")
    all_made = "100 of 100 blocks of 1 MiB, 0 wrong words"
    runs = {
        "bare": lab.bare([binary], 60),
        "default": lab.shim([binary], 60, {}),
        "256MiB": lab.shim([binary], 60, {"MALLOC_HEAP_SIZE": "256MiB"}),
    }
    for name, finished in runs.items():
        finished.succeeded()
        right = finished.lines() == [all_made] if name == "256MiB" else _too_few(finished.lines())
        if not right:
            raise Failed(f"{finished.command}: printed {finished.lines()}")
    default, larger = runs["default"], runs["256MiB"]
    limits = [(one["limit"], one["value"], one["result"], one["by"]) for one in larger.events("limit.set")]
    if limits != [("malloc_heap_size", 256 * MIB, 0, "gpupool")]:
        raise Failed(f"limit.set with the setting: {limits}")
    _findings(larger, [])
    images = default.events("module.load")
    if not images:
        raise Failed(f"{default.command}: no module.load in the log, so nobody can have looked for malloc in it")
    seen = any(image["uses_malloc"] for image in images)
    _findings(default, ["GP009"] if seen else [])
    kinds = ", ".join(f"{image['kind']} of {image.get('bytes', 0)} B" for image in images)
    found = "GP009 made" if seen else f"no GP009: no malloc is seen in {kinds}; compressed code hides it"
    blocks = runs["bare"].lines()[0].split()[0]
    return f"bare and by default {blocks} of 100 blocks of 1 MiB, {found}; with GPUPOOL_MALLOC_HEAP_SIZE=256MiB all 100"


def _too_few(lines):
    """Some blocks were refused and the others are right."""
    return len(lines) == 1 and lines[0].endswith("0 wrong words") and not lines[0].startswith("100 ")
