"""Several programs on one machine: a borrower gives way to who starts on the GPU that it borrows from, and a GPU is emptied under a program."""

import json
import os
import pathlib
import time

import building
from client import client, needs_modules, needs_two_gpus
from machine import GIB
from running import BelowGoal, Failed, NotRun, same

# Seconds that a program has to fill its memory and to check it.
TO_FILL, TO_CHECK = 60, 60
# Seconds that 100 GiB may take.
TO_PEER, TO_HOST = 0.6, 3.0
# GiB of a GPU that a borrower leaves: contexts and kernels of two programs, the reserve, and as much again for who comes.
LEFT, RESERVE = 16, 6
# GiB that are to give way. What is on the host afterwards is worked at at 3.4 GB/s before its program goes on, so it is little unless more is asked for.
TO_A_PEER, ONTO_THE_HOST = 40, int(os.environ.get("GPU_CHECK_ONTO_HOST", "12"))
# Of a program under gpupool that comes. It keeps no cache that it could return, as one with CuPy is taken to do.
COMES = {"RESERVE": f"{RESERVE}GiB", "SOFT_OOM": "off"}


def _held(lab, pid, gpu):
    told = json.loads(lab.bare([lab.gpupool, "ps", "--json"], 30).succeeded().stdout)
    for row in told:
        if row["process"]["identity"]["pid"] == pid:
            rows = row["levels"]["places"]["rows"]
            return sum(place["held"] + place["own"] for place in rows if place["place"] == f"gpu{gpu}")
    # Its page has not said anything yet.
    return 0


def _until(what, is_so, seconds=20):
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > until:
            raise Failed(f"never: {what}")
        time.sleep(0.05)


def _checked(child, said):
    child.process.stdin.write("\n")
    child.process.stdin.flush()
    done = child.finish(TO_CHECK, said).succeeded()
    if "wrong: []" not in done.stdout:
        raise Failed(f"{child.title}: {done.stdout.splitlines()[-2:]}")
    return done


def _borrows(lab, to_peer):
    """Settings of a program on GPU 0 that borrows of GPU 1 alone. `to_peer`: there is a third GPU, which lends once it has begun ([`LENT`]): a GPU 0 that lent
    more would have it all at once, as its home."""
    needs_two_gpus(lab)
    if to_peer and len(lab.machine.gpus) < 3:
        raise NotRun("needs three GPUs: what gives way on the second one goes to the third")
    limits = ["0:1GiB", *(f"{gpu}:1GiB" for gpu in range(2, len(lab.machine.gpus)) if to_peer)]
    return {"LIMIT": ",".join(limits), "RESERVE": f"{RESERVE}GiB", "SOFT_OOM": "off"}


# What is set then.
LENT = "limit=0:1GiB"


def _gives_way(lab, to_peer, settings, goal):
    """A borrower on GPU 0 that has nearly all of GPU 1, and a program that starts there; `settings`: under gpupool, or bare."""
    return _displaced(lab, 1, to_peer, _borrows(lab, to_peer), settings, goal)


