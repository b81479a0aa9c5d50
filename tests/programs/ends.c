/*
 * What is left of a primary context that was reset: its handle has the same value in its next life, and nothing else of
 * it is there. Without a context most calls say so.
 */
#include "program.h"

int main(void)
{
    CUcontext before = start_on(0), after;
    CUdeviceptr old[2], base;
    CUdevice device;
    size_t bytes, total;
    int ordinal;
    void *pinned, *other;
    CHECK(cuMemAlloc_v2(&old[0], 4 * KIB));
    CHECK(cuMemAlloc_v2(&old[1], 64 * MIB));
    CHECK(cuMemHostAlloc(&pinned, 4 * KIB, 0));
    CHECK(cuDevicePrimaryCtxReset_v2(0));
    SHOW(cuMemAlloc_v2(&base, 4 * KIB));
    SHOW(cuMemAlloc_v2(&base, 64 * MIB));
    SHOW(cuMemFree_v2(old[1]));
    SHOW(cuMemHostAlloc(&other, 4 * KIB, 0));
    SHOW(cuMemFreeHost(pinned));
    SHOW(cuMemGetInfo_v2(&bytes, &total));
    SHOW(cuMemsetD8_v2(old[1], 0, 16));
    SHOW(cuCtxSynchronize());
    SHOW(cuCtxGetDevice(&device));
    SHOW(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, old[1]));
    CHECK(cuDevicePrimaryCtxRetain(&after, 0));
    printf("the handle is the same again: %s\n", before == after ? "yes" : "no");
    /* Nobody made it current. */
    SHOW(cuMemAlloc_v2(&base, 4 * MIB));
    SHOW(cuCtxSynchronize());
    SHOW(cuMemFree_v2(base));
    for (int i = 0; i < 2; i++) {
        SHOW(cuMemGetAddressRange_v2(&base, &bytes, old[i]));
        SHOW(cuMemFree_v2(old[i]));
    }
    CHECK(cuMemAlloc_v2(&old[0], 4 * KIB));
    CHECK(cuMemAlloc_v2(&old[1], 64 * MIB));
    CHECK(cuCtxSetCurrent(NULL));
    for (int i = 0; i < 2; i++)
        SHOW(cuMemGetAddressRange_v2(&base, &bytes, old[i]));
    SHOW(cuMemAlloc_v2(&base, 64 * MIB));
    SHOW(cuMemFree_v2(old[1]));
    SHOW(cuMemGetInfo_v2(&bytes, &total));
    SHOW(cuCtxSynchronize());
    return 0;
}
