"""Matrices of 512 MiB that are multiplied in turn, and then live while others look: each line of the input is answered by what PyTorch
and the pool say of themselves.

torch_look.py COUNT ROUNDS
"""

import sys

import torch

from places import numbers, report

WIDTH = 16384


def main():
    count, rounds = int(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(7)
    matrices = [torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(count)]
    out = torch.empty_like(matrices[0])
    for number in range(rounds):
        for at, matrix in enumerate(matrices):
            torch.mm(matrix, matrices[(at + 1) % count], out=out)
            torch.cuda.synchronize()
        print(f"round {number}: {out.view(torch.int16).sum(dtype=torch.int64).item()}", flush=True)
    for _ in sys.stdin:
        report(allocated=torch.cuda.memory_allocated(), reserved=torch.cuda.memory_reserved(), **numbers())


main()
