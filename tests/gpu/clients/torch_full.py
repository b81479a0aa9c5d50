"""A GPU that is full, once by what PyTorch lets itself have and once in truth: what a pool of one's own (torch.cuda.MemPool) has is refused to
others and serves them where it may, and what was given up serves again.

torch_full.py limited ALLOCATOR: a library that torch_full.c made. What PyTorch's own tests of memory pools under a limit ask, in other words.
torch_full.py filled: the GPU itself.
"""

import sys
import time

import torch

from places import report

MIB, GIB = 1 << 20, 1 << 30


def block(bytes_, value):
    return torch.full((bytes_ // 4,), value, dtype=torch.int32, device="cuda")


def is_all(tensor, value):
    """By its ends: whatever compares all of it needs memory, of which there may be none."""
    return int(tensor[0]) == value == int(tensor[-1])


def is_refused(bytes_):
    try:
        torch.empty(bytes_ // 4, dtype=torch.int32, device="cuda")
    except torch.OutOfMemoryError:
        return True
    return False


def limited(allocator):
    """PyTorch may have 80 MiB more: 40 in a pool that helps out, 40 in one that does not."""
    torch.cuda.empty_cache()
    # As those tests do: what they are told here and what PyTorch reckons with may be two things.
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 80 * MIB) / total)
    try:
        keeps, helps = torch.cuda.MemPool(allocator), torch.cuda.MemPool(allocator, use_on_oom=True)
    except TypeError:
        return print("limited: this PyTorch has no pool that helps out")
    with torch.cuda.use_mem_pool(keeps):
        kept = block(40 * MIB, 1)
    with torch.cuda.use_mem_pool(helps):
        helper = block(40 * MIB, 2)
    where = helper.data_ptr()
    print("limited: beyond it, refused:", is_refused(30 * MIB))
    print("limited: contents:", is_all(kept, 1), is_all(helper, 2))
    del kept, helper
    third = block(30 * MIB, 3)
    print("limited: served by the pool that helps out:", third.data_ptr() == where, "contents:", is_all(third, 3))
    print("limited: a second time, refused:", is_refused(30 * MIB))
    del third
    with torch.cuda.use_mem_pool(helps):
        again = block(40 * MIB, 4)
    print("limited: the pool serves its own again:", again.data_ptr() == where, "contents:", is_all(again, 4))
    del again, keeps, helps
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


def filled():
    """All that there is, in a pool; bytes, seconds to fill it, and those of what came after."""
    pool, blocks = torch.cuda.MemPool(), []
    since = time.perf_counter()
    size = GIB
    while size >= 64 * MIB:
        try:
            with torch.cuda.use_mem_pool(pool):
                blocks.append(block(size, len(blocks)))
        except torch.OutOfMemoryError:
            size //= 4
    torch.cuda.synchronize()
    filling = time.perf_counter() - since
    total = sum(one.numel() * 4 for one in blocks)
    print("full: beyond it, refused:", is_refused(GIB))
    print("full: contents:", all(is_all(one, nth) for nth, one in enumerate(blocks)))
    since = time.perf_counter()
    blocks.clear()
    del pool
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    giving_up = time.perf_counter() - since
    since = time.perf_counter()
    after = block(total // 2, 7)
    torch.cuda.synchronize()
    serving = time.perf_counter() - since
    print("full: half of it at once, after that:", is_all(after, 7))
    return total, filling, giving_up, serving


def main():
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    if sys.argv[1] == "filled":
        total, filling, giving_up, serving = filled()
        report(bytes=total, seconds={"filling": filling, "giving up": giving_up, "half of it": serving})
        return
    # It must outlive the pools that use it.
    pluggable = torch.cuda.memory.CUDAPluggableAllocator(sys.argv[2], "take", "give")
    since = time.perf_counter()
    limited(pluggable.allocator())
    report(seconds={"limited": time.perf_counter() - since})


main()
