/*
 * A destroyed context is current again on a thread that had made another one since, and the driver had given that the same
 * handle. Nothing is allocated, freed or found in it, whoever's it is.
 */
#include "program.h"

#include <pthread.h>

enum { LEAST = 4 };

static CUcontext first, second;

static void *destroy_first(void *unused)
{
    CHECK(cuCtxSetCurrent(first));
    CHECK(cuCtxDestroy_v2(first));
    return unused;
}

static CUdeviceptr small, block;
static void *pinned;

static void ask(const char *when)
{
    CUdeviceptr other = 0, base;
    void *host = NULL;
    size_t bytes;
    printf("-- %s\n", when);
    SHOW(cuMemAlloc_v2(&other, LEAST * MIB));
    SHOW(cuMemHostAlloc(&host, LEAST * MIB, 0));
    SHOW(cuMemGetAddressRange_v2(&base, &bytes, block));
    SHOW(cuMemsetD8_v2(block, 1, 9));
    SHOW(cuMemFree_v2(small));
    SHOW(cuMemFree_v2(block));
    SHOW(cuMemFreeHost(pinned));
}

static void *free_in_second(void *unused)
{
    CHECK(cuCtxSetCurrent(second));
    SHOW(cuMemsetD8_v2(block, 1, 9));
    SHOW(cuMemFree_v2(small));
    SHOW(cuMemFree_v2(block));
    SHOW(cuMemFreeHost(pinned));
    return unused;
}

int main(void)
{
    CUcontext popped;
    pthread_t thread;
    CHECK(cuInit(0));
    CHECK(cuCtxCreate_v2(&first, 0, 0));
    REQUIRE(pthread_create(&thread, NULL, destroy_first, NULL) == 0);
    REQUIRE(pthread_join(thread, NULL) == 0);
    CHECK(cuCtxCreate_v2(&second, 0, 0));
    printf("the handle of the first: %s\n", first == second ? "given again" : "not given again");
    CHECK(cuMemAlloc_v2(&block, LEAST * MIB));
    CHECK(cuMemAlloc_v2(&small, 4 * KIB));
    CHECK(cuMemHostAlloc(&pinned, LEAST * MIB, 0));
    CHECK(cuCtxPopCurrent_v2(&popped));
    ask("the second was popped");
    CHECK(cuCtxPushCurrent_v2(second));
    CHECK(cuCtxPopCurrent_v2(&popped));
    ask("it was pushed and popped");
    REQUIRE(pthread_create(&thread, NULL, free_in_second, NULL) == 0);
    REQUIRE(pthread_join(thread, NULL) == 0);
    return 0;
}
