"""Runs the checks on a machine with real GPUs and writes the table; started by scripts/gpu-check.sh.

A row is printed and the table written as soon as a check is done, so that a run that is cut off shows what it got to.
"""

import argparse
import concurrent.futures
import os
import pathlib
import signal
import sys
import time

sys.dont_write_bytecode = True

import checkpointing
import costs
import cuda_python
import diagnosis
import examples
import fleet
import launchers
import look
import machine
import managed
import moving
import native
import pinned
import probes
import pytorch
import sanitizer
import several
import suspending
import whole
import xla
from running import BelowGoal, Failed, Lab, NotRun

# By importance within a set: a run that is cut off has done what matters most.
SETS = {
    "pool": {
        "demo": native.demo,
        "programs": native.programs,
        "everywhere": native.everywhere,
        "sequences": native.sequences,
        "cupy-two": cuda_python.cupy_two,
        "contexts": cuda_python.contexts,
        "torch": pytorch.training,
        "torch-oversize": pytorch.oversize,
        "torch-home": pytorch.goes_home,
        "torch-full": pytorch.full,
        "nvcc-static": native.nvcc_static,
        "nvcc-shared": native.nvcc_shared,
        "ddp": several.ddp,
        "jax": xla.training,
        "numba": cuda_python.numba,
        "expected": native.expected,
    },
    "pinned": {
        "pinned-copies": pinned.copies,
        "pinned-times": pinned.times,
        "pinned-torch": pinned.loader,
        "pinned-cupy": pinned.asarray,
        "pinned-replay": pinned.replay,
        "pinned-staging": pinned.staging,
    },
    "allocators": {
        "torch-allocators": pytorch.allocators,
        "torch-graphs": pytorch.graphs,
        "torch-queue": several.torch_queue,
        "ipc": several.ipc_runtime,
        "ipc-driver": several.ipc_driver,
        "ipc-mixed": several.ipc_mixed,
        "peer-access": several.peer_access,
        "lenders": several.lenders,
        "managed-stripes": managed.stripes,
        "fsdp": several.fsdp,
        "nccl-graph": several.nccl_graph,
        "cupy-ranks": several.cupy_ranks,
        "cupy-managed": cuda_python.cupy_managed,
        "triton": pytorch.triton,
        "rmm": cuda_python.rmm,
        "green-contexts": cuda_python.green_contexts,
        "examples": examples.examples,
        "memcheck": sanitizer.memcheck,
        "own-memory": native.own_memory,
        "torch-expandable": pytorch.oversize_expandable,
        "torch-async": pytorch.oversize_async,
        "cupy-default": cuda_python.cupy_default,
        "cupy-async": cuda_python.cupy_async,
        "jax-growing": xla.growing,
        "jax-preallocating": xla.preallocating,
    },
    "probes": {
        "probe-remaps": probes.remaps,
        "probe-markers": probes.markers,
        "probe-atomics": probes.atomics,
        "probe-graphs": probes.graphs,
        "probe-aliases": probes.aliases,
        "probe-contexts": probes.contexts,
        "probe-grants": probes.grants,
        "probe-ranges": probes.ranges,
        "probe-ended": probes.ended,
        "probe-coverage": probes.coverage,
        "probe-latency": probes.latency,
        "probe-events": probes.events,
        "probe-room": probes.room,
        "probe-adapters": probes.adapters,
        "probe-digest": probes.digests,
    },
    "moving": {
        "move-program": moving.program,
        "move-stress": moving.stressed,
        "move-own": moving.own,
        "move-rotation": moving.rotation,
        "move-phases": moving.phases,
        "move-training": moving.training,
        "move-decoding": moving.decoding,
        "move-training-more": moving.training_more,
        "move-training-twice": moving.training_twice,
        "move-rotation-graph": moving.rotation_graph,
        "move-training-graph": moving.training_graph,
        "move-training-expandable": moving.training_expandable,
        "move-rotation-host": moving.rotation_host,
        "move-training-host": moving.training_host,
        "move-cupy": moving.cupy,
        "move-jax": moving.jax,
        "move-llm": moving.language_model,
        "move-llm-host": moving.language_model_host,
        "move-fsdp": moving.fsdp,
        "move-ranks": moving.ranks,
        "move-collective": moving.collective,
    },
    "suspend": {
        "suspend-rotation": suspending.rotation,
        "suspend-training": suspending.training,
        "suspend-training-expandable": suspending.training_expandable,
        "suspend-graph": suspending.graph,
        "suspend-ranks": suspending.ranks,
        "suspend-cupy": suspending.cupy,
        "suspend-jax": suspending.jax,
        "suspend-disk": suspending.disk,
        "suspend-idle": suspending.idle,
        "suspend-large": suspending.large,
    },
    "fleet": {
        "fleet-stranger-peer": fleet.stranger_peer,
        "fleet-comers": fleet.comers,
        "fleet-stranger-at-once": fleet.stranger_at_once,
        "fleet-owner-peer": fleet.owner_peer,
        "fleet-stranger-host": fleet.stranger_host,
        "fleet-owner-host": fleet.owner_host,
        "fleet-priority-host": fleet.priority_host,
        "fleet-drain": fleet.drain,
        "fleet-drain-training": fleet.drain_training,
    },
    "launchers": {
        "launch-torchrun": launchers.torchrun,
        "launch-spawn": launchers.spawned,
        "launch-ray": launchers.ray,
        "launch-dask": launchers.dask,
    },
    "checkpoint": {
        "checkpoint-training": checkpointing.training,
        "checkpoint-large": checkpointing.large,
        "checkpoint-large-host": checkpointing.large_host,
        "checkpoint-kinds": checkpointing.kinds,
    },
    "look": {
        "look-program": look.program,
        "look-torch": look.torch,
        "look-cupy": look.cupy,
    },
    "diagnosis": {
        "ctx-table": diagnosis.ctx_table,
        "stray-torch": diagnosis.stray_torch,
        "stray-cupy": diagnosis.stray_cupy,
        "ranks": diagnosis.ranks,
        "jax-ctx": diagnosis.jax_ctx,
        "ctx-cost": diagnosis.ctx_cost,
        "heap": diagnosis.heap,
    },
    "costs": {
        "alloc-times": native.alloc_times,
        "before": costs.before,
        "rmm-threads": cuda_python.rmm_threads,
        "rmm-mix": cuda_python.rmm_mix,
        "traces": costs.traces,
        "steady": costs.steady,
        "growth": costs.growth,
        "growth-fresh": costs.fresh,
        "home": costs.home,
        "home-for-others": costs.home_for_others,
        "launch-cost": costs.launches,
        "private-tables": costs.private_tables,
        "moves": costs.moves,
        "log-cost": costs.log,
        "torch-modes": costs.torch_modes,
        "cupy-modes": costs.cupy_modes,
        "jax-modes": costs.jax_modes,
    },
    # Last of all: what the driver loses may wait for it for ever, and hold its GPU as long.
    "whole": {
        "suspend-process": whole.suspended,
        "checkpoint-process": whole.imaged,
        "probe-checkpoint": probes.checkpoints,
        "suspend-process-ranks": whole.ranks,
    },
}
CHECKS = {name: check for checks in SETS.values() for name, check in checks.items()}
# Sets that run within 9 minutes each on a machine of two GPUs: all that leaves its GPUs. tests/README.md
# says how long each check takes by estimate.
SITTINGS = {
    "suspend15": [
        "suspend-training",
        "suspend-training-expandable",
        "suspend-graph",
        "suspend-ranks",
        "suspend-cupy",
        "suspend-jax",
        "suspend-idle",
    ],
    "images15": [
        "suspend-disk",
        "checkpoint-training",
        "checkpoint-large",
        "checkpoint-large-host",
        "checkpoint-kinds",
    ],
    "whole15": [
        "suspend-process",
        "checkpoint-process",
        "probe-checkpoint",
        "suspend-process-ranks",
    ],
}
# Checks that run side by side. More would contend for the processors.
WORKERS = 6


