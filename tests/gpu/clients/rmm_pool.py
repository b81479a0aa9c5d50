"""RMM's pool over cudaMalloc: rmm_pool.py BYTES COUNT. Buffers are filled by CuPy, checked, dropped and made anew."""

import sys

import cupy as cp
import rmm
from rmm.allocators.cupy import rmm_cupy_allocator

from places import held, report
from ramp import expected, fill, total


def made(number, words):
    array = cp.empty(words, dtype=cp.uint64)
    fill(array, number * words)
    return array


def main():
    words, count = int(sys.argv[1]) // 4096 * 512, int(sys.argv[2])
    # It grows by what is asked for, so that the pool beneath it is asked many times.
    rmm.mr.set_current_device_resource(rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=1 << 28))
    cp.cuda.set_allocator(rmm_cupy_allocator)
    arrays = [made(number, words) for number in range(count)]
    places = held()
    wrong = [number for number, array in enumerate(arrays) if total(array) != expected(number * words, words)]
    print(f"{count} arrays, wrong: {wrong}")
    del arrays[::2]
    arrays += [made(count + number, words) for number in range(3)]
    print("new:", [total(array) == expected((count + number) * words, words) for number, array in enumerate(arrays[-3:])])
    buffer = rmm.DeviceBuffer.to_device(bytes(range(256)) * (1 << 14))
    print("bytes:", buffer.size, buffer.tobytes() == bytes(range(256)) * (1 << 14))
    report(held=places)


main()
