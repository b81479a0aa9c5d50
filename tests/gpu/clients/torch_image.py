"""Matrices of 512 MiB, all changed by each step, until a file is there: what it prints does not depend on how many steps that were.

torch_image.py COUNT WORDS_FILE

Each step's time goes to WORDS_FILE, a line with its end and its seconds. It ends once WORDS_FILE.stop is there. Once WORDS_FILE.few is there, a step changes one
matrix in ten.
"""

import os
import sys
import time

import torch

from places import report

WIDTH, LEAST = 16384, 20
count, words = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(11)
matrices = [torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(count)]
out = torch.empty_like(matrices[0])


def total(tensor):
    return tensor.view(torch.int16).sum(dtype=torch.int64).item()


# The library's own memory, before anything is timed.
torch.mm(matrices[0], matrices[1], out=out)
torch.cuda.synchronize()
results, steps = {}, 0
changed = matrices
with open(words, "w", buffering=1, encoding="utf-8") as log:
    # An even number, so that each matrix ends with the signs that it began with.
    while steps < LEAST or steps % 2 or not os.path.exists(f"{words}.stop"):
        # At an even number: each of the others has the signs that it began with, and keeps them.
        if steps % 2 == 0 and len(changed) == count and os.path.exists(f"{words}.few"):
            changed = matrices[: max(4, count // 10)]
        begun = time.monotonic()
        for matrix in changed:
            matrix.neg_()
        for at in range(3):
            torch.mm(matrices[at], matrices[at + 1], out=out)
        torch.cuda.synchronize()
        log.write(f"{time.time():.6f} {time.monotonic() - begun:.6f}\n")
        # Not timed. Two results take turns, for ever; where few change, they are not those.
        if len(changed) == count:
            results.setdefault(steps % 2, set()).add((total(out), total(matrices[-1])))
        steps += 1
for at, seen in sorted(results.items()):
    print(f"results {at}: {sorted(seen)}")
print(f"matrices: {[total(matrix) for matrix in matrices]}")
report(steps=steps)
