"""Programs whose memory leaves their GPUs and comes back in the middle of what they do: what they print is what they print bare, and how
fast it goes."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import time
from dataclasses import dataclass

import building
from client import client, needs_modules, needs_two_gpus, rank_client
from fleet import _steps
from machine import GIB, MIB
from running import BelowGoal, Failed, NotRun, same

# Seconds that a program has to fill its memory, a command to move it, and a program to go on for two steps after that.
TO_FILL, TO_MOVE, TO_GO_ON = 120, 120, 60
# In place of a folder, which each run has one of.
DISK = "disk"
# Of what a plain writer or reader reaches, times the compression.
GOAL_DISK = 0.9


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


def _folder(lab):
    """Where memory goes that goes to a disk."""
    folder = pathlib.Path(lab.folder.name) / "suspended"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _size(folder):
    """Bytes of all files there."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _touched(lab, size):
    """GiB of the machine's own memory that were touched, so that a virtual machine has them before anything to the host is timed; a process of
    its own does it, as the kernel may end it where too much is wanted."""
    done = lab.bare(client("touch.py", size), 60).succeeded().measured()
    return done["bytes"] / GIB


@dataclass
class Cycle:
    """A suspension and its resume: bytes and seconds out and back, bytes that files took meanwhile (0 without a folder), and all in words."""

    out: int
    out_seconds: float
    back: int
    back_seconds: float
    stored: int
    line: str


def _cycles(lab, pids, targets, go_on=None):
    """Suspends and resumes, once for each target, and lets the program go on in between: until it has used its memory again, or for as long as
    `go_on` says."""
    if set(targets) != {"peers"}:
        touched = _touched(lab, sum(_held(row) for row in _rows(lab, pids).values()))
        lab.note(f"{touched:.1f} GiB of the machine's memory were touched")
    cycles = []
    for number, target in enumerate(targets):
        before = _used(lab)
        to = _folder(lab) if target == DISK else target
        out, stayed, out_seconds, waited = _asked(lab, "suspend", "--to", to, "--wait", "30s", *pids)
        while_suspended = _used(lab)
        running = [pid for pid, row in _rows(lab, pids).items() if not row["levels"]["suspended"]]
        if running:
            raise Failed(f"gpupool ps does not say that {running} are suspended")
        stored = _size(to) if target == DISK else 0
        back, kept, back_seconds, _ = _asked(lab, "resume", *pids)
        on_disk = f" ({stored / GIB:.1f} GiB on the disk)" if target == DISK else ""
        line = (
            f"{number + 1}. to {target}{on_disk}: {out / GIB:.1f} GiB out in {out_seconds:.2f} s ({out / out_seconds / 1e9:.1f} GB/s) after {waited:.2f} s of "
            f"wait, back in {back_seconds:.2f} s ({back / back_seconds / 1e9:.1f} GB/s); stayed {stayed / GIB:.2f}, did not come back "
            f"{kept / GIB:.2f}; GiB in use by GPU, before, suspended, after: {before}, {while_suspended}, {_used(lab)}"
        )
        cycles.append(Cycle(out, out_seconds, back, back_seconds, stored, line))
        if not out or kept or back != out:
            raise Failed(line, _lines(cycles))
        if target == DISK and _size(to):
            raise Failed(f"{to} has files of a program that was resumed", _lines(cycles))
        if go_on:
            go_on()
    return cycles


def _lines(cycles):
    return [cycle.line for cycle in cycles]


def _reached(lab, targets):
    """One GPU alone has no peers."""
    return [target for target in targets if target != "peers" or len(lab.machine.gpus) > 1]


@contextlib.contextmanager
def _ended(pids):
    """Ends these processes where a check fails: ranks have sessions of their own, and one that is suspended would wait for good."""
    try:
        yield
    except Failed:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise


def _suspended(lab, command, least, targets, settings=None, env=None, count=1, compare=same):
    """The command bare, and under the shim, suspended to each of these targets in turn. All cycles."""
    bare = lab.bare(command, 120, env).succeeded()
    child = lab.start(command, env, settings or {})
    pids = []
    with _ended(pids):
        pids += _filled(lab, child, least, count)
        cycles = _cycles(lab, pids, _reached(lab, targets))
        if child.process.poll() is not None:
            raise Failed(f"{child.title}: it had ended before it was resumed for the last time", _lines(cycles))
        compare(bare, child.finish(120).succeeded())
    return cycles


def _told(cycles, what="as bare"):
    return f"{len(cycles)} times, {what}; {cycles[-1].line.split('; ')[0][3:]}", _lines(cycles)


