/*
 * Timing events around launches: what a pair costs the thread that launches, and whether it parts kernels that follow each other
 * without a gap.
 */
#include "probe.h"

enum { LAUNCHES = 160, ROUNDS = 5 };

static Probed *gpu = &on_gpu[0];
static CUevent events[2 * LAUNCHES], outer[2];
static CUdeviceptr block;

typedef enum { PLAIN, EACH, EIGHTH, UNTIMED } Kind;
static const char *const KINDS[] = {"no events", "a timed pair around each", "a timed pair around one of 8", "an untimed pair around each"};

/* Milliseconds of the GPU and ns of the thread for each launch. */
static void sequence(Kind kind, uint64_t n, double *on_device, double *on_thread)
{
    float milliseconds;
    uint32_t value = 3;
    now_asking = KINDS[kind];
    for (int i = 0; i < 2 * LAUNCHES; i++)
        CHECK(cuEventCreate(&events[i], kind == UNTIMED ? CU_EVENT_DISABLE_TIMING : 0));
    /* Held back until all are submitted, so that the thread is never what they wait for. They fit into the launch queue. */
    spin_in(gpu, gpu->stream, 3000);
    CHECK(cuEventRecord(outer[0], gpu->stream));
    double since = now_us();
    for (int i = 0; i < LAUNCHES; i++) {
        int pair = kind == EACH || kind == UNTIMED || (kind == EIGHTH && i % 8 == 0);
        if (pair)
            CHECK(cuEventRecord(events[2 * i], gpu->stream));
        CHECK(cuLaunchKernel(gpu->kernels.fill, 528, 1, 1, 256, 1, 1, 0, gpu->stream, (void *[]){&block, &n, &value}, NULL));
        if (pair)
            CHECK(cuEventRecord(events[2 * i + 1], gpu->stream));
    }
    *on_thread = (now_us() - since) * 1e3 / LAUNCHES;
    let_go();
    CHECK(cuEventRecord(outer[1], gpu->stream));
    CHECK(cuStreamSynchronize(gpu->stream));
    CHECK(cuEventElapsedTime(&milliseconds, outer[0], outer[1]));
    *on_device = milliseconds;
    for (int i = 0; i < 2 * LAUNCHES; i++)
        CHECK(cuEventDestroy_v2(events[i]));
}

int main(int argc, char **argv)
{
    static const size_t sizes[] = {64, 512, 4096, 32768, 262144};
    size_t largest = argc > 1 ? (size_t)atoi(argv[1]) * KIB : 256 * MIB;
    begin_probe(60);
    CHECK(cuEventCreate(&outer[0], 0));
    CHECK(cuEventCreate(&outer[1], 0));
    CHECK(cuMemAlloc_v2(&block, largest));
    warm_up(gpu, gpu->stream);
    for (int i = 0; i < 5 && sizes[i] * KIB <= largest; i++) {
        double device[4][ROUNDS], thread[4][ROUNDS];
        for (int round = 0; round < ROUNDS; round++)
            for (Kind kind = PLAIN; kind <= UNTIMED; kind++)
                sequence(kind, sizes[i] * KIB / 4, &device[kind][round], &thread[kind][round]);
        for (Kind kind = PLAIN; kind <= UNTIMED; kind++) {
            char what[128];
            snprintf(what, sizeof what, "kernels of %zu KiB, %s, GPU time for each", sizes[i], KINDS[kind]);
            for (int round = 0; round < ROUNDS; round++)
                device[kind][round] *= 1e3 / LAUNCHES;
            measured_all(what, "us", device[kind], ROUNDS);
            snprintf(what, sizeof what, "kernels of %zu KiB, %s, thread time for each", sizes[i], KINDS[kind]);
            measured_all(what, "ns", thread[kind], ROUNDS);
        }
        /* Medians, now that they are sorted; of kernels that take as long as those worth timing. */
        double plain = device[PLAIN][ROUNDS / 2], eighth = device[EIGHTH][ROUNDS / 2];
        if (sizes[i] >= 32768)
            answer("B6: timing one launch of 8 costs the GPU less than 2 %", eighth <= plain * 1.02,
                   "kernels of %zu KiB: a timed pair around one of 8 lengthens them by less than 2 %%: %s", sizes[i],
                   eighth <= plain * 1.02 ? "yes" : "no");
    }
    return end_probe();
}
