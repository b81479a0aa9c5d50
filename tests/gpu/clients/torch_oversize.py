"""PyTorch tensors that together are larger than GPU 0.

torch_oversize.py PART COUNT: COUNT tensors of PART bytes, each with its own contents and all checked at the end. Before
that, three more are made and dropped: they stay in PyTorch's cache, which must be returned before the GPU overflows.
"""

import sys

import torch

from places import allocator, held, report


def made(part, number):
    """Values that depend on the place, so that overlapping memory shows; made in pieces, to need no large temporary."""
    tensor = torch.empty(part // 4, dtype=torch.int32, device="cuda")
    for at in range(0, tensor.numel(), 1 << 26):
        piece = tensor[at : at + (1 << 26)]
        torch.arange(piece.numel(), out=piece)
        piece.bitwise_and_(0xFFFF).add_(number + (at >> 26))
    return tensor


def is_right(tensor, number):
    for at in range(0, tensor.numel(), 1 << 26):
        piece = tensor[at : at + (1 << 26)]
        ramp = torch.arange(piece.numel(), dtype=torch.int32, device="cuda").bitwise_and_(0xFFFF)
        if not torch.equal(piece, ramp.add_(number + (at >> 26))):
            return False
    return True


def main():
    part, count = int(sys.argv[1]) // 4096 * 4096, int(sys.argv[2])
    torch.cuda.set_device(0)
    # Unlike the rest in size, so that the cache cannot serve them from these.
    dropped = [torch.empty(part // 8, dtype=torch.int8, device="cuda") for _ in range(3)]
    del dropped
    tensors = []
    try:
        for number in range(count):
            tensors.append(made(part, number))
    except torch.OutOfMemoryError:
        print(f"OutOfMemoryError after {len(tensors)} tensors")
        return 3
    retries = torch.cuda.memory_stats()["num_alloc_retries"]
    places = held()
    wrong = [number for number, tensor in enumerate(tensors) if not is_right(tensor, number)]
    kind = allocator(torch)
    # While all of them live, somebody may look at the GPUs from outside.
    print(f"{count} tensors, wrong: {wrong}", flush=True)
    sys.stdin.readline()
    sums = [tensor.sum(dtype=torch.int64).item() for tensor in tensors]
    whole, rest = divmod(part // 4, 1 << 26)
    ramp = (1 << 10) * (0xFFFF * 0x10000 // 2)
    most = sum(range(whole)) * (1 << 26) + whole * ramp
    tail = sum(range(rest & 0xFFFF)) + (rest >> 16) * (0xFFFF * 0x10000 // 2) + rest * whole
    expected = [most + tail + number * (part // 4) for number in range(count)]
    print("sums:", "right" if sums == expected else f"wrong: {sums}, expected {expected}")
    tensors.clear()
    torch.cuda.empty_cache()
    print("after empty_cache:", torch.cuda.memory_reserved(), "bytes reserved")
    again = made(part, 1)
    print("a tensor made afterwards:", "right" if is_right(again, 1) else "wrong")
    report(held=places, retries=retries, **kind)
    return 0


sys.exit(main())
