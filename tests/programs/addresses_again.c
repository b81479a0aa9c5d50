/*
 * addresses_again MANAGED|PLAIN ROUNDS
 * A context ends with pinned memory in it and many blocks beside, while another thread allocates: what that gets where the
 * pinned memory was is its own from the first question on. What a call still has to do for the many blocks, once the driver
 * has ended the context, must not leave the old answers standing.
 */
#include "program.h"

#include <pthread.h>
#include <stdatomic.h>

enum { BLOCKS = 2000, SEGMENTS = 4, LEAST = 2, PINNED = 8, ATTACH_GLOBAL = 1 };

static int managed, rounds;
static atomic_int done;
static atomic_long wrong;

static CUresult allocate(CUdeviceptr *pointer, size_t bytes)
{
    return managed ? cuMemAllocManaged(pointer, bytes, ATTACH_GLOBAL) : cuMemAlloc_v2(pointer, bytes);
}

static void *end_contexts(void *unused)
{
    for (int round = 0; round < rounds; round++) {
        CUcontext context;
        CUdeviceptr block;
        void *pinned;
        CHECK(cuCtxCreate_v2(&context, 0, 0));
        for (int i = 0; i < SEGMENTS; i++)
            CHECK(cuMemHostAlloc(&pinned, PINNED * MIB, 0));
        for (int i = 0; i < BLOCKS; i++)
            CHECK(cuMemAlloc_v2(&block, LEAST * MIB));
        CHECK(cuCtxDestroy_v2(context));
    }
    atomic_store(&done, 1);
    return unused;
}

int main(int argc, char **argv)
{
    pthread_t thread;
    CUcontext own;
    REQUIRE(argc == 3);
    managed = strcmp(argv[1], "managed") == 0;
    rounds = atoi(argv[2]);
    CHECK(cuInit(0));
    CHECK(cuCtxCreate_v2(&own, 0, 0));
    REQUIRE(pthread_create(&thread, NULL, end_contexts, NULL) == 0);
    for (unsigned turn = 0; !atomic_load(&done); turn++) {
        size_t bytes = (turn % 4 + 2) * MIB, size = 0;
        CUdeviceptr block, base = 0;
        CUcontext context = NULL;
        CHECK(allocate(&block, bytes));
        if (cuMemGetAddressRange_v2(&base, &size, block + bytes / 2) != CUDA_SUCCESS || base != block || size != bytes)
            atomic_fetch_add(&wrong, 1);
        if (cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, block) != CUDA_SUCCESS || context != own)
            atomic_fetch_add(&wrong, 1);
        CHECK(cuMemFree_v2(block));
    }
    REQUIRE(pthread_join(thread, NULL) == 0);
    printf("wrong answers: %ld\n", atomic_load(&wrong));
    return 0;
}
