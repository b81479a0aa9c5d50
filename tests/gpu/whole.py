"""Whole processes that leave their GPUs, by the driver's own checkpoint behind ours: what the GPUs show of them meanwhile, and what they print afterwards.
Where the driver refuses, it says why, and the program goes on as it was."""

import contextlib
import json
import os
import pathlib
import signal
import time

from client import client, needs_modules, needs_two_gpus, rank_client
from machine import GIB, MIB
from running import Failed, same
from suspending import TO_MOVE, _ended, _filled, _goes_on, _held, _in_any_order, _rows, _steps, _touched

# Matrices of half a GiB that PyTorch maps itself; the pool has half as many beside them. And how often the program leaves.
MATRICES, TIMES = 16, 2
# PyTorch maps its memory itself, so that the program has both kinds.
OWN = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
# Of a GPU that shows nothing of a process: what differs from one look to the next.
NOTHING = 64 * MIB
# Seconds for what a process does that may be lost.
TO_SHOW = 30


def _used(lab):
    return lab.machine.used() if lab.machine.has_smi else []


def _gib(used):
    return [round(bytes_ / GIB, 2) for bytes_ in used]


def _why(ended):
    """What a command that failed said last."""
    return (ended.stderr.strip().splitlines() or ended.stdout.strip().splitlines() or ["nothing"])[-1]


def _is_suspended(lab, pid):
    row = _rows(lab, [pid]).get(pid)
    return bool(row and row["levels"]["suspended"])


def _resumed(lab, *pids):
    """Seconds, and GiB that came back."""
    begun = time.monotonic()
    told = json.loads(lab.bare([lab.gpupool, "resume", "--json", *pids], TO_MOVE).succeeded().stdout)
    if kept := sum(row["stayed_bytes"] for row in told):
        raise Failed(f"gpupool resume: {kept} bytes did not come back")
    return time.monotonic() - begun, sum(row["bytes"] for row in told) / GIB


