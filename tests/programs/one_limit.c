/*
 * one_limit MIB ROUNDS
 * one_limit MIB handle | block
 * Two threads at once, again and again: one allocates so much on GPU 0, the other makes a handle of as much there itself.
 * What GPU 0 has room for by a limit holds for both together, so each gets its memory, one of them somewhere else. With a word in
 * place of the number, once: the other comes while the driver has made memory for that one, which has not heard of it yet.
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

static Shared held;

static void *make_block(void *unused)
{
    CUdeviceptr block;
    CHECK(cuCtxSetCurrent(held.context));
    CHECK(cuMemAlloc_v2(&block, held.bytes));
    return unused;
}

static void *make_handle(void *unused)
{
    CUmemAllocationProp properties = on_device(0);
    uint64_t handle;
    CHECK(cuCtxSetCurrent(held.context));
    CHECK(cuMemCreate(&handle, held.bytes, &properties, 0));
    return unused;
}

static void in_thread(void *(*body)(void *))
{
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, body, NULL) == 0);
    REQUIRE(pthread_join(thread, NULL) == 0);
}

static void block_meanwhile(void)
{
    in_thread(make_block);
}

static void handle_meanwhile(void)
{
    in_thread(make_handle);
}

static int hold(Simulator simulator, const char *first)
{
    int is_handle = strcmp(first, "handle") == 0;
    simulator.after("cuMemCreate", is_handle ? block_meanwhile : handle_meanwhile);
    (is_handle ? make_handle : make_block)(NULL);
    printf("on GPU 0: %llu\n", (unsigned long long)(simulator.used(0) / MIB));
    printf("done\n");
    return 0;
}

int main(int argc, char **argv)
{
    Shared s = {.context = start_on(0), .bytes = argc > 1 ? strtoull(argv[1], NULL, 10) * MIB : 0};
    Simulator simulator = find_simulator();
    CUmemAllocationProp properties = on_device(0);
    pthread_t thread;
    if (argc > 2 && (strcmp(argv[2], "handle") == 0 || strcmp(argv[2], "block") == 0)) {
        held.context = s.context;
        held.bytes = s.bytes;
        return hold(simulator, argv[2]);
    }
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
