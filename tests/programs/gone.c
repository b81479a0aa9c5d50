/*
 * What calls answer in a context that is gone, and without one: for memory of both sizes, and for what was made in a
 * context that is gone.
 */
#include "program.h"

enum { LEAST = 4 };

CUresult cuCtxAttach(CUcontext *context, unsigned flags);
CUresult cuCtxDetach(CUcontext context);

static CUdeviceptr small, block;
static void *pinned, *tiny;

static void make(void)
{
    CHECK(cuMemAlloc_v2(&small, 4 * KIB));
    CHECK(cuMemAlloc_v2(&block, LEAST * MIB));
    CHECK(cuMemHostAlloc(&tiny, 4 * KIB, 0));
    CHECK(cuMemHostAlloc(&pinned, LEAST * MIB, 0));
}

static void ask(const char *when)
{
    CUdeviceptr other = 0, base;
    void *host = NULL;
    size_t bytes, total;
    int kinds[2] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
    unsigned kind = 9;
    int ordinal = 9;
    void *data[2] = {&kind, &ordinal};
    printf("-- %s\n", when);
    SHOW(cuMemAlloc_v2(&other, LEAST * MIB));
    SHOW(cuMemAlloc_v2(&other, 4 * KIB));
    SHOW(cuMemHostAlloc(&host, LEAST * MIB, 0));
    SHOW(cuMemGetInfo_v2(&bytes, &total));
    SHOW(cuMemGetAddressRange_v2(&base, &bytes, small));
    SHOW(cuMemGetAddressRange_v2(&base, &bytes, block));
    SHOW(cuPointerGetAttribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, block));
    SHOW(cuPointerGetAttributes(2, kinds, data, block));
    printf("attributes: %u %d\n", kind, ordinal);
    SHOW(cuMemsetD8_v2(small, 1, 4 * KIB));
    SHOW(cuMemFree_v2(small));
    SHOW(cuMemFree_v2(block));
    SHOW(cuMemFreeHost(tiny));
    SHOW(cuMemFreeHost(pinned));
}

int main(void)
{
    CUcontext primary = start_on(0), created, same;

    make();
    CHECK(cuCtxSetCurrent(NULL));
    ask("live memory, no context is current");

    CHECK(cuCtxSetCurrent(primary));
    make();
    CHECK(cuDevicePrimaryCtxReset_v2(0));
    ask("the current primary context was reset");
    CHECK(cuDevicePrimaryCtxRetain(&primary, 0));
    SHOW(cuMemFree_v2(small));
    SHOW(cuMemFree_v2(block));
    SHOW(cuMemFreeHost(pinned));
    make();
    ask("it is there again, and was not made current again");

    make();
    CHECK(cuCtxCreate_v2(&created, 0, 0));
    CHECK(cuCtxPushCurrent_v2(created));
    CHECK(cuCtxDestroy_v2(created));
    ask("the current context was destroyed; the memory is another's");
    CHECK(cuCtxSetCurrent(primary));
    ask("back in that other one");

    /* As many detaches as attaches and the making of it. */
    CHECK(cuCtxCreate_v2(&created, 0, 0));
    make();
    CHECK(cuCtxAttach(&same, 0));
    CHECK(cuCtxDetach(created));
    ask("detached, and not for the last time");
    make();
    CHECK(cuCtxDetach(created));
    CHECK(cuCtxSetCurrent(primary));
    SHOW(cuMemFree_v2(small));
    SHOW(cuMemFree_v2(block));
    SHOW(cuMemFreeHost(pinned));
    return 0;
}
