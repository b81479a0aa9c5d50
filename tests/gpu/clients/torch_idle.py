"""Matrices of 512 MiB that are multiplied, then nothing until a line comes on the standard input or that ends, and the same again: what they add
up to, and the times.

torch_idle.py COUNT
"""

import sys
import time

import torch

from places import report

WIDTH = 16384


def main():
    count = int(sys.argv[1])
    torch.manual_seed(7)
    matrices = [torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(count)]
    out = torch.empty_like(matrices[0])

    def turn():
        """Milliseconds of all products."""
        since = time.perf_counter()
        for number, matrix in enumerate(matrices):
            torch.mm(matrix, matrices[(number + 1) % count], out=out)
        torch.cuda.synchronize()
        return (time.perf_counter() - since) * 1e3

    def total(matrix):
        return matrix.view(torch.int16).sum(dtype=torch.int64).item()

    # The library's own memory, before anything is timed.
    turn()
    before = turn()
    print(f"matrices: {[total(matrix) for matrix in (*matrices, out)]}")
    print("idles", flush=True)
    sys.stdin.readline()
    woken = turn()
    after = turn()
    print(f"matrices: {[total(matrix) for matrix in (*matrices, out)]}")
    report(before=before, woken=woken, after=after)


main()