def _displaced(lab, gpu, to_peer, held_by, settings, goal):
    """A program on GPU 0 with the settings `held_by` that has nearly all of GPU `gpu`, and one that starts there and takes more than is free. To one
    without gpupool all of it gives way whatever that takes, so it takes what is free (`stranger_at_once` takes more), and on the way to the host there is less of it."""
    needs_modules("cupy")
    gib = lab.machine.gpus[gpu].total // GIB - LEFT
    given = min(TO_A_PEER if to_peer else ONTO_THE_HOST, gib // 2)
    wants = LEFT - RESERVE - 2 + given
    if settings is None:
        gib, wants = gib if to_peer else 2 * given, LEFT - 4
    borrower, said = _holds(lab, gpu, gib, held_by, to_peer)
    # As in the checks of suspension: what a virtual machine has not had yet takes its host's time, not the library's.
    touched = 0 if to_peer else lab.bare(client("touch.py", gib * GIB), 60).succeeded().measured()["bytes"] / GIB
    begun = time.monotonic()
    comer = lab.start(client("cupy_holder.py", gpu, wants), settings=settings)
    comer_said = comer.read_until("holds", TO_FILL)
    seconds = time.monotonic() - begun
    if "holds" not in comer_said:
        comer.finish(5, comer_said).succeeded()
        raise Failed(f"{comer.title}: it ended before it held anything")
    checked = _checked(comer, comer_said)
    done = _checked(borrower, said)
    gave = [(event["freed"], event["microseconds"] / 1e6, event.get("to_pid")) for event in done.events("recall.give")]
    if not gave:
        raise Failed("the borrower gave nothing")
    freed, took = sum(row[0] for row in gave), sum(row[1] for row in gave)
    lines = [f"{bytes_ / GIB:.1f} GiB in {took_:.2f} s to process {who}" for bytes_, took_, who in gave]
    lines.append(f"the program that came held {wants} GiB after {seconds:.1f} s; its allocations took {checked.measured()['seconds']} s")
    lines += [f"{touched:.0f} GiB of the machine's memory were touched before"] * bool(touched)
    text = f"{freed / GIB:.1f} GiB gave way in {took:.2f} s ({freed / took / 1e9:.0f} GB/s, {len(gave)} times)"
    if took > goal * max(freed / (100 * GIB), 0.1):
        raise BelowGoal(f"{text}; the goal is {goal} s for 100 GiB", lines)
    return text, lines


def _holds(lab, gpu, gib, held_by, to_peer):
    """A program on GPU 0 that has so much of GPU `gpu`, and what it has said so far."""
    borrower = lab.start(client("cupy_holder.py", 0, gib), settings=held_by)
    said = borrower.read_until("holds", TO_FILL)
    if "holds" not in said:
        borrower.finish(5, said).succeeded()
        raise Failed(f"{borrower.title}: it ended before it held anything")
    pid = borrower.process.pid
    _until(f"{gib - 2} GiB on GPU {gpu}", lambda: _held(lab, pid, gpu) >= (gib - 2) * GIB)
    if to_peer:
        lab.bare([lab.gpupool, "set", pid, LENT], 30).succeeded()
    return borrower, said


def stranger_at_once(lab):
    """A program without gpupool that as soon as it has its context asks for more than is free, block after block: by how much it may exceed that. For each
    amount a borrower anew. The least amount has to be served."""
    needs_modules("cupy")
    # At that level the log says also what was taken for no sign.
    held_by = {**_borrows(lab, True), "LOG": "gpupool::memory=debug"}
    gib = lab.machine.gpus[1].total // GIB - LEFT
    lines, refused = [], []
    # What is free, and of what is borrowed a part; CuPy itself takes 1 to 2 GiB.
    for part in (8, gib // 4, gib // 2, gib - 4):
        wants = LEFT - RESERVE // 2 + part
        borrower, said = _holds(lab, 1, gib, held_by, True)
        comer = lab.start(client("cupy_holder.py", 1, wants))
        comer_said = comer.read_until("holds", TO_FILL)
        is_served = "holds" in comer_said
        came = (_checked(comer, comer_said) if is_served else comer.finish(5, comer_said)).measured()
        # One that was refused has ended, and all left or leaves all the same.
        done = _checked(borrower, said)
        line = f"{wants} GiB at once: {'served' if is_served else 'refused at ' + str(came['held'])}; the context took {(came['context'] - came['before']) * 1e3:.0f} ms, "
        line += f"the blocks {came['seconds'] * 1e3:.0f} ms; "
        for sign in done.events("recall.sign"):
            line += f"a sign at {(sign['t'] - came['context']) * 1e3:+.0f} ms ({sign['bytes'] >> 10} KiB, {'all leaves' if sign['leaves'] else 'nothing leaves'}); "
        notes = [note for note in done.events("note") if note.get("about") == "awaited" and note["t"] > came["before"] - 3]
        lines += [f"  {(note['t'] - came['context']) * 1e3:+.0f} ms: {note.get('message', '')}"[:200] for note in notes]
        gave = done.events("recall.give")
        if gave:
            first = min(event["t"] - event["microseconds"] / 1e6 for event in gave)
            freed = sum(event["freed"] for event in gave)
            line += f"from when it had its context, giving way began at {(first - came['context']) * 1e3:+.0f} ms and ended at {(gave[-1]['t'] - came['context']) * 1e3:+.0f} ms "
            line += f"({freed / GIB:.0f} GiB)"
        elif is_served:
            raise Failed("the borrower gave nothing", [*lines, line])
        else:
            line += "it had ended before anything left"
        lines.append(line)
        if not is_served:
            refused.append(wants)
        if refused == [LEFT - RESERVE // 2 + 8]:
            raise Failed(f"refused: {wants} GiB, of which about {LEFT - RESERVE // 2 + 1} were free", lines)
    text = f"refused: {', '.join(f'{wants} GiB' for wants in refused)}" if refused else f"up to {wants} GiB at once were served"
    if refused:
        raise BelowGoal(f"{text}; the goal is that nobody is", lines)
    return text, lines


def comers(lab):
    """When it shows that a program comes: what time there is before it asks for memory. Nothing of gpupool takes part."""
    watcher = building.watcher(lab, "comers")
    gpu = len(lab.machine.gpus) - 1
    env = {"CUDA_MODULE_LOADING": "LAZY"}
    # On another GPU than the one that it is looked at, and where it sees that one alone: whether the sign says which GPU it goes to.
    alone = ["env", f"CUDA_VISIBLE_DEVICES={gpu}", watcher, "come", 0, 4]
    elsewhere = ["env", "CUDA_VISIBLE_DEVICES=0", watcher, "come", 0, 4]
    commands = [("plain C", [watcher, "come", gpu, 4]), ("plain C that sees it alone", alone), ("plain C that sees another one alone", elsewhere)]
    if gpu:
        commands.append(("plain C that goes to another one", [watcher, "come", 0, 4]))
    for module in ("cupy", "torch"):
        try:
            needs_modules(module)
            commands.append((module, client("comes.py", module, gpu, 4)))
        except NotRun:
            pass
    lines, text = [], []
    borrower, said = None, ""
    if gpu:
        try:
            needs_modules("cupy")
            commands.append(("plain C beside a borrower", [watcher, "come", gpu, 4]))
        except NotRun:
            pass
    for name, command in commands:
        if name.endswith("a borrower"):
            borrower, said = _holds(lab, gpu, 8, {"LIMIT": "0:1GiB", "DEVICES": f"0,{gpu}", "RECALL_WAIT": "off", "SOFT_OOM": "off"}, False)
        for again in ("", " again"):
            told = lab.bare([watcher, "watch", gpu, *command], 60, env).succeeded()
            lines += [f"{name}{again}:", *(f"  {line}" for line in told.lines())]
            at = dict(line.removeprefix("sign ").rsplit(": ", 1) for line in told.lines() if line.startswith("sign "))
            first = {sign: float(when.split(" ")[0]) for sign, when in at.items() if when != "never"}
            context = first.get("context-is-made")
            if context is None:
                raise Failed(f"{name}: it made no context", lines)
            signs = [("the driver's users", "more users of nvidia_uvm"), ("memory in use", "memory in use"), ("NVML's list", "in NVML's list")]
            shown = [f"{what} {context - first[sign]:.0f}" if sign in first else f"{what} never" for what, sign in signs]
            text.append(f"{name}{again}: {', '.join(shown)}")
    if borrower:
        _checked(borrower, said)
    return "ms before the context was made: " + "; ".join(text), lines


def stranger_peer(lab):
    """A program without gpupool, and room on a third GPU."""
    return _gives_way(lab, True, None, TO_PEER)


def stranger_host(lab):
    """The same with no room but on the host."""
    return _gives_way(lab, False, None, TO_HOST)


def owner_peer(lab):
    """A program under gpupool, which asks for what it needs."""
    return _gives_way(lab, True, COMES, TO_PEER)


def owner_host(lab):
    return _gives_way(lab, False, COMES, TO_HOST)


def priority_host(lab):
    """On one GPU: a program of low priority gives way to one of high priority, and its memory goes to the host."""
    held_by = {"DEVICES": "0", "PRIORITY": "10", "RESERVE": f"{RESERVE}GiB", "SOFT_OOM": "off"}
    comes = {**held_by, "PRIORITY": "90"}
    return _displaced(lab, 0, False, held_by, comes, TO_HOST)


def drain(lab):
    """GPU 1 is emptied under a program that borrows from it, and filled again; it computes the same."""
    needs_modules("torch")
    needs_two_gpus(lab)
    command = client("torch_rotation.py", 24, 8)
    bare = lab.bare(command, 120).succeeded()
    child = lab.start(command, settings={"LIMIT": "0:8GiB"})
    pid = child.process.pid
    lines = []
    _until("a loan", lambda: child.process.poll() is None and _held(lab, pid, 1) >= 4 * GIB, 60)
    for word in ("drain", "undrain"):
        begun = time.monotonic()
        told = json.loads(lab.bare([lab.gpupool, word, "--json", "1"], 60).stdout or "[]")
        row = next((row for row in told if row["pid"] == pid), None)
        lines.append(f"{word}: {(row or {}).get('bytes', 0) / GIB:.1f} GiB in {time.monotonic() - begun:.2f} s")
        if not row or not row["bytes"]:
            raise Failed(f"{word} moved nothing: {told}", lines)
    same(bare, child.finish(120).succeeded())
    return "the same sums; " + ", ".join(lines), lines


def drain_training(lab):
    """The same under a training loop that goes on until GPU 1 was drained twice: each of its losses is the one that it has bare."""
    needs_modules("torch")
    needs_two_gpus(lab)
    losses = pathlib.Path(lab.folder.name) / "drained-training"
    child = lab.start(client("torch_train.py", "until", losses), settings={"LIMIT": "0:6GiB"})
    pid = child.process.pid
    lines = []

    def trains(until, is_so):
        def still():
            if child.process.poll() is not None:
                child.finish(5).succeeded()
                raise Failed(f"{child.title}: it had ended before {until}", lines)
            return is_so()

        _until(until, still, 60)

    def trains_on(what):
        # One step may have begun before; the second has read and written all of the model where that lies now.
        done = _steps(losses) + 2
        trains(f"two more steps {what}", lambda: _steps(losses) >= done)

    trains("a loan of 4 GiB on GPU 1", lambda: _held(lab, pid, 1) >= 4 * GIB)
    trains_on("with the loan")
    try:
        for word in ("drain", "undrain", "drain"):
            lines.append(_emptied(lab, word, pid, _steps(losses)))
            trains_on(f"after {word}")
    finally:
        lab.bare([lab.gpupool, "undrain", "1"], 30)
    losses.with_name(f"{losses.name}.end").touch()
    trained = child.finish(60).succeeded()
    steps = _steps(losses)
    same(lab.bare(client("torch_train.py", "steps", steps), 200).succeeded(), trained)
    return f"{steps} steps, the same losses; " + ", ".join(lines), lines


def _emptied(lab, word, pid, step):
    """What `gpupool drain` or `undrain` of GPU 1 did to this program, which it has to have moved."""
    begun, before = time.monotonic(), _held(lab, pid, 1)
    told = json.loads(lab.bare([lab.gpupool, word, "--json", "1"], 90).stdout or "[]")
    moved = next((row["bytes"] for row in told if row["pid"] == pid), 0)
    took, after = time.monotonic() - begun, _held(lab, pid, 1)
    line = f"{word} after step {step}: {moved / GIB:.1f} GiB in {took:.2f} s, GPU 1 had {before / GIB:.1f} GiB of it before and {after / GIB:.1f} after"
    if moved < 2 * GIB or (word == "drain" and after > before / 4):
        raise Failed(f"{line}; it says {told}")
    return line


def _steps(losses):
    return losses.read_text(encoding="utf-8").count("\n") if losses.exists() else 0