def _goes_on(child, words, seconds=TO_GO_ON):
    """Two steps more: one may have begun before; the second has read and written all of the memory where that lies now."""
    done, until = _steps(words) + 2, time.monotonic() + seconds
    while _steps(words) < done:
        if child.process.poll() is not None:
            child.finish(5).succeeded()
            raise Failed(f"{child.title}: it ended by itself")
        if time.monotonic() > until:
            raise Failed(f"{child.title}: no two steps within {seconds} s")
        time.sleep(0.05)


def _trained(lab, name, command, least, targets, env=None, count=1, compare=same):
    """A program that trains until it was suspended to each of these targets, and the same bare for as many steps: each loss is the one that it is there.
    `command` makes a command of a client's words. All cycles, the steps, and the run under the shim."""
    losses = pathlib.Path(lab.folder.name) / f"{name}-losses"
    child = lab.start(command("until", losses), env, {})
    pids = []

    def trains_on():
        _goes_on(child, losses)

    with _ended(pids):
        pids += _filled(lab, child, least, count)
        trains_on()
        cycles = _cycles(lab, pids, _reached(lab, targets), trains_on)
        losses.with_name(f"{losses.name}.end").touch()
        trained = child.finish(120).succeeded()
    steps = _steps(losses)
    compare(lab.bare(command("steps", steps), 200, env).succeeded(), trained)
    return cycles, steps, trained


def rotation(lab):
    """30 GiB of matrices in PyTorch, whose products go on after each cycle."""
    needs_modules("torch")
    return _told(_suspended(lab, client("torch_rotation.py", 60, 40), 29 * GIB, ["peers", "host", "host", "host", "peers"]))


def large(lab):
    """The same with 100 GiB."""
    needs_modules("torch")
    return _told(_suspended(lab, client("torch_rotation.py", 200, 12), 99 * GIB, ["peers", "host", "host"], {"RESERVE": "6GiB"}))


