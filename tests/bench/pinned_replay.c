/*
 * Replays a recorded sequence of pinned allocations: how much is pinned at the peak, against what was in use?
 *
 *   pinned_replay FILE                             the driver's own
 *   LD_PRELOAD=libgpupool.so pinned_replay FILE    the pool's
 *
 * A line of the file is `a ID BYTES FLAGS` or `f ID`; more columns and lines that begin with # mean nothing. Pinned is what
 * the kernel says: such pages are shared memory that is resident, and nothing else of this process is. Goal: 1.1.
 */
#include "paired.h"
#include <string.h>

enum { BLOCKS = 1 << 20 };

struct block {
    unsigned long long id;
    void *address;
    size_t bytes;
};

static struct block *blocks;
static size_t live;

/* RssShmem of this process, in bytes. */
static double resident(void) {
    char line[256];
    double kib = 0;
    FILE *status = fopen("/proc/self/status", "r");
    if (!status) return 0;
    while (fgets(line, sizeof line, status))
        if (sscanf(line, "RssShmem: %lf", &kib) == 1) break;
    fclose(status);
    return kib * 1024;
}

static struct block *find(unsigned long long id) {
    for (size_t i = live; i-- > 0;)
        if (blocks[i].id == id) return &blocks[i];
    return NULL;
}

int main(int count, char **arguments) {
    FILE *sequence = count == 2 ? fopen(arguments[1], "r") : NULL;
    if (!sequence) {
        fprintf(stderr, "usage: pinned_replay FILE (a sequence of `a ID BYTES FLAGS` and `f ID`)\n");
        return 2;
    }
    open_first_gpu();
    int (*allocate)(void **, size_t, unsigned) = (int (*)(void **, size_t, unsigned))hooked("cuMemHostAlloc");
    int (*release)(void *) = (int (*)(void *))hooked("cuMemFreeHost");
    int is_hooked = (void *)allocate != bare("cuMemHostAlloc");

    blocks = malloc(sizeof *blocks * BLOCKS);
    double *times = malloc(sizeof *times * BLOCKS), before = resident(), used = 0, peak_used = 0, peak_pinned = 0, begin;
    size_t allocations = 0, number = 0;
    char line[256];
    while (fgets(line, sizeof line, sequence)) {
        unsigned long long id, bytes;
        unsigned flags;
        number++;
        if (sscanf(line, " a %lli %llu %u", (long long *)&id, &bytes, &flags) == 3 && live < BLOCKS && !find(id)) {
            struct block *block = &blocks[live++];
            *block = (struct block){id, NULL, bytes};
            begin = seconds();
            require(allocate(&block->address, bytes, flags), "cuMemHostAlloc");
            if (allocations < BLOCKS) times[allocations] = seconds() - begin;
            allocations++;
            used += (double)bytes;
            if (used > peak_used) peak_used = used;
            double pinned = resident() - before;
            if (pinned > peak_pinned) peak_pinned = pinned;
        } else if (sscanf(line, " f %lli", (long long *)&id) == 1 && find(id)) {
            struct block *block = find(id);
            require(release(block->address), "cuMemFreeHost");
            used -= (double)block->bytes;
            *block = blocks[--live];
        } else if (line[0] != '#' && line[0] != '\n') {
            fprintf(stderr, "%s:%zu: neither `a NEW-ID BYTES FLAGS` nor `f LIVE-ID`: %s", arguments[1], number, line);
            return 2;
        }
    }
    if (!allocations) {
        fprintf(stderr, "%s: no allocation in it\n", arguments[1]);
        return 2;
    }
    if (peak_pinned < peak_used / 2) {
        fprintf(stderr, "pinned memory is not resident, so nothing can be measured; on the simulated driver set SIMCUDA_PINNED=resident\n");
        return 1;
    }
    double mib = 1 << 20, ratio = peak_used > 0 ? peak_pinned / peak_used : 0;
    double median = quantile(times, allocations < BLOCKS ? allocations : BLOCKS, 0.5) * 1e6;
    printf("%-6s in use %.1f MiB at the peak, pinned %.1f MiB   ratio %.3f   %s   %zu allocations, median %.2f us\n",
           is_hooked ? "pool" : "driver", peak_used / mib, peak_pinned / mib, ratio, ratio <= 1.1 ? "within 1.1" : "ABOVE 1.1",
           allocations, median);
    return 0;
}
