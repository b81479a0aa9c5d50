/*
 * Pinned host memory, allocated and freed: the driver's own calls and the pool, in one process and by turns.
 *
 *   LD_PRELOAD=libgpupool.so pinned [SIZE...]                        4KiB 1MiB 64MiB 1GiB; each free waits as the driver's does
 *   LD_PRELOAD=libgpupool.so GPUPOOL_FREE=lazy pinned [SIZE...]
 *
 * For each size the median and p99 of a pair, both ways. A pool pair is warm: its memory was pinned by one before. Goal: 1 us.
 */
#include "paired.h"
#include <string.h>

typedef int (*alloc_fn)(void **, size_t, unsigned);
typedef int (*free_fn)(void *);

static alloc_fn pool_alloc, driver_alloc;
static free_fn pool_free, driver_free;

static double pair(alloc_fn allocate, free_fn release, size_t bytes) {
    void *p = NULL;
    double begin = seconds();
    int a = allocate(&p, bytes, 0), b = release(p);
    double end = seconds();
    require(a, "cuMemHostAlloc");
    require(b, "cuMemFreeHost");
    return (end - begin) * 1e6;
}

static size_t size_of(const char *text) {
    char *end;
    size_t n = strtoull(text, &end, 10);
    return !strcmp(end, "KiB") ? n << 10 : !strcmp(end, "MiB") ? n << 20 : !strcmp(end, "GiB") ? n << 30 : n;
}

/* Pool pairs after one of the driver's. The first of them finds the caches full of the driver's work and is not counted. */
enum { ROW = 20 };

static void compare(const char *label, size_t bytes) {
    /* The driver takes a third of a millisecond a MiB; a size should take seconds, not minutes. */
    size_t rounds = bytes <= 1 << 20 ? 300 : bytes <= 64 << 20 ? 50 : 9;
    double *theirs = malloc(sizeof(double) * rounds), *ours = malloc(sizeof(double) * rounds * ROW);
    for (int i = 0; i < 10; i++) pair(pool_alloc, pool_free, bytes); /* the memory is there */
    for (size_t i = 0; i < rounds; i++) {
        theirs[i] = pair(driver_alloc, driver_free, bytes);
        pair(pool_alloc, pool_free, bytes);
        for (size_t k = 0; k < ROW; k++) ours[i * ROW + k] = pair(pool_alloc, pool_free, bytes);
    }
    double x = quantile(theirs, rounds, 0.5), y = quantile(ours, rounds * ROW, 0.5);
    printf("%-6s driver %10.2f us (p99 %10.2f)   pool %6.2f us (p99 %6.2f)   driver/pool %.0f   %s\n", label, x,
           quantile(theirs, rounds, 0.99), y, quantile(ours, rounds * ROW, 0.99), x / y, y <= 1.0 ? "within 1 us" : "ABOVE 1 us");
    free(theirs);
    free(ours);
}

int main(int count, char **arguments) {
    static const char *sizes[] = {"4KiB", "1MiB", "64MiB", "1GiB"};
    open_first_gpu();
    pool_alloc = (alloc_fn)hooked("cuMemHostAlloc");
    pool_free = (free_fn)hooked("cuMemFreeHost");
    driver_alloc = (alloc_fn)bare("cuMemHostAlloc");
    driver_free = (free_fn)bare("cuMemFreeHost");
    const char *when = getenv("GPUPOOL_FREE");
    printf("free: %s%s\n", when ? when : "strict", pool_alloc == driver_alloc ? "; NOT HOOKED" : "");
    if (count > 1)
        for (int i = 1; i < count; i++) compare(arguments[i], size_of(arguments[i]));
    else
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) compare(sizes[i], size_of(sizes[i]));
    return 0;
}
