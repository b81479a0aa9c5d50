"""A loop of CuPy as programs have it: temporaries of many sizes, a matrix product, a reduction; the time of a step."""

import statistics

import cupy as cp

from places import report

SIDE, WARM, STEPS = 3072, 20, 120


def main():
    cp.cuda.Device(0).use()
    x = (cp.arange(SIDE * SIDE, dtype=cp.float32) % 7).reshape(SIDE, SIDE)
    weight = (cp.arange(SIDE * SIDE, dtype=cp.float32) % 3).reshape(SIDE, SIDE)
    sums, marks = [], []
    for number in range(WARM + STEPS):
        start, end = cp.cuda.Event(), cp.cuda.Event()
        start.record()
        y = (x @ weight) % 97
        z = cp.concatenate([y, y[::-1]])[: SIDE + 8 * number]
        x = (x + z[:SIDE] + cp.sqrt(x * x)) % 7
        sums.append(z.sum(dtype=cp.float64))
        if number % 20 == 19:
            # So that the allocator beneath CuPy's own pool is asked too.
            cp.get_default_memory_pool().free_all_blocks()
        end.record()
        marks.append((start, end))
    print([int(total) for total in sums[::10]])
    report(milliseconds={"step": statistics.median(cp.cuda.get_elapsed_time(*pair) for pair in marks[WARM:])})


main()