class Table:
    """The results so far, on stdout and in gpu-check.md."""

    def __init__(self, path, facts):
        self.path, self.facts, self.rows, self.blocks = path, facts, {}, {}

    def add(self, name, result, detail, lines, seconds):
        self.rows[name] = f"| {name} | {result} | {detail.replace('|', '/').replace(chr(10), ' ')} |"
        if lines:
            self.blocks[name] = f"### {name}\n\n```\n" + "\n".join(lines) + "\n```\n"
        print(f"{self.rows[name]} {seconds:.0f} s", *(f"    {line}" for line in lines), sep="\n", flush=True)
        self.path.write_text(str(self), encoding="utf-8")

    def __str__(self):
        # By importance, in whatever order they ended.
        rows = ["| check | result | detail |", "| --- | --- | --- |", *self._in_order(self.rows)]
        return "\n".join(["# Checks on real GPUs", "", *self.facts, "", *rows, "", *self._in_order(self.blocks)])

    @staticmethod
    def _in_order(told):
        return [told[name] for name in CHECKS if name in told]


def chosen(text):
    names = [name for word in text.split(",") for name in {**SETS, **SITTINGS}.get(word, [word])]
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        sets = ", ".join(f"{name} ({', '.join(checks)})" for name, checks in {**SETS, **SITTINGS}.items())
        raise argparse.ArgumentTypeError(f"no check or set is called {', '.join(unknown)}; there are {sets}")
    # In the table's order, whatever order they were written in.
    return [name for name in CHECKS if name in names]


