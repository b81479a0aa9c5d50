/*
 * What it costs to move a block of the pool by hand (gpupool_prefetch), beside a plain copy of as many bytes the same way, which is
 * the most that a move could reach. The data is looked at after every turn.
 *
 *   LD_PRELOAD=libgpupool.so moves [MIB..]      sizes of the block; 32 and 512 without any
 */
#include "paired.h"

#include <string.h>

#define CALL(name, ...) require(((int (*)())hooked(#name))(__VA_ARGS__), #name)

enum { ROUNDS = 5, WORDS = 64 };

typedef int (*prefetch_fn)(const void *, size_t, int, void *);
static const char *const names[] = {"host", "GPU 0", "GPU 1"};

static void *stream;
static int gpus;

/* The first words of some pages: what is asked is whether they came along, not whether the copy engine can copy. */
static void mark(unsigned long long block, size_t bytes, unsigned seed) {
    for (int i = 0; i < WORDS; i++) {
        unsigned word = seed + (unsigned)i;
        CALL(cuMemcpyHtoD_v2, block + bytes / WORDS * (size_t)i / 8 * 8, &word, sizeof word);
    }
}

static int is_marked(unsigned long long block, size_t bytes, unsigned seed) {
    unsigned wrong = 0, word;
    for (int i = 0; i < WORDS; i++) {
        CALL(cuMemcpyDtoH_v2, &word, block + bytes / WORDS * (size_t)i / 8 * 8, sizeof word);
        wrong += word != seed + (unsigned)i;
    }
    return wrong == 0;
}

static double timed_copy(unsigned long long to, unsigned long long from, size_t bytes) {
    double start = seconds();
    require(((int (*)())bare("cuMemcpyDtoDAsync_v2"))(to, from, bytes, stream), "cuMemcpyDtoDAsync");
    CALL(cuStreamSynchronize, stream);
    return seconds() - start;
}

static void measure(prefetch_fn prefetch, size_t bytes) {
    static const int ways[][2] = {{0, 1}, {1, 0}, {0, -1}, {-1, 0}};
    unsigned long long block, other;
    CALL(cuMemAlloc_v2, &block, bytes);
    CALL(cuMemAlloc_v2, &other, bytes);
    for (size_t way = 0; way < sizeof ways / sizeof *ways; way++) {
        double move[ROUNDS], copy[ROUNDS];
        int from = ways[way][0], to = ways[way][1], right = 1;
        if (from >= gpus || to >= gpus) continue;
        require(prefetch((void *)(uintptr_t)other, bytes, to, NULL), "gpupool_prefetch");
        for (int round = 0; round < ROUNDS; round++) {
            require(prefetch((void *)(uintptr_t)block, bytes, from, NULL), "gpupool_prefetch");
            copy[round] = timed_copy(other, block, bytes);
            mark(block, bytes, (unsigned)(way * 100 + (size_t)round));
            double start = seconds();
            require(prefetch((void *)(uintptr_t)block, bytes, to, NULL), "gpupool_prefetch");
            move[round] = seconds() - start;
            right &= is_marked(block, bytes, (unsigned)(way * 100 + (size_t)round));
        }
        double first = move[0], median = quantile(move, ROUNDS, 0.5), plain = quantile(copy, ROUNDS, 0.5);
        printf("%5zu MiB %-5s to %-5s  move %8.3f ms, %6.1f GB/s (first %8.3f ms)   copy %8.3f ms, %6.1f GB/s   data %s\n", bytes >> 20,
               names[from + 1], names[to + 1], median * 1e3, (double)bytes / median * 1e-9, first * 1e3, plain * 1e3,
               (double)bytes / plain * 1e-9, right ? "right" : "WRONG");
        fflush(stdout);
    }
    CALL(cuMemFree_v2, block);
    CALL(cuMemFree_v2, other);
}

int main(int argc, char **argv) {
    static char *usual[] = {"32", "512"};
    void *context;
    open_driver();
    prefetch_fn prefetch = (prefetch_fn)dlsym(RTLD_DEFAULT, "gpupool_prefetch");
    if (!prefetch) return fprintf(stderr, "run this with libgpupool.so preloaded\n"), 1;
    CALL(cuInit, 0u);
    CALL(cuDeviceGetCount, &gpus);
    CALL(cuDevicePrimaryCtxRetain, &context, 0);
    CALL(cuCtxSetCurrent, context);
    CALL(cuStreamCreate, &stream, 1u);
    char **sizes = argc > 1 ? argv + 1 : usual;
    int count = argc > 1 ? argc - 1 : 2;
    for (int i = 0; i < count; i++) measure(prefetch, (size_t)atoll(sizes[i]) << 20);
    return 0;
}
