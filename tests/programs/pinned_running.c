/*
 * pinned_running [lazy] [beside MODE GPU]
 * Pinned memory freed while a copy out of it is still queued, behind a kernel that a flag holds back. The thread that
 * frees then takes memory of the same size and overwrites all of it; the copy must still find what was there. Where a
 * free waits, the kernel is let go after a while; with `lazy` only after the free has returned. Meanwhile another thread may capture.
 */
#define _GNU_SOURCE
#include "beside.h"
#include "kernels.h"

#define BYTES (16 * MIB)

typedef struct {
    CUcontext context;
    uint32_t *victim, *next;
    atomic_int calling, freed;
} Freeing;

static void *free_and_reuse(void *argument)
{
    Freeing *f = argument;
    CHECK(cuCtxSetCurrent(f->context));
    atomic_store(&f->calling, 1);
    CHECK(cuMemFreeHost(f->victim));
    atomic_store(&f->freed, 1);
    CHECK(cuMemHostAlloc((void **)&f->next, BYTES, 0));
    memset(f->next, 0xff, BYTES);
    return NULL;
}

int main(int argc, char **argv)
{
    int lazy = argc > 1 && strcmp(argv[1], "lazy") == 0;
    Freeing f = {.context = start_on(0)};
    Beside beside = {0};
    Kernels k = load_kernels();
    volatile uint32_t *flag;
    CUdeviceptr target;
    CUstream held;
    CHECK(cuStreamCreate(&held, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemHostAlloc((void **)&flag, 4096, CU_MEMHOSTALLOC_PORTABLE));
    CHECK(cuMemAlloc_v2(&target, BYTES));
    prepare_told(&beside, argc, argv);
    for (uint32_t round = 1; round <= 4; round++) {
        CUdeviceptr flag_on_device = (CUdeviceptr)(uintptr_t)flag;
        pthread_t thread;
        *flag = 0;
        atomic_store(&f.calling, 0);
        atomic_store(&f.freed, 0);
        CHECK(cuMemHostAlloc((void **)&f.victim, BYTES, 0));
        for (uint32_t i = 0; i < BYTES / 4; i++)
            f.victim[i] = i + round;
        CHECK(cuLaunchKernel(k.wait_flag, 1, 1, 1, 1, 1, 1, 0, held, (void *[]){&flag_on_device}, NULL));
        CHECK(cuMemcpyHtoDAsync_v2(target, f.victim, BYTES, held));
        begin_told(&beside);
        REQUIRE(pthread_create(&thread, NULL, free_and_reuse, &f) == 0);
        while (!atomic_load(&f.calling))
            sched_yield();
        for (int i = 0; (lazy || i < 2000) && !atomic_load(&f.freed); i++)
            sched_yield();
        printf("round %u: the free returned before the copy ran: %s\n", round, atomic_load(&f.freed) ? "yes" : "no");
        *flag = 1;
        REQUIRE(pthread_join(thread, NULL) == 0);
        end_told(&beside);
        CHECK(cuStreamSynchronize(held));
        printf("round %u: %llu words overwritten\n", round,
               (unsigned long long)count_wrong(&k, target, BYTES / 4, round));
        CHECK(cuMemFreeHost(f.next));
    }
    CHECK(cuMemFreeHost((void *)(uintptr_t)flag));
    CHECK(cuMemFree_v2(target));
    CHECK(cuStreamDestroy_v2(held));
    return 0;
}
