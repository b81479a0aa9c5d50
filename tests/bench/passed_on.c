/*
 * What a hooked call costs that the shim passes on: the same driver function bare and hooked, in alternating batches of
 * one process. Prints the median nanoseconds of each and the median difference. Goal: at most 25 ns more.
 *
 *   LD_PRELOAD=libgpupool.so passed_on
 */
#include "paired.h"

enum { ROUNDS = 301, BATCH = 20000 };

typedef int (*set_current_fn)(void *);
typedef int (*free_fn)(unsigned long long);
typedef int (*attribute_fn)(void *, int, unsigned long long);
typedef int (*range_fn)(unsigned long long *, size_t *, unsigned long long);

static void *context;
static unsigned long long driver_memory; /* below GPUPOOL_MIN_SIZE, so the driver's */

static void set_current(void *f) { ((set_current_fn)f)(context); }
static void free_null(void *f) { ((free_fn)f)(0); }
static void attribute(void *f) {
    int ordinal;
    ((attribute_fn)f)(&ordinal, 9, driver_memory);
}
static void range(void *f) {
    unsigned long long base;
    size_t bytes;
    ((range_fn)f)(&base, &bytes, driver_memory);
}

static double batch(void (*call)(void *), void *f) {
    double start = seconds();
    for (int i = 0; i < BATCH; i++) call(f);
    return (seconds() - start) * 1e9 / BATCH;
}

static void measure(const char *name, void (*call)(void *)) {
    static double without[ROUNDS], with[ROUNDS], more[ROUNDS];
    void *b = bare(name), *h = hooked(name);
    for (int round = 0; round < ROUNDS; round++) {
        without[round] = batch(call, b);
        with[round] = batch(call, h);
        more[round] = with[round] - without[round];
    }
    double x = quantile(without, ROUNDS, 0.5), y = quantile(with, ROUNDS, 0.5), d = quantile(more, ROUNDS, 0.5);
    printf("%-26s bare %7.1f ns   hooked %7.1f ns   %+6.1f ns   x%.2f   %s\n", name, x, y, d, y / x,
           b == h ? "NOT HOOKED" : d <= 25 ? "within 25 ns" : "OVER 25 ns");
}

int main(void) {
    open_driver();
    require(((int (*)(unsigned))hooked("cuInit"))(0), "cuInit");
    require(((int (*)(void **, int))hooked("cuDevicePrimaryCtxRetain"))(&context, 0), "cuDevicePrimaryCtxRetain");
    require(((int (*)(void *))hooked("cuCtxSetCurrent"))(context), "cuCtxSetCurrent");
    require(((int (*)(unsigned long long *, size_t))hooked("cuMemAlloc_v2"))(&driver_memory, 4096), "cuMemAlloc_v2");
    measure("cuCtxSetCurrent", set_current);
    measure("cuMemFree_v2", free_null);
    measure("cuPointerGetAttribute", attribute);
    measure("cuMemGetAddressRange_v2", range);
    return 0;
}
