"""Memory of the pool and memory that the program maps itself, which each step changes and adds up, until a file is there: what it prints does not depend
on how many steps that were.

torch_process.py COUNT FILE   COUNT matrices of 512 MiB that PyTorch has, and half as many blocks of that size by cuMemAlloc

Each step is a line in FILE. It ends once FILE.end is there. With expandable segments PyTorch maps its memory itself; what cuMemAlloc returns is the
pool's in any case.
"""

import ctypes
import os
import sys
import time

import torch

from places import allocator, report

WIDTH, LEAST = 16384, 4
count, words = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(11)
matrices = [torch.empty(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(count)]
out = torch.empty_like(matrices[0])
size = out.numel() * out.element_size()
driver = ctypes.CDLL("libcuda.so.1")


def called(name, *arguments):
    code = getattr(driver, name)(*arguments)
    if code:
        sys.exit(f"{name} answered {code}")


def copied(to, source):
    called("cuMemcpyDtoD_v2", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size))


def total(tensor):
    return tensor.view(torch.int16).sum(dtype=torch.int64).item()


blocks = []
for at in range(count // 2):
    block = ctypes.c_uint64()
    called("cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(size))
    copied(block.value, matrices[at].data_ptr())
    blocks.append(block.value)
torch.cuda.synchronize()
results, steps = {}, 0
with open(words, "w", buffering=1, encoding="utf-8") as log:
    # An even number, so that each matrix ends with the signs that it began with.
    while steps < LEAST or steps % 2 or not os.path.exists(f"{words}.end"):
        begun = time.monotonic()
        for matrix in matrices:
            matrix.neg_()
        torch.mm(matrices[0], matrices[1], out=out)
        product = total(out)
        sums = []
        for block in blocks:
            copied(out.data_ptr(), block)
            sums.append(total(out))
        log.write(f"{time.time():.6f} {time.monotonic() - begun:.6f}\n")
        results.setdefault(steps % 2, set()).add((product, total(matrices[-1]), *sums))
        steps += 1
for at, seen in sorted(results.items()):
    print(f"results {at}: {sorted(seen)}")
print(f"matrices: {[total(matrix) for matrix in matrices]}")
report(steps=steps, **allocator(torch))
