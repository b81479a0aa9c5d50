"""Arrays of 512 MiB that are summed in turn, and then live while others look: each line of the input is answered by what CuPy and the
pool say of themselves.

cupy_look.py COUNT ROUNDS
"""

import sys

import cupy as cp

from places import numbers, report

WORDS = 1 << 26


def main():
    count, rounds = int(sys.argv[1]), int(sys.argv[2])
    cp.cuda.Device(0).use()
    arrays = [cp.arange(at, at + WORDS, dtype=cp.uint64) for at in range(count)]
    for number in range(rounds):
        # Each array is read again and again, so that it is worth bringing near.
        total = sum(int((array * factor).sum()) for array in arrays for factor in range(1, 9))
        print(f"round {number}: {total % (1 << 64)}", flush=True)
    memory = cp.get_default_memory_pool()
    for _ in sys.stdin:
        report(allocated=memory.used_bytes(), reserved=memory.total_bytes(), **numbers())


main()
