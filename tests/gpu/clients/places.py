"""What a client tells about itself beside its results: what the pool holds where, which allocator it uses."""

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


class _Statistics(ctypes.Structure):
    """`gpupool_statistics` of include/gpupool.h."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("live_blocks", ctypes.c_uint64),
        ("live_bytes", ctypes.c_uint64),
        ("peak_live_bytes", ctypes.c_uint64),
        ("held_on_gpus", ctypes.c_uint64),
        ("held_on_host", ctypes.c_uint64),
        ("allocations", ctypes.c_uint64),
        ("reuses", ctypes.c_uint64),
        ("spilled_bytes", ctypes.c_uint64),
        ("trimmed_bytes", ctypes.c_uint64),
    ]


def _places():
    """Rows by place, `gpu0`, `host0`, through the C control interface; empty without the shim."""
    try:
        ask = ctypes.CDLL(None).gpupool_places
    except AttributeError:
        return {}
    ask.restype = ctypes.c_size_t
    ask.argtypes = [ctypes.POINTER(_Place), ctypes.c_size_t]
    rows = (_Place * 64)()
    count = min(ask(rows, 64), 64)
    return {f"gpu{row.place}" if row.place >= 0 else f"host{-1 - row.place}": row for row in rows[:count]}


def held():
    """Bytes by place; empty without the shim."""
    return {place: row.held for place, row in _places().items()}


def numbers():
    """The C interface's statistics and places, as tests/programs/numbers.h prints them; empty without the shim."""
    places = {
        place: {name: getattr(row, name) for name in ("used", "held", "peak_used", "limit")} for place, row in _places().items()
    }
    if not places:
        return {}
    told = _Statistics(size=ctypes.sizeof(_Statistics))
    if ctypes.CDLL(None).gpupool_get_statistics(ctypes.byref(told)):
        return {}
    return {name: getattr(told, name) for name, _ in _Statistics._fields_ if name != "size"} | {"places": places}


def pinned():
    """Bytes of memory that this process has pinned, as the kernel shows them: the driver pins shared memory without a
    file. Batches that come from other processes are shared memory with one."""
    total, counts = 0, False
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            words = line.split()
            if not words[0].endswith(":"):
                counts = "s" in words[1] and not " ".join(words[5:]).startswith(("/dev/shm/", "/memfd:"))
            elif counts and words[0] == "Rss:":
                total += int(words[1]) << 10
    return total


def allocator(torch):
    """Which of its allocators PyTorch uses, and whether with expandable segments."""
    backend = torch.cuda.get_allocator_backend()
    # The other backend has no segments and refuses the question.
    segments = torch.cuda.memory_snapshot() if backend == "native" else []
    return {"backend": backend, "expandable": any(segment.get("is_expandable") for segment in segments)}


def report(**numbers):
    """The line that a check reads and does not compare. Where it says what is held, it says what is used of that too."""
    if "held" in numbers:
        numbers["used"] = {place: row.used for place, row in _places().items()}
    print("measured: " + json.dumps(numbers), flush=True)
