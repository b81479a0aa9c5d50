"""Checks with several processes: jobs over NCCL, and memory of a GPU that one process shares with another."""

import time

import building
from client import client, free_port, needs_modules, needs_two_gpus, printed, rank_client
from running import Failed, NotRun, same, side_by_side

# Scripts of tests/programs/ipc.c; A and B are two processes.
SHARED = (
    "A:alloc:0:153600 A:fill:0:100 A:get:0:4096 B:open:0 B:range:0 B:check:0:100 B:again:0 B:fill:0:7 A:check:0:7 "
    "B:free:0 B:close:0 B:close:0 B:close:0 A:check:0:7 A:free:0 B:exit A:exit",
    "A:alloc:0:32768 A:free:0 A:alloc:1:3000 A:alloc:2:70000 A:fill:1:10 A:fill:2:20 A:get:1:0 A:get:2:99 B:open:2 B:open:1 "
    "B:check:1:10 B:check:2:20 A:free:2 B:check:2:20 B:close:2 A:alloc:3:70000 A:fill:3:30 A:check:3:30 A:exit B:check:1:10",
    "A:alloc:0:153600 A:fill:0:5 A:get:0:0 B:open:0 A:exit B:check:0:5 B:fill:0:9 B:check:0:9 B:close:0 B:exit",
    "A:alloc:0:153600 A:fill:0:5 A:get:0:0 B:open:0 B:fill:0:9 B:exit A:check:0:9 A:free:0 A:alloc:1:153600 A:exit",
    "A:alloc:0:153600 A:fill:0:5 A:get:0:0 B:open:0 B:check:0:5 A:kill B:check:0:5 B:close:0 B:exit",
    # Less than 1 MiB each, so that several lie in one piece of the driver's memory, or in one slab of ours.
    "A:alloc:0:300 A:alloc:1:4 A:alloc:2:100 A:fill:0:10 A:fill:1:20 A:fill:2:30 A:get:0:0 A:get:1:512 A:get:2:0 B:open:1 B:open:0 "
    "B:open:2 B:check:0:10 B:check:1:20 B:check:2:30 B:fill:1:7 A:check:1:7 B:again:1 B:close:1 B:close:1 B:close:1 A:free:1 "
    "A:alloc:3:4 A:fill:3:50 B:check:0:10 B:close:0 B:close:2 A:check:0:10 A:check:2:30 A:check:3:50 B:exit A:exit",
    "A:alloc:0:300 A:alloc:1:4 A:fill:0:10 A:fill:1:20 A:get:0:0 A:get:1:0 B:open:0 B:open:1 B:range:0 B:range:1 B:exit A:exit",
    "A:alloc:0:300 A:fill:0:5 A:get:0:0 B:open:0 A:exit B:check:0:5 B:fill:0:9 B:check:0:9 B:close:0 B:exit",
)


def _ranks(lab, script, env=None):
    """Two ranks, bare and under the shim: the same lines, in any order, and each rank's memory on its own GPU."""
    needs_modules("torch")
    needs_two_gpus(lab)
    bare = lab.bare(rank_client(script), 120, env).succeeded()
    shim = lab.shim(rank_client(script), 120, env=env).succeeded()
    if len(bare.lines()) != 2 or sorted(bare.lines()) != sorted(shim.lines()):
        raise Failed(f"lines differ: shim {sorted(shim.lines())}, bare {sorted(bare.lines())}"[:500])
    ranks = [log for log in shim.logs if any(record["event"] == "pool.open" for record in log)]
    homes = []
    for log in ranks:
        if not any(record["event"] == "note" and record.get("about") == "home_only" for record in log):
            raise Failed(f"process {log[0]['pid']}: the log does not say that the rank keeps to its own GPU")
        peaks = [peak for record in log if record["event"] == "process.exit" for peak in record["peak"]]
        homes.append(sorted(peak["place"] for peak in peaks if peak["peak_used"] and peak["place"].startswith("gpu")))
    if sorted(homes) != [["gpu0"], ["gpu1"]]:
        raise Failed(f"pooled memory of the {len(ranks)} ranks lay on {homes}, expected each on its own GPU")


@side_by_side
def ddp(lab):
    """Two ranks of data-parallel training: the same losses, each rank on its own GPU."""
    _ranks(lab, "ddp.py")
    return "losses the same; the log of each rank says that it keeps to its own GPU, and it did"


@side_by_side
def fsdp(lab):
    """Two ranks that share one model's parameters between them."""
    _ranks(lab, "fsdp.py")
    return "losses and the sums of the parameters the same"


@side_by_side
def nccl_graph(lab):
    """All-reduces in a captured graph. NCCL asks whether it can map one rank's buffer in the other, and else copies."""
    _ranks(lab, "nccl_graph.py", {"NCCL_GRAPH_REGISTER": "1"})
    _ranks(lab, "nccl_graph.py", {"NCCL_GRAPH_REGISTER": "0"})
    return "sums the same with NCCL_GRAPH_REGISTER=1 and 0"


@side_by_side
def torch_queue(lab):
    """CUDA tensors sent through a torch.multiprocessing queue, whichever process ends first."""
    needs_modules("torch")
    cases = [settings for settings in _ipc_settings(lab) if "FREE" not in settings]
    told = []
    for order in ("sender-first", "receiver-first"):
        command = client("torch_queue.py", order)
        bare = lab.bare(command, 120).succeeded()
        for settings in cases:
            shim = same(bare, lab.shim(command, 120, settings))
            imports = len(shim.events("ipc.import"))
            if not shim.events("ipc.export") or not imports:
                raise Failed(f"{shim.command}: no ipc.export or ipc.import in the log, so nothing pooled was shared")
        told.append(f"{order} ({imports} imported)")
    # PyTorch then exports the physical memory that it made itself.
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    bare = lab.bare(client("torch_queue.py", "receiver-first"), 120, env)
    if bare.status == 0:
        same(bare, lab.shim(client("torch_queue.py", "receiver-first"), 120, env=env))
        told.append("expandable segments")
    return f"same lines as bare in {len(cases)} settings: {', '.join(told)}"


