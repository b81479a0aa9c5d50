"""Does with pinned memory what CuPy's asarray does with a NumPy array. The tests install it as the package cupy, of a
version before 13 or not; CuPy itself needs a real GPU."""

import ctypes
import os

import cuda_calls

# Blocks that a pool keeps, as CuPy's does: the driver never sees them freed.
_kept = []


class Pinned:
    """Memory in the manner of cupyx.empty_pinned."""

    def __init__(self, size):
        self.size = size
        self.address = ctypes.c_void_p()
        cuda_calls.call("cuMemHostAlloc", ctypes.byref(self.address), ctypes.c_size_t(size), 1)


def _to_device(size, source):
    target = ctypes.c_uint64()
    cuda_calls.call("cuMemAlloc_v2", ctypes.byref(target), ctypes.c_size_t(size))
    cuda_calls.call("cuMemcpyHtoD_v2", target, source, ctypes.c_size_t(size))
    return target


def asarray(source):
    """Before version 13 through a pinned buffer of its own, since then straight where the source is pinned."""
    if int(os.environ["CUPY_VERSION"].split(".")[0]) >= 13:
        return _to_device(source.size, source.address)
    staged = Pinned(source.size)
    _kept.append(staged)
    ctypes.memmove(staged.address, source.address, source.size)
    return _to_device(staged.size, staged.address)
