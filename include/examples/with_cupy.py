"""CuPy's arrays from gpupool, without LD_PRELOAD:

python3 with_cupy.py /path/to/libgpupool.so

CuPy's own memory pool stays in front and keeps what is freed, so gpupool is called for new memory only.
"""

import ctypes
import sys

import cupy

gpupool = ctypes.CDLL(sys.argv[1] if len(sys.argv) > 1 else "libgpupool.so")
gpupool.gpupool_malloc.argtypes = [
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
]
gpupool.gpupool_free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]


def malloc(size, device):
    address = ctypes.c_void_p()
    error = gpupool.gpupool_malloc(ctypes.byref(address), size, device, cupy.cuda.get_current_stream().ptr)
    if error:
        # Codes above 0 are the driver's, the same as the runtime's for out of memory: CuPy empties its pool and comes back.
        raise cupy.cuda.runtime.CUDARuntimeError(error if error > 0 else 2)
    return address.value


def free(address, device):
    gpupool.gpupool_free(address, device, cupy.cuda.get_current_stream().ptr)


class Statistics(ctypes.Structure):
    """The first fields of gpupool_statistics; `size` says how many they are."""

    _fields_ = [("size", ctypes.c_size_t), ("live_blocks", ctypes.c_uint64), ("live_bytes", ctypes.c_uint64)]


def main():
    pool = cupy.cuda.MemoryPool(cupy.cuda.PythonFunctionAllocator(malloc, free).malloc)
    cupy.cuda.set_allocator(pool.malloc)

    numbers = cupy.arange(1 << 24, dtype=cupy.int64)
    doubled = numbers * 2
    print("sum:", "right" if int(doubled.sum()) == (1 << 24) * ((1 << 24) - 1) else "wrong")

    statistics = Statistics(size=ctypes.sizeof(Statistics))
    gpupool.gpupool_get_statistics(ctypes.byref(statistics))
    print(f"pooled: {statistics.live_blocks} blocks, {statistics.live_bytes >> 20} MiB")

    # While Python still runs: `free` is a Python function.
    del numbers, doubled
    pool.free_all_blocks()


main()