def _plain(lab, folder):
    """GB/s of a writer and a reader that do nothing else: the better of two ways, and all of it in words."""
    mib = min(8 << 10, shutil.disk_usage(folder).free // MIB // 2)
    done = lab.bare([building.bench(lab, "plain_disk"), folder, mib], 120).succeeded().measured()
    best = {what: max(way[what] for way in done.values()) for what in ("write", "read")}
    ways = ", ".join(f"{way} {rates['write']:.2f} and {rates['read']:.2f}" for way, rates in done.items())
    return best, f"a plain writer and reader there, of {mib} MiB with direct I/O, in GB/s: {ways} (4 io_uring of 32 requests each, 32 threads)"


def _against(cycle, plain):
    """What a suspension to files reached of the goal each way, in words, and whether it missed it."""
    ratio = cycle.out / cycle.stored
    told, missed = [], False
    for way, bytes_, seconds, rate in (("out", cycle.out, cycle.out_seconds, plain["write"]), ("back", cycle.back, cycle.back_seconds, plain["read"])):
        reached, goal = bytes_ / seconds / 1e9, GOAL_DISK * rate * ratio
        told.append(f"{way} {reached:.2f} GB/s, goal {goal:.2f}: {'met' if reached >= goal else 'missed'}")
        missed |= reached < goal
    return f"compressed to 1/{ratio:.2f}; {'; '.join(told)}", missed


# Of a suspension to a disk: GiB of memory, and GiB that stay free there. A matrix is half a GiB.
ON_DISK, DISK_SPARE = 30, 10


def disk(lab):
    """30 GiB of matrices to files and back, less where the disk is small. Random numbers of normal distribution: about a quarter of each is not needed."""
    needs_modules("torch")
    folder = _folder(lab)
    free = shutil.disk_usage(folder).free // GIB
    gib = min(ON_DISK, free - DISK_SPARE, lab.machine.gpus[0].total // GIB - 8)
    if gib < 4:
        raise NotRun(f"{free} GiB are free in {folder}, of which {DISK_SPARE} are to stay so")
    plain, words = _plain(lab, folder)
    # A product takes about 15 ms, and it works for a few seconds before, between and after.
    rounds = 24 * ON_DISK // gib
    cycles = _suspended(lab, client("torch_rotation.py", 2 * gib, rounds), gib * GIB, [DISK, DISK])
    judged = [_against(cycle, plain) for cycle in cycles]
    told, lines = _told(cycles)
    lines = [line for cycle, (text, _) in zip(lines, judged) for line in (cycle, f"   {text}")] + [words]
    lines += [f"only {gib} GiB: {free} are free on the disk"] * (gib < ON_DISK)
    told = f"{told}; {judged[-1][0]}"
    if any(missed for _, missed in judged):
        raise BelowGoal(told, lines)
    return told, lines


def _training(lab, name, env=None):
    """A deterministic training loop of 13 GiB: PyTorch's cache and its optimizer's state leave and come back in the middle of a step."""
    needs_modules("torch")
    cycles, steps, trained = _trained(
        lab, name, lambda *words: client("torch_train.py", *words), 10 * GIB, ["peers", "host", "any", DISK], env
    )
    told, lines = _told(cycles, f"all {steps} losses as bare")
    if trained.measured()["expandable"] != bool(env):
        raise Failed(f"{trained.command}: PyTorch says of expandable segments {trained.measured()['expandable']}", lines)
    return told, lines


def training(lab):
    return _training(lab, "suspend-training")


def training_expandable(lab):
    """The same where PyTorch maps its memory itself."""
    return _training(lab, "suspend-training-expandable", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})


def graph(lab):
    """A CUDA graph that is replayed."""
    needs_modules("torch")
    return _told(_suspended(lab, client("torch_rotation.py", 16, 120, "graph"), 8 * GIB, ["host", "peers", "host", DISK]))


def _with_losses(bare, shim):
    same(bare, shim)
    if bare.measured()["losses"] != shim.measured()["losses"]:
        raise Failed(f"{shim.command}: other losses than bare")


def cupy(lab):
    """A network trained in CuPy."""
    needs_modules("cupy")
    return _told(_suspended(lab, client("cupy_large.py", 12), 20 * GIB, ["peers", "host", DISK], compare=_with_losses))


def jax(lab):
    """A jitted step in JAX. Its memory is its own, and goes where the pool's goes."""
    needs_modules("jax")
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return _told(_suspended(lab, client("jax_large.py", 150), 12 * GIB, ["peers", "host", "host", DISK], env=env, compare=_with_losses))


def _in_any_order(bare, shim):
    # Which rank prints first is not said.
    if sorted(bare.lines()) != sorted(shim.lines()):
        raise Failed(f"{shim.command}: printed {shim.lines()}, bare {bare.lines()}")


def ranks(lab):
    """Two ranks that reduce over NCCL, suspended together. Each works on a GPU of its own, so that only a third one is a peer."""
    needs_modules("torch")
    needs_two_gpus(lab)
    has_third = len(lab.machine.gpus) > 2
    targets = ["host", "host", DISK] + ["peers"] * has_third
    cycles, steps, _ = _trained(lab, "suspend-ranks", lambda *words: rank_client("ddp.py", *words), 50 * MIB, targets, count=2, compare=_in_any_order)
    told, lines = _told(cycles, f"as bare after {steps} steps")
    return told, lines + ["to peers: not asked, there is no third GPU"] * (not has_third)


def idle(lab):
    """GPUPOOL_IDLE_SUSPEND: a program that waits for its user leaves its GPU by itself, and its next call brings it back."""
    needs_modules("torch")
    command = client("torch_idle.py", 40)
    bare = lab.bare(command, 120).succeeded()
    child = lab.start(command, None, {"IDLE_SUSPEND": "2s"})
    said = child.read_until("idles", TO_FILL)
    begun, before = time.monotonic(), _used(lab)
    pid = child.process.pid
    while not (row := _rows(lab, [pid]).get(pid)) or not row["levels"]["suspended"]:
        if child.process.poll() is not None or time.monotonic() - begun > 30:
            child.kill()
            child.finish(5, said)
            raise Failed(f"{child.title}: it was not suspended within 30 s")
        time.sleep(0.05)
    after, while_suspended = time.monotonic() - begun, _used(lab)
    done = same(bare, child.finish(60, said).succeeded())
    # It may have been idle before, while libraries were loaded.
    left, back = [(done.events(f"program.{what}") or [{"bytes": 0}])[-1] for what in ("suspend", "resume")]
    if not left["bytes"] or back["bytes"] != left["bytes"]:
        raise Failed(f"{done.command}: its log says at last {left} and {back}")
    times = done.measured()
    seconds = [event["microseconds"] / 1e6 for event in (left, back)]
    return (
        f"{left['bytes'] / GIB:.1f} GiB to {left['to']} after {after:.1f} s without a call, in {seconds[0]:.2f} s; the next call took "
        f"{times['woken']:.0f} ms ({seconds[1]:.2f} s of them the resume), the same ones before and after {times['before']:.0f} and {times['after']:.0f} ms; "
        f"as bare; GiB in use by GPU, idle, suspended: {before}, {while_suspended}"
    )
