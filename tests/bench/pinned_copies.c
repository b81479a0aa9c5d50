/*
 * Bandwidth of copies between a GPU and pinned memory from gpupool against memory that the driver pinned itself, in
 * alternating copies of one process. Prints the median GB/s of each and the median ratio. Goal: within 1 %.
 *
 *   LD_PRELOAD=libgpupool.so pinned_copies
 */
#include "paired.h"

#include <string.h>

enum { ROUNDS = 41 };
static const size_t BYTES = (size_t)256 << 20;

typedef int (*host_alloc_fn)(void **, size_t, unsigned);
typedef int (*host_free_fn)(void *);
typedef int (*to_device_fn)(unsigned long long, const void *, size_t, void *);
typedef int (*to_host_fn)(void *, unsigned long long, size_t, void *);

static unsigned long long array;
static void *stream, *pooled, *driver;
static to_device_fn to_device;
static to_host_fn to_host;
static int (*synchronize)(void *);

/* GB/s of one copy, until it is over. */
static double copy(void *host, int up) {
    double begin = seconds();
    require(up ? to_device(array, host, BYTES, stream) : to_host(host, array, BYTES, stream), "copy");
    require(synchronize(stream), "cuStreamSynchronize");
    return (double)BYTES / (seconds() - begin) / 1e9;
}

static void measure(const char *name, int up, int hooked_at_all) {
    static double ours[ROUNDS], theirs[ROUNDS], ratio[ROUNDS];
    copy(pooled, up), copy(driver, up); /* warm */
    for (int round = 0; round < ROUNDS; round++) {
        if (round % 2) theirs[round] = copy(driver, up);
        ours[round] = copy(pooled, up);
        if (round % 2 == 0) theirs[round] = copy(driver, up);
        ratio[round] = ours[round] / theirs[round];
    }
    double x = quantile(theirs, ROUNDS, 0.5), y = quantile(ours, ROUNDS, 0.5), r = quantile(ratio, ROUNDS, 0.5);
    printf("%-5s driver %6.2f GB/s   pooled %6.2f GB/s   ratio %.4f   %s\n", name, x, y, r,
           !hooked_at_all ? "NOT HOOKED" : r >= 0.99 ? "within 1 %" : "BELOW 1 %");
}

int main(void) {
    void *context;
    open_driver();
    host_alloc_fn allocate = (host_alloc_fn)hooked("cuMemHostAlloc"), bare_allocate = (host_alloc_fn)bare("cuMemHostAlloc");
    to_device = (to_device_fn)bare("cuMemcpyHtoDAsync_v2");
    to_host = (to_host_fn)bare("cuMemcpyDtoHAsync_v2");
    synchronize = (int (*)(void *))bare("cuStreamSynchronize");
    require(((int (*)(unsigned))hooked("cuInit"))(0), "cuInit");
    require(((int (*)(void **, int))hooked("cuDevicePrimaryCtxRetain"))(&context, 0), "cuDevicePrimaryCtxRetain");
    require(((int (*)(void *))hooked("cuCtxSetCurrent"))(context), "cuCtxSetCurrent");
    require(((int (*)(void **, unsigned))hooked("cuStreamCreate"))(&stream, 1), "cuStreamCreate");
    require(((int (*)(unsigned long long *, size_t))bare("cuMemAlloc_v2"))(&array, BYTES), "cuMemAlloc_v2");
    /* Not at the start of what the pool pinned, as most blocks of a program are not. */
    void *before;
    require(allocate(&before, (size_t)5 << 20, 0), "cuMemHostAlloc");
    require(allocate(&pooled, BYTES, 0), "cuMemHostAlloc");
    require(bare_allocate(&driver, BYTES, 0), "cuMemHostAlloc");
    memset(pooled, 1, BYTES), memset(driver, 2, BYTES);
    measure("HtoD", 1, allocate != bare_allocate);
    measure("DtoH", 0, allocate != bare_allocate);
    require(((host_free_fn)hooked("cuMemFreeHost"))(pooled), "cuMemFreeHost");
    require(((host_free_fn)hooked("cuMemFreeHost"))(before), "cuMemFreeHost");
    require(((host_free_fn)bare("cuMemFreeHost"))(driver), "cuMemFreeHost");
    return 0;
}
