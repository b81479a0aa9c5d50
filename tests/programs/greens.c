/*
 * Green contexts come and go, current on this thread or not, and with them the primary context where nobody else holds it.
 * What is made in one belongs to the primary context; to the handle of one that is gone, nothing may be done any more.
 */
#include "green.h"

enum { LEAST = 4 };

static CUcontext handle_of(CUgreenCtx green)
{
    CUcontext context;
    CHECK(cuCtxFromGreenCtx(&context, green));
    return context;
}

static CUcontext owner(CUdeviceptr address)
{
    CUcontext context = NULL;
    CHECK(cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, address));
    return context;
}

static int first_byte(CUdeviceptr block)
{
    unsigned char byte = 0;
    CHECK(cuMemcpyDtoH_v2(&byte, block, 1));
    return byte;
}

int main(void)
{
    CUcontext primary = start_on(0), context;
    CUdeviceptr block, other;
    CUstream stream;
    void *pinned;
    int active;
    unsigned flags;

    for (int round = 1; round <= 3; round++) {
        CUgreenCtx green = green_on(0);
        context = handle_of(green);
        CHECK(cuCtxSetCurrent(context));
        CHECK(cuMemAlloc_v2(&block, LEAST * MIB));
        CHECK(cuMemHostAlloc(&pinned, LEAST * MIB, 0));
        CHECK(cuMemsetD8_v2(block, (unsigned char)round, LEAST * MIB));
        printf("round %d: owners are the primary context: %d %d\n", round, owner(block) == primary,
               owner((CUdeviceptr)(uintptr_t)pinned) == primary);
        CHECK(cuGreenCtxStreamCreate(&stream, green, CU_STREAM_NON_BLOCKING, 0));
        CHECK(cuMemsetD32Async(block + 1 * MIB, 7, 1024, stream));
        CHECK(cuStreamSynchronize(stream));
        CHECK(cuStreamDestroy_v2(stream));
        CHECK(cuGreenCtxDestroy(green));
        SHOW(cuMemAlloc_v2(&other, LEAST * MIB));
        SHOW(cuMemFree_v2(block));
        SHOW(cuMemFreeHost(pinned));
        SHOW(cuCtxSynchronize());
        CHECK(cuCtxSetCurrent(primary));
        printf("round %d: its memory holds %d\n", round, first_byte(block));
        SHOW(cuMemAlloc_v2(&other, LEAST * MIB));
        CHECK(cuMemsetD8_v2(other, 0x77, LEAST * MIB));
        printf("round %d: its memory holds %d\n", round, first_byte(block));
        SHOW(cuMemFree_v2(block));
        SHOW(cuMemFree_v2(other));
        SHOW(cuMemFreeHost(pinned));
    }

    /* The last one to hold the primary context takes it along, and all memory with it. */
    CUgreenCtx green = green_on(0);
    CHECK(cuDevicePrimaryCtxRelease_v2(0));
    CHECK(cuMemAlloc_v2(&block, LEAST * MIB));
    SHOW(cuDevicePrimaryCtxReset_v2(0));
    CHECK(cuGreenCtxDestroy(green));
    CHECK(cuDevicePrimaryCtxGetState(0, &flags, &active));
    printf("active: %d\n", active);
    SHOW(cuMemAlloc_v2(&other, LEAST * MIB));
    CHECK(cuDevicePrimaryCtxRetain(&primary, 0));
    CHECK(cuCtxSetCurrent(primary));
    SHOW(cuMemFree_v2(block));

    /* And one is enough to make it. */
    CHECK(cuDevicePrimaryCtxReset_v2(0));
    green = green_on(0);
    CHECK(cuCtxSetCurrent(handle_of(green)));
    CHECK(cuMemAlloc_v2(&block, LEAST * MIB));
    CHECK(cuDevicePrimaryCtxRetain(&primary, 0));
    printf("its owner is the primary context: %d\n", owner(block) == primary);
    SHOW(cuMemFree_v2(block));
    SHOW(cuGreenCtxDestroy(green));
    return 0;
}
