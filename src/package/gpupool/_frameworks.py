"""Allocators of frameworks that take their memory from gpupool, in a program that is not under the library.

Where the library is preloaded, everything that these frameworks allocate is gpupool's to serve already, by way of their own caches, and
these functions change nothing and say so by answering False.
"""

from __future__ import annotations

import ctypes

from gpupool._interface import interface
from gpupool._preload import is_preloaded, library

#: The GPU of the context that is current.
_CURRENT = -1
_OUT_OF_MEMORY = 2


def use_with_torch() -> bool:
    """Has PyTorch take its memory from gpupool, by ``CUDAPluggableAllocator``. Before the first tensor on a GPU.

    Every tensor is a call of gpupool's then, as such an allocator replaces PyTorch's cache; under the library the cache stays.
    """
    if is_preloaded():
        return False
    import torch

    allocator = torch.cuda.memory.CUDAPluggableAllocator(library(), "gpupool_torch_malloc", "gpupool_torch_free")
    torch.cuda.memory.change_current_allocator(allocator)
    return True


def use_with_cupy() -> bool:
    """Has CuPy take its memory from gpupool. CuPy's own pool stays in front and keeps what is freed."""
    if is_preloaded():
        return False
    import cupy

    functions = interface()

    def malloc(size: int, device: int) -> int:
        address = ctypes.c_void_p()
        error = functions.gpupool_malloc(ctypes.byref(address), size, device, cupy.cuda.get_current_stream().ptr)
        if error:
            # Codes above 0 are the driver's, the same as the runtime's for out of memory: CuPy empties its pool and comes back.
            raise cupy.cuda.runtime.CUDARuntimeError(error if error > 0 else _OUT_OF_MEMORY)
        return address.value or 0

    def free(address: int, device: int) -> None:
        functions.gpupool_free(address, device, cupy.cuda.get_current_stream().ptr)

    pool = cupy.cuda.MemoryPool(cupy.cuda.PythonFunctionAllocator(malloc, free).malloc)
    cupy.cuda.set_allocator(pool.malloc)
    return True


def use_with_rmm() -> bool:
    """Has RMM (cuDF, cuML) take its memory from gpupool, on the GPU whose context is current."""
    if is_preloaded():
        return False
    import rmm

    functions = interface()

    def allocate(size: int, *_stream: object) -> int:
        address = ctypes.c_void_p()
        if functions.gpupool_malloc(ctypes.byref(address), size, _CURRENT, None):
            raise MemoryError(f"gpupool has no {size} bytes")
        return address.value or 0

    def deallocate(address: int, _size: int, *_stream: object) -> None:
        functions.gpupool_free(address, _CURRENT, None)

    # An allocation with the runtime's allocator makes the context that `_CURRENT` means.
    rmm.DeviceBuffer(size=256)
    rmm.mr.set_current_device_resource(rmm.mr.CallbackMemoryResource(allocate, deallocate))
    return True
