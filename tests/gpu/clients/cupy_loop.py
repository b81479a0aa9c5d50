"""A loop of CuPy as programs have it: temporaries of many sizes, a matrix product, a reduction; the time of a step."""

import cupy as cp

from places import report

SIDE, WARM, STEPS = 3072, 20, 400


def main():
    cp.cuda.Device(0).use()
    x = (cp.arange(SIDE * SIDE, dtype=cp.float32) % 7).reshape(SIDE, SIDE)
    weight = (cp.arange(SIDE * SIDE, dtype=cp.float32) % 3).reshape(SIDE, SIDE)
    sums, start, end = [], cp.cuda.Event(), cp.cuda.Event()
    for number in range(WARM + STEPS):
        if number == WARM:
            start.record()
        y = (x @ weight) % 97
        z = cp.concatenate([y, y[::-1]])[: SIDE + 8 * (number % 100)]
        x = (x + z[:SIDE] + cp.sqrt(x * x)) % 7
        sums.append(z.sum(dtype=cp.float64))
        if number % 20 == 19:
            # So that the allocator beneath CuPy's own pool is asked too.
            cp.get_default_memory_pool().free_all_blocks()
    end.record()
    end.synchronize()
    print([int(total) for total in sums[::10]])
    # All steps together: those that allocate are the ones that may differ.
    report(milliseconds={"step": cp.cuda.get_elapsed_time(start, end) / STEPS})


main()
