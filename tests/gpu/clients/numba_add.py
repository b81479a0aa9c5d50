"""A Numba kernel over two arrays on the device."""

import numpy
from numba import cuda


@cuda.jit
def add(a, b, c):
    for i in range(cuda.grid(1), c.size, cuda.gridsize(1)):
        c[i] = 2 * a[i] + b[i]


def main():
    n = 24 << 20
    a = numpy.arange(n, dtype=numpy.int64)
    b = a[::-1].copy()
    on_device = [cuda.to_device(array) for array in (a, b)] + [cuda.device_array(n, dtype=numpy.int64)]
    add[1024, 256](*on_device)
    c = on_device[2].copy_to_host()
    print("c:", "right" if (c == 2 * a + b).all() else "wrong", "sum", int(c.sum()))
    view = on_device[2][n // 2 :]
    print("half:", int(view.copy_to_host().sum()))


main()
