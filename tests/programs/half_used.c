/*
 * half_used MIB [WHAT]: eight blocks on a large freed one, every other of which ends: then a request of so many MiB that no hole has room
 * for. Says on which GPU it lies, and whether all blocks have what was written to them, by kernels that find them through a table of
 * pointers and a list.
 * WHAT: trim (the pool is asked to return what is free, and nothing is requested), shared (a block was given to another process),
 * captured (a stream is being captured), busy (a kernel waits for the host), threads (others launch and copy meanwhile).
 */
#define _GNU_SOURCE
#include "pointer_kernels.h"
#include "simulator.h"
#include "streams.h"

#include <pthread.h>

enum { BLOCKS = 8, BLOCK = 8 * MIB, WORDS = BLOCK / 8, THREADS = 3 };

static CUcontext context;
static Kernels kernels;
static CUdeviceptr blocks[BLOCKS];
static volatile int over;

/* What a thread does meanwhile: it writes a block of its own, and reads what it wrote. */
static void *meanwhile(void *result)
{
    CUstream stream;
    CUdeviceptr own;
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemAlloc_v2(&own, 2 * MIB));
    for (uint32_t round = 0; round < 20 || !over; round++) {
        uint32_t last;
        iota(&kernels, stream, own, MIB / 2, round);
        CHECK(cuMemcpyDtoHAsync_v2(&last, own + 2 * MIB - 4, 4, stream));
        CHECK(cuStreamSynchronize(stream));
        *(uint64_t *)result += last != round + MIB / 2 - 1;
    }
    CHECK(cuMemFree_v2(own));
    return NULL;
}

static uint64_t total(CUdeviceptr counter)
{
    uint64_t sum;
    CHECK(cuCtxSynchronize());
    CHECK(cuMemcpyDtoH_v2(&sum, counter, sizeof sum));
    CHECK(cuMemsetD32_v2(counter, 0, 2));
    return sum;
}

static void print_place(const char *what, CUresult result, const Simulator *s, const uint64_t *before)
{
    printf("%s: %s", what, result == CUDA_SUCCESS ? "served" : error_name(result));
    for (int gpu = 0; s->used && result == CUDA_SUCCESS && gpu < 2; gpu++)
        printf(", GPU %d %+lld MiB", gpu, (long long)(s->used(gpu) - before[gpu]) / (long long)MIB);
    printf("\n");
}

int main(int argc, char **argv)
{
    size_t wanted = strtoull(argv[1], NULL, 0) * MIB;
    const char *what = argc > 2 ? argv[2] : "";
    CUdeviceptr ground, table, counter, head = 0, requested = 0, no_flag = 0, flag_on_device = 0;
    uint64_t count = BLOCKS / 2, n = WORDS, zero = 0, wrong[THREADS] = {0}, expected = 0;
    volatile uint32_t *flag = NULL;
    CUstream stream;
    pthread_t threads[THREADS];
    Simulator s = find_simulator();

    context = start_on(0);
    kernels = load_kernels();
    PointerKernels k = load_pointer_kernels();
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemAlloc_v2(&ground, BLOCKS * BLOCK));
    CHECK(cuMemAlloc_v2(&table, sizeof blocks));
    CHECK(cuMemAlloc_v2(&counter, sizeof zero));
    CHECK(cuMemcpyHtoD_v2(counter, &zero, sizeof zero));
    CHECK(cuMemFree_v2(ground));
    for (int i = 0; i < BLOCKS; i++)
        CHECK(cuMemAlloc_v2(&blocks[i], BLOCK));
    /* What stays: the first half of each block is numbers, and behind it a node. */
    CUdeviceptr stays[BLOCKS / 2];
    for (uint64_t i = 0; i < count; i++) {
        stays[i] = blocks[2 * i + 1];
        uint64_t node[2] = {head, i + 1};
        iota(&kernels, stream, stays[i], n, (uint32_t)i);
        for (uint64_t at = 0; at < n; at++)
            expected += (uint32_t)(at + i);
        head = stays[i] + BLOCK - sizeof node;
        CHECK(cuMemcpyHtoD_v2(head, node, sizeof node));
    }
    CHECK(cuMemcpyHtoD_v2(table, stays, sizeof stays));
    CHECK(cuCtxSynchronize());
    for (int i = 0; i < BLOCKS; i += 2)
        CHECK(cuMemFree_v2(blocks[i]));

    if (strcmp(what, "shared") == 0) {
        CUipcMemHandle shared;
        CHECK(cuIpcGetMemHandle(&shared, stays[1]));
    }
    if (strcmp(what, "captured") == 0)
        CHECK(cuStreamBeginCapture_v2(stream, CAPTURE_RELAXED));
    if (strcmp(what, "busy") == 0) {
        CHECK(cuMemHostAlloc((void **)&flag, 4096, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
        *flag = 0;
        flag_on_device = (CUdeviceptr)(uintptr_t)flag;
        launch(k.sum_list, stream, (void *[]){&head, &counter, &flag_on_device});
    }
    for (int i = 0; i < THREADS && strcmp(what, "threads") == 0; i++)
        REQUIRE(pthread_create(&threads[i], NULL, meanwhile, &wrong[i]) == 0);

    uint64_t before[2] = {s.used ? s.used(0) : 0, s.used ? s.used(1) : 0};
    if (strcmp(what, "trim") == 0)
        printf("returned: %llu MiB\n", (unsigned long long)(s.trim ? s.trim() / MIB : 0));
    else
        print_place(argv[1], cuMemAlloc_v2(&requested, wanted), &s, before);

    if (strcmp(what, "captured") == 0) {
        CUgraph graph;
        CHECK(cuStreamEndCapture(stream, &graph));
    }
    if (flag) {
        *flag = 1;
        printf("the kernel that waited: %s\n", total(counter) == count * (count + 1) / 2 ? "right" : "WRONG");
    }
    over = 1;
    for (int i = 0; i < THREADS && strcmp(what, "threads") == 0; i++) {
        REQUIRE(pthread_join(threads[i], NULL) == 0);
        printf("thread %d: %llu wrong\n", i, (unsigned long long)wrong[i]);
    }
    if (requested)
        CHECK(cuMemsetD8_v2(requested, 0xff, wanted));
    launch(k.sum_table, NULL, (void *[]){&table, &count, &n, &counter});
    printf("the table's blocks: %s\n", total(counter) == expected ? "right" : "WRONG");
    launch(k.sum_list, NULL, (void *[]){&head, &counter, &no_flag});
    printf("the list's nodes: %s\n", total(counter) == count * (count + 1) / 2 ? "right" : "WRONG");
    if (requested)
        CHECK(cuMemFree_v2(requested));
    for (uint64_t i = 0; i < count; i++)
        CHECK(cuMemFree_v2(stays[i]));
    return 0;
}
