"""A kernel of Triton over three arrays of which not all need be on the program's own GPU."""

import torch
import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) * factor + tl.load(y + at, mask=inside), mask=inside)


def main():
    for n in (1000, (24 << 20) + 17):
        x = torch.arange(n, dtype=torch.int32, device="cuda")
        y = x.flip(0) % 1000
        out = torch.zeros_like(x)
        add[(triton.cdiv(n, 1024),)](x, y, out, n, 3, BLOCK=1024)
        print(n, "right" if torch.equal(out, x * 3 + y) else "wrong", out.sum(dtype=torch.int64).item())


main()