def _leaves(lab, name, leave):
    """A program with memory of the pool and its own that leaves its GPUs by `leave` and is resumed, again and again. What that says of a process is a line
    of it, and why the driver refused, if it did."""
    needs_modules("torch")
    steps = pathlib.Path(lab.folder.name) / f"{name}-steps"
    at_first = _used(lab)
    child = lab.start(client("torch_process.py", MATRICES, steps), OWN, {})
    lines, pids, refused = [], [], None
    with _ended(pids):
        pids += _filled(lab, child, (MATRICES * 3 // 2) * GIB // 2, 1)
        pid = pids[0]
        _touched(lab, sum(_held(row) for row in _rows(lab, pids).values()))
        for number in range(1, TIMES + 1):
            _goes_on(child, steps)
            before, begun = _used(lab), time.monotonic()
            line, refused = leave(pid)
            took, meanwhile = time.monotonic() - begun, _used(lab)
            if refused:
                if _is_suspended(lab, pid):
                    raise Failed(f"refused, and not resumed: {refused}", lines)
                break
            back, gib = _resumed(lab, pid)
            lines.append(
                f"{number}. {line}, {took:.2f} s with the command; resume {back:.2f} s, {gib:.1f} GiB; GiB in use by GPU, before, meanwhile, after: "
                f"{_gib(before)}, {_gib(meanwhile)}, {_gib(_used(lab))}"
            )
            shows = [now - then for now, then in zip(meanwhile, at_first) if now > then + NOTHING]
            if shows:
                raise Failed(f"the GPUs show {_gib(shows)} GiB of it meanwhile", lines)
        _goes_on(child, steps)
        steps.with_name(f"{steps.name}.end").touch()
        done = child.finish(120).succeeded()
    if not done.measured()["expandable"]:
        raise Failed(f"{done.command}: PyTorch did not map its memory itself", lines)
    # The one that tells it to end is there from the start.
    bare_steps = steps.with_name(f"{steps.name}-bare")
    bare_steps.with_name(f"{bare_steps.name}.end").touch()
    same(lab.bare(client("torch_process.py", MATRICES, bare_steps), 120, OWN).succeeded(), done)
    if refused:
        raise Failed(f"refused: {refused}; the program went on as it was, and printed what it prints bare", lines)
    return f"{TIMES} times, as bare; {lines[-1].split('; GiB')[0][3:]}", lines


def suspended(lab):
    """`gpupool suspend --process`."""

    def leave(pid):
        ended = lab.bare([lab.gpupool, "suspend", "--process", "--to", "host", "--wait", "30s", "--json", pid], TO_MOVE)
        if ended.status:
            return "", _why(ended)
        told = json.loads(ended.stdout)
        out, stayed = (sum(row[name] for row in told) for name in ("bytes", "stayed_bytes"))
        seconds = max(row["microseconds"] - row["waited_microseconds"] for row in told) / 1e6
        return f"{out / GIB:.1f} GiB out in {seconds:.2f} s ({out / seconds / 1e9:.1f} GB/s), {stayed / GIB:.2f} stayed", None

    return _leaves(lab, "suspend-process", leave)


def imaged(lab):
    """`gpupool checkpoint --process`: an image, whole while the process has nothing on its GPUs."""
    folder = pathlib.Path(lab.folder.name) / "process-images"

    def leave(pid):
        ended = lab.bare([lab.gpupool, "checkpoint", "--process", "--wait", "30s", "--keep", "1", "--json", pid, folder], TO_MOVE)
        told = json.loads(ended.stdout) if ended.stdout.strip() else {}
        generation, rest = told.get("generation"), told.get("process") or {}
        if generation:
            verify = [lab.gpupool, "store", "verify", "--generation", generation, folder]
            lab.bare(verify, TO_MOVE).succeeded()
        if ended.status:
            return "", rest.get("error") or _why(ended)
        if not rest.get("is_off_gpus"):
            raise Failed(f"gpupool checkpoint --process ended well and says {told}")
        seconds = told["microseconds"] / 1e6
        return (
            f"generation {generation} of {told['bytes'] / GIB:.1f} GiB in {seconds:.2f} s ({told['bytes'] / seconds / 1e9:.2f} GB/s), whole, "
            f"{told['left_out_bytes'] / GIB:.1f} GiB of the program's own left out, {rest['bytes'] / GIB:.1f} GiB to the host"
        ), None

    return _leaves(lab, "checkpoint-process", leave)


def ranks(lab):
    """What the driver does with two processes that have a communicator: nothing relies on it, so whatever comes out is told."""
    needs_modules("torch")
    needs_two_gpus(lab)
    losses = pathlib.Path(lab.folder.name) / "process-ranks-losses"
    child = lab.start(rank_client("ddp.py", "until", losses), None, {})
    lines, pids = [], []
    with _ended(pids):
        pids += _filled(lab, child, 50 * MIB, 2)
        _goes_on(child, losses)
        before = _used(lab)
        ended = lab.bare([lab.gpupool, "suspend", "--process", "--to", "host", "--wait", "30s", *pids], TO_MOVE)
        lines += [f"gpupool suspend --process: exit code {ended.status}", *(ended.stdout + ended.stderr).strip().splitlines()]
        lines.append(f"GiB in use by GPU, before, meanwhile: {_gib(before)}, {_gib(_used(lab))}")
        if ended.status == 0:
            back = lab.bare([lab.gpupool, "resume", *pids], TO_MOVE)
            lines += [f"gpupool resume: exit code {back.status}", *(back.stdout + back.stderr).strip().splitlines()]
    answer = "they left" if ended.status == 0 else f"refused: {_why(ended)}"
    try:
        _goes_on(child, losses, TO_SHOW)
    except Failed as failure:
        _given_up(lab, child, pids)
        return f"{answer}; lost: {failure}", lines + [str(failure)]
    losses.with_name(f"{losses.name}.end").touch()
    done = child.finish(60)
    if done.status:
        return f"{answer}; they ended with {done.status}: {_why(done)}", lines
    steps = _steps(losses)
    _in_any_order(lab.bare(rank_client("ddp.py", "steps", steps), 120).succeeded(), done)
    return f"{answer}; they went on, as bare after {steps} steps", lines


def _given_up(lab, child, pids):
    """Ends processes that may wait for the driver for ever: nobody waits for them."""
    child.kill()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + TO_SHOW
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    lab.forget(child)
