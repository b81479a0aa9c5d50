"""Daemon threads read their frames while the interpreter goes down under them, until the process is gone.

They never return to Python: an interpreter that is no more lets no thread back in, and some versions crash at that.
"""

import threading

from probe import HELD, RELEASED, state

THREADS = 8
started = threading.Barrier(THREADS + 1)


def body():
    started.wait()
    RELEASED.frames_time_text(2**32 - 1)


for _ in range(THREADS):
    threading.Thread(target=body, daemon=True).start()
HELD.frames_count()
started.wait()
print(state())
