"""What the pool of this process holds where, through the C control interface; for clients that run under the shim."""

import ctypes
import json


class _Place(ctypes.Structure):
    """`gpupool_place` of include/gpupool.h."""

    _fields_ = [
        ("place", ctypes.c_int),
        ("used", ctypes.c_uint64),
        ("held", ctypes.c_uint64),
        ("peak_used", ctypes.c_uint64),
        ("limit", ctypes.c_uint64),
    ]


def held():
    """Bytes by place, `gpu0`, `host0`; empty without the shim."""
    try:
        ask = ctypes.CDLL(None).gpupool_places
    except AttributeError:
        return {}
    ask.restype = ctypes.c_size_t
    ask.argtypes = [ctypes.POINTER(_Place), ctypes.c_size_t]
    rows = (_Place * 64)()
    count = min(ask(rows, 64), 64)
    return {f"gpu{row.place}" if row.place >= 0 else f"host{-1 - row.place}": row.held for row in rows[:count]}


def report(**numbers):
    """The line that a check reads and does not compare."""
    print("measured: " + json.dumps(numbers), flush=True)
