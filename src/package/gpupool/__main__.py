"""``python -m gpupool`` is the command ``gpupool``."""

import os
import signal
import sys

from gpupool._command import command


def main() -> None:
    """Becomes the command."""
    try:
        path = command()
    except FileNotFoundError as error:
        sys.exit(f"gpupool: {error}")
    # Python ignores these two as it starts, and what is ignored stays so in what a process becomes: programs would run on
    # when nobody reads what they print.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.execv(path, ["gpupool", *sys.argv[1:]])


if __name__ == "__main__":
    main()
