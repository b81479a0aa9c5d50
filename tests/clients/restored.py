"""Memory that has names, and blocks in their order, by the Python package: restored.py WORD, which the memory begins with; lines say what to do."""

import ctypes
import sys

import gpupool
from cuda_calls import call, init, use

KIB = 1 << 10


class Array:
    """What a framework's array says of itself, filled with one word."""

    def __init__(self, kibibytes, word):
        address = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(kibibytes * KIB))
        call("cuMemsetD32_v2", address, ctypes.c_uint(word), ctypes.c_size_t(kibibytes * KIB // 4))
        self.address, self.kibibytes = address.value, kibibytes
        self.__cuda_array_interface__ = {
            "shape": (kibibytes, KIB // 4),
            "typestr": "<u4",
            "data": (self.address, False),
            "version": 3,
        }

    def words(self):
        words = (ctypes.c_uint * (self.kibibytes * KIB // 4))()
        call("cuMemcpyDtoH_v2", words, ctypes.c_uint64(self.address), ctypes.c_size_t(ctypes.sizeof(words)))
        return sorted(set(words))


def tried(function, *arguments):
    """What it answered, or the code of its error."""
    try:
        return function(*arguments)
    except gpupool.GpupoolError as error:
        return error.code


def main():
    init()
    use(0)
    first = int(sys.argv[1])
    arrays = [Array(kibibytes, first + at) for at, kibibytes in enumerate((3072, 40, 2048))]
    weights, _, state = arrays
    does = {
        "name array": lambda: tried(gpupool.name, weights, "weights"),
        "name address": lambda: tried(gpupool.name, state.address, "state", 1024 * KIB),
        "name other": lambda: tried(gpupool.name, state.address + 1024 * KIB, "other", 4096),
        "take it back": lambda: tried(gpupool.name, state.address + 1024 * KIB, None, 4096),
        "restore": lambda: tried(gpupool.restore),
        "words": lambda: [array.words() for array in arrays],
    }
    for line in sys.stdin:
        print(does[line.strip()](), flush=True)


main()
