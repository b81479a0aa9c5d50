"""Two CuPy arrays that fit on GPU 0 one by one but not together.

cupy_two.py pool BYTES [hold]   both on device 0; every element checked; `a += b` where b lies beyond GPU 0
cupy_two.py native BYTES        the same operation with b on GPU 1, as a program would do it that knows of both GPUs
cupy_two.py overflow BYTES      both on device 0, expecting the second to be refused

`hold` waits for a line on stdin while both arrays are live, so that somebody can look at the GPUs from outside.
"""

import statistics
import sys
import time
import warnings

import cupy as cp

from places import held, report
from ramp import expected, fill, total, WORD


ROUNDS = 8
# Seconds.
WARM_UP = 4


def time_addition(a, b, first_a, first_b):
    """Median GB/s of `a += b` in its first and its last rounds, each of the three passes over the memory counted, and
    whether the result is right. A GPU falls asleep some seconds after its last context ended, and is read more slowly then:
    the last rounds are what holds."""
    rates, begin = [], time.monotonic()
    while time.monotonic() - begin < WARM_UP or len(rates) < 2 * ROUNDS:
        start, end = cp.cuda.Event(), cp.cuda.Event()
        start.record()
        a += b
        end.record()
        end.synchronize()
        rates.append(3 * a.nbytes / cp.cuda.get_elapsed_time(start, end) / 1e6)
    n = a.size
    right = total(a) == (expected(first_a, n) + len(rates) * expected(first_b, n)) % WORD
    # The first round loads the kernel.
    return statistics.median(rates[1:ROUNDS]), statistics.median(rates[-ROUNDS:]), right


def pool(size, hold):
    n = size // 8
    a = cp.empty(n, dtype=cp.uint64)
    b = cp.empty(n, dtype=cp.uint64)
    fill(a, 0)
    fill(b, n)
    print("a:", "right" if total(a) == expected(0, n) else "wrong")
    print("b:", "right" if total(b) == expected(n, n) else "wrong")
    if hold:
        report(held=held())
        sys.stdin.readline()
    quarter = n // 4
    cold, rate, right = time_addition(a[:quarter], b[n - quarter :], 0, n + n - quarter)
    print("a += b:", "right" if right else "wrong")
    report(cold=cold, rate=rate, held=held(), quarter=8 * quarter)


def native(size):
    n = size // 8
    quarter = n // 4
    a = cp.empty(n, dtype=cp.uint64)
    with cp.cuda.Device(1):
        address = cp.cuda.runtime.malloc(8 * n)
    cp.cuda.runtime.deviceEnablePeerAccess(1)
    # Named as device 0's, so that CuPy launches the same kernel as for local memory and asks nothing on the way.
    memory = cp.cuda.UnownedMemory(address, 8 * n, None, 0)
    b = cp.ndarray(n, dtype=cp.uint64, memptr=cp.cuda.MemoryPointer(memory, 0))
    head, tail = a[:quarter], b[n - quarter :]
    fill(head, 0)
    fill(tail, n + n - quarter)
    cold, rate, right = time_addition(head, tail, 0, n + n - quarter)
    print("a += b:", "right" if right else "wrong")
    report(cold=cold, rate=rate)


def overflow(size):
    a = cp.zeros(size // 8, dtype=cp.uint64)
    print("first array: allocated,", a.nbytes)
    try:
        b = cp.zeros(size // 8, dtype=cp.uint64)
        print("second array: allocated,", b.nbytes)
    except cp.cuda.memory.OutOfMemoryError:
        print("second array: OutOfMemoryError")


def main():
    what, size = sys.argv[1], int(sys.argv[2]) // 4096 * 4096
    warnings.simplefilter("ignore")
    cp.cuda.Device(0).use()
    if what == "pool":
        pool(size, "hold" in sys.argv[3:])
    elif what == "native":
        native(size)
    else:
        overflow(size)


main()
