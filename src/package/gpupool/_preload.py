"""Whether this interpreter runs under the library, and how it comes to."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from typing import NoReturn

from gpupool._command import PACKAGE, command, flags

#: The folder that this program was in when it first imported this package: the words of its command line may be relative to it.
try:
    _FOLDER = os.getcwd()
except FileNotFoundError:  # somebody has deleted it
    _FOLDER = ""
#: Set over the new start alone, so that one that does not help is not tried for ever. (Not `GPUPOOL_…`: those are settings.)
_TRIED = "_GPUPOOL_STARTED_ANEW"
#: What the driver answers before `cuInit`.
_NOT_INITIALIZED = 3
#: What Python runs to see whether the library comes into it.
_LOOK = "import ctypes; ctypes.CDLL(None).gpupool_version"


class NotActivated(RuntimeError):
    """This interpreter cannot be started anew under the library; the text says why, and what to do instead."""


def library() -> str:
    """The path of ``libgpupool.so``, for ``LD_PRELOAD``. A path with a space cannot be preloaded; ``gpupool run`` makes a link."""
    path = PACKAGE / "lib" / "libgpupool.so"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; install the package again: pip install --force-reinstall gpupool")
    return str(path)


def is_preloaded() -> bool:
    """Whether this process was started under the library, whether or not it takes part."""
    return hasattr(ctypes.CDLL(None), "gpupool_version")


def is_active() -> bool:
    """Whether CUDA memory of this process is gpupool's to serve: the library is preloaded, and has not passed (see ``why()``)."""
    from gpupool._interface import State, state

    return is_preloaded() and state() in (State.IDLE, State.ACTIVE)


def activate(**settings: str) -> None:
    """Makes this program run under the library: starts it anew there, unless it runs there already.

    Call it first in a program, before CUDA is used and before work is done that would be lost: the program begins again, in
    the same process, with the same command line and environment. Settings are those of ``gpupool run --set``:
    ``gpupool.activate(mode="spill", limit="0:70GiB")``. Under the library they cannot be changed any more, and are not.

    Raises NotActivated where the program cannot be started anew.
    """
    was_tried = os.environ.pop(_TRIED, None) is not None
    if is_preloaded():
        return
    if was_tried:
        raise NotActivated("this program was started anew, and the library did not come with it; `gpupool doctor` looks for the reason")
    reason = _why_not()
    if reason:
        raise NotActivated(reason)
    _start_anew(settings)


def _why_not() -> str | None:
    """Why this process cannot begin again, if it cannot."""
    if "ipykernel" in sys.modules:
        return (
            "a notebook's kernel cannot be started anew; `gpupool kernel install` makes a kernel that runs under the library, "
            "and the notebook's menu chooses it"
        )
    if hasattr(sys, "ps1") or sys.flags.interactive or sys.flags.inspect:
        return "what was typed here would be lost; start it by `gpupool run -- python`"
    if _came_from_stdin():
        return "the program came from standard input, where it is not a second time; write it to a file, or start it by `gpupool run`"
    gone = _gone()
    if gone:
        return f"{gone} is not there a second time; start the program by `gpupool run`, or call gpupool.activate() as its first line"
    multiprocessing = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        return "this is a process of multiprocessing's; call gpupool.activate() in the program that starts it"
    others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    if others:
        return f"other threads run already ({', '.join(sorted(others))}), which would be lost; call it before they are started"
    if threading.current_thread() is not threading.main_thread():
        return "this is not the main thread; call it there"
    if _cuda_is_in_use():
        return "CUDA is in use in this process already; call gpupool.activate() before, best as the program's first line"
    return None


def _came_from_stdin() -> bool:
    # A script and a module have their file there, and the words of `python -c` are in the command line.
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return file == "<stdin>" or file is None and sys.argv[:1] != ["-c"]


def _gone() -> str | None:
    """What the program was read from, if a second interpreter could not read it: a pipe, or a file that the folder of today has not."""
    main = sys.modules.get("__main__")
    file, spec = getattr(main, "__file__", None), getattr(main, "__spec__", None)
    if file is None:
        return None
    if spec is not None and spec.name != "__main__":
        # `python -m`: the module is looked for in the folder that the interpreter was started in.
        folder = sys.path[0]
        is_from_there = bool(folder) and os.path.dirname(os.path.abspath(file)).startswith(folder)
        if not os.path.isfile(file) or is_from_there and _FOLDER and not os.path.samefile(folder, _FOLDER):
            return str(file)
        return None
    named = sys.argv[0] if sys.argv else ""
    if spec is None and os.path.basename(named) != os.path.basename(file):
        named = file  # the program has changed its command line
    return None if _can_be_read_again(os.path.join(_FOLDER, named)) else str(named)


def _can_be_read_again(path: str) -> bool:
    # Pipes and terminals give each byte once.
    return os.path.isfile(path) or os.path.isdir(path)


def _cuda_is_in_use() -> bool:
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    count = ctypes.c_int()
    return int(driver.cuDeviceGetCount(ctypes.byref(count))) != _NOT_INITIALIZED


def _start_anew(settings: dict[str, str]) -> NoReturn:
    # What the command has to say of settings and libraries is said before this program is gone, and whether the library comes
    # into this interpreter is seen.
    run = [command(), "run", *flags(settings), "--"]
    tried = subprocess.run([*run, sys.executable, "-I", "-S", "-c", _LOOK], capture_output=True, text=True, check=False)
    if tried.returncode:
        said = tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"]
        raise NotActivated("; ".join(said) if tried.returncode == 2 else f"{sys.executable} does not take the library: {said[-1]}")
    sys.stdout.flush()
    sys.stderr.flush()
    # What the interpreter was started with, its own flags among it. (`sys.orig_argv` begins with Python 3.10.)
    with open("/proc/self/cmdline", "rb") as words:
        own = [os.fsdecode(word) for word in words.read().split(b"\0")[1:-1]]
    if _FOLDER:
        os.chdir(_FOLDER)
    os.environ[_TRIED] = "1"
    try:
        os.execv(run[0], [*run, sys.executable, *own])
    finally:
        del os.environ[_TRIED]