@side_by_side
def cupy_ranks(lab):
    """cupyx.distributed: two processes over NCCL."""
    needs_modules("cupy")
    needs_two_gpus(lab)

    def job(settings):
        port = free_port()
        started = [lab.start(client("cupy_ranks.py", rank, port), None, settings) for rank in (0, 1)]
        return [child.finish(90) for child in started]

    bare = job(None)
    if any(rank.status for rank in bare):
        raise NotRun(f"fails without us too: {(bare[0].stderr.strip() or bare[1].stderr.strip()).splitlines()[-1]}")
    for alone, shim in zip(bare, job({})):
        same(alone, shim)
    return f"same lines as bare: {'; '.join(bare[0].lines())}"


@side_by_side
def ipc_runtime(lab):
    """cudaIpcGetMemHandle and cudaIpcOpenMemHandle between two processes of a CUDA runtime program."""
    binary = building.cuda_program(lab, "ipc")
    for order in ("importer-first", "exporter-first"):
        bare = lab.bare([binary, order], 60).succeeded()
        for settings in _ipc_settings(lab):
            shim = same(bare, lab.shim([binary, order], 60, settings))
            if not shim.events("ipc.export") or not shim.events("ipc.import"):
                raise Failed(f"{shim.command}: no ipc.export or ipc.import in the log, so nothing pooled was shared")
    return f"same {len(bare.lines())} lines as bare, in both orders of ending"


@side_by_side
def ipc_driver(lab):
    """The same at the driver interface, step by step: inner pointers, opened twice, freed while open, either ends first."""
    program = building.program(lab, "ipc")
    count = 0
    for steps in SHARED:
        command = [program, *steps.split()]
        bare = lab.bare(command, 60).succeeded()
        for settings in _ipc_settings(lab):
            same(bare, lab.shim(command, 60, settings))
            count += 1
    return f"{count} runs print the same as bare"


def _ipc_settings(lab):
    settings = [{}, {"FREE": "lazy"}]
    # What is shared lies on both GPUs then.
    return settings + [{"LIMIT": "0:64MiB", "HOST_LIMIT": "0", "SOFT_OOM": "off"}] * (len(lab.machine.gpus) > 1)


@side_by_side
def ipc_mixed(lab):
    """One process under the shim and one without: pooled memory cannot be opened, the driver's can, and the log tells."""
    binary = building.cuda_program(lab, "ipc")

    def opened(exporting, importing):
        exporter = lab.start([binary, "export"], None, exporting)
        said = exporter.read_until("handle ", 60)
        handle = said.strip().rsplit(" ", 1)[-1]
        importer = lab.start([binary, "import", handle], None, importing).finish(60).succeeded()
        return exporter.finish(30, said).succeeded(), importer

    exporter, importer = opened({}, None)
    printed(importer, ["cudaIpcOpenMemHandle: cudaErrorInvalidValue"])
    if not exporter.events("ipc.export"):
        raise Failed(f"{exporter.command}: no ipc.export in the log")
    _, importer = opened(None, {})
    printed(importer, ["cudaIpcOpenMemHandle: cudaSuccess", "0 wrong words"])
    return "pooled memory, opened bare: cudaErrorInvalidValue; the driver's memory, opened under the shim: 0 wrong words"


@side_by_side
def peer_access(lab):
    """cudaDeviceEnablePeerAccess, kernels that use the other GPU's memory, copies between them."""
    needs_two_gpus(lab)
    binary = building.cuda_program(lab, "peer")
    bare = lab.bare([binary], 60).succeeded()
    for settings in ({}, {"MIN_SIZE": "1"}, {"LIMIT": "0:64MiB", "HOST_LIMIT": "0", "SOFT_OOM": "off"}):
        same(bare, lab.shim([binary], 60, settings))
    return f"same {len(bare.lines())} lines as bare in 3 settings"


def lenders(lab):
    """GPUPOOL_LENDERS=awake: a GPU that only lends keeps its clock by a context of the helper's, as long as the program runs."""
    needs_two_gpus(lab)
    settings = {"LENDERS": "awake", "LIMIT": "0:256MiB", "HOST_LIMIT": "0"}
    program = lab.start([building.program(lab, "agent")], None, settings)

    def ask(line):
        program.process.stdin.write(f"{line}\n")
        program.process.stdin.flush()
        return program.read_until("", 30).strip()

    def until(holds):
        """Asks for the clock of GPU 1 for some seconds; the last answer."""
        end = time.monotonic() + 15
        while not holds(clock := int(ask("clock 1"))) and time.monotonic() < end:
            time.sleep(0.1)
        return clock

    for line in ("nvml", "init", "allocate 64"):
        ask(line)
    asleep = until(lambda clock: clock < 1000)
    others = ask("on 1")
    ask("allocate 1024")
    awake = until(lambda clock: clock > 1000)
    helpers = ask("on 1")
    finished = program.finish(30).succeeded()
    if others != "0":
        raise NotRun(f"{others} processes have contexts on GPU 1, which keep it awake")
    if awake <= asleep or helpers != "1":
        raise Failed(f"{finished.command}: clock {asleep} MHz before and {awake} after, {helpers} processes on the lender")
    return f"{asleep} MHz asleep, {awake} MHz with one helper on it"
