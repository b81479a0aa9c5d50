/*
 * What is left of a primary context that was reset: its handle has the same value in its next life, and nothing else of
 * it is there. Without a context most calls say so.
 */
#include "program.h"

int main(void)
{
    CUcontext before = start_on(0), after;
    CUdeviceptr old[2], base;
    size_t bytes;
    CHECK(cuMemAlloc_v2(&old[0], 4 * KIB));
    CHECK(cuMemAlloc_v2(&old[1], 64 * MIB));
    CHECK(cuDevicePrimaryCtxReset_v2(0));
    SHOW(cuMemAlloc_v2(&base, 4 * KIB));
    SHOW(cuMemAlloc_v2(&base, 64 * MIB));
    SHOW(cuCtxSynchronize());
    CHECK(cuDevicePrimaryCtxRetain(&after, 0));
    printf("the handle is the same again: %s\n", before == after ? "yes" : "no");
    CHECK(cuCtxSetCurrent(after));
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
    return 0;
}
