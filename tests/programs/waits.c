/*
 * Who waits for whom: memory of GPU 0 is freed while a kernel on GPU 0 or on GPU 1 waits for the host, without peer
 * access, with access from 0 to 1, and with access both ways. The free waits for the GPU that owns the memory and for
 * nobody else.
 */
#include "kernels.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

typedef struct {
    CUcontext context;
    CUdeviceptr block;
    atomic_int calling, freed;
} Freeing;

static void *free_block(void *argument)
{
    Freeing *f = argument;
    CHECK(cuCtxSetCurrent(f->context));
    atomic_store(&f->calling, 1);
    CHECK(cuMemFree_v2(f->block));
    atomic_store(&f->freed, 1);
    return NULL;
}

/* Whether the free returned while the kernel was still held. One that does not wait has long to return, so that a busy
 * machine changes nothing; one that waits has enough to show if it did not. */
static int returned(Freeing *f, int expected)
{
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; !atomic_load(&f->freed); i++) {
        sched_yield();
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (expected ? now.tv_sec - start.tv_sec > 5 : i > 20000)
            break;
    }
    return atomic_load(&f->freed);
}

static void round_on(int busy, size_t bytes, CUcontext *contexts, const Kernels *kernels, CUstream *streams,
                     volatile uint32_t *flag)
{
    Freeing f = {.context = contexts[0]};
    CUdeviceptr flag_on_device = (CUdeviceptr)(uintptr_t)flag;
    pthread_t thread;
    CHECK(cuCtxSetCurrent(contexts[0]));
    CHECK(cuMemAlloc_v2(&f.block, bytes));
    *flag = 0;
    CHECK(cuCtxSetCurrent(contexts[busy]));
    CHECK(cuLaunchKernel(kernels[busy].wait_flag, 1, 1, 1, 1, 1, 1, 0, streams[busy], (void *[]){&flag_on_device},
                         NULL));
    REQUIRE(pthread_create(&thread, NULL, free_block, &f) == 0);
    while (!atomic_load(&f.calling))
        sched_yield();
    printf("  %zu KiB of GPU 0, a kernel on GPU %d: %s\n", bytes / KIB, busy,
           returned(&f, busy != 0) ? "does not wait" : "waits");
    *flag = 1;
    REQUIRE(pthread_join(thread, NULL) == 0);
    CHECK(cuStreamSynchronize(streams[busy]));
}

int main(void)
{
    CUcontext contexts[2];
    CUstream streams[2];
    Kernels kernels[2];
    void *flag;
    for (int gpu = 0; gpu < 2; gpu++) {
        contexts[gpu] = start_on(gpu);
        kernels[gpu] = load_kernels();
        CHECK(cuStreamCreate(&streams[gpu], CU_STREAM_NON_BLOCKING));
    }
    CHECK(cuMemHostAlloc(&flag, 4096, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    static const char *const access[] = {"no peer access", "access from 0 to 1", "access both ways"};
    for (int peer = 0; peer < 3; peer++) {
        if (peer > 0) {
            CHECK(cuCtxSetCurrent(contexts[peer - 1]));
            CHECK(cuCtxEnablePeerAccess(contexts[2 - peer], 0));
        }
        printf("%s\n", access[peer]);
        for (int busy = 0; busy < 2; busy++) {
            round_on(busy, 4 * KIB, contexts, kernels, streams, flag);
            round_on(busy, 64 * MIB, contexts, kernels, streams, flag);
        }
    }
    CHECK(cuMemFreeHost(flag));
    return 0;
}
