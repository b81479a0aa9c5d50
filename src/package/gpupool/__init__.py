"""The memory of every GPU, and then of the host, for one unmodified CUDA program.

A program needs none of this: ``gpupool run -- python train.py`` is enough. From a program, this module tells where the library is
and what it holds, starts others under it, and reaches the C interface of ``include/gpupool.h``.

>>> import gpupool
>>> gpupool.activate()          # before CUDA is used: starts this program anew under the library, unless it is there already
>>> gpupool.statistics().live_bytes
0
"""

from gpupool._command import command, run
from gpupool._frameworks import use_with_cupy, use_with_rmm, use_with_torch
from gpupool._interface import (
    Advice,
    Anchors,
    GpupoolError,
    LabelUsage,
    Piece,
    PlaceUsage,
    State,
    Statistics,
    advise,
    anchor,
    far,
    gpu,
    host,
    label,
    label_budget,
    labels,
    mode,
    name,
    pieces,
    places,
    prefetch,
    release_anchor,
    restore,
    state,
    statistics,
    trim,
    why,
)
from gpupool._logs import NoLog, log_file, memory_snapshot, report
from gpupool._preload import NotActivated, activate, is_active, is_preloaded, library
from gpupool._version import __version__

__all__ = [
    "Advice",
    "Anchors",
    "GpupoolError",
    "LabelUsage",
    "NoLog",
    "NotActivated",
    "Piece",
    "PlaceUsage",
    "State",
    "Statistics",
    "__version__",
    "activate",
    "advise",
    "anchor",
    "command",
    "far",
    "gpu",
    "host",
    "is_active",
    "is_preloaded",
    "label",
    "label_budget",
    "labels",
    "library",
    "log_file",
    "memory_snapshot",
    "mode",
    "name",
    "pieces",
    "places",
    "prefetch",
    "release_anchor",
    "report",
    "restore",
    "run",
    "state",
    "statistics",
    "trim",
    "use_with_cupy",
    "use_with_rmm",
    "use_with_torch",
    "why",
]


def load_ipython_extension(shell: object) -> None:
    """``%load_ext gpupool`` in IPython and notebooks: ``%gpupool`` shows what the pool holds, ``%gpupool ?`` says what else there is."""
    from gpupool._notebook import load

    load(shell)
