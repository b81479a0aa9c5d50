"""Runs the checks on a machine with real GPUs and writes the table; started by scripts/gpu-check.sh.

A row is printed and the table written as soon as a check is done, so that a run that is cut off shows what it got to.
"""

import argparse
import os
import pathlib
import signal
import sys
import time

sys.dont_write_bytecode = True

import costs
import diagnosis
import frameworks
import machine
import native
from running import BelowGoal, Failed, Lab, NotRun

# By importance: a run that is cut off has done what matters most.
CHECKS = {
    "demo": native.demo,
    "programs": native.programs,
    "cupy-two": frameworks.cupy_two,
    "contexts": frameworks.contexts,
    "torch": frameworks.torch,
    "torch-oversize": frameworks.torch_oversize,
    "nvcc-static": native.nvcc_static,
    "nvcc-shared": native.nvcc_shared,
    "ddp": frameworks.nccl,
    "jax": frameworks.jax,
    "alloc-times": native.alloc_times,
    "numba": frameworks.numba,
    "expected": native.expected,
    "ctx-table": diagnosis.ctx_table,
    "stray-torch": diagnosis.stray_torch,
    "stray-cupy": diagnosis.stray_cupy,
    "ranks": diagnosis.ranks,
    "jax-ctx": diagnosis.jax_ctx,
    "ctx-cost": diagnosis.ctx_cost,
    "heap": diagnosis.heap,
    "launch-cost": costs.launches,
    "log-cost": costs.log,
}


class Table:
    """The results so far, on stdout and in gpu-check.md."""

    def __init__(self, path, facts):
        self.path, self.facts, self.rows, self.blocks = path, facts, [], []

    def add(self, name, result, detail, lines, seconds):
        self.rows.append(f"| {name} | {result} | {detail.replace('|', '/').replace(chr(10), ' ')} |")
        if lines:
            self.blocks.append(f"### {name}\n\n```\n" + "\n".join(lines) + "\n```\n")
        print(f"{self.rows[-1]} {seconds:.0f} s", *(f"    {line}" for line in lines), sep="\n", flush=True)
        self.path.write_text(str(self), encoding="utf-8")

    def __str__(self):
        rows = ["| check | result | detail |", "| --- | --- | --- |", *self.rows]
        return "\n".join(["# Checks on real GPUs", "", *self.facts, "", *rows, "", *self.blocks])


def chosen(text):
    names = text.split(",")
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no check is called {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    # In the table's order, whatever order they were written in.
    return [name for name in CHECKS if name in names]


def arguments():
    parser = argparse.ArgumentParser(prog="scripts/gpu-check.sh", description="Checks gpupool on this machine's GPUs.")
    parser.add_argument("--only", type=chosen, default=list(CHECKS), metavar="NAMES", help=f"of {','.join(CHECKS)}")
    output = pathlib.Path(os.environ.get("OUT") or ".")
    help_output = "for gpu-check.md and gpu-check.log [default: $OUT, else the current folder]"
    parser.add_argument("--output", type=pathlib.Path, default=output, metavar="FOLDER", help=help_output)
    help_seconds = "what has not ended by then is ended, the rest not run [default: 560]"
    parser.add_argument("--seconds", type=float, default=560, metavar="N", help=help_seconds)
    parser.add_argument("--release", type=pathlib.Path, required=True, help=argparse.SUPPRESS)
    return parser.parse_args()


def run(check, lab):
    """Result, detail and further lines of one check."""
    try:
        told = check(lab)
    except NotRun as reason:
        return "not run", f"not run: {reason}", []
    except Failed as failure:
        return "FAILED", str(failure), failure.lines
    except BelowGoal as shortfall:
        return "BELOW GOAL", str(shortfall), shortfall.lines
    # A mistake in one check must not keep the others from running on a machine that is hard to get.
    except Exception as mistake:
        return "FAILED", f"the check itself failed: {type(mistake).__name__}: {mistake}", []
    detail, lines = told if isinstance(told, tuple) else (told, [])
    return "passed", detail, lines


def main():
    options = arguments()
    begin = time.monotonic()
    # So that a run ended from outside ends its children: they would go on holding GPUs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.output.mkdir(parents=True, exist_ok=True)
    here = machine.find()
    facts = here.facts(options.release / "gpupool")
    table = Table(options.output / "gpu-check.md", facts)
    print("\n".join(facts), flush=True)
    results = []
    with open(options.output / "gpu-check.log", "w", encoding="utf-8") as log:
        lab = Lab(options.release.resolve(), log, begin + options.seconds, here)
        try:
            for name in options.only:
                lab.note(f"\n===== {name}")
                since = time.monotonic()
                result = run(CHECKS[name], lab) if lab.left() > 10 else ("not run", "not run: the time was used up", [])
                lab.end_children()
                results.append(result[0])
                table.add(name, *result, time.monotonic() - since)
        finally:
            lab.end_children()
    seconds = time.monotonic() - begin
    print(f"\n{table}\n{seconds:.0f} s; {table.path} and gpu-check.log beside it have the rest", flush=True)
    return 1 if {"FAILED", "BELOW GOAL"} & set(results) else 0


if __name__ == "__main__":
    sys.exit(main())
