/*
 * pinned_habits CASE [LIBRARY]: good and bad habits with pinned memory, one a case, and what nearly is a bad one.
 */
#define _GNU_SOURCE
#include "diagnosed.h"

#include <dlfcn.h>
#include <time.h>

static CUdeviceptr device_block;

static void work(void)
{
    CHECK(cuMemsetD8_v2(device_block, 1, 4096));
}

__attribute__((always_inline)) static inline void *pin(size_t bytes)
{
    void *memory;
    CHECK(cuMemHostAlloc(&memory, bytes, 0));
    return memory;
}

/* More allocations than a program needs to have its buffers. */
static void warm_up(void)
{
    for (int i = 0; i < 80; i++)
        CHECK(cuMemFreeHost(pin(4096)));
}

NAMED void keep_every_batch(int batches, size_t bytes, int at_once);
NAMED void keep_every_batch(int batches, size_t bytes, int at_once)
{
    for (int i = 0; i < batches; i++) {
        memset(pin(bytes), i, bytes);
        if (!at_once)
            work();
    }
}

/* Larger from step to step, but the old one is freed. */
static void replace_every_batch(void)
{
    void *last = NULL;
    for (int i = 1; i <= 100; i++) {
        void *next = pin((size_t)i * 256 * KIB);
        work();
        CHECK(cuMemFreeHost(last));
        last = next;
    }
    CHECK(cuMemFreeHost(last));
}

static void free_every_batch(void)
{
    void *batches[8];
    for (int i = 0; i < 8; i++) {
        batches[i] = pin(4 * MIB);
        work();
    }
    for (int i = 0; i < 8; i++)
        CHECK(cuMemFreeHost(batches[i]));
}

static double now(void)
{
    struct timespec time;
    REQUIRE(clock_gettime(CLOCK_MONOTONIC, &time) == 0);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

NAMED void pin_for(double seconds);
NAMED void pin_for(double seconds)
{
    for (double spent = 0; spent < seconds;) {
        double start = now();
        void *memory = pin(64 * MIB);
        spent += now() - start;
        CHECK(cuMemFreeHost(memory));
    }
}

NAMED void register_again(char *memory, size_t bytes);
NAMED void register_again(char *memory, size_t bytes)
{
    SHOW(cuMemHostRegister_v2(memory, bytes, 0));
}

/* Batches of `bytes` bytes through the allocator of `library`. */
static void through(const char *library, size_t bytes)
{
    CUresult (*allocate)(void **, size_t);
    CUdeviceptr target;
    void *opened = dlopen(library, RTLD_NOW);
    REQUIRE(opened);
    *(void **)&allocate = dlsym(opened, "cached_host_alloc");
    REQUIRE(allocate);
    CHECK(cuMemAlloc_v2(&target, bytes));
    for (int i = 0; i < 2; i++) {
        void *batch;
        CHECK(allocate(&batch, bytes));
        memset(batch, i + 1, bytes);
        for (int copies = 0; copies < 3; copies++)
            CHECK(cuMemcpyHtoD_v2(target, batch, bytes));
    }
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "";
    start_on(0);
    CHECK(cuMemAlloc_v2(&device_block, 4096));
    work();
    if (strcmp(name, "growing") == 0) {
        warm_up();
        keep_every_batch(70, 512 * KIB, 0);
    } else if (strcmp(name, "early") == 0) {
        /* As much, but the last new peak is not the sixty-fourth after the warm-up. */
        keep_every_batch(100, 128 * KIB, 0);
    } else if (strcmp(name, "at_once") == 0) {
        warm_up();
        keep_every_batch(200, 512 * KIB, 1);
    } else if (strcmp(name, "replaced") == 0) {
        warm_up();
        replace_every_batch();
    } else if (strcmp(name, "leaked") == 0) {
        keep_every_batch(8, 4 * MIB, 0);
    } else if (strcmp(name, "little") == 0) {
        keep_every_batch(8, 1 * MIB, 0);
    } else if (strcmp(name, "freed") == 0) {
        free_every_batch();
    } else if (strcmp(name, "kept") == 0) {
        keep_every_batch(8, 4 * MIB, 1);
        work();
    } else if (strcmp(name, "slow") == 0) {
        pin_for(1.2);
    } else if (strcmp(name, "quick") == 0) {
        pin_for(0.5);
    } else if (strcmp(name, "registered") == 0) {
        char *memory = aligned_alloc(4096, 64 * KIB);
        REQUIRE(memory);
        CHECK(cuMemHostRegister_v2(memory, 64 * KIB, 0));
        for (int i = 0; i < argc + 1; i++) /* unknown to the compiler, which would make three places of one */
            register_again(memory + i * 4096, 8192);
        CHECK(cuMemHostUnregister(memory));
        free(memory);
    } else if (strcmp(name, "neighbours") == 0) {
        char *memory = aligned_alloc(4096, 64 * KIB);
        REQUIRE(memory);
        for (int i = 0; i < 16; i++)
            CHECK(cuMemHostRegister_v2(memory + i * 4096, 4096, 0));
        for (int i = 0; i < 16; i++)
            CHECK(cuMemHostUnregister(memory + i * 4096));
        CHECK(cuMemHostRegister_v2(memory, 64 * KIB, 0));
        CHECK(cuMemHostUnregister(memory));
        free(memory);
    } else if (strcmp(name, "large") == 0) {
        CHECK(cuMemFreeHost(pin(8 * MIB)));
        CHECK(cuMemFreeHost(pin(8 * MIB)));
    } else if (strcmp(name, "rounded") == 0) {
        through(argv[2], 36 * MIB);
    } else if (strcmp(name, "exact") == 0) {
        through(argv[2], 32 * MIB);
    } else if (strcmp(name, "nearly") == 0) {
        through(argv[2], 25 * MIB);
    } else {
        printf("pinned_habits: no case %s\n", name);
        return 2;
    }
    puts("done");
    return 0;
}
