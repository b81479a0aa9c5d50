/*
 * Replays a recorded sequence of device allocations: how much memory is held, against what is in use?
 *
 *   replay FILE [NAME=VALUE...]                             the driver's own
 *   LD_PRELOAD=libgpupool.so replay FILE [NAME=VALUE...]    gpupool's
 *
 *   hours=1      of the recorded program's calls are made, that is so many rounds of the file
 *   seconds=60   after which it stops all the same
 *   pace=0       1 waits between calls as long as the program did, which is what memory that goes home by itself needs
 *
 * A line is `+ID BYTES`, `-ID`, or `@MILLISECONDS` since the start of the recording; lines that begin with # mean nothing. What a
 * round leaves is freed at its end. tests/bench/traces has recordings (gzip -d first); traces/record.py makes them.
 *
 * Held is what the driver says is no longer free on the GPU since the start, asked past the shim, so that it is the same measure
 * for both; nobody else may use the GPU meanwhile. It is asked every 64 calls and whenever more is in use than before.
 */
#include "paired.h"
#include <string.h>

typedef struct {
    unsigned id; /* less than `ids`; none for a mark */
    long long bytes; /* of an allocation; -1: a free; -2: a mark */
    double at; /* milliseconds, of a mark */
} Step;

typedef struct {
    size_t size;
    uint64_t live_blocks, live_bytes, peak_live_bytes, held_on_gpus, held_on_host, allocations, reuses, spilled_bytes, trimmed_bytes;
} Statistics;

static Step *steps;
static size_t count, ids;

static int read_steps(const char *path) {
    char line[128];
    size_t room = 0, number = 0;
    FILE *file = fopen(path, "r");
    if (!file) return perror(path), 0;
    while (fgets(line, sizeof line, file)) {
        Step step = {0, -2, 0};
        char *end = line + 1;
        number++;
        if (line[0] == '#' || line[0] == '\n') continue;
        if (line[0] == '@') step.at = strtod(line + 1, &end);
        else step.id = (unsigned)strtoul(line + 1, &end, 10);
        if (line[0] == '+') step.bytes = strtoll(end, &end, 10);
        if (line[0] == '-') step.bytes = -1;
        if (!strchr("+-@", line[0]) || end == line + 1 || *end != '\n' || (line[0] == '+' && step.bytes <= 0)) {
            fprintf(stderr, "%s:%zu: expected `+ID BYTES`, `-ID` or `@MILLISECONDS`: %s", path, number, line);
            exit(2);
        }
        if (count == room) steps = realloc(steps, sizeof *steps * (room = room ? room * 2 : 4096));
        if (!steps) abort();
        if (step.id >= ids) ids = step.id + 1;
        steps[count++] = step;
    }
    fclose(file);
    return count > 0;
}

static int (*info)(size_t *, size_t *);

static double free_on_the_gpu(void) {
    size_t free_bytes, total;
    require(info(&free_bytes, &total), "cuMemGetInfo");
    return (double)free_bytes;
}

int main(int words, char **arguments) {
    double hours = 1, limit = 60, pace = 0;
    for (int i = 2; i < words; i++)
        if (sscanf(arguments[i], "hours=%lf", &hours) + sscanf(arguments[i], "seconds=%lf", &limit) +
                sscanf(arguments[i], "pace=%lf", &pace) < 1) words = 0;
    if (words < 2 || !read_steps(arguments[1])) {
        fprintf(stderr, "usage: replay FILE [hours=1] [seconds=60] [pace=0] (a sequence of `+ID BYTES`, `-ID`, `@MILLISECONDS`)\n");
        return 2;
    }
    double recorded = 0;
    for (size_t i = 0; i < count; i++)
        if (steps[i].at > recorded) recorded = steps[i].at;
    if (recorded <= 0) return fprintf(stderr, "%s: no @MILLISECONDS says how long it took\n", arguments[1]), 2;

    open_first_gpu();
    int (*allocate)(unsigned long long *, size_t) = (int (*)(unsigned long long *, size_t))hooked("cuMemAlloc_v2");
    int (*release)(unsigned long long) = (int (*)(unsigned long long))hooked("cuMemFree_v2");
    int (*statistics)(Statistics *) = (int (*)(Statistics *))dlsym(RTLD_DEFAULT, "gpupool_get_statistics");
    info = (int (*)(size_t *, size_t *))bare("cuMemGetInfo_v2");

    unsigned long long *addresses = calloc(ids, sizeof *addresses);
    size_t *sizes = calloc(ids, sizeof *sizes);
    if (!addresses || !sizes) abort();
    double before = free_on_the_gpu(), used = 0, peak_used = 0, peak_held = 0, held_sum = 0, used_sum = 0, in_calls = 0;
    double worst = 0; /* the largest ratio while at least half the peak of a round is in use */
    double start = seconds(), round_start = start;
    size_t calls = 0, samples = 0, refused = 0, rounds = 0, wanted = (size_t)(hours * 3600e3 / recorded + 0.5);
    if (!wanted) wanted = 1;
    for (; rounds < wanted && (!rounds || seconds() - start < limit); rounds++, round_start = seconds()) {
        for (size_t i = 0; i < count + ids; i++) {
            Step step = i < count ? steps[i] : (Step){(unsigned)(i - count), -1, 0};
            if (step.bytes == -2) {
                double wait = pace > 0 ? round_start + step.at / 1e3 * pace - seconds() : 0;
                struct timespec pause = {(time_t)wait, (long)((wait - (double)(time_t)wait) * 1e9)};
                if (wait > 0) nanosleep(&pause, NULL);
                continue;
            }
            double begin = seconds();
            if (step.bytes > 0 && !addresses[step.id]) {
                int answer = allocate(&addresses[step.id], (size_t)step.bytes);
                if (answer == 2) refused++, addresses[step.id] = 0;
                else require(answer, "cuMemAlloc"), used += (double)(sizes[step.id] = (size_t)step.bytes);
            } else if (step.bytes == -1 && addresses[step.id]) {
                require(release(addresses[step.id]), "cuMemFree");
                used -= (double)sizes[step.id];
                addresses[step.id] = 0;
            } else continue;
            in_calls += seconds() - begin;
            if (++calls % 64 && used <= peak_used) continue;
            double held = before - free_on_the_gpu();
            if (used > peak_used) peak_used = used;
            if (held > peak_held) peak_held = held;
            if (used >= peak_used / 2 && rounds && held / used > worst) worst = held / used;
            held_sum += held, used_sum += used, samples++;
        }
    }
    Statistics told = {.size = sizeof told};
    int ours = statistics && statistics(&told) == 0;
    const char *name = strrchr(arguments[1], '/') ? strrchr(arguments[1], '/') + 1 : arguments[1];
    double mib = 1 << 20;
    printf("replay file=%s by=%s rounds=%zu hours=%.3f calls=%zu refused=%zu us_per_call=%.3f seconds=%.1f peak_used_mib=%.1f "
           "peak_held_mib=%.1f peak_ratio=%.4f mean_ratio=%.4f worst_ratio=%.4f allocations=%llu reuses=%llu trimmed_mib=%.1f\n",
           name, ours ? "gpupool" : "driver", rounds, (double)rounds * recorded / 3600e3, calls, refused,
           in_calls * 1e6 / (double)(calls ? calls : 1), seconds() - start, peak_used / mib, peak_held / mib,
           peak_used > 0 ? peak_held / peak_used : 0, used_sum > 0 ? held_sum / used_sum : 0, worst,
           (unsigned long long)told.allocations, (unsigned long long)told.reuses, (double)told.trimmed_bytes / mib);
    return 0;
}
