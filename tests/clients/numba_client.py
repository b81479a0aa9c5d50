"""numba-cuda as far as it needs only the driver: devices, arrays to the device and back, its memory information."""

import numpy
from numba import cuda


def main():
    device = cuda.get_current_device()
    print("devices:", len(cuda.gpus), "current:", device.id)
    numbers = numpy.arange(12 << 20, dtype=numpy.uint32)
    first = cuda.to_device(numbers)
    second = cuda.device_array_like(numbers)
    second.copy_to_device(first)
    print("copied:", "right" if (second.copy_to_host() == numbers).all() else "wrong")
    part = first[1 << 20 : 2 << 20]
    print("part:", "right" if (part.copy_to_host() == numbers[1 << 20 : 2 << 20]).all() else "wrong")
    free, total = cuda.current_context().get_memory_info()
    print("free is at most total:", free <= total)
    del part, first, second
    cuda.current_context().deallocations.clear()
    for size in (1, 4096, 1 << 22):
        array = cuda.device_array(size, dtype=numpy.uint64)
        array.copy_to_device(numpy.full(size, size, dtype=numpy.uint64))
        print(size, "words:", "right" if (array.copy_to_host() == size).all() else "wrong")
    cuda.close()


main()
