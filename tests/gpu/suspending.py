"""Programs whose memory leaves their GPUs and comes back in the middle of what they do: what they print is what they print bare, and how
fast it goes."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import time

from client import client, needs_modules, needs_two_gpus, rank_client
from machine import GIB, MIB
from running import Failed, same

# Seconds that a program has to fill its memory, and a command to move it.
TO_FILL, TO_MOVE = 120, 120


def _rows(lab, pids=None):
    """What `gpupool ps` tells of the processes that hold memory now, by number."""
    told = json.loads(lab.bare([lab.gpupool, "ps", "--json"], 30).succeeded().stdout)
    rows = {row["process"]["identity"]["pid"]: row for row in told}
    return {pid: row for pid, row in rows.items() if pids is None or pid in pids}


def _filled(lab, child, least, count):
    """Numbers of the processes of this child that hold so many bytes, once there are as many."""
    until = time.monotonic() + TO_FILL
    while time.monotonic() < until and child.process.poll() is None:
        # Other checks may have programs of their own.
        pids = [pid for pid, row in _rows(lab).items() if _held(row) >= least and _is_of(pid, child)]
        if len(pids) == count:
            return sorted(pids)
    raise Failed(f"{child.title}: no {count} processes of it held {least // MIB} MiB within {TO_FILL} s")


def _held(row):
    """Bytes at all places, the pool's and those that the program makes itself, as JAX does."""
    return sum(place["held"] + place["own"] for place in row["levels"]["places"]["rows"])


