"""Contents for CuPy arrays of 8-byte words: any page that comes from elsewhere shows in them."""

import cupy as cp

STEP = 1 << 28
FACTOR = 0x9E3779B97F4A7C15
WORD = 1 << 64

fill_part = cp.ElementwiseKernel("uint64 first, uint64 factor", "uint64 x", "x = (first + i) * factor", "fill_part")


def fill(array, first):
    """Element k becomes (first + k) * FACTOR."""
    for at in range(0, array.size, STEP):
        part = array[at : at + STEP]
        fill_part(cp.uint64(first + at), cp.uint64(FACTOR), part)


def total(array):
    """Sum modulo 2^64, which is exact for integers in any order."""
    return sum(int(array[at : at + STEP].sum(dtype=cp.uint64)) for at in range(0, array.size, STEP)) % WORD


def expected(first, count):
    """What `total` is of `count` elements filled from `first`."""
    return FACTOR * (first * count + count * (count - 1) // 2) % WORD
