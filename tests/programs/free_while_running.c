/*
 * free_while_running [lazy] [beside MODE GPU]
 * Memory freed while a kernel that reads it is still queued: the driver's free waits for the device, so what is
 * allocated next may reuse the memory but must not disturb that kernel. The kernel is held back by a flag in pinned
 * memory; the freeing thread then takes memory of the same size and overwrites all of it. With the argument the free is
 * one that does not wait, and the kernel is held back until it has returned. Meanwhile another thread may capture.
 */
#define _GNU_SOURCE
#include "beside.h"
#include "kernels.h"

#define BYTES (64 * MIB)
#define ELEMENTS (BYTES / 4)

typedef struct {
    CUcontext context;
    CUdeviceptr victim, next;
    CUstream stream;
    atomic_int calling, freed;
} Freeing;

static void *free_and_reuse(void *argument)
{
    Freeing *f = argument;
    CHECK(cuCtxSetCurrent(f->context));
    atomic_store(&f->calling, 1);
    CHECK(cuMemFree_v2(f->victim));
    atomic_store(&f->freed, 1);
    CHECK(cuMemAlloc_v2(&f->next, BYTES));
    CHECK(cuMemsetD32Async(f->next, 0xffffffffu, ELEMENTS, f->stream));
    CHECK(cuStreamSynchronize(f->stream));
    return NULL;
}

static void round_with_flag(const Kernels *k, Freeing *f, Beside *beside, CUstream held, volatile uint32_t *flag, int round,
                            int lazy)
{
    CUdeviceptr source, target, flag_on_device = (CUdeviceptr)(uintptr_t)flag;
    pthread_t thread;
    *flag = 0;
    atomic_store(&f->calling, 0);
    atomic_store(&f->freed, 0);
    CHECK(cuMemAlloc_v2(&source, BYTES));
    CHECK(cuMemAlloc_v2(&target, BYTES));
    iota(k, held, source, ELEMENTS, (uint32_t)round);
    CHECK(cuStreamSynchronize(held));
    CHECK(cuLaunchKernel(k->wait_flag, 1, 1, 1, 1, 1, 1, 0, held, (void *[]){&flag_on_device}, NULL));
    copy(k, held, target, source, ELEMENTS);

    f->victim = source;
    begin_told(beside);
    REQUIRE(pthread_create(&thread, NULL, free_and_reuse, f) == 0);
    while (!atomic_load(&f->calling))
        sched_yield();
    /* A free that should wait gets the time to return all the same; the data is checked whether or not it used it. */
    for (int i = 0; (lazy || i < 2000) && !atomic_load(&f->freed); i++)
        sched_yield();
    printf("round %d: the free returned before the kernel ran: %s\n", round, atomic_load(&f->freed) ? "yes" : "no");
    *flag = 1;
    REQUIRE(pthread_join(thread, NULL) == 0);
    end_told(beside);
    CHECK(cuStreamSynchronize(held));
    printf("round %d: %llu words overwritten\n", round,
           (unsigned long long)count_wrong(k, target, ELEMENTS, (uint32_t)round));
    CHECK(cuMemFree_v2(f->next));
    CHECK(cuMemFree_v2(target));
}

/* The same within one thread, with kernels that nothing holds back. */
static void round_in_order(const Kernels *k, CUstream stream, int round)
{
    CUdeviceptr source, target, next;
    CHECK(cuMemAlloc_v2(&source, BYTES));
    CHECK(cuMemAlloc_v2(&target, BYTES));
    iota(k, stream, source, ELEMENTS, (uint32_t)round);
    copy(k, stream, target, source, ELEMENTS);
    CHECK(cuMemFree_v2(source));
    CHECK(cuMemAlloc_v2(&next, BYTES));
    CHECK(cuMemsetD32_v2(next, 0xffffffffu, ELEMENTS));
    CHECK(cuCtxSynchronize());
    printf("round %d: %llu words overwritten\n", round,
           (unsigned long long)count_wrong(k, target, ELEMENTS, (uint32_t)round));
    CHECK(cuMemFree_v2(next));
    CHECK(cuMemFree_v2(target));
}

int main(int argc, char **argv)
{
    int lazy = argc > 1 && strcmp(argv[1], "lazy") == 0;
    Freeing f = {.context = start_on(0)};
    Beside beside = {0};
    Kernels k = load_kernels();
    CUstream held;
    void *flag;
    CHECK(cuStreamCreate(&held, CU_STREAM_NON_BLOCKING));
    CHECK(cuStreamCreate(&f.stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemHostAlloc(&flag, 4096, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    prepare_told(&beside, argc, argv);
    for (int round = 1; round <= 3; round++)
        round_with_flag(&k, &f, &beside, held, flag, round, lazy);
    for (int round = 4; round <= 8; round++)
        round_in_order(&k, held, round);
    CHECK(cuMemFreeHost(flag));
    CHECK(cuStreamDestroy_v2(held));
    CHECK(cuStreamDestroy_v2(f.stream));
    return 0;
}
