/*
 * A library that asks for memory, of the pool and by a handle of its own. The shim knows by its file's name what it does when it is refused.
 */
#include "vmm.h"

CUresult ask_for_block(size_t bytes);
CUresult ask_for_handle(size_t bytes);

CUresult ask_for_block(size_t bytes)
{
    CUdeviceptr address;
    return cuMemAlloc_v2(&address, bytes);
}

CUresult ask_for_handle(size_t bytes)
{
    uint64_t handle;
    CUmemAllocationProp properties = on_device(0);
    return cuMemCreate(&handle, bytes, &properties, 0);
}