def arguments():
    parser = argparse.ArgumentParser(prog="scripts/gpu-check.sh", description="Checks gpupool on this machine's GPUs.")
    help_only = f"checks or sets of them, with commas: {', '.join([*SETS, *SITTINGS])}; {', '.join(CHECKS)}"
    parser.add_argument("--only", type=chosen, default=list(CHECKS), metavar="NAMES", help=help_only)
    output = pathlib.Path(os.environ.get("OUT") or ".")
    help_output = "for gpu-check.md, gpu-check.log and what checks leave behind [default: $OUT, else the current folder]"
    parser.add_argument("--output", type=pathlib.Path, default=output, metavar="FOLDER", help=help_output)
    help_seconds = "what has not ended by then is ended, the rest not run [default: 560]"
    parser.add_argument("--seconds", type=float, default=560, metavar="N", help=help_seconds)
    help_moves = "with which GPUPOOL_MOVE the programs of the set moving run [default: off,auto]"
    parser.add_argument("--moves", type=lambda text: text.split(","), default=["off", "auto"], metavar="WORDS", help=help_moves)
    help_lenders = "with which GPUPOOL_LENDERS they run [default: asleep]"
    parser.add_argument("--lenders", type=lambda text: text.split(","), default=["asleep"], metavar="WORDS", help=help_lenders)
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


def timed(name, lab):
    """What `run` says of it, and the seconds it took."""
    lab.note(f"\n===== {name}")
    since = time.monotonic()
    result = run(CHECKS[name], lab) if lab.left() > 10 else ("not run", "not run: the time was used up", [])
    return result, time.monotonic() - since


def run_all(names, lab, table):
    """First those that can run side by side, then the others one by one. All results."""
    results = []

    def done(name, result, seconds):
        results.append(result[0])
        table.add(name, *result, seconds)

    beside = [name for name in names if getattr(CHECKS[name], "side_by_side", False)]
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as workers:
        started = {workers.submit(timed, name, lab): name for name in beside}
        try:
            for ended in concurrent.futures.as_completed(started):
                done(started[ended], *ended.result())
        except BaseException:
            # Ended from outside. The pool waits for its threads, which must not begin anything long now.
            lab.stop()
            raise
    lab.end_children()
    for name in (name for name in names if name not in beside):
        done(name, *timed(name, lab))
        lab.end_children()
    return results


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
    with open(options.output / "gpu-check.log", "w", encoding="utf-8") as log:
        lab = Lab(options.release.resolve(), options.output.resolve(), log, begin + options.seconds, here)
        lab.moves, lab.lenders = options.moves, options.lenders
        try:
            results = run_all(options.only, lab, table)
        finally:
            lab.end_children()
    seconds = time.monotonic() - begin
    print(f"\n{table}\n{seconds:.0f} s; {table.path} and gpu-check.log beside it have the rest", flush=True)
    return 1 if {"FAILED", "BELOW GOAL"} & set(results) else 0


if __name__ == "__main__":
    sys.exit(main())
