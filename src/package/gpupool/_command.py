"""The command that was installed with this package, and programs that are started by it."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any, Mapping, Sequence

#: The folder of this package.
PACKAGE = Path(__file__).resolve().parent


def command() -> str:
    """The path of the command ``gpupool`` of this installation, also where it is not on ``PATH``.

    Raises FileNotFoundError where there is none, and says where it was looked for.
    """
    # Beside the package after `pip install --target`, in the environment that it lies in, or where this Python's installers
    # put commands: for everybody, or for this user.
    folders = [
        PACKAGE.parent / "bin",
        *(folder / "bin" for folder in list(PACKAGE.parents)[3:4]),
        Path(sysconfig.get_path("scripts")),
        Path(sysconfig.get_path("scripts", "posix_user")),
    ]
    for folder in folders:
        path = folder / "gpupool"
        if path.is_file() and os.access(path, os.X_OK):
            return str(path)
    looked = ", ".join(str(folder) for folder in dict.fromkeys(folders))
    raise FileNotFoundError(f"the command gpupool is in none of {looked}; install the package again: pip install --force-reinstall gpupool")


def flags(settings: Mapping[str, str]) -> list[str]:
    """The words of ``gpupool run`` that stand for settings: ``{"min_size": "2MiB"}`` is ``--set min_size=2MiB``."""
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def run(
    program: Sequence[str],
    settings: Mapping[str, str] | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Runs a program under the library, as ``gpupool run -- PROGRAM`` does, and waits for its end.

    ``settings`` are those of ``gpupool run --set``, as ``{"limit": "0:70GiB"}``; ``options`` are those of ``subprocess.run``.

    >>> gpupool.run([sys.executable, "train.py"], {"mode": "spill"}, check=True)
    """
    if isinstance(program, (str, bytes)):
        raise TypeError(f"program: a list of words, as [sys.executable, 'train.py'], not {program!r}")
    return subprocess.run([command(), "run", *flags(settings or {}), "--", *program], **options)
