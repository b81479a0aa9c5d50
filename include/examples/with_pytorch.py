"""PyTorch's tensors from gpupool, without LD_PRELOAD:

python3 with_pytorch.py /path/to/libgpupool.so

Every tensor is a call of gpupool's here, because a pluggable allocator replaces PyTorch's cache. To keep the cache, preload
the library instead, or give `allocator.allocator()` to torch.cuda.MemPool.
"""

import ctypes
import sys

import torch

library = sys.argv[1] if len(sys.argv) > 1 else "libgpupool.so"
allocator = torch.cuda.memory.CUDAPluggableAllocator(library, "gpupool_torch_malloc", "gpupool_torch_free")
# Before the first tensor: PyTorch does not change allocators later.
torch.cuda.memory.change_current_allocator(allocator)


class Statistics(ctypes.Structure):
    """The first fields of gpupool_statistics; `size` says how many they are."""

    _fields_ = [("size", ctypes.c_size_t), ("live_blocks", ctypes.c_uint64), ("live_bytes", ctypes.c_uint64)]


def main():
    numbers = torch.arange(1 << 24, dtype=torch.int64, device="cuda")
    doubled = numbers * 2
    print("sum:", "right" if doubled.sum().item() == (1 << 24) * ((1 << 24) - 1) else "wrong")

    statistics = Statistics(size=ctypes.sizeof(Statistics))
    ctypes.CDLL(library).gpupool_get_statistics(ctypes.byref(statistics))
    print(f"pooled: {statistics.live_blocks} blocks, {statistics.live_bytes >> 20} MiB")


main()
