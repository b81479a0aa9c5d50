"""The frames probe from Python, with the GIL released and held, and the comparison with traceback."""

import ctypes
import os
import sys
import traceback

SIZE = 1 << 20
RELEASED = ctypes.CDLL(os.environ["FRAMES_PROBE"])
HELD = ctypes.PyDLL(os.environ["FRAMES_PROBE"])

for library in (RELEASED, HELD):
    for name in ("frames_text", "frames_shown", "frames_state", "frames_understood"):
        function = getattr(library, name)
        function.restype = ctypes.c_ssize_t
        function.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
    for name in ("count", "count_on_new_thread", "allocations", "keep", "resolve_kept"):
        getattr(library, "frames_" + name).restype = ctypes.c_ssize_t
    for name in ("frames_time_raw", "frames_time_text"):
        getattr(library, name).restype = ctypes.c_double
        getattr(library, name).argtypes = [ctypes.c_uint32]

MOST = 64
compared = 0


def told(function):
    """What a function of the probe writes."""
    buffer = ctypes.create_string_buffer(SIZE)
    length = function(buffer, SIZE)
    assert length < SIZE, length
    return None if length < 0 else buffer.value.decode()


def state():
    return told(RELEASED.frames_state)


def parse(text):
    """Lines of the probe as (file, function, line), the innermost first, and whether there are more."""
    lines = text.splitlines()
    truncated = bool(lines) and lines[-1] == "…"
    frames = [tuple(line.rsplit("\t", 2)) for line in lines[: len(lines) - truncated]]
    return [(file, function, int(line)) for file, function, line in frames], truncated


def shown(text):
    """A name as it arrives in UTF-8: what is no character is replaced."""
    return "".join("\ufffd" if 0xD800 <= ord(char) < 0xE000 else char for char in text)


def compare():
    """Reads the stack with the GIL released and held, and fails unless both are what traceback says."""
    global compared
    for library in (RELEASED, HELD):
        buffer = ctypes.create_string_buffer(SIZE)
        # On one line, because the line of this frame is compared too.
        length, expected = library.frames_text(buffer, SIZE), traceback.extract_stack()
        assert 0 < length < SIZE, (length, state())
        frames, truncated = parse(buffer.value.decode())
        expected = [(shown(frame.filename), shown(frame.name), frame.lineno or 0) for frame in reversed(expected)]
        assert frames == expected[:MOST], "\n".join(
            ["read:", *map(str, frames), "traceback:", *map(str, expected[:MOST])]
        )
        assert truncated == (len(expected) > MOST), (truncated, len(expected))
        assert len(frames) == library.frames_count() == min(len(expected), MOST)
    compared += 1
    return 0


def done(least):
    """The last line of a client. `least` guards against a client that compared nothing."""
    assert compared >= least, (compared, least)
    print(f"{sys.version.split()[0]}: {compared} stacks equal; {state()}")
