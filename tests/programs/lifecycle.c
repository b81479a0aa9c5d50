/*
 * lifecycle ROUNDS [GPUS]
 * Threads make and end contexts of their own, green ones and references to primary ones, on every GPU, and capture, while
 * each allocates, fills, checks and frees memory of both kinds in what it holds. Then the primary context is reset, again
 * and again.
 */
#include "green.h"
#include "streams.h"

#include <pthread.h>
#include <stdatomic.h>

enum { WORKERS = 3, HELD = 4, WORDS = 1 << 19 };

static int rounds, gpus = 2;
static atomic_int working, wrong, made;

static unsigned next(unsigned *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 8;
}

typedef struct {
    CUdeviceptr block;
    uint32_t *pinned;
    uint32_t mark;
} Held;

/* Whether both were made; what was made of them is in `held`. */
static int make(Held *held, uint32_t mark)
{
    void *pinned = NULL;
    *held = (Held){.mark = mark};
    if (cuMemAlloc_v2(&held->block, WORDS * 4) != CUDA_SUCCESS)
        return 0;
    if (cuMemHostAlloc(&pinned, WORDS * 4, 0) != CUDA_SUCCESS) {
        cuMemFree_v2(held->block);
        return 0;
    }
    held->pinned = pinned;
    CHECK(cuMemsetD32_v2(held->block, mark, WORDS));
    for (size_t i = 0; i < WORDS; i += 512)
        held->pinned[i] = mark;
    atomic_fetch_add(&made, 1);
    return 1;
}

static void check_and_free(const Held *held)
{
    static _Thread_local uint32_t words[WORDS];
    CHECK(cuMemcpyDtoH_v2(words, held->block, sizeof words));
    for (size_t i = 0; i < WORDS; i += 512)
        if (words[i] != held->mark || held->pinned[i] != held->mark)
            atomic_fetch_add(&wrong, 1);
    CHECK(cuMemFree_v2(held->block));
    CHECK(cuMemFreeHost(held->pinned));
}

static void hold_and_check(unsigned *seed)
{
    Held held[HELD];
    int count = 0;
    while (count < HELD && make(&held[count], next(seed)))
        count++;
    while (count)
        check_and_free(&held[--count]);
}

/* A context of this thread's own: nobody else ends it, and its handle is soon another thread's. */
static void in_own_context(unsigned *seed, CUdevice device)
{
    CUcontext own;
    CHECK(cuCtxCreate_v2(&own, 0, device));
    hold_and_check(seed);
    Held left;
    make(&left, 1);
    if (next(seed) % 4 == 0) {
        CUstream stream;
        CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        CHECK(cuStreamBeginCapture_v2(stream, CAPTURE_RELAXED));
    }
    CHECK(cuCtxDestroy_v2(own));
}

/* The primary context is held by the green one for as long as that lives. */
static void in_green_context(unsigned *seed, CUdevice device)
{
    CUgreenCtx green = green_on(device);
    CUcontext context;
    CHECK(cuCtxFromGreenCtx(&context, green));
    CHECK(cuCtxSetCurrent(context));
    hold_and_check(seed);
    CHECK(cuGreenCtxDestroy(green));
    CHECK(cuCtxSetCurrent(NULL));
}

/* Between the retain and the release nobody can end it but by a reset, which the other threads do not make then. */
static void in_primary_context(unsigned *seed, CUdevice device)
{
    CUcontext context;
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    hold_and_check(seed);
    CHECK(cuDevicePrimaryCtxRelease_v2(device));
    CHECK(cuCtxSetCurrent(NULL));
}

static void *work(void *argument)
{
    unsigned seed = 7u + (unsigned)(uintptr_t)argument;
    for (int round = 0; round < rounds; round++) {
        CUdevice device = (CUdevice)(next(&seed) % (unsigned)gpus);
        switch (next(&seed) % 3) {
        case 0: in_own_context(&seed, device); break;
        case 1: in_green_context(&seed, device); break;
        default: in_primary_context(&seed, device); break;
        }
    }
    atomic_fetch_sub(&working, 1);
    return NULL;
}

/* Retains and releases all the time, so that few releases of the workers are the last; and frees under its feet. */
static void *churn(void *argument)
{
    unsigned seed = 99u;
    while (atomic_load(&working) > 0) {
        CUcontext context;
        CUdevice device = (CUdevice)(next(&seed) % (unsigned)gpus);
        Held left;
        CHECK(cuDevicePrimaryCtxRetain(&context, device));
        CHECK(cuCtxSetCurrent(context));
        if (make(&left, 2) && next(&seed) % 2)
            check_and_free(&left);
        CHECK(cuDevicePrimaryCtxRelease_v2(device));
        CHECK(cuCtxSetCurrent(NULL));
    }
    return argument;
}

int main(int argc, char **argv)
{
    pthread_t workers[WORKERS], other;
    rounds = argc > 1 ? atoi(argv[1]) : 20;
    gpus = argc > 2 ? atoi(argv[2]) : gpus;
    CHECK(cuInit(0));
    atomic_store(&working, WORKERS);
    for (uintptr_t i = 0; i < WORKERS; i++)
        REQUIRE(pthread_create(&workers[i], NULL, work, (void *)i) == 0);
    REQUIRE(pthread_create(&other, NULL, churn, NULL) == 0);
    for (int i = 0; i < WORKERS; i++)
        REQUIRE(pthread_join(workers[i], NULL) == 0);
    REQUIRE(pthread_join(other, NULL) == 0);
    printf("%s, %d wrong\n", atomic_load(&made) >= rounds * WORKERS ? "enough was made" : "too little was made", wrong);

    /* Alone: each reset takes all along, again and again, and the next life begins empty. */
    for (int round = 0; round < rounds; round++) {
        CUcontext context;
        Held lost, held;
        unsigned seed = (unsigned)round;
        CHECK(cuDevicePrimaryCtxRetain(&context, 0));
        CHECK(cuCtxSetCurrent(context));
        REQUIRE(make(&lost, 3));
        CHECK(cuDevicePrimaryCtxReset_v2(0));
        REQUIRE(!make(&held, 4));
        CHECK(cuDevicePrimaryCtxRetain(&context, 0));
        REQUIRE(make(&held, 5));
        hold_and_check(&seed);
        check_and_free(&held);
        CHECK(cuDevicePrimaryCtxReset_v2(0));
    }
    printf("after the resets, %d wrong\n", wrong);
    return 0;
}
