"""Holds memory of one GPU in blocks of a gibibyte and says what is in it once it is told to go on.

cupy_holder.py GPU GIB
"""

import sys
import time

import cupy

GIB = 1 << 30


def main():
    gpu, count = int(sys.argv[1]), int(sys.argv[2])
    # No pool of its own: each block is one of the driver's.
    cupy.cuda.set_allocator(None)
    with cupy.cuda.Device(gpu):
        blocks = []
        begun = time.monotonic()
        for number in range(count):
            blocks.append(cupy.empty(GIB // 4, dtype=cupy.uint32))
        took = time.monotonic() - begun
        for number, block in enumerate(blocks):
            block.fill(number * 7 + 3)
        cupy.cuda.Device(gpu).synchronize()
        print(f"holds {count} GiB", flush=True)
        sys.stdin.readline()
        wrong = [number for number, block in enumerate(blocks) if not bool((block == number * 7 + 3).all())]
        print(f"wrong: {wrong}")
        print(f'measured: {{"seconds": {took:.3f}}}')


main()
