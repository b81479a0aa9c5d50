"""Checks of what the diagnosis costs a program that has nothing wrong."""

import statistics

import building
from frameworks import client, needs_modules
from running import BelowGoal, Failed, same

LOG_GOAL = 1.005
ROUNDS = 3


def launches(lab):
    """A kernel launch, bare and counted, in one process."""
    finished = lab.shim([building.bench(lab, "launches")], 90, {}).succeeded()
    lines = finished.stdout.splitlines()
    if len(lines) != 2 or "NOT HOOKED" in finished.stdout:
        raise Failed(f"expected two lines about hooked calls, found {lines}", lines)
    detail = "; ".join(" ".join(line.split()) for line in lines)
    if "OVER" in lines[0]:
        raise BelowGoal(detail, lines)
    return detail


def log(lab):
    """PyTorch's training loop with the log at its default level in a file, and with errors only and no file."""
    needs_modules("torch")
    quiet = {"LOG": "error", "LOG_FILE": None}
    times = {"eager": [], "graph": []}
    reference = None
    for number in range(ROUNDS):
        # In turn, so that a GPU that warms up favours neither.
        order = [{}, quiet] if number % 2 else [quiet, {}]
        runs = [lab.shim(client("torch_train.py"), 90, settings).succeeded() for settings in order]
        for run in runs:
            reference = same(reference, run) if reference else run
        silent, logged = runs[::-1] if number % 2 else runs
        if silent.logs or not logged.events("context.create"):
            raise Failed(f"{len(silent.logs)} logs where none was asked for; contexts in the other: {len(logged.logs)}")
        for name, pairs in times.items():
            pairs.append((logged.measured()["milliseconds"][name], silent.measured()["milliseconds"][name]))
    medians = {name: [statistics.median(column) for column in zip(*pairs)] for name, pairs in times.items()}
    ratios = {name: ours / theirs for name, (ours, theirs) in medians.items()}
    steps = [
        f"{name} {ours:.3f} ms, without {theirs:.3f} ms, ratio {ratios[name]:.4f}"
        for name, (ours, theirs) in medians.items()
    ]
    detail = f"step with the log {', '.join(steps)} (goal {LOG_GOAL})"
    lines = [f"{name}: log {one:.3f} ms, none {other:.3f} ms" for name, pairs in times.items() for one, other in pairs]
    if max(ratios.values()) > LOG_GOAL:
        raise BelowGoal(detail, lines)
    return detail, lines
