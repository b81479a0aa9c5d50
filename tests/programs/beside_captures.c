/*
 * beside_captures WHEN
 * A free waits for a held kernel on one thread while another begins a capture in the same context: the capture is whole, and the
 * free still waits. WHEN is `first` for the first capture of the process, `later` for a later one, and `moment` for one that
 * begins when the driver has been asked for an event behind all work, `just_before` for one that would begin before that, when
 * the library has seen that nobody captures (simulated driver).
 */
#define _GNU_SOURCE
#include "beside.h"
#include "held.h"
#include "simulator.h"

static Gpu gpu;
static Beside capture;
static CUdeviceptr block;
static atomic_int frees, freed;

static void *free_block(void *unused)
{
    (void)unused;
    CHECK(cuCtxSetCurrent(gpu.context));
    atomic_store(&frees, 1);
    CHECK(cuMemFree_v2(block));
    atomic_store(&freed, 1);
    return NULL;
}

/* Whoever calls this may be what the beginning of the capture has to wait for. */
static void start_capture(void)
{
    REQUIRE(sem_init(&capture.over, 0, 0) == 0);
    REQUIRE(pthread_create(&capture.thread, NULL, capture_beside, &capture) == 0);
}

/* Fifty milliseconds for it to begin, which it must not use. */
static void give_a_capture_time(void)
{
    struct timespec then, now;
    start_capture();
    clock_gettime(CLOCK_MONOTONIC, &then);
    do {
        sched_yield();
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (!atomic_load(&capture.begun) && (now.tv_sec - then.tv_sec) * 1000 + (now.tv_nsec - then.tv_nsec) / 1000000 < 50);
}

static void wait_until(atomic_int *set)
{
    while (!atomic_load(set))
        sched_yield();
}

int main(int argc, char **argv)
{
    const char *when = argc > 1 ? argv[1] : "";
    int is_moment = strcmp(when, "moment") == 0, is_before = strcmp(when, "just_before") == 0;
    Simulator simulator = find_simulator();
    pthread_t thread;
    REQUIRE(simulator.before && simulator.after);
    open_gpu(&gpu, 0);
    capture.context = gpu.context;
    CHECK(cuStreamCreate(&capture.stream, CU_STREAM_NON_BLOCKING));
    for (capture.mode = CAPTURE_GLOBAL; capture.mode <= CAPTURE_RELAXED; capture.mode++) {
        if (strcmp(when, "first") != 0) {
            begin_beside(&capture);
            end_beside(&capture);
            REQUIRE(capture.ended == CUDA_SUCCESS);
        }
        CHECK(cuMemAlloc_v2(&block, 4 * MIB));
        hold(&gpu);
        atomic_store(&capture.begun, 0);
        atomic_store(&frees, 0);
        atomic_store(&freed, 0);
        if (is_moment)
            simulator.after("cuCtxRecordEvent", start_capture);
        if (is_before)
            simulator.before("cuCtxRecordEvent", give_a_capture_time);
        pthread_t guard = watch("a capture that begins beside a free");
        REQUIRE(pthread_create(&thread, NULL, free_block, NULL) == 0);
        wait_until(&frees);
        if (!is_moment && !is_before)
            start_capture();
        wait_until(&capture.begun);
        watch_ends(guard);
        int waited = !atomic_load(&freed);
        *gpu.flag = 1;
        REQUIRE(pthread_join(thread, NULL) == 0);
        end_beside(&capture);
        printf("the free %s, end of the capture: %d\n", waited ? "waited" : "did not wait", capture.ended);
        REQUIRE(waited && capture.ended == CUDA_SUCCESS);
    }
    CHECK(cuStreamDestroy_v2(capture.stream));
    printf("done\n");
    return 0;
}
