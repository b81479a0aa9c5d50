"""A deep network trained with momentum in CuPy, about 25 GiB: its losses, and the time of each step.

cupy_large.py STEPS
"""

import sys
import time

import cupy as cp

from places import held, report

WIDTH, LAYERS, ROWS = 8192, 32, 8192


def main():
    steps = int(sys.argv[1])
    cp.cuda.Device(0).use()
    random = cp.random.RandomState(7)
    scale = WIDTH**-0.5
    weights = [random.standard_normal((WIDTH, WIDTH), dtype=cp.float32) * scale for _ in range(LAYERS)]
    moments = [cp.zeros_like(weight) for weight in weights]
    batch = random.standard_normal((ROWS, WIDTH), dtype=cp.float32)
    losses, milliseconds, ended = [], [], []
    for _ in range(steps):
        since = time.perf_counter()
        inputs = [batch]
        for weight in weights:
            inputs.append(cp.tanh(inputs[-1] @ weight))
        last = inputs.pop()
        gradient = last - batch
        loss = (gradient * gradient).mean()
        for weight, moment in zip(reversed(weights), reversed(moments)):
            gradient *= 1 - last * last
            last = inputs.pop()
            change = last.T @ gradient
            gradient = gradient @ weight.T
            moment *= 0.9
            moment += change
            weight -= 1e-3 / ROWS * moment
        losses.append(float(loss))
        milliseconds.append((time.perf_counter() - since) * 1e3)
        ended.append(time.time())
    print(f"{steps} steps, the loss fell: {losses[-1] < losses[0]}")
    report(milliseconds=milliseconds, ended=ended, losses=losses, held=held())


main()
