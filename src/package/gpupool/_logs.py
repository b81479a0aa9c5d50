"""What this process has logged so far, and what the command makes of logs."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Union

from gpupool._command import command
from gpupool._interface import interface, why
from gpupool._preload import is_preloaded

_Path = Union[str, "os.PathLike[str]"]


class NoLog(RuntimeError):
    """This process writes no log, or has not begun to; the text says what to do."""


def log_file() -> str:
    """The file that this process writes its log to. Raises NoLog where there is none."""
    path = os.fsdecode(interface().gpupool_log_file()) if is_preloaded() else ""
    if not path:
        reason = why() or "no log was asked for"
        raise NoLog(
            f"this process has no log: {reason}; start it by `gpupool run --log gpupool.%p.jsonl`, with `--set log=debug` for every block"
        )
    return path


def report(
    *logs: _Path,
    html: _Path | None = None,
    memory_viz: _Path | None = None,
    perfetto: _Path | None = None,
    speedscope: _Path | None = None,
) -> dict[str, Any]:
    """What logs tell, as ``gpupool report --json`` says it: sizes in bytes, times in seconds. Without a log: of this process so far.

    A file that is named is written as well: a page for a browser, or for the viewer of that name.

    Raises NoLog where no log is named and this process has none, and RuntimeError with what the command says where one cannot be read.

    >>> gpupool.report("train.4711.jsonl")["findings"]
    []
    """
    files = {"--html": html, "--memory-viz": memory_viz, "--perfetto": perfetto, "--speedscope": speedscope}
    words = [word for name, path in files.items() if path is not None for word in (name, os.fspath(path))]
    answer: dict[str, Any] = json.loads(_asked("--json", *words, logs=logs))
    return answer


def report_text(*logs: _Path) -> str:
    """The same for a person, as ``gpupool report`` prints it."""
    return _asked(logs=logs)


def memory_snapshot(*logs: _Path) -> dict[str, Any]:
    """A snapshot as ``torch.cuda.memory._snapshot()`` has it, for PyTorch's functions and viewer; each place is a device.

    Without a log: of this process so far. Blocks are in a log of level debug alone; what happened before the last half million entries
    of the trace is not in it. Raises as ``report`` does.

    >>> pickle.dump(gpupool.memory_snapshot(), open("snapshot.pickle", "wb"))   # for https://pytorch.org/memory_viz
    """
    with tempfile.TemporaryDirectory(prefix="gpupool-") as folder:
        path = Path(folder, "snapshot.pickle")
        _asked("--memory-viz", str(path), logs=logs)
        # Whose file it is was made by the command a moment ago, in a folder of this user alone.
        snapshot: dict[str, Any] = pickle.loads(path.read_bytes())
    return snapshot


def _asked(*words: str, logs: tuple[_Path, ...]) -> str:
    paths = [os.fspath(path) for path in logs] or [log_file()]
    # The command is no program to be served, and must not write into this process's log.
    clean = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD" and not name.startswith("GPUPOOL_")}
    clean.update(NO_COLOR="1", COLUMNS="110")
    done = subprocess.run(
        [command(), "report", *words, "--", *paths], env=clean, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"gpupool report: exit code {done.returncode}")
    return done.stdout
