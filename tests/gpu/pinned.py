"""Checks of pinned host memory: its pool's times and bandwidth, what PyTorch and CuPy pin, the second staging buffer."""

import building
from building import TESTS
from client import client, marked, needs_modules, printed
from machine import MIB
from running import BelowGoal, Failed, same, side_by_side
from sequence import lines as sequence_lines

RECORD = {"LOG": "info,gpupool::pinned=debug"}
# What the pool may pin beyond the bytes that were in use at the peak.
PEAK_GOAL = 1.1
SECOND_BUFFER = "GP014"


def times(lab):
    """Pinning and freeing, pooled and by the driver, in one process."""
    binary = building.bench(lab, "pinned")
    lines = []
    for free in ("strict", "lazy"):
        finished = lab.shim([binary], 120, {"FREE": free, "PINNED_LIMIT": "4GiB"}).succeeded()
        told = finished.stdout.splitlines()
        # The first line says again how memory is freed, and whether that is hooked at all.
        lines += [f"{free:<7} {line}" for line in (told if "NOT HOOKED" in told[0] else told[1:])]
    return _judged(lines)


def copies(lab):
    """Copies from and to pooled pinned memory against memory that the driver pinned."""
    finished = lab.shim([building.bench(lab, "pinned_copies")], 60, RECORD).succeeded()
    if not any(record["by"] == "pool" for record in finished.events("pinned.allocate")):
        raise Failed("no pinned memory of the pool in the log")
    return _judged(finished.stdout.splitlines(), whole=True)


def _judged(lines, whole=False):
    unhooked = [line for line in lines if "NOT HOOKED" in line]
    if unhooked or not lines:
        raise Failed(f"the driver was compared with itself: {(unhooked or ['no output'])[0]}", lines)
    missed = [line for line in lines if any(word in line for word in ("OVER", "ABOVE", "BELOW"))]
    if missed:
        raise BelowGoal(f"{len(missed)} of {len(lines)} lines below miss their goal", lines)
    if whole:
        return "; ".join(" ".join(line.split()) for line in lines)
    return f"all {len(lines)} lines below meet their goals", lines


@side_by_side
def loader(lab):
    """PyTorch's DataLoader with workers and pin_memory: the same batches, and what is pinned at the peak."""
    needs_modules("torch")
    return _recorded(lab, "dataloader", client("torch_loader.py"))


@side_by_side
def asarray(lab):
    """CuPy's copies between the host and the GPU, from plain and pinned memory: likewise."""
    needs_modules("cupy")
    return _recorded(lab, "cupy", client("cupy_asarray.py"))


def _recorded(lab, name, command):
    """Bare and with the pool, whose log is written down as a sequence for the replay."""
    bare = lab.bare(command, 120).succeeded()
    shim = same(bare, lab.shim(command, 120, RECORD))
    # Workers that a program forks have logs of their own, without such events.
    sequence = [line for log in shim.logs for line in sequence_lines(log)]
    if not sequence:
        raise Failed(f"{shim.command}: no pinned.allocate in the log")
    path = lab.output / f"pinned-{name}.txt"
    path.write_text("\n".join(sequence) + "\n", encoding="utf-8")
    levels = shim.events("pinned.level")
    theirs, ours = bare.measured()["peak"], shim.measured()["peak"]
    told = f"pinned at the peak {ours / MIB:.1f} MiB, bare {theirs / MIB:.1f} MiB"
    if levels:
        most = max(levels, key=lambda level: level["pinned"])
        told += f"; by the log {most['pinned'] / MIB:.1f} MiB for {most['requested'] / MIB:.1f} MiB asked for"
    codes = sorted({finding["code"] for finding in shim.events("finding")})
    told += f"; findings: {', '.join(codes) or 'none'}"
    if theirs and ours > PEAK_GOAL * theirs:
        raise BelowGoal(f"{told}; expected at most {PEAK_GOAL} times bare")
    return f"same {len(bare.lines())} lines as bare; {told}; {len(sequence)} steps in {path.name}"


def replay(lab):
    """The recorded sequences again, bare and pooled: bytes pinned at the peak against bytes in use."""
    binary = building.bench(lab, "pinned_replay")
    files = sorted((TESTS / "bench" / "sequences").glob("*.txt")) + sorted(lab.output.glob("pinned-*.txt"))
    if not files:
        raise Failed("no sequence in tests/bench/sequences")
    bare, pooled = [], []
    for path in files:
        for lines, finished in ((bare, lab.bare([binary, path], 60)), (pooled, lab.shim([binary, path], 60))):
            lines += [f"{path.stem:<18} {line}" for line in finished.succeeded().stdout.splitlines()]
    detail, lines = _judged(pooled)
    # No goal is the driver's: it pins what is asked for, and in small requests a little more.
    return detail, lines + bare


@side_by_side
def staging(lab):
    """A second pinned buffer for data that is pinned already is found with its line; CuPy's way since 13 is not."""
    needs_modules("cupy")
    bare = lab.bare(client("cupy_staging.py", "staged"), 60).succeeded()
    staged = same(bare, lab.shim(client("cupy_staging.py", "staged"), 60))
    direct = lab.shim(client("cupy_staging.py", "direct"), 60).succeeded()
    printed(direct, bare.lines())
    found = [finding for finding in staged.events("finding") if finding["code"] == SECOND_BUFFER]
    where = marked("cupy_staging.py", "the second buffer")
    if len(found) != 1 or where not in found[0]["message"]:
        raise Failed(f"expected one {SECOND_BUFFER} that names {where}; found {[one['message'] for one in found]}")
    others = [finding["code"] for finding in direct.events("finding")]
    if SECOND_BUFFER in others:
        raise Failed(f"{SECOND_BUFFER} also for cupy.asarray of a pinned array")
    return f"{SECOND_BUFFER}: {found[0]['what']}; cupy.asarray of the same arrays: {', '.join(others) or 'no finding'}"
