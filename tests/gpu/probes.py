"""What moving memory under a running program relies on, asked of the driver: the programs tests/programs/probe_*.c, bare, and one under the library too."""

import building
from running import MEASURED, Failed

STANDS, FALLS = "every rule stands", "  FALLS: "


def _probe(lab, name, *runs, timeout=95, is_shown_under=False):
    """Runs a probe with each of these words. Its lines, with what it measured, go below the table. What it says under the library is shown
    where that is another question."""
    program = building.program(lab, name)
    lines, fallen, answers, unasked = [], [], 0, 0
    ways = [(lab.bare, words) for words in runs or [""]] + [(lab.shim, words) for words in runs or [""] if is_shown_under]
    for way, words in ways:
        finished = way([program, *words.split()], timeout)
        lines += ["under gpupool:"] * (way == lab.shim)
        told = finished.stdout.splitlines()
        lines += [line.removeprefix(MEASURED) for line in told]
        fallen += [line.removeprefix(FALLS) for line in told if line.startswith(FALLS)]
        answers += sum(not line.startswith((MEASURED, FALLS, STANDS)) and "not asked: " not in line for line in told)
        unasked += sum("not asked: " in line for line in told)
        if finished.status not in (0, 1) or (finished.status == 1) != any(line.startswith(FALLS) for line in told):
            why = (finished.stderr.strip().splitlines() or told or ["no output"])[-1]
            raise Failed(f"{finished.command}: exit code {finished.status}; {why}", lines)
    if fallen:
        raise Failed(f"{len(fallen)} answers are not what is relied on: {'; '.join(sorted(set(fallen)))}", lines)
    return f"{answers} answers, {unasked} not asked; {STANDS}", lines


def markers(lab):
    """P1: whether anybody waits because the end of a context's work is marked behind a kernel that spins."""
    return _probe(lab, "probe_markers", "connections 1", "connections 8", "connections 32")


def latency(lab):
    """P2: calls while a marker or cuCtxSynchronize waits."""
    return _probe(lab, "probe_markers", "latency")


def coverage(lab):
    """P3: what a marker waits for, and what it costs."""
    return _probe(lab, "probe_markers", "coverage", "cost")


def graphs(lab):
    """P4: graphs replayed, updated and instantiated anew over memory that moved."""
    return _probe(lab, "probe_graphs")


def contexts(lab):
    """P5: contexts that are made after memory was mapped."""
    return _probe(lab, "probe_contexts")


def grants(lab):
    """Access that several threads give to one range at once, as where GPUs get their contexts at the same moment."""
    return _probe(lab, "probe_grants", *(f"{question} 40 lock" for question in ("same", "growing", "coming", "ending", "first")), "neighbours 40")


def ranges(lab):
    """What the driver says of the range that an address belongs to, by the place of the memory and by where it was mapped before."""
    return _probe(lab, "probe_ranges", "0", "-1", *["1"] * (len(lab.machine.gpus) > 1))


def ended(lab):
    """When what a killed process had is free for others: whoever asked it for room looks then."""
    large = ["40960 4"] * (lab.machine.gpus[0].total > 60 << 30)
    return _probe(lab, "probe_ended", "1024", *large)


def room(lab):
    """P6: page tables, and whether a remap needs more of them."""
    return _probe(lab, "probe_room")


def atomics(lab):
    """P7: atomics by the place of their memory."""
    return _probe(lab, "probe_atomics", timeout=160)


def adapters(lab):
    """P8: what reaches memory without a call of the driver, as far as it is here."""
    return _probe(lab, "probe_adapters")


def remaps(lab):
    """P9: remaps with poison behind the old address, all multiprocessors reading."""
    return _probe(lab, "probe_remaps", "60", timeout=130)


def aliases(lab):
    """Second mappings, and remaps beside kernels."""
    return _probe(lab, "probe_aliases")


def events(lab):
    """Timing events around launches."""
    return _probe(lab, "probe_events")


def digests(lab):
    """The library's own kernel: translating and loading it, what it takes, and whether it sees every change."""
    return _probe(lab, "probe_digest", str(building.TESTS.parent / "src" / "cuda" / "digest.ptx"))


def checkpoints(lab):
    """P10: what the driver's own checkpoint takes off the GPUs, brings back and loses, as RESULTS.md has it; and what it makes of the same
    programs where their memory is the pool's, which nothing relies on."""
    return _probe(lab, "probe_checkpoint", timeout=175, is_shown_under=True)
