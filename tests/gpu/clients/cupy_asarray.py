"""NumPy arrays to the GPU and back with CuPy, from plain and from pinned memory, and the bytes pinned at the peak."""

import collections

import cupy as cp
import cupyx
import numpy

from places import pinned, report

SIZES = (1000, 250_000, 1_100_000, 5_000_000, 700_000, 3_300_000, 40_000)
ROUNDS = 3


def main():
    cp.cuda.Device(0).use()
    cp.zeros(1).sum()
    begin = peak = pinned()
    kept = collections.deque(maxlen=4)
    for number in range(ROUNDS * len(SIZES)):
        n = SIZES[number % len(SIZES)] + number
        plain = numpy.arange(n, dtype=numpy.uint32) * numpy.uint32(2654435761) + numpy.uint32(number)
        fixed = cupyx.empty_pinned(n, dtype=numpy.uint32)
        fixed[:] = plain
        a, b = cp.asarray(plain), cp.asarray(fixed)
        # A list of arrays goes through pinned memory of CuPy's own.
        both = cp.asarray([plain[: n // 2], fixed[n // 2 :][: n // 2]])
        out = cupyx.empty_pinned(n, dtype=numpy.uint32)
        b.get(out=out)
        right = [
            numpy.array_equal(cp.asnumpy(a), plain),
            numpy.array_equal(out, plain),
            numpy.array_equal(cp.asnumpy(both).reshape(-1), plain[: n // 2 * 2]),
        ]
        print(n, right, int(a.sum(dtype=cp.uint64)), int(both.sum(dtype=cp.uint64)))
        kept.append((fixed, out))
        peak = max(peak, pinned())
    report(peak=peak - begin)


main()