def _is_of(pid, child):
    """Whether this process is the child or was started by it: launchers have sessions of their own for their ranks."""
    while pid > 1:
        if pid == child.process.pid:
            return True
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
                # The name may hold anything, also spaces and parentheses.
                pid = int(stat.read().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


def _asked(lab, *words):
    """What `gpupool suspend` or `resume` answers of all processes together: bytes, bytes that did not move, seconds of the slowest, and the
    longest of their waits for work before that."""
    told = json.loads(lab.bare([lab.gpupool, *words, "--json"], TO_MOVE).succeeded().stdout)
    total = {name: sum(row[name] for row in told) for name in ("bytes", "stayed_bytes")}
    waited = [row["waited_microseconds"] / 1e6 for row in told]
    seconds = [row["microseconds"] / 1e6 - wait for row, wait in zip(told, waited)]
    return total["bytes"], total["stayed_bytes"], max(seconds), max(waited)


def _used(lab):
    return [round(used / GIB, 1) for used in lab.machine.used()] if lab.machine.has_smi else []


def _cycles(lab, pids, targets):
    """Suspends and resumes, once for each target, and lets the program go on in between until it has used its memory again."""
    lines = []
    for number, target in enumerate(targets):
        before = _used(lab)
        out, stayed, out_seconds, waited = _asked(lab, "suspend", "--to", target, "--wait", "30s", *pids)
        while_suspended = _used(lab)
        running = [pid for pid, row in _rows(lab, pids).items() if not row["levels"]["suspended"]]
        if running:
            raise Failed(f"gpupool ps does not say that {running} are suspended")
        back, kept, back_seconds, _ = _asked(lab, "resume", *pids)
        lines.append(
            f"{number + 1}. to {target}: {out / GIB:.1f} GiB out in {out_seconds:.2f} s ({out / out_seconds / 1e9:.1f} GB/s) after {waited:.2f} s of "
            f"wait, back in {back_seconds:.2f} s ({back / back_seconds / 1e9:.1f} GB/s); stayed {stayed / GIB:.2f}, did not come back "
            f"{kept / GIB:.2f}; GiB in use by GPU, before, suspended, after: {before}, {while_suspended}, {_used(lab)}"
        )
        if not out or kept or back != out:
            raise Failed(lines[-1], lines)
    return lines


def _suspended(lab, command, least, targets, settings=None, env=None, count=1, compare=same):
    """The command bare, and under the shim, suspended to each of these targets in turn. One GPU alone has no peers."""
    if len(lab.machine.gpus) < 2:
        targets = [target for target in targets if target != "peers"]
    bare = lab.bare(command, 120, env).succeeded()
    child = lab.start(command, env, settings or {})
    pids = []
    try:
        pids = _filled(lab, child, least, count)
        lines = _cycles(lab, pids, targets)
        if child.process.poll() is not None:
            raise Failed(f"{child.title}: it had ended before it was resumed for the last time")
        compare(bare, child.finish(120).succeeded())
    except Failed:
        # Ranks have sessions of their own, and one that is suspended would wait for good.
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise
    return f"{len(targets)} times, as bare; {lines[-1].split('; ')[0][3:]}", lines


def rotation(lab):
    """30 GiB of matrices in PyTorch, whose products go on after each cycle."""
    needs_modules("torch")
    return _suspended(lab, client("torch_rotation.py", 60, 40), 29 * GIB, ["peers", "host", "host", "host", "peers"])


def large(lab):
    """The same with 100 GiB."""
    needs_modules("torch")
    return _suspended(lab, client("torch_rotation.py", 200, 5), 99 * GIB, ["peers", "host", "host"], {"RESERVE": "6GiB"})


def _plain_writer(folder, writers=8):
    """GB/s of writers that do nothing else, past the page cache, each to a file of its own."""
    size, files = 1 << 30, [folder / f"plain-{number}" for number in range(writers)]
    begun = time.monotonic()
    words = ["dd", "if=/dev/zero", "bs=8M", f"count={size >> 23}", "oflag=direct", "conv=fdatasync"]
    all_of_them = [subprocess.Popen([*words, f"of={path}"], stderr=subprocess.DEVNULL) for path in files]
    statuses = [one.wait() for one in all_of_them]
    rate = writers * size / (time.monotonic() - begun) / 1e9
    for path in files:
        path.unlink(missing_ok=True)
    if any(statuses):
        raise Failed(f"dd in {folder} failed")
    return rate


def disk(lab):
    """12 GiB of matrices to files and back. Random numbers of normal distribution: about a quarter of each is not needed."""
    needs_modules("torch")
    folder = pathlib.Path(lab.folder.name) / "suspended"
    folder.mkdir(mode=0o700)
    plain = _plain_writer(folder)
    told, lines = _suspended(lab, client("torch_rotation.py", 24, 120), 12 * GIB, [folder, folder])
    return told, [*lines, f"a plain writer there: {plain:.2f} GB/s"]


def training(lab):
    """A training program of 44 GiB; PyTorch's cache and its optimizer's state leave and come back in the middle of a step."""
    needs_modules("torch")
    return _suspended(lab, client("torch_large.py", 60), 30 * GIB, ["peers", "host", "any"])


def graph(lab):
    """A CUDA graph that is replayed."""
    needs_modules("torch")
    return _suspended(lab, client("torch_rotation.py", 16, 120, "graph"), 8 * GIB, ["host", "peers", "host"])


def _with_losses(bare, shim):
    same(bare, shim)
    if bare.measured()["losses"] != shim.measured()["losses"]:
        raise Failed(f"{shim.command}: other losses than bare")


def cupy(lab):
    """A network trained in CuPy."""
    needs_modules("cupy")
    return _suspended(lab, client("cupy_large.py", 10), 20 * GIB, ["peers", "host"], compare=_with_losses)


def jax(lab):
    """A jitted step in JAX."""
    needs_modules("jax")
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return _suspended(lab, client("jax_large.py", 60), 12 * GIB, ["peers", "host", "host"], env=env, compare=_with_losses)


def ranks(lab):
    """Two ranks that reduce over NCCL, suspended together."""
    needs_modules("torch")
    needs_two_gpus(lab)

    def sorted_lines(bare, shim):
        # Which rank prints first is not said.
        if sorted(bare.lines()) != sorted(shim.lines()):
            raise Failed(f"{shim.command}: printed {shim.lines()}, bare {bare.lines()}")

    command = rank_client("ddp.py", 6000)
    return _suspended(lab, command, 50 * MIB, ["host", "host"], count=2, compare=sorted_lines)
