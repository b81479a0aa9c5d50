/*
 * lives CASE
 * A context ends on one thread, and the next one begins on another before the first thread has heard of it: what is made in
 * the next life, under the same handle, is not taken away with the last. The simulated driver holds the call that ends
 * the first, or makes the next, between its effect and its return.
 */
#define _GNU_SOURCE
#include "held.h"
#include "simulator.h"

enum { LEAST = 4, MOST = 600 };

typedef struct {
    CUdeviceptr block;
    void *pinned;
} Memory;

static CUcontext context;
static Memory next;

static Memory make(void)
{
    Memory memory;
    CHECK(cuMemAlloc_v2(&memory.block, LEAST * MIB));
    CHECK(cuMemsetD8_v2(memory.block, 0x5a, LEAST * MIB));
    CHECK(cuMemHostAlloc(&memory.pinned, LEAST * MIB, 0));
    memset(memory.pinned, 0x5a, LEAST * MIB);
    return memory;
}

/* Whoever gets the same memory writes to it. */
static int is_whole(Memory kept)
{
    static unsigned char bytes[LEAST * MIB];
    Memory other[4];
    int right = 1;
    for (int i = 0; i < 4; i++) {
        other[i] = make();
        CHECK(cuMemsetD8_v2(other[i].block, 0x11, LEAST * MIB));
        memset(other[i].pinned, 0x11, LEAST * MIB);
    }
    CHECK(cuMemcpyDtoH_v2(bytes, kept.block, sizeof bytes));
    for (size_t i = 0; i < sizeof bytes; i++)
        right &= bytes[i] == 0x5a && ((unsigned char *)kept.pinned)[i] == 0x5a;
    for (int i = 0; i < 4; i++) {
        CHECK(cuMemFree_v2(other[i].block));
        CHECK(cuMemFreeHost(other[i].pinned));
    }
    return right;
}

static void in_thread(void *(*body)(void *), void *argument)
{
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, body, argument) == 0);
    REQUIRE(pthread_join(thread, NULL) == 0);
}

static void *retain_and_make(void *unused)
{
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    next = make();
    return unused;
}

static void *create_and_make(void *same)
{
    CUcontext before = context;
    CHECK(cuCtxCreate_v2(&context, 0, 0));
    *(int *)same = context == before;
    next = make();
    return same;
}

static void *just_make(void *unused)
{
    CHECK(cuCtxSetCurrent(context));
    next = make();
    return unused;
}

static void next_primary(void)
{
    in_thread(retain_and_make, NULL);
}

static int same_handle;

static void next_created(void)
{
    in_thread(create_and_make, &same_handle);
}

static void same_primary(void)
{
    in_thread(just_make, NULL);
}

/* A thread that has the context current and used it, and uses the next one without having made it. */
static pthread_barrier_t meet;

static void *stay(void *unused)
{
    CHECK(cuCtxSetCurrent(context));
    Memory first = make();
    CHECK(cuMemFree_v2(first.block));
    CHECK(cuMemFreeHost(first.pinned));
    pthread_barrier_wait(&meet);
    pthread_barrier_wait(&meet);
    next = make();
    pthread_barrier_wait(&meet);
    return unused;
}

static void *just_retain(void *unused)
{
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    return unused;
}

static void next_for_another(void)
{
    in_thread(just_retain, NULL);
    pthread_barrier_wait(&meet);
    pthread_barrier_wait(&meet);
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "";
    Simulator simulator = find_simulator();
    context = start_on(0);
    if (strcmp(name, "reset") == 0) {
        make();
        simulator.after("cuDevicePrimaryCtxReset_v2", next_primary);
        CHECK(cuDevicePrimaryCtxReset_v2(0));
    } else if (strcmp(name, "release") == 0) {
        CUdeviceptr most;
        CHECK(cuMemAlloc_v2(&most, MOST * MIB));
        make();
        simulator.after("cuDevicePrimaryCtxRelease_v2", next_primary);
        CHECK(cuDevicePrimaryCtxRelease_v2(0));
    } else if (strcmp(name, "remembered") == 0) {
        pthread_t thread;
        REQUIRE(pthread_barrier_init(&meet, NULL, 2) == 0);
        REQUIRE(pthread_create(&thread, NULL, stay, NULL) == 0);
        pthread_barrier_wait(&meet);
        simulator.after("cuDevicePrimaryCtxReset_v2", next_for_another);
        CHECK(cuDevicePrimaryCtxReset_v2(0));
        REQUIRE(pthread_join(thread, NULL) == 0);
    } else if (strcmp(name, "begun") == 0) {
        /* The next life is there, and who has the handle uses it before the thread that made it has heard of it. */
        CHECK(cuDevicePrimaryCtxRelease_v2(0));
        simulator.after("cuDevicePrimaryCtxRetain", same_primary);
        pthread_t guard = watch("use of a primary context that another thread is just making");
        CHECK(cuDevicePrimaryCtxRetain(&context, 0));
        watch_ends(guard);
    } else if (strcmp(name, "not_the_last") == 0) {
        CHECK(cuDevicePrimaryCtxRetain(&context, 0));
        simulator.after("cuDevicePrimaryCtxRelease_v2", same_primary);
        CHECK(cuDevicePrimaryCtxRelease_v2(0));
    } else if (strcmp(name, "destroy") == 0) {
        CHECK(cuCtxCreate_v2(&context, 0, 0));
        make();
        simulator.after("cuCtxDestroy_v2", next_created);
        CHECK(cuCtxDestroy_v2(context));
        printf("the handle is the same again: %s\n", same_handle ? "yes" : "no");
    } else if (strcmp(name, "refused") == 0) {
        /* A destruction that fails leaves the context and all of it. */
        CHECK(cuCtxCreate_v2(&context, 0, 0));
        next = make();
        REQUIRE(simulator.arm("cuCtxDestroy_v2:1=999") == 0);
        SHOW(cuCtxDestroy_v2(context));
    } else {
        printf("lives: no case %s\n", name);
        return 2;
    }
    CHECK(cuCtxSetCurrent(context));
    printf("what the next life made is whole: %s\n", is_whole(next) ? "yes" : "no");
    SHOW(cuMemFree_v2(next.block));
    SHOW(cuMemFreeHost(next.pinned));
    /* What the last life had is gone with it: the GPU has no room for two of these. */
    CUdeviceptr again;
    SHOW(cuMemAlloc_v2(&again, MOST * MIB));
    return 0;
}
