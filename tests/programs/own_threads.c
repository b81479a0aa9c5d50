/*
 * own_threads: eight threads make, map, write, check, retain, unmap and release memory of their own on one GPU, in an order
 * that differs from thread to thread, together more than the GPU has. Prints how many words were wrong, and what is left
 * (simulated driver only).
 */
#include "simulator.h"

#include "kernels.h"
#include "vmm.h"

#include <pthread.h>
#include <stdatomic.h>

enum { THREADS = 8, ROUNDS = 12 };

static CUcontext context;
static Kernels kernels;
static atomic_ullong wrong, made;

static void *work(void *argument)
{
    uint32_t seed = (uint32_t)(uintptr_t)argument;
    CHECK(cuCtxSetCurrent(context));
    for (uint32_t round = 0; round < ROUNDS; round++) {
        seed = seed * 1664525 + 1013904223;
        size_t bytes = (2 + seed % 8 * 2) * MIB;
        uint32_t start = seed ^ round;
        uint64_t handle, again;
        CUmemAllocationProp properties = on_device(0);
        if (cuMemCreate(&handle, bytes, &properties, 0) != CUDA_SUCCESS)
            continue;
        atomic_fetch_add(&made, 1);
        CUdeviceptr address = map_for(0, handle, bytes);
        int early = seed >> 16 & 1;
        if (early)
            CHECK(cuMemRelease(handle));
        iota(&kernels, NULL, address, bytes / 4, start);
        if (seed >> 17 & 1) {
            CHECK(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)address));
            REQUIRE(again == handle);
            CHECK(cuMemRelease(again));
        }
        CHECK(cuCtxSynchronize());
        atomic_fetch_add(&wrong, wrong_on_host(address, bytes, start));
        CHECK(cuMemUnmap(address, bytes));
        CHECK(cuMemAddressFree(address, bytes));
        if (!early)
            CHECK(cuMemRelease(handle));
    }
    return NULL;
}

int main(void)
{
    pthread_t threads[THREADS];
    context = start_on(0);
    kernels = load_kernels();
    for (uintptr_t i = 0; i < THREADS; i++)
        REQUIRE(pthread_create(&threads[i], NULL, work, (void *)(i + 1)) == 0);
    for (int i = 0; i < THREADS; i++)
        REQUIRE(pthread_join(threads[i], NULL) == 0);
    Simulator simulator = find_simulator();
    printf("%llu of %d made, %llu wrong\n", (unsigned long long)made, THREADS * ROUNDS, (unsigned long long)wrong);
    if (simulator.handles)
        printf("left: %llu handles, %llu bytes mapped\n", (unsigned long long)simulator.handles(),
               (unsigned long long)simulator.mapped());
    return 0;
}
