/*
 * What allocations and questions answer in a context that is in error, what in another one of that GPU, and what in its next
 * life.
 */
#include "vmm.h"

enum { LEAST = 4, GRANULE = 2 };

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes);

int main(void)
{
    CUdeviceptr block, freed, other = 0, base;
    CUcontext elsewhere, made;
    CUipcMemHandle handle;
    uint64_t chunk;
    size_t bytes, pitch, total;
    void *host = NULL;
    unsigned kind = 9;
    CUcontext first = start_on(0);
    CHECK(cuMemAlloc_v2(&block, LEAST * MIB));
    CHECK(cuMemAlloc_v2(&freed, LEAST * MIB));

    /* A copy from memory that this GPU was given no access to. */
    CUmemAllocationProp properties = on_device(1);
    CHECK(cuMemCreate(&chunk, GRANULE * MIB, &properties, 0));
    CUdeviceptr forbidden = map_for(1, chunk, GRANULE * MIB);
    CHECK(cuDevicePrimaryCtxRetain(&elsewhere, 1));
    SHOW(cuMemcpy(block, forbidden, MIB));
    /* The driver's to answer, so that the program is told. */
    SHOW(cuCtxSynchronize());

    SHOW(cuMemAlloc_v2(&other, 4 * KIB));
    SHOW(cuMemAlloc_v2(&other, LEAST * MIB));
    SHOW(cuMemAllocPitch_v2(&other, &pitch, MIB, LEAST, 4));
    SHOW(cuMemHostAlloc(&host, LEAST * MIB, 0));
    SHOW(cuMemAllocManaged(&other, LEAST * MIB, 1));
    SHOW(cuMemGetAddressRange_v2(&base, &bytes, block));
    SHOW(cuMemGetInfo_v2(&bytes, &total));
    SHOW(cuIpcGetMemHandle(&handle, block));
    SHOW(cuPointerGetAttribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, block));
    SHOW(cuMemFree_v2(freed));
    SHOW(cuMemsetD8_v2(block, 0, MIB));

    CHECK(cuCtxCreate_v2(&made, 0, 0));
    SHOW(cuMemAlloc_v2(&other, LEAST * MIB));
    SHOW(cuMemGetAddressRange_v2(&base, &bytes, other));
    CHECK(cuCtxPopCurrent_v2(&made));
    SHOW(cuMemAlloc_v2(&other, LEAST * MIB));
    CHECK(cuDevicePrimaryCtxReset_v2(0));
    CHECK(cuDevicePrimaryCtxRetain(&first, 0));
    SHOW(cuMemAlloc_v2(&other, LEAST * MIB));
    SHOW(cuMemGetAddressRange_v2(&base, &bytes, other));
    SHOW(cuMemFree_v2(other));
    return 0;
}
