"""Weights of 24 GiB that a step reads once, as a language model does for each token: what comes out, and the time of a step.

torch_decode.py STEPS
"""

import sys
import time

import torch

from places import held, report

WIDTH, LAYERS, ROWS = 16384, 48, 8


def main():
    steps = int(sys.argv[1])
    torch.manual_seed(7)
    weights = [torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(LAYERS)]
    first = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, device="cuda")
    milliseconds, ended = [], []
    for number in range(steps):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        x = first
        for weight in weights:
            x = (x @ weight) * (1 / 128)
        end.record()
        torch.cuda.synchronize()
        milliseconds.append(begin.elapsed_time(end))
        ended.append(time.time())
        print(f"step {number}: {x.view(torch.int16).sum(dtype=torch.int64).item()}", flush=True)
    report(milliseconds=milliseconds, ended=ended, held=held())


main()
