"""A program whose images are written while it trains: how long it stands still, how fast its steps are meanwhile, and whether its bytes come back."""

import json
import pathlib
import re
import shutil
import statistics
import time

from client import client, needs_modules
from machine import GIB, MIB
from running import BelowGoal, Failed, NotRun, same
from suspending import DISK, _cycles, _ended, _filled, _touched

# Seconds for an image or a look at all of one, and images while it trains.
TO_WRITE, IMAGES = 150, 3


def _steps(path):
    """When each step ended and how long it took."""
    return [tuple(map(float, line.split())) for line in path.read_text(encoding="utf-8").splitlines() if line.count(" ") == 1]


def _image(lab, pid, folder):
    """What the command says of an image, and from when until when it was asked for."""
    begun = time.time()
    said = lab.bare([lab.gpupool, "checkpoint", "--json", "--keep", "2", pid, folder], TO_WRITE).succeeded().stdout
    return json.loads(said), begun, time.time()


def _kind_of(name):
    return name.split(".")[0]


def _stored(lab, folder):
    """How much of each kind of memory there is, and what it takes on the disk."""
    manifest = json.loads(lab.bare([lab.gpupool, "store", "show", "--json", folder], 60).succeeded().stdout)
    sums = {}
    for block in manifest["blocks"]:
        names = block.get("names", [])
        # PyTorch gives tensors of this size a block each; what has none is its other memory.
        kind = _kind_of(names[0]["name"]) if names else "other"
        memory, stored = sums.get(kind, (0, 0))
        sums[kind] = (memory + block["bytes"], stored + sum(part.get("stored", 0) for part in block["parts"]))
    return sums


def _hashes(program):
    line = next((line for line in program.stdout.splitlines() if line.startswith("hashes ")), None)
    if line is None:
        raise Failed(f"{program.command}: it told no hashes", program.stdout.splitlines()[-5:])
    return dict(word.split("=") for word in line.split()[1:])


def training(lab):
    """About 6 GiB: weights, their state, activations and zeros; half of the model does not change."""
    needs_modules("torch")
    folder, words = pathlib.Path(lab.folder.name) / "images", pathlib.Path(lab.folder.name) / "checkpoint-steps"
    child = lab.start(client("torch_checkpoint.py", words), None, {})
    pids = []
    with _ended(pids):
        pids += _filled(lab, child, 4 * GIB, 1)
        until = time.monotonic() + 60
        while not words.exists() or len(_steps(words)) < 20:
            if time.monotonic() > until or child.process.poll() is not None:
                raise Failed(f"{child.title}: it made no steps")
            time.sleep(0.05)
        images = [_image(lab, str(pids[0]), folder) for _ in range(IMAGES)]
        steps = _steps(words)
        words.with_name(words.name + ".stop").touch()
        time.sleep(2)
        last, _, _ = _image(lab, str(pids[0]), folder)
        lab.bare([lab.gpupool, "store", "verify", "--generation", str(last["generation"]), folder], 60).succeeded()
        sums = _stored(lab, folder)
        words.with_name(words.name + ".end").touch()
        trained = child.finish(60).succeeded()
    again = lab.start(client("torch_checkpoint.py", words, "again"), None, {"RESTORE": folder}).finish(60).succeeded()
    if _hashes(trained) != _hashes(again):
        raise Failed("other bytes came back than the program had", [str(_hashes(trained)), str(_hashes(again))])
    return _told(images, last, steps, sums, again)


def _told(images, last, steps, sums, again):
    spans = [(begun, ended) for _, begun, ended in images]
    during = [seconds for end, seconds in steps if any(begun <= end <= ended for begun, ended in spans)]
    aside = [seconds for end, seconds in steps if not any(begun <= end - seconds and end <= ended for begun, ended in spans)]
    usual, slowed, worst = statistics.median(aside[5:] or aside), statistics.median(during), max(during)
    lines = []
    for image, _, _ in [*images, (last, 0, 0)]:
        seconds, stopped = image["microseconds"] / 1e6, image["stopped_microseconds"] / 1e6
        lines.append(
            f"generation {image['generation']}: {image['bytes'] / GIB:.1f} GiB, {image['new_bytes'] / GIB:.2f} GiB written, "
            f"{image['unchanged_bytes'] / GIB:.2f} GiB unchanged, {image['in_stop_bytes'] / MIB:.0f} MiB within the stop; stopped {stopped:.3f} s of "
            f"{seconds:.2f} s ({image['bytes'] / seconds / 1e9:.2f} GB/s of memory)"
        )
    lines.append(f"a step: {usual * 1e3:.1f} ms alone, {slowed * 1e3:.1f} ms while an image is written, {worst * 1e3:.0f} ms the slowest")
    for kind, (memory, stored) in sorted(sums.items()):
        lines.append(f"{kind}: {memory / GIB:.2f} GiB of memory take {stored / GIB:.3f} GiB ({stored / memory:.1%})")
    size, seconds = next(line.split()[1:] for line in again.stdout.splitlines() if line.startswith("back "))
    lines.append(f"back by name: {int(size) / GIB:.1f} GiB in {float(seconds):.2f} s ({int(size) / float(seconds) / 1e9:.2f} GB/s)")
    first = images[0][0]
    stop = first["stopped_microseconds"] / 1e6
    return (
        f"{first['bytes'] / GIB:.1f} GiB with a stop of {stop:.3f} s, steps {slowed / usual:.2f} times as long meanwhile; all bytes came back by name",
        lines,
    )


