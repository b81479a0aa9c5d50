/*
 * Stands for PyTorch's allocator of pinned memory: asks for powers of two, and keeps what it was given. The shim knows it
 * by the name of the library, libtorch_cuda.so.
 */
#include "cuda_driver.h"

CUresult cached_host_alloc(void **pointer, size_t bytes);
CUresult cached_host_alloc(void **pointer, size_t bytes)
{
    size_t rounded = 1;
    while (rounded < bytes)
        rounded *= 2;
    return cuMemHostAlloc(pointer, rounded, 0);
}
