"""gpupool by ctypes, as include/examples do it, without a framework: opened_client.py LIBRARY"""

import ctypes
import sys

from cuda_calls import call, init

gpupool = ctypes.CDLL(sys.argv[1])
gpupool.gpupool_malloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
gpupool.gpupool_free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
MIB = 1 << 20


class Statistics(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("live_blocks", ctypes.c_uint64), ("live_bytes", ctypes.c_uint64)]


def live():
    statistics = Statistics(size=ctypes.sizeof(Statistics))
    gpupool.gpupool_get_statistics(ctypes.byref(statistics))
    return statistics.live_blocks


def main():
    init()
    blocks = []
    for size in (48, 300):
        block = ctypes.c_void_p()
        if gpupool.gpupool_malloc(ctypes.byref(block), size * MIB, 0, None):
            raise SystemExit("no memory")
        if not blocks:
            # The call above made it; what follows needs one that is current.
            context = ctypes.c_void_p()
            call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
            call("cuCtxSetCurrent", context)
        last = ctypes.c_uint64(block.value + size * MIB - 4096)
        call("cuMemsetD8_v2", ctypes.c_uint64(block.value), ctypes.c_ubyte(size % 256), ctypes.c_size_t(size * MIB))
        page = (ctypes.c_ubyte * 4096)()
        call("cuMemcpyDtoH_v2", page, last, ctypes.c_size_t(4096))
        print(f"block of {size} MiB:", "right" if bytes(page) == bytes([size % 256]) * 4096 else "wrong")
        blocks.append(block)
    print("live:", live())
    print("refused:", gpupool.gpupool_malloc(ctypes.byref(ctypes.c_void_p()), 1 << 60, 0, None))
    for block in blocks:
        gpupool.gpupool_free(block, 0, None)
    print("live:", live())


main()