def kinds(lab):
    """What each kind of memory takes on a disk, and how fast it goes there and comes back: each alone, as a suspension to files."""
    needs_modules("torch")
    child = lab.start(client("torch_kinds.py"), None, {})
    pid, said, lines = child.process.pid, "", []
    with _ended([pid]):
        while True:
            told = child.read_until("kind ", TO_WRITE)
            said += told
            last = told.splitlines()[-1] if told else ""
            if not last.startswith("kind "):
                break
            _, name, size = last.split()
            cycle = _cycles(lab, [pid], [DISK])[0]
            if cycle.out < int(size):
                raise Failed(f"{name}: {cycle.out} bytes left, it has {size}", [cycle.line])
            lines.append(
                f"{name}: {cycle.out / GIB:.2f} GiB of memory take {cycle.stored / GIB:.3f} GiB ({cycle.stored / cycle.out:.1%}), out in {cycle.out_seconds:.2f} s "
                f"({cycle.out / cycle.out_seconds / 1e9:.2f} GB/s of memory, {cycle.stored / cycle.out_seconds / 1e9:.2f} of the disk), back in "
                f"{cycle.back_seconds:.2f} s ({cycle.back / cycle.back_seconds / 1e9:.2f} and {cycle.stored / cycle.back_seconds / 1e9:.2f})"
            )
            child.process.stdin.write("\n")
            child.process.stdin.flush()
    done = child.finish(60, said).succeeded()
    if "WRONG" in done.stdout or done.stdout.count(": right") != len(lines) or not lines:
        raise Failed(f"{done.command}: not all of it came back as it was", done.stdout.splitlines() + lines)
    return "; ".join(line.split(", out")[0] for line in lines), lines


# Of a large image: GiB of memory, what the disk has to have beyond them, the size of a matrix, and the goals for the stop and for a step meanwhile.
LARGE, SPARE, MATRIX = 60, 10, GIB // 2
GOAL_RATE, GOAL_STEP = 100, 1.1
# The same where the memory has no room on a peer: the bytes that changed at 45 GB/s.
HOST_RATE = 45e9
GOAL_HOST_RATE = HOST_RATE / GIB
# Of each GPU: contexts, what libraries take, the reserve that every check has, and 2 GiB that stay free.
KEPT = 6 * GIB


