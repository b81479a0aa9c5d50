/*
 * What it costs to get memory that the process does not have yet: cuMemAlloc past the shim and through it, where all that is freed goes
 * back to the driver each time (gpupool_trim). Goal: at most twice the driver's time in the same state.
 *
 * That state is memory that was released before. The driver keeps some of what cuMemFree gave it for its own next call, and no memory goes
 * out of that to anybody else. So before a round of either way its cache is emptied: all free memory of the GPU is taken by cuMemCreate
 * and released, which leaves it as it would be for a process that begins. What the driver takes out of its cache is a column of its own, and
 * no goal: 4 GiB out of that take a tenth of what 4 GiB take otherwise.
 *
 *   LD_PRELOAD=libgpupool.so growth [seconds=30] [most=120000]
 *
 * A line a size of 2 MiB to `most` MiB, as far as the GPU has room: medians of what fits in the time, two rounds at least, and of the driver's
 * cache as many.
 *
 *   growth first=MIB
 *
 * The first growth of a process, by the driver, or by the pool where that is preloaded: a block of this size, with nothing allocated before but 2 MiB,
 * which open the pool (opened_ms). Each such process is one figure.
 */
#include "paired.h"
#include <string.h>

typedef int (*allocate_fn)(unsigned long long *, size_t);
typedef int (*free_fn)(unsigned long long);
typedef unsigned long long (*trim_fn)(void);
typedef struct {
    allocate_fn allocate;
    free_fn free;
} Way;
typedef struct {
    int kind, handle_types, location, device;
    void *windows;
    unsigned char flags[8];
} Properties;

enum { MOST_ROUNDS = 9, MOST_HANDLES = 4096, DEVICE = 1 };
enum { RELEASED, CACHED, POOL, COLUMNS };

static double in_milliseconds(double since) { return (seconds() - since) * 1e3; }

/* Takes all free memory of the first GPU and gives it back, past the shim; milliseconds. */
static double empty_cache(void) {
    static unsigned long long handles[MOST_HANDLES];
    int (*create)(unsigned long long *, size_t, const Properties *, unsigned long long) =
        (int (*)(unsigned long long *, size_t, const Properties *, unsigned long long))bare("cuMemCreate");
    int (*release)(unsigned long long) = (int (*)(unsigned long long))bare("cuMemRelease");
    Properties properties = {.kind = 1, .location = DEVICE};
    int count = 0;
    double start = seconds();
    for (size_t mib = 8192; mib >= 2; mib /= 4)
        while (count < MOST_HANDLES && create(&handles[count], mib << 20, &properties, 0) == 0) count++;
    while (count) require(release(handles[--count]), "cuMemRelease");
    return in_milliseconds(start);
}

/* Allocates and frees once; both in milliseconds. */
static void once(Way way, trim_fn trim, size_t bytes, double *up, double *down) {
    unsigned long long address;
    double start = seconds();
    require(way.allocate(&address, bytes), "cuMemAlloc");
    *up = in_milliseconds(start);
    start = seconds();
    require(way.free(address), "cuMemFree");
    if (trim) trim();
    *down = in_milliseconds(start);
}

/* What a process that begins pays for memory, however it is served. */
static int first(size_t mib) {
    open_first_gpu();
    allocate_fn allocate = (allocate_fn)hooked("cuMemAlloc_v2");
    unsigned long long small, block;
    double start = seconds();
    require(allocate(&small, (size_t)2 << 20), "cuMemAlloc");
    double opened = in_milliseconds(start);
    start = seconds();
    require(allocate(&block, mib << 20), "cuMemAlloc");
    printf("first by=%s mib=%zu first_ms=%.3f opened_ms=%.3f\n", dlsym(RTLD_DEFAULT, "gpupool_trim") ? "gpupool" : "driver", mib,
           in_milliseconds(start), opened);
    return 0;
}

int main(int words, char **arguments) {
    static const size_t sizes[] = {2, 64, 512, 4096, 32768, 120000}; /* MiB */
    enum { SIZES = sizeof sizes / sizeof *sizes };
    size_t free_bytes, total, limit = 30, most = 120000, alone = 0;
    if (words == 2 && sscanf(arguments[1], "first=%zu", &alone) == 1) return first(alone);
    for (int i = 1; i < words; i++)
        if (sscanf(arguments[i], "seconds=%zu", &limit) + sscanf(arguments[i], "most=%zu", &most) < 1)
            return fprintf(stderr, "usage: growth [seconds=30] [most=120000], or growth first=MIB\n"), 2;
    open_first_gpu();
    require(((int (*)(size_t *, size_t *))bare("cuMemGetInfo_v2"))(&free_bytes, &total), "cuMemGetInfo");
    trim_fn trim = (trim_fn)dlsym(RTLD_DEFAULT, "gpupool_trim");
    Way driver = {(allocate_fn)bare("cuMemAlloc_v2"), (free_fn)bare("cuMemFree_v2")};
    Way pool = {(allocate_fn)hooked("cuMemAlloc_v2"), (free_fn)hooked("cuMemFree_v2")};
    double begun = seconds(), emptied = 0;
    int times = 0;
    for (size_t i = 0; i < SIZES; i++) {
        size_t bytes = sizes[i] << 20;
        double up[COLUMNS][MOST_ROUNDS], down[COLUMNS][MOST_ROUNDS];
        int rounds = 0;
        if (sizes[i] > most || bytes + ((size_t)2 << 30) > free_bytes) continue;
        while (rounds < MOST_ROUNDS && (rounds < 2 || seconds() - begun < (double)limit * (double)(i + 1) / SIZES)) {
            emptied += empty_cache();
            once(driver, NULL, bytes, &up[RELEASED][rounds], &down[RELEASED][rounds]);
            once(driver, NULL, bytes, &up[CACHED][rounds], &down[CACHED][rounds]);
            emptied += empty_cache();
            once(pool, trim, bytes, &up[POOL][rounds], &down[POOL][rounds]);
            rounds++, times += 2;
        }
        double median[COLUMNS], back[COLUMNS];
        for (int column = 0; column < COLUMNS; column++) {
            median[column] = quantile(up[column], (size_t)rounds, 0.5);
            back[column] = quantile(down[column], (size_t)rounds, 0.5);
        }
        printf("growth by=%s mib=%zu driver_ms=%.3f cache_ms=%.3f pool_ms=%.3f ratio=%.2f driver_free_ms=%.3f pool_trim_ms=%.3f rounds=%d\n",
               trim ? "gpupool" : "driver", sizes[i], median[RELEASED], median[CACHED], median[POOL], median[POOL] / median[RELEASED],
               back[RELEASED], back[POOL], rounds);
        fflush(stdout);
    }
    printf("emptying took %.0f ms each time\n", times ? emptied / times : 0);
    return 0;
}
