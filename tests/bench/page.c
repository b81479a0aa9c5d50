/*
 * What a pair of allocation and free takes of reused memory, in nanoseconds: for what the metrics page and the call sites of blocks cost it.
 *
 *   for i in 1 2 3 4 5; do for m in off on; do LD_PRELOAD=libgpupool.so GPUPOOL_METRICS=$m GPUPOOL_FREE=lazy page 4MiB; done; done
 *
 * The fastest of many rounds is what the machine can do when nobody else is on it; of several processes of each kind compare the fastest.
 * Two builds of the library are compared in the same way.
 */
#include "paired.h"
#include <string.h>

typedef int (*alloc_fn)(unsigned long long *, size_t);
typedef int (*free_fn)(unsigned long long);

enum { ROUNDS = 400, ROW = 2000 };

int main(int argc, char **argv) {
    size_t bytes = argc > 1 ? strtoull(argv[1], NULL, 0) << 20 : 4 << 20;
    double *rounds = malloc(sizeof(double) * ROUNDS);
    open_first_gpu();
    alloc_fn allocate = (alloc_fn)hooked("cuMemAlloc_v2");
    free_fn release = (free_fn)hooked("cuMemFree_v2");
    for (int i = 0; i < ROUNDS; i++) {
        double begin = seconds();
        for (int k = 0; k < ROW; k++) {
            unsigned long long p = 0;
            require(allocate(&p, bytes), "allocation");
            require(release(p), "free");
        }
        rounds[i] = (seconds() - begin) * 1e9 / ROW;
    }
    double median = quantile(rounds, ROUNDS, 0.5);
    printf("pair of %zu MiB: fastest round %.1f ns, median %.1f ns\n", bytes >> 20, rounds[0], median);
    free(rounds);
    return 0;
}
