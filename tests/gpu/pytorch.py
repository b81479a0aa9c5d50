"""Checks with PyTorch in one process: training, its allocators, graphs, Triton."""

import pathlib

import building
from client import client, needs_modules, past_one_gpu, printed, served, share
from machine import GIB
from paired import Pairs, in_turn
from running import BelowGoal, Failed, same, side_by_side

STEP_GOAL = 1.005
# GPU 0 lends so little that the program's memory lies on both GPUs.
CROWDED = {"LIMIT": "0:1GiB", "HOST_LIMIT": "0", "SOFT_OOM": "off"}


def configured(words):
    """The allocator's configuration; the name of the variable changed in PyTorch 2.9."""
    return {"PYTORCH_CUDA_ALLOC_CONF": words, "PYTORCH_ALLOC_CONF": words}


EXPANDABLE = configured("expandable_segments:True")
ASYNC = configured("backend:cudaMallocAsync")


def training(lab):
    """A training loop, eager and as a CUDA graph: the same losses, and the time of a step."""
    needs_modules("torch")
    pairs = Pairs("ms")
    reference = None
    command = client("torch_train.py")
    for shim, bare in in_turn(3, lambda: lab.shim(command, 90), lambda: lab.bare(command, 90)):
        reference = same(reference, bare) if reference else bare.succeeded()
        served(same(reference, shim))
        for name in ("eager", "graph"):
            pairs.add(name, shim.measured()["milliseconds"][name], bare.measured()["milliseconds"][name])
    return pairs.judged("losses the same in 6 runs; step ", at_most=STEP_GOAL)


def oversize(lab):
    """Tensors of 1.3 times GPU 0; PyTorch must be told to return its cache before the GPU overflows."""
    told, shim = _oversize(lab, {})
    soft = [record for record in shim.events("pool.refuse") if record["why"] == "soft"]
    retries = shim.measured()["retries"]
    if not soft or retries < 1:
        raise Failed(f"{len(soft)} soft refusals in the log, {retries} retries of PyTorch, expected both")
    return f"{told}; soft refusals: {len(soft)}"


def oversize_expandable(lab):
    """The same with expandable segments, for which PyTorch makes and maps physical memory itself."""
    told, shim = _oversize(lab, EXPANDABLE)
    if not shim.measured()["expandable"]:
        raise Failed("no segment of PyTorch's was expandable, so this is the default allocator")
    return told


def goes_home(lab):
    """What PyTorch gives back is free for others within a second, by NVML; and what it makes then shows there."""
    needs_modules("torch")
    command = client("torch_home.py")
    bare = lab.bare(command, 60).succeeded()
    shim = same(bare, lab.shim(command, 60))
    printed(shim, ["a tensor shows"])
    told = [f"{name} {run.measured()['seconds']:.3f} s" for name, run in (("bare", bare), ("shim", shim))]
    detail = f"{shim.measured()['grown'] / GIB:.1f} GiB, free again after: {', '.join(told)}"
    if shim.measured()["seconds"] > 1:
        raise BelowGoal(f"{detail}; goal 1 s")
    return detail


def full(lab):
    """A GPU that is full: pools of one's own are refused, help out and serve again as they do bare, and what that takes."""
    needs_modules("torch")
    # What fills the GPU may use no more than that has.
    parts = [(["limited", building.library(lab, "torch_full")], {}), (["filled"], {"DEVICES": "0", "HOST_LIMIT": "0"})]
    lines, count, held = [], 0, ""
    for words, settings in parts:
        command = client("torch_full.py", *words)
        bare = lab.bare(command, 120).succeeded()
        shim = same(bare, lab.shim(command, 120, settings))
        count += len(bare.lines())
        for what, seconds in bare.measured()["seconds"].items():
            lines.append(f"{what}: bare {seconds * 1e3:.1f} ms, shim {shim.measured()['seconds'][what] * 1e3:.1f}")
        if "bytes" in bare.measured():
            held = ", ".join(f"{name} {run.measured()['bytes'] / GIB:.1f}" for name, run in (("bare", bare), ("shim", shim)))
    return f"{count} lines the same; GiB that filled the GPU: {held}", lines


