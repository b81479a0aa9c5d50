/*
 * What counting launches and copies costs the program: the same driver function bare and hooked, in alternating
 * batches of one process. Prints the median nanoseconds of each and the median difference. Goal: at most 30 ns more for
 * a launch; the copy of 4 bytes is there for comparison. Where the arguments of launches are looked at, in a second row with
 * a block of managed memory among them that is where it should be, the goal is 150 ns.
 *
 * With a number, launches use as many arrays of 2 MiB in turn, and nothing is copied: with memory that is far (goal: 100 ns more than
 * where none is) and without.
 *
 *   LD_PRELOAD=libgpupool.so launches
 *   LD_PRELOAD=libgpupool.so GPUPOOL_MOVE=auto GPUPOOL_LIMIT=0:64MiB launches 40
 *   LD_PRELOAD=libgpupool.so GPUPOOL_MODE=managed GPUPOOL_PREFETCH=launch launches
 */
#include "paired.h"
#include <string.h>

/* A batch must not fill the queue of launches (1024 on GPUs so far): a call that waits for the GPU measures the GPU. */
enum { ROUNDS = 2001, BATCH = 200 };

/* Empty. The simulated driver runs kernels by name; with no words to fill, its own version does nothing either. */
static const char KERNEL[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry fill_u32(.param .u64 fill_u32_0, .param .u64 fill_u32_1, .param .u32 fill_u32_2)\n{\n ret;\n}\n";

typedef int (*launch_fn)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                         void **);
typedef int (*copy_fn)(unsigned long long, const void *, size_t);

static void *function;
static unsigned long long array;
static int (*synchronize)(void);

/* What launches use in turn, where that is more than one. */
enum { MOST = 4096 };
static unsigned long long arrays[MOST];
static unsigned count, next;

static int launch(void *f) {
    unsigned long long words = 0;
    unsigned value = 0;
    if (count) array = arrays[next++ % count];
    void *parameters[] = {&array, &words, &value};
    return ((launch_fn)f)(function, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL);
}

static int copy(void *f) {
    unsigned value = 7;
    return ((copy_fn)f)(array, &value, sizeof value);
}

static double batch(int (*call)(void *), void *f, const char *name) {
    int result = 0;
    double begin = seconds();
    for (int i = 0; i < BATCH; i++) result |= call(f);
    double end = seconds();
    require(result, name);
    require(synchronize(), "cuCtxSynchronize");
    return (end - begin) * 1e9 / BATCH;
}

/* `goal` in nanoseconds; 0 for none. */
static void measure(const char *name, int (*call)(void *), int goal) {
    static double without[ROUNDS], with[ROUNDS], more[ROUNDS];
    void *b = bare(name), *h = hooked(name);
    batch(call, b, name), batch(call, h, name); /* warm */
    for (int round = 0; round < ROUNDS; round++) {
        /* Whoever comes second finds warmer caches, so both do in turn. */
        if (round % 2) without[round] = batch(call, b, name);
        with[round] = batch(call, h, name);
        if (round % 2 == 0) without[round] = batch(call, b, name);
        more[round] = with[round] - without[round];
    }
    double x = quantile(without, ROUNDS, 0.5), y = quantile(with, ROUNDS, 0.5), d = quantile(more, ROUNDS, 0.5);
    printf("%-26s bare %7.1f ns   hooked %7.1f ns   %+6.1f ns   x%.3f   ", name, x, y, d, y / x);
    if (b == h) printf("NOT HOOKED\n");
    else if (!goal) printf("no goal\n");
    else printf("%s %d ns\n", d <= goal ? "within" : "OVER", goal);
}

int main(int argc, char **argv) {
    void *module;
    count = argc > 1 ? (unsigned)strtoul(argv[1], NULL, 0) : 0;
    if (count > MOST) return fprintf(stderr, "at most %d arrays\n", MOST), 2;
    open_first_gpu();
    require(((int (*)(void **, const void *))hooked("cuModuleLoadData"))(&module, KERNEL), "cuModuleLoadData");
    require(((int (*)(void **, void *, const char *))hooked("cuModuleGetFunction"))(&function, module, "fill_u32"),
            "cuModuleGetFunction");
    require(((int (*)(unsigned long long *, size_t))hooked("cuMemAlloc_v2"))(&array, 4096), "cuMemAlloc_v2");
    synchronize = (int (*)(void))bare("cuCtxSynchronize");
    for (unsigned i = 0; i < count; i++)
        require(((int (*)(unsigned long long *, size_t))hooked("cuMemAlloc_v2"))(&arrays[i], 2 << 20), "cuMemAlloc_v2");
    if (count) {
        measure("cuLaunchKernel", launch, 0);
        return 0;
    }
    const char *prefetch = getenv("GPUPOOL_PREFETCH");
    int scanned = prefetch && !strcmp(prefetch, "launch");
    if (scanned) { /* launches are looked at once there is a block */
        unsigned long long small = array, block;
        require(((int (*)(unsigned long long *, size_t))hooked("cuMemAlloc_v2"))(&block, 4 << 20), "cuMemAlloc_v2");
        measure("cuLaunchKernel", launch, 150);
        array = block;
        measure("cuLaunchKernel", launch, 150);
        array = small;
    } else {
        measure("cuLaunchKernel", launch, 30);
    }
    measure("cuMemcpyHtoD_v2", copy, 0);
    return 0;
}
