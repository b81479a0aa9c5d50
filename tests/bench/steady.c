/*
 * A loop that comes back for its memory before GPUPOOL_IDLE: how often is memory made again that it had before?
 *
 *   LD_PRELOAD=libgpupool.so GPUPOOL_IDLE=1s steady [PERIOD_MS=400] [ROUNDS=30]
 *
 * Every round takes blocks of many sizes up to half of what is free (16 GiB at most), frees them in another order, and rests.
 * `grown` counts blocks that were not served from freed memory after the first round; a steady loop has none, which is a
 * ratio of 1 beside GPUPOOL_IDLE=off. `round_us` is the median of a round's calls after the first.
 */
#include "paired.h"

typedef struct {
    size_t size;
    uint64_t live_blocks, live_bytes, peak_live_bytes, held_on_gpus, held_on_host, allocations, reuses, spilled_bytes, trimmed_bytes;
} Statistics;

enum { BLOCKS = 48, MOST_ROUNDS = 10000 };

int main(int words, char **arguments) {
    long period = words > 1 ? atol(arguments[1]) : 400, rounds = words > 2 ? atol(arguments[2]) : 30;
    if (period < 0 || rounds < 2 || rounds > MOST_ROUNDS) return fprintf(stderr, "usage: steady [PERIOD_MS] [ROUNDS]\n"), 2;
    size_t free_bytes, total;
    open_first_gpu();
    require(((int (*)(size_t *, size_t *))bare("cuMemGetInfo_v2"))(&free_bytes, &total), "cuMemGetInfo");
    int (*allocate)(unsigned long long *, size_t) = (int (*)(unsigned long long *, size_t))hooked("cuMemAlloc_v2");
    int (*release)(unsigned long long) = (int (*)(unsigned long long))hooked("cuMemFree_v2");
    int (*statistics)(Statistics *) = (int (*)(Statistics *))dlsym(RTLD_DEFAULT, "gpupool_get_statistics");
    size_t most = free_bytes / 2 < (size_t)16 << 30 ? free_bytes / 2 : (size_t)16 << 30, sizes[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) sizes[i] = ((most / BLOCKS * (size_t)(i + 1)) / BLOCKS + (1 << 20)) & ~(size_t)511;
    unsigned long long addresses[BLOCKS];
    static double took[MOST_ROUNDS];
    Statistics first = {.size = sizeof first}, last = {.size = sizeof last};
    for (long round = 0; round < rounds; round++) {
        double begin = seconds();
        for (int i = 0; i < BLOCKS; i++) require(allocate(&addresses[i], sizes[i]), "cuMemAlloc");
        for (int i = 0; i < BLOCKS; i++) require(release(addresses[(i * 7) % BLOCKS]), "cuMemFree");
        took[round] = (seconds() - begin) * 1e6;
        if (!round && statistics) statistics(&first);
        struct timespec pause = {period / 1000, period % 1000 * 1000000};
        nanosleep(&pause, NULL);
    }
    if (statistics) statistics(&last);
    unsigned long long made = last.allocations - first.allocations, reused = last.reuses - first.reuses;
    double once = took[0];
    printf("steady by=%s idle=%s period_ms=%ld rounds=%ld first_round_us=%.1f round_us=%.1f worst_round_us=%.1f blocks=%llu grown=%llu "
           "ratio=%.4f trimmed_mib=%.1f\n",
           last.allocations ? "gpupool" : "driver", getenv("GPUPOOL_IDLE") ? getenv("GPUPOOL_IDLE") : "default", period, rounds, once,
           quantile(took + 1, (size_t)rounds - 1, 0.5), quantile(took + 1, (size_t)rounds - 1, 1), made, made - reused,
           made ? (double)made / (double)(reused ? reused : 1) : 0, (double)(last.trimmed_bytes - first.trimmed_bytes) / (1 << 20));
    return 0;
}
