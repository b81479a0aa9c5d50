"""Nanoseconds for a stack of so many frames: captured, and captured with text. The best of many rounds."""

import sys

from probe import HELD, RELEASED, state


def deeper(frames, call, rounds):
    return call(rounds) if frames == 1 else deeper(frames - 1, call, rounds)


HELD.frames_count()
frames = int(sys.argv[1])
raw = min(deeper(frames - 1, RELEASED.frames_time_raw, 5_000) for _ in range(100))
text = min(deeper(frames - 1, RELEASED.frames_time_text, 500) for _ in range(100))
assert "compared with" in state(), state()
print(f"{raw:.0f} {text:.0f}")
