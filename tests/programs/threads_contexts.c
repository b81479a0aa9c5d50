/*
 * Blocks that outlive the thread and the current context they were made in: freed from another thread, under another
 * context, with contexts pushed, popped, created and destroyed. Run it on one GPU.
 */
#include "program.h"

#include <pthread.h>

typedef struct {
    CUcontext context;
    CUdeviceptr block;
} Task;

static void *free_in_thread(void *argument)
{
    Task *task = argument;
    CHECK(cuCtxSetCurrent(task->context));
    CHECK(cuMemFree_v2(task->block));
    CHECK(cuMemAlloc_v2(&task->block, 4 * MIB));
    CHECK(cuMemsetD8_v2(task->block, 0x11, 4 * MIB));
    return NULL;
}

static int is_current(CUcontext context)
{
    CUcontext current;
    CHECK(cuCtxGetCurrent(&current));
    return current == context;
}

static int device_of(CUdeviceptr block)
{
    int ordinal = -1;
    CHECK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, block));
    return ordinal;
}

static CUcontext context_of(CUdeviceptr block)
{
    CUcontext context = NULL;
    CHECK(cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, block));
    return context;
}

int main(void)
{
    CUcontext primary = start_on(0), created, popped;
    CUdeviceptr first, second, third;
    unsigned char byte = 0;
    pthread_t thread;
    size_t free_bytes, total;

    CHECK(cuMemAlloc_v2(&first, 4 * MIB));
    CHECK(cuCtxCreate_v2(&created, 0, 0));
    printf("a created context is current: %d\n", is_current(created));
    CHECK(cuMemAlloc_v2(&second, 4 * MIB));
    printf("owners differ: %d %d\n", context_of(first) == primary, context_of(second) == created);
    printf("devices: %d %d\n", device_of(first), device_of(second));

    /* Memory of the other context is used and freed while this one is current. */
    CHECK(cuMemsetD8_v2(first, 0x22, 4 * MIB));
    CHECK(cuMemcpyDtoD_v2(second, first, 4 * MIB));
    CHECK(cuMemcpyDtoH_v2(&byte, second + 4 * MIB - 1, 1));
    printf("copied across contexts: %02x\n", byte);
    CHECK(cuMemFree_v2(first));
    printf("freed under another context; current still: %d\n", is_current(created));

    CHECK(cuCtxPopCurrent_v2(&popped));
    printf("popped the created one: %d, primary is current: %d\n", popped == created, is_current(primary));
    Task task = {primary, second};
    REQUIRE(pthread_create(&thread, NULL, free_in_thread, &task) == 0);
    REQUIRE(pthread_join(thread, NULL) == 0);
    CHECK(cuMemcpyDtoH_v2(&byte, task.block + 4 * MIB - 1, 1));
    printf("freed and made in a thread that has ended: %02x\n", byte);
    CHECK(cuMemFree_v2(task.block));

    /* A context destroyed with live memory gives it back: two thirds of what is free fit again afterwards. */
    CHECK(cuMemGetInfo_v2(&free_bytes, &total));
    size_t large = free_bytes / 3 * 2 / MIB * MIB;
    CHECK(cuCtxPushCurrent_v2(created));
    CHECK(cuMemAlloc_v2(&third, large));
    CHECK(cuMemAlloc_v2(&second, 100));
    CHECK(cuMemsetD8_v2(third + large - 1, 1, 1));
    CHECK(cuCtxDestroy_v2(created));
    printf("destroyed; primary is current: %d\n", is_current(primary));
    SHOW(cuMemFree_v2(third));
    SHOW(cuMemFree_v2(second));
    SHOW(cuMemAlloc_v2(&third, large));
    CHECK(cuMemsetD8_v2(third + large - 1, 1, 1));
    CHECK(cuMemFree_v2(third));

    /* The primary context reset while it holds memory. */
    CHECK(cuMemAlloc_v2(&first, 4 * MIB));
    CHECK(cuDevicePrimaryCtxReset_v2(0));
    CHECK(cuCtxSetCurrent(NULL));
    CHECK(cuDevicePrimaryCtxRetain(&primary, 0));
    CHECK(cuCtxSetCurrent(primary));
    SHOW(cuMemFree_v2(first));
    SHOW(cuMemAlloc_v2(&first, large));
    CHECK(cuMemFree_v2(first));
    printf("done\n");
    return 0;
}
