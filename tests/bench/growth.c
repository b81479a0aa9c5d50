/*
 * What it costs to get memory that the process does not have yet: cuMemAlloc past the shim and through it, where all that is
 * freed goes back to the driver each time (gpupool_trim). Goal: at most twice the driver's time in the same state.
 *
 * The driver keeps some of what was freed for itself, so its own rounds after the first often find memory that is cleared
 * already; that is no goal, and "first" has both without it.
 *
 *   LD_PRELOAD=libgpupool.so growth
 */
#include "paired.h"

typedef int (*allocate_fn)(unsigned long long *, size_t);
typedef int (*free_fn)(unsigned long long);
typedef unsigned long long (*trim_fn)(void);
typedef struct {
    allocate_fn allocate;
    free_fn free;
} Way;

enum { MOST_ROUNDS = 9 };

static double in_milliseconds(double since) { return (seconds() - since) * 1e3; }

int main(void) {
    static const size_t sizes[] = {2, 64, 512, 4096, 32768, 120000}; /* MiB */
    size_t free_bytes, total;
    open_first_gpu();
    require(((int (*)(size_t *, size_t *))bare("cuMemGetInfo_v2"))(&free_bytes, &total), "cuMemGetInfo");
    trim_fn trim = (trim_fn)dlsym(RTLD_DEFAULT, "gpupool_trim");
    Way ways[2] = {{(allocate_fn)bare("cuMemAlloc_v2"), (free_fn)bare("cuMemFree_v2")},
                   {(allocate_fn)hooked("cuMemAlloc_v2"), (free_fn)hooked("cuMemFree_v2")}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t bytes = sizes[i] << 20;
        int rounds = sizes[i] > 40000 ? 3 : MOST_ROUNDS;
        double up[2][MOST_ROUNDS], down[2][MOST_ROUNDS];
        if (bytes + ((size_t)2 << 30) > free_bytes) continue;
        for (int round = 0; round < rounds; round++)
            for (int way = 0; way < 2; way++) {
                unsigned long long address;
                double start = seconds();
                require(ways[way].allocate(&address, bytes), "cuMemAlloc");
                up[way][round] = in_milliseconds(start);
                start = seconds();
                require(ways[way].free(address), "cuMemFree");
                if (way == 1 && trim) trim();
                down[way][round] = in_milliseconds(start);
            }
        double first[2] = {up[0][0], up[1][0]};
        double driver = quantile(up[0] + 1, rounds - 1, 0.5), pool = quantile(up[1] + 1, rounds - 1, 0.5);
        printf("%6zu MiB  driver %8.3f ms, free %8.3f   pool %8.3f ms, free and trim %8.3f   x%.2f   first %.3f and %.3f\n",
               sizes[i], driver, quantile(down[0] + 1, rounds - 1, 0.5), pool, quantile(down[1] + 1, rounds - 1, 0.5),
               pool / driver, first[0], first[1]);
        fflush(stdout);
    }
    return 0;
}