def _large_size(lab, elsewhere):
    """Matrices that go on the first GPU, and again on what is left of it and `elsewhere` (bytes there); and a word about it where they are fewer than
    usual."""
    free, memory = shutil.disk_usage(lab.folder.name).free, lab.machine.gpus[0].total - KEPT
    room = min(free - SPARE * GIB, memory, (memory + elsewhere) // 2)
    if room < 4 * MATRIX:
        raise NotRun(f"{free / GIB:.0f} GiB are free in {lab.folder.name}, the first GPU has {memory / GIB:.0f}, and there are {elsewhere / GIB:.0f} elsewhere")
    count = min(LARGE * GIB, room) // MATRIX
    few = f"only {count * MATRIX / GIB:.0f} GiB: {free / GIB:.0f} are free on the disk, the GPU has {memory / GIB:.0f}, and there are {elsewhere / GIB:.0f} elsewhere"
    return count, "" if count * MATRIX == LARGE * GIB else few


def _until_steps(child, words, more):
    """So many steps more than there are now."""
    made = len(_steps(words)) if words.exists() else 0
    until = time.monotonic() + TO_WRITE
    while not words.exists() or len(_steps(words)) < made + more:
        if time.monotonic() > until or child.process.poll() is not None:
            raise Failed(f"{child.title}: it made no {more} steps more")
        time.sleep(0.05)


def large(lab):
    """About 60 GiB: an image while each step changes all of it, and one when each changes a tenth, with room for all of it on GPUs."""
    peers = sum(max(0, gpu.total - KEPT) for gpu in lab.machine.gpus[1:])
    return _large(lab, "large", peers, {}, GOAL_RATE)


def large_host(lab):
    """The same where only the program's own GPU and the host have room."""
    with open("/proc/meminfo", encoding="utf-8") as rows:
        available = int(next(row for row in rows if row.startswith("MemAvailable")).split()[1]) << 10
    # The pool takes half of it at most.
    return _large(lab, "large-host", max(0, available // 2 - 2 * GIB), {"DEVICES": "0"}, GOAL_HOST_RATE)


def _large(lab, name, elsewhere, settings, goal):
    needs_modules("torch")
    count, few = _large_size(lab, elsewhere)
    memory = count * MATRIX
    folder, words = pathlib.Path(lab.folder.name) / f"{name}-images", pathlib.Path(lab.folder.name) / f"{name}-steps"
    log = words.with_name(words.name + ".log")
    child = lab.start(client("torch_image.py", count, words), None, {**settings, "LOG_FILE": str(log), "LOG": "gpupool::memory=debug"})
    pids = []
    try:
        with _ended(pids):
            pids += _filled(lab, child, memory, 1)
            touched = _touched(lab, memory) if settings else 0
            _until_steps(child, words, 20)
            image, begun, ended = _image(lab, str(pids[0]), folder)
            _until_steps(child, words, 20)
            words.with_name(words.name + ".few").touch()
            # One at least begins behind that.
            _until_steps(child, words, 4)
            second = _image(lab, str(pids[0]), folder)
            words.with_name(words.name + ".stop").touch()
            program = child.finish(60).succeeded()
            said = lab.bare([lab.gpupool, "store", "verify", "--generation", str(second[0]["generation"]), folder], TO_WRITE).succeeded()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if image["bytes"] < memory:
        raise Failed(f"the image has {image['bytes']} bytes, the program {memory}", [str(image), *said.stdout.splitlines()])
    steps = _steps(words)
    if ("large", count) not in lab.kept:
        # Its file of steps must not be the one of the other, and the one that tells it to end is there from the start.
        bare_words = words.with_name("large-steps-bare")
        bare_words.with_name(bare_words.name + ".stop").touch()
        lab.kept["large", count] = lab.bare(client("torch_image.py", count, bare_words), TO_WRITE).succeeded()
    same(lab.kept["large", count], program)
    notes = [few] * bool(few) + [f"{touched:.0f} GiB of the machine's memory were touched before"] * bool(settings)
    notes += re.findall(r"the program was stopped for [^\"]*", log.read_text(encoding="utf-8"))
    return _told_large(image, steps, (begun, ended), second, notes, goal)


def _told_large(image, steps, span, second, notes, goal):
    begun, ended = span
    again, again_begun, _ = second
    steps = [(end, seconds) for end, seconds in steps if end < again_begun]
    # Some of the first are slower, as everything is new.
    before = [seconds for end, seconds in steps[5:] if end < begun]
    during = [seconds for end, seconds in steps if end - seconds >= begun and end <= ended]
    after = [seconds for end, seconds in steps if end - seconds > ended]
    across = [seconds for end, seconds in steps if end >= begun and end - seconds <= ended]
    if not before or not during or not after:
        raise Failed(f"{len(before)} steps before the image, {len(during)} meanwhile, {len(after)} after it: nothing to compare", [str(image)])
    usual, slowed, later = (statistics.median(some) for some in (before, during, after))
    stop, seconds = image["stopped_microseconds"] / 1e6, image["microseconds"] / 1e6
    rate = image["bytes"] / GIB / stop
    lines = [
        *notes,
        f"stopped {stop:.3f} s of {seconds:.2f} s for {image['bytes'] / GIB:.1f} GiB ({rate:.0f} GiB/s), {image['in_stop_bytes'] / MIB:.0f} MiB of it written within the stop",
        f"written: {image['new_bytes'] / GIB:.2f} GiB on the disk in {seconds - stop:.2f} s ({image['new_bytes'] / (seconds - stop) / 1e9:.2f} GB/s of the disk, "
        f"{image['bytes'] / (seconds - stop) / 1e9:.2f} GB/s of memory); every byte verified",
        f"a step: {usual * 1e3:.1f} ms before ({len(before)}), {slowed * 1e3:.1f} ms meanwhile ({len(during)}), {later * 1e3:.1f} ms after ({len(after)}); "
        f"the slowest from the question to the answer {max(across) * 1e3:.0f} ms",
    ]
    # What the GPUs saw to be as it was is not copied; the goal is that the rest takes no longer than it does to the host.
    changed, again_stop = again["bytes"] - again["not_copied_bytes"], again["stopped_microseconds"] / 1e6
    allowed = changed / HOST_RATE
    lines.append(
        f"with a tenth changed: {changed / GIB:.2f} of {again['bytes'] / GIB:.1f} GiB copied ({again['to_gpus_bytes'] / GIB:.2f} to GPUs, {again['to_host_bytes'] / GIB:.2f} to the "
        f"host), stopped {again_stop:.3f} s ({changed / GIB / again_stop:.0f} GiB/s of what changed; at 45 GB/s {allowed:.3f} s), {again['new_bytes'] / GIB:.2f} GiB written, "
        f"in {again['microseconds'] / 1e6:.2f} s with what was read again"
    )
    told = f"{image['bytes'] / GIB:.1f} GiB with a stop of {stop:.3f} s ({rate:.0f} GiB/s), steps {slowed / usual:.2f} times as long meanwhile; output as bare"
    told += f"; with a tenth changed a stop of {again_stop:.3f} s"
    goals = (("the stop", rate < goal), ("the steps", slowed > GOAL_STEP * usual), ("the stop with a tenth changed", again_stop > allowed))
    missed = [name for name, is_missed in goals if is_missed]
    if missed:
        raise BelowGoal(f"{told}; the goal ({goal:.0f} GiB/s, {GOAL_STEP} times, what changed at 45 GB/s) is missed by {' and '.join(missed)}", lines)
    return told, lines
