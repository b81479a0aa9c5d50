"""Holds memory of one GPU in blocks of a gibibyte and says what is in it once it is told to go on.

cupy_holder.py GPU GIB

One that is refused a block says how many it had and how long after its context, and ends with 1.
"""

import sys
import time

import cupy

GIB = 1 << 30


def main():
    gpu, count = int(sys.argv[1]), int(sys.argv[2])
    # No pool of its own: each block is one of the driver's.
    cupy.cuda.set_allocator(None)
    before = time.time()
    with cupy.cuda.Device(gpu):
        cupy.cuda.runtime.free(0)
        context = time.time()
        blocks = []
        begun = time.monotonic()
        try:
            for number in range(count):
                blocks.append(cupy.empty(GIB // 4, dtype=cupy.uint32))
        # Without a pool, the runtime's own error.
        except (cupy.cuda.memory.OutOfMemoryError, cupy.cuda.runtime.CUDARuntimeError):
            took = time.monotonic() - begun
            print(f'measured: {{"seconds": {took:.4f}, "before": {before:.4f}, "context": {context:.4f}, "held": {len(blocks)}}}', flush=True)
            # What others borrow leaves for it all the same, and says when.
            time.sleep(2)
            sys.exit(f"refused: it had {len(blocks)} of {count} GiB {took:.3f} s after its context was made, which took {context - before:.3f} s")
        took = time.monotonic() - begun
        for number, block in enumerate(blocks):
            block.fill(number * 7 + 3)
        cupy.cuda.Device(gpu).synchronize()
        print(f"holds {count} GiB", flush=True)
        sys.stdin.readline()
        wrong = [number for number, block in enumerate(blocks) if not bool((block == number * 7 + 3).all())]
        print(f"wrong: {wrong}")
        print(f'measured: {{"seconds": {took:.4f}, "before": {before:.4f}, "context": {context:.4f}, "held": {count}}}')


main()
