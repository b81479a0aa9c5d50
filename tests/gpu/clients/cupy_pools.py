"""CuPy arrays from one of CuPy's allocators: cupy_pools.py default|managed|async BYTES COUNT

COUNT arrays of BYTES, each with its own contents, all checked at the end; then half of them are dropped and made anew.
"""

import sys
import warnings

import cupy as cp

from places import held, report
from ramp import expected, fill, total

ALLOCATORS = {
    "default": cp.get_default_memory_pool,
    "managed": lambda: cp.cuda.MemoryPool(cp.cuda.malloc_managed),
    "async": cp.cuda.MemoryAsyncPool,
}


def made(number, words):
    array = cp.empty(words, dtype=cp.uint64)
    fill(array, number * words)
    return array


def main():
    kind, words, count = sys.argv[1], int(sys.argv[2]) // 4096 * 512, int(sys.argv[3])
    warnings.simplefilter("ignore")
    cp.cuda.Device(0).use()
    pool = ALLOCATORS[kind]()
    cp.cuda.set_allocator(pool.malloc)
    arrays = []
    try:
        for number in range(count):
            arrays.append(made(number, words))
    except (cp.cuda.memory.OutOfMemoryError, cp.cuda.runtime.CUDARuntimeError) as error:
        print(f"{type(error).__name__} after {len(arrays)} arrays")
        return 3
    places = held()
    # While all of them live, somebody may look at the GPUs from outside.
    print(f"{count} arrays", flush=True)
    sys.stdin.readline()
    wrong = [number for number, array in enumerate(arrays) if total(array) != expected(number * words, words)]
    print("wrong:", wrong)
    del arrays[::2]
    pool.free_all_blocks()
    arrays += [made(count + number, words) for number in range((count + 1) // 2)]
    numbers = [*range(1, count, 2), *range(count, count + (count + 1) // 2)]
    wrong = [number for number, array in zip(numbers, arrays) if total(array) != expected(number * words, words)]
    print("wrong of the remaining and the new:", wrong, len(arrays))
    report(held=places)
    return 0


sys.exit(main())
