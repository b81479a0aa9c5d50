"""Daemon threads read their frames while the interpreter goes down under them."""

import threading

from probe import HELD, RELEASED, state

started = threading.Barrier(9)


def body(library):
    started.wait()
    while True:
        # Long enough in C that finalisation happens meanwhile.
        library.frames_time_text(20_000)


for number in range(8):
    threading.Thread(target=body, args=((RELEASED, HELD)[number % 4 == 0],), daemon=True).start()
HELD.frames_count()
started.wait()
print(state())
