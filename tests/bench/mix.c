/*
 * The random mix of allocations and frees of rmm_mix.cpp, drawn in the same way, without RMM: for the simulated driver, and where
 * its headers are not. Sizes in one process and in this order, so that large blocks stand on what small ones left.
 *
 *   LD_PRELOAD=libgpupool.so [GPUPOOL_FREE=lazy] mix [NAME=VALUE...]
 *
 *   sizes=1,4,64,1024,4096   largest block in MiB      counts=1000,10000   allocations of a round
 *   live=16000               MiB in use at most        rounds=9            of which the first is cold; seed=1
 *
 * A line a row: the median and the best of the other rounds, and of the first, µs an operation; blocks that were not served from
 * freed memory after the first round, and bytes held for each in use at the peak.
 */
#include "paired.h"
#include <string.h>

typedef struct {
    size_t size;
    uint64_t live_blocks, live_bytes, peak_live_bytes, held_on_gpus, held_on_host, allocations, reuses, spilled_bytes, trimmed_bytes;
} Statistics;

/* Allocates block `block` with `bytes`, or frees it where that is 0. */
typedef struct {
    uint32_t block;
    size_t bytes;
} Step;

enum { MOST = 100000, MOST_ROUNDS = 100 };
static Step steps[2 * MOST];
static struct { uint32_t block; size_t bytes; } held[MOST];
static unsigned long long addresses[MOST], state;

static uint64_t next(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state * 0x2545f4914f6cdd1dull >> 11;
}

/* About three allocations to each free until `count` were made or `live` bytes are in use; then the rest is freed. Any order. */
static size_t draw(size_t count, size_t largest, size_t live, uint64_t seed) {
    size_t used = 0, kept = 0, drawn = 0;
    uint32_t made = 0;
    state = 88172645463325252ull + seed * 0x9e3779b97f4a7c15ull;
    for (int i = 0; i < 16; i++) next();
    while (made < count || kept) {
        size_t bytes = 1 + next() % largest;
        int grow = next() % 100 < 73 && made < count && used + bytes <= live;
        if (grow || !kept) {
            if (bytes > live) bytes = live;
            steps[drawn++] = (Step){made, bytes};
            held[kept].block = made++, held[kept++].bytes = bytes;
            used += bytes;
        } else {
            size_t victim = next() % kept;
            used -= held[victim].bytes;
            steps[drawn++] = (Step){held[victim].block, 0};
            held[victim] = held[--kept];
        }
    }
    return drawn;
}

static size_t numbers(const char *list, size_t *values) {
    size_t count = 0;
    for (char *end; *list && count < 16; list = *end ? end + 1 : end) values[count++] = strtoull(list, &end, 10);
    return count;
}

int main(int words, char **arguments) {
    size_t sizes[16] = {1, 4, 64, 1024, 4096}, counts[16] = {1000, 10000}, kinds = 5, lengths = 2, live = 16000, rounds = 9, seed = 1;
    for (int i = 1; i < words; i++) {
        char *value = strchr(arguments[i], '=');
        if (value && !strncmp(arguments[i], "sizes=", 6)) kinds = numbers(value + 1, sizes);
        else if (value && !strncmp(arguments[i], "counts=", 7)) lengths = numbers(value + 1, counts);
        else if (sscanf(arguments[i], "live=%zu", &live) + sscanf(arguments[i], "rounds=%zu", &rounds) +
                     sscanf(arguments[i], "seed=%zu", &seed) < 1)
            return fprintf(stderr, "usage: mix [sizes=1,4] [counts=1000] [live=16000] [rounds=9] [seed=1]\n"), 2;
    }
    for (size_t i = 0; i < lengths; i++)
        if (!counts[i] || counts[i] > MOST) return fprintf(stderr, "counts are 1 to %d\n", MOST), 2;
    if (rounds < 2 || rounds > MOST_ROUNDS) return fprintf(stderr, "rounds are 2 to %d\n", MOST_ROUNDS), 2;
    open_first_gpu();
    int (*allocate)(unsigned long long *, size_t) = (int (*)(unsigned long long *, size_t))hooked("cuMemAlloc_v2");
    int (*release)(unsigned long long) = (int (*)(unsigned long long))hooked("cuMemFree_v2");
    int (*statistics)(Statistics *) = (int (*)(Statistics *))dlsym(RTLD_DEFAULT, "gpupool_get_statistics");
    for (size_t row = 0; row < kinds * lengths; row++) {
        size_t largest = sizes[row / lengths], count = counts[row % lengths], drawn = draw(count, largest << 20, live << 20, seed);
        double took[MOST_ROUNDS], first, peak = 0;
        size_t used = 0;
        Statistics cold = {.size = sizeof cold}, warm = {.size = sizeof warm};
        for (size_t i = 0, now = 0; i < drawn; i++) {
            static size_t bytes[MOST];
            now = steps[i].bytes ? now + (bytes[steps[i].block] = steps[i].bytes) : now - bytes[steps[i].block];
            if (now > used) used = now;
        }
        for (size_t round = 0; round < rounds; round++) {
            double begin = seconds();
            for (size_t i = 0; i < drawn; i++) {
                if (steps[i].bytes) require(allocate(&addresses[steps[i].block], steps[i].bytes), "cuMemAlloc");
                else require(release(addresses[steps[i].block]), "cuMemFree");
            }
            took[round] = (seconds() - begin) * 1e6 / (double)drawn;
            if (!round && statistics) statistics(&cold);
        }
        if (statistics) statistics(&warm), peak = (double)warm.held_on_gpus / (double)used;
        first = took[0];
        printf("mix by=%s mib=%zu count=%zu median_us=%.3f best_us=%.3f first_us=%.3f grown=%llu held_ratio=%.3f\n",
               statistics ? "gpupool" : "driver", largest, count, quantile(took + 1, rounds - 1, 0.5), quantile(took + 1, rounds - 1, 0),
               first, (unsigned long long)((warm.allocations - warm.reuses) - (cold.allocations - cold.reuses)), peak);
    }
    return 0;
}
