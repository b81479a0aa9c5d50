"""compute-sanitizer over programs of ours: what it says of them under the shim."""

import concurrent.futures
import pathlib
import re
import shutil
import tempfile

import building
from running import Failed, NotRun, same, side_by_side

# Without errors of the driver that are asked for on purpose, and without children.
RUNS = [
    ("fill_spread", "8 64 130", {}),
    ("fill_spread", "600 500", {"LIMIT": "400MiB", "HOST_LIMIT": "1GiB", "SOFT_OOM": "off"}),
    ("pitch", "", {}),
    ("steps", "a:100 a:3 f:0 a:50 c:1 c:2 s f:1 f:2", {"FREE": "lazy"}),
    ("peers", "", {}),
]
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")


@side_by_side
def memcheck(lab):
    """memcheck finds nothing in programs that use pooled memory of one GPU, of several places, and freed memory again."""
    tool = shutil.which("compute-sanitizer")
    if not tool:
        raise NotRun("compute-sanitizer is neither on PATH nor beside nvcc")
    for name in sorted({name for name, _, _ in RUNS}):
        building.program(lab, name)
    # A machine on which the tool cannot work says so of a bare program too.
    name, arguments, _ = RUNS[0]
    alone, report = _checked(lab, tool, name, arguments, None)
    if alone.status:
        raise NotRun(f"compute-sanitizer ends with {alone.status} without us too: {report.splitlines()[-1]}")
    one_gpu = len(lab.machine.gpus) < 2
    runs = [run for run in RUNS if not (one_gpu and (run[0] == "peers" or "LIMIT" in run[2]))]
    with concurrent.futures.ThreadPoolExecutor(3) as workers:
        wrong = [text for text in workers.map(lambda run: _wrong(lab, tool, *run), runs) if text]
    if wrong:
        raise Failed(f"{len(wrong)} of {len(runs)} runs are not clean, as listed below", wrong)
    return f"0 errors in {len(runs)} runs under the shim, which print the same as bare"


def _checked(lab, tool, name, arguments, settings):
    """The run under the tool, and the tool's report."""
    with tempfile.NamedTemporaryFile(dir=lab.folder.name, suffix=".txt") as report:
        # Errors that the driver's calls return are the program's business and in its output.
        words = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "86"]
        words += ["--log-file", report.name, building.program(lab, name), *arguments.split()]
        finished = lab.start(words, None, settings).finish(120)
        text = pathlib.Path(report.name).read_text(encoding="utf-8", errors="replace").strip()
    lab.note(text)
    return finished, text or finished.stderr.strip() or "no report"


def _wrong(lab, tool, name, arguments, settings):
    """What is wrong with one run under the shim; empty where nothing is."""
    bare = lab.bare([building.program(lab, name), *arguments.split()], 60)
    shim, report = _checked(lab, tool, name, arguments, settings)
    errors = SUMMARY.search(report)
    if not errors or int(errors[1]):
        return f"{name} {arguments}: {report.splitlines()[-1]}"
    if not shim.events("pool.open"):
        return f"{name} {arguments}: no pool.open in the log, so the tool ran it without the shim"
    try:
        same(bare, shim)
    except Failed as failure:
        return str(failure)
    return ""