def oversize_async(lab):
    """The same with the driver's stream-ordered memory behind PyTorch."""
    told, shim = _oversize(lab, ASYNC)
    backend = shim.measured()["backend"]
    if backend != "cudaMallocAsync":
        raise Failed(f"PyTorch used its allocator {backend}")
    return told


def _oversize(lab, env):
    needs_modules("torch")
    bare, shim, used = past_one_gpu(lab, client("torch_oversize.py", share(lab, 0.1), 13), "13 tensors", env)
    expected = [
        "13 tensors, wrong: []",
        "sums: right",
        "after empty_cache: 0 bytes reserved",
        "a tensor made afterwards: right",
    ]
    printed(shim, expected)
    return f"bare: {bare.lines()[0]}; shim: 13 of 13, sums right; GiB in use: {used}", shim


@side_by_side
def allocators(lab):
    """The training loop with each of PyTorch's allocators, bare and under the shim."""
    needs_modules("torch")
    command = client("torch_train.py", "short")
    forms = {"native": {}, "expandable": EXPANDABLE, "cudaMallocAsync": ASYNC}
    for name, env in forms.items():
        bare = lab.bare(command, 90, env).succeeded()
        shim = same(bare, lab.shim(command, 90, env=env))
        used = shim.measured()
        if used["backend"] != (name if name == "cudaMallocAsync" else "native"):
            raise Failed(f"{name}: PyTorch used its allocator {used['backend']}")
        if used["expandable"] != (name == "expandable"):
            raise Failed(f"{name}: expandable segments: {used['expandable']}")
        if name == "native":
            served(shim)
            served(same(bare, lab.shim(command, 90, CROWDED)))
    return f"losses the same, eager and as a graph, with {', '.join(forms)}, and with GPU 0 limited to 1 GiB"


@side_by_side
def graphs(lab):
    """Graphs with memory of their own, replayed while other memory comes and goes."""
    needs_modules("torch")
    command = client("torch_graphs.py")
    cases = {"by default": {}, "lazily freed": {"FREE": "lazy"}}
    if len(lab.machine.gpus) > 1:
        cases["over two GPUs"] = {**CROWDED, "LIMIT": "0:256MiB"}
    reference = lab.bare(command, 90).succeeded()
    for settings in cases.values():
        shim = served(same(reference, lab.shim(command, 90, settings)))
        if "LIMIT" in settings and not shim.peaks().get("gpu1"):
            raise Failed(f"{shim.command}: nothing lay on GPU 1; peaks {shim.peaks()}")
    same(reference, lab.bare(command, 90, EXPANDABLE))
    same(reference, lab.shim(command, 90, env=EXPANDABLE))
    return f"{len(reference.lines())} lines the same {', '.join(cases)}, and with expandable segments"


@side_by_side
def triton(lab):
    """A Triton kernel; with memory on another GPU too."""
    needs_modules("torch", "triton")
    command = client("triton_add.py")
    env = {"TRITON_CACHE_DIR": str(pathlib.Path(lab.folder.name) / "triton")}
    reference = lab.bare(command, 120, env).succeeded()
    served(same(reference, lab.shim(command, 90, env=env)))
    if len(lab.machine.gpus) < 2:
        return f"same {len(reference.lines())} lines as bare"
    shim = same(reference, lab.shim(command, 90, {**CROWDED, "LIMIT": "0:64MiB"}, env))
    if not shim.peaks().get("gpu1"):
        raise Failed(f"{shim.command}: nothing lay on GPU 1; peaks {shim.peaks()}")
    return f"same {len(reference.lines())} lines as bare, also with arrays on GPU 1"
