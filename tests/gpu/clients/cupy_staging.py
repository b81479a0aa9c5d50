"""Pinned arrays to the GPU: cupy_staging.py staged|direct

staged: as CuPy before 13 did it, through a second pinned buffer, although the first one could be copied from
direct: as CuPy does it now
"""

import sys

import cupy as cp
import cupyx
import numpy


def filled(memory, source):
    buffer = numpy.frombuffer(memory, source.dtype, source.size)
    buffer[...] = source
    return buffer


def staged(source):
    array = cp.empty(source.size, source.dtype)
    # One line of Python, as asarray was.
    array.set(filled(cp.cuda.alloc_pinned_memory(source.nbytes), source))  # the second buffer
    return array


def main():
    cp.cuda.Device(0).use()
    for number in range(4):
        # Each larger than the one before, so that no buffer fits that CuPy has kept.
        source = cupyx.empty_pinned(3_000_000 << number, dtype=numpy.uint32)
        source[:] = numpy.arange(source.size, dtype=numpy.uint32) * numpy.uint32(2654435761)
        array = staged(source) if sys.argv[1] == "staged" else cp.asarray(source)
        cp.cuda.Device().synchronize()
        print(source.size, int(array.sum(dtype=cp.uint64)))


main()
