/* Calls that the driver refuses. Its answers, code by code, are what a program under the shim must get as well. */
#include "program.h"

static void refusals(const char *when)
{
    CUdeviceptr block = 0x77;
    printf("%s\n", when);
    SHOW(cuMemAlloc_v2(&block, 0));
    SHOW(cuMemAlloc_v2(&block, (size_t)1 << 63));
    SHOW(cuMemAlloc_v2(&block, SIZE_MAX));
    SHOW(cuMemAlloc_v2(NULL, 4 * MIB));
    SHOW(cuMemAlloc_v2(NULL, 0));
    SHOW(cuMemFree_v2(0xdeadbeef000));
    SHOW(cuMemFree_v2(1));
    printf("the output is %s\n", block == 0x77 ? "untouched" : block ? "written" : "null");
}

static void frees(size_t bytes)
{
    CUdeviceptr block, again;
    printf("blocks of %zu\n", bytes);
    CHECK(cuMemAlloc_v2(&block, bytes));
    SHOW(cuMemFree_v2(block + 512));
    SHOW(cuMemFree_v2(block + bytes));
    SHOW(cuMemFree_v2(block));
    SHOW(cuMemFree_v2(block));
    CHECK(cuMemAlloc_v2(&again, bytes));
    CHECK(cuMemsetD8_v2(again, 1, bytes));
    SHOW(cuMemFree_v2(again));
    SHOW(cuMemFree_v2(again));
}

int main(void)
{
    CUdeviceptr block, other;
    CUcontext context;
    size_t free_bytes, total;
    int local = 0;
    void *host;

    /* Before cuInit. */
    SHOW(cuMemAlloc_v2(&block, 4 * MIB));
    SHOW(cuMemFree_v2(0x1000));
    SHOW(cuMemGetInfo_v2(&free_bytes, &total));
    SHOW(cuDeviceTotalMem_v2(&total, 0));
    SHOW(cuInit(1));

    /* No context is current. */
    CHECK(cuInit(0));
    refusals("no context");
    SHOW(cuMemAlloc_v2(&block, 4 * MIB));
    SHOW(cuMemAlloc_v2(&block, 16));
    SHOW(cuMemGetInfo_v2(&free_bytes, &total));

    context = start_on(0);
    refusals("a context");
    frees(4 * MIB);
    frees(4096);
    CHECK(cuMemHostAlloc(&host, 4 * MIB, 0));
    SHOW(cuMemFree_v2((CUdeviceptr)(uintptr_t)&local));
    SHOW(cuMemFree_v2((CUdeviceptr)(uintptr_t)host));
    CHECK(cuMemFreeHost(host));

    /* A block freed with no context current, then with one. */
    CHECK(cuMemAlloc_v2(&block, 4 * MIB));
    CHECK(cuMemAlloc_v2(&other, 4 * MIB));
    CHECK(cuCtxSetCurrent(NULL));
    SHOW(cuMemFree_v2(block));
    CHECK(cuCtxSetCurrent(context));
    SHOW(cuMemFree_v2(other));

    /* What is left works. */
    CHECK(cuMemAlloc_v2(&block, 4 * MIB));
    CHECK(cuMemsetD8_v2(block, 1, 4 * MIB));
    SHOW(cuMemFree_v2(block));
    return 0;
}
