"""Matrices of 512 MiB that are multiplied in turn, each with its neighbour: what they add up to, and the time of a product.

torch_rotation.py COUNT ROUNDS [graph]   graph: one round is a CUDA graph that is replayed
"""

import sys
import time

import torch

from places import held, report

WIDTH = 16384


def main():
    count, rounds = int(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(7)
    matrices = [torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(count)]
    out = torch.empty_like(matrices[0])

    def turn():
        for number, matrix in enumerate(matrices):
            torch.mm(matrix, matrices[(number + 1) % count], out=out)

    # The library's own memory, before anything is captured or timed.
    torch.mm(matrices[0], matrices[1], out=out)
    torch.cuda.synchronize()
    if "graph" in sys.argv:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            turn()
        turn = graph.replay
    milliseconds, ended = [], []
    for number in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        turn()
        end.record()
        torch.cuda.synchronize()
        milliseconds.append(begin.elapsed_time(end) / count)
        ended.append(time.time())
        print(f"round {number}: {out.view(torch.int16).sum(dtype=torch.int64).item()}", flush=True)
    sums = [matrix.view(torch.int16).sum(dtype=torch.int64).item() for matrix in matrices]
    print(f"matrices: {sums}")
    report(milliseconds=milliseconds, ended=ended, held=held())


main()
