"""RMM's buffers (cuDF, cuML) from gpupool, without LD_PRELOAD:

python3 with_rmm.py /path/to/libgpupool.so
"""

import ctypes
import sys

import rmm

gpupool = ctypes.CDLL(sys.argv[1] if len(sys.argv) > 1 else "libgpupool.so")
gpupool.gpupool_malloc.argtypes = [
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
]
gpupool.gpupool_free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]

# The GPU of the context that is current, and no word on captures: RMM's callbacks are told neither.
CURRENT, NO_STREAM = -1, None


def allocate(size, *_stream):
    address = ctypes.c_void_p()
    if gpupool.gpupool_malloc(ctypes.byref(address), size, CURRENT, NO_STREAM):
        raise MemoryError(f"gpupool has no {size} bytes")
    return address.value


def deallocate(address, _size, *_stream):
    gpupool.gpupool_free(address, CURRENT, NO_STREAM)


class Statistics(ctypes.Structure):
    """The first fields of gpupool_statistics; `size` says how many they are."""

    _fields_ = [("size", ctypes.c_size_t), ("live_blocks", ctypes.c_uint64), ("live_bytes", ctypes.c_uint64)]


def main():
    # An allocation with the runtime's allocator makes the context that `CURRENT` means.
    rmm.DeviceBuffer(size=256)
    resource = rmm.mr.CallbackMemoryResource(allocate, deallocate)
    rmm.mr.set_current_device_resource(resource)

    data = bytes(range(256)) * (1 << 16)
    buffer = rmm.DeviceBuffer.to_device(data)
    print("data:", "right" if buffer.tobytes() == data else "wrong")

    statistics = Statistics(size=ctypes.sizeof(Statistics))
    gpupool.gpupool_get_statistics(ctypes.byref(statistics))
    print(f"pooled: {statistics.live_blocks} blocks, {statistics.live_bytes >> 20} MiB")


main()
