/*
 * one_limit MIB ROUNDS
 * Two threads at once, again and again: one allocates so much on GPU 0, the other makes a handle of as much there itself.
 * What GPU 0 has room for by a limit holds for both together, so each gets its memory, one of them somewhere else.
 */
#define _GNU_SOURCE
#include "simulator.h"
#include "vmm.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

typedef struct {
    CUcontext context;
    size_t bytes;
    int rounds;
    atomic_int arrived;
} Shared;

/* Both leave it within nanoseconds, where there is a processor for each. */
static void meet(Shared *s, int times)
{
    atomic_fetch_add(&s->arrived, 1);
    for (int i = 1; atomic_load(&s->arrived) < 2 * times; i++)
        if (i % 10000 == 0)
            sched_yield();
}

static void *allocate(void *argument)
{
    Shared *s = argument;
    CHECK(cuCtxSetCurrent(s->context));
    for (int i = 0; i < s->rounds; i++) {
        CUdeviceptr block;
        meet(s, 2 * i + 1);
        CHECK(cuMemAlloc_v2(&block, s->bytes));
        meet(s, 2 * i + 2);
        CHECK(cuMemFree_v2(block));
    }
    return NULL;
}

int main(int argc, char **argv)
{
    Shared s = {.context = start_on(0), .bytes = argc > 1 ? strtoull(argv[1], NULL, 10) * MIB : 0};
    Simulator simulator = find_simulator();
    CUmemAllocationProp properties = on_device(0);
    pthread_t thread;
    s.rounds = argc > 2 ? atoi(argv[2]) : 1;
    REQUIRE(pthread_create(&thread, NULL, allocate, &s) == 0);
    for (int i = 0; i < s.rounds; i++) {
        uint64_t handle;
        /* Nothing is kept from the round before, so both have to take new memory. */
        if (simulator.trim)
            simulator.trim();
        meet(&s, 2 * i + 1);
        /* Once earlier, once later than the other. */
        for (volatile int wait = i % 64 * 16; wait > 0; wait--)
            ;
        CHECK(cuMemCreate(&handle, s.bytes, &properties, 0));
        meet(&s, 2 * i + 2);
        CHECK(cuMemRelease(handle));
    }
    REQUIRE(pthread_join(thread, NULL) == 0);
    printf("done\n");
    return 0;
}
