/*
 * pinned_cases CASE: pinned memory across what may happen to it: reuse, limits, idleness, forks, the end of its context,
 * captures. What differs under the shim on purpose is said by other lines than what must not.
 */
#define _GNU_SOURCE
#include "kernels.h"
#include "simulator.h"

#include <sched.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { CAPTURE_GLOBAL = 0, CAPTURE_RELAXED = 2 };

static void *pin(size_t bytes, unsigned flags)
{
    void *memory;
    CHECK(cuMemHostAlloc(&memory, bytes, flags));
    return memory;
}

/* On the first GPU, in its primary context. */
static CUdeviceptr block;

/* Fills it, sends it to the GPU and back, and compares. */
static void use(unsigned char *memory, size_t bytes, int seed)
{
    unsigned char back[4096];
    for (size_t at = 0; at + sizeof back <= bytes; at += MIB) {
        memset(memory + at, seed + (int)(at / MIB), sizeof back);
        CHECK(cuMemcpyHtoD_v2(block, memory + at, sizeof back));
        CHECK(cuMemcpyDtoH_v2(back, block, sizeof back));
        REQUIRE(memcmp(back, memory + at, sizeof back) == 0);
    }
}

/* Pages of this process that are shared memory, which is what the kernel makes of pinned ones. */
static long shared_kib(void)
{
    char line[256];
    long kib = -1;
    FILE *status = fopen("/proc/self/status", "r");
    REQUIRE(status);
    while (fgets(line, sizeof line, status))
        if (sscanf(line, "RssShmem: %ld", &kib) == 1)
            break;
    fclose(status);
    REQUIRE(kib >= 0);
    return kib;
}

static int soon(int (*is_so)(long), long argument)
{
    time_t end = time(NULL) + 30;
    while (!is_so(argument)) {
        if (time(NULL) > end)
            return 0;
        /* The shim has no thread of its own: it looks at calls. */
        CHECK(cuCtxSynchronize());
        sched_yield();
    }
    return 1;
}

static int is_back_at(long start)
{
    return shared_kib() <= start;
}

static void idle(void)
{
    static const size_t sizes[] = {4096, 100000, 1 * MIB, 8 * MIB, 32 * MIB, 5 * MIB + 1};
    void *memory[6];
    use(pin(4096, 0), 4096, 1);
    CHECK(cuCtxSynchronize());
    long start = shared_kib();
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 6; i++)
            use(memory[i] = pin(sizes[i], i % 2 ? 0 : CU_MEMHOSTALLOC_PORTABLE), sizes[i], i);
        printf("pinned: %s\n", shared_kib() >= start + 46 * 1024 ? "yes" : "no");
        for (int i = 0; i < 6; i++)
            CHECK(cuMemFreeHost(memory[i]));
    }
    printf("kept when freed: %s\n", is_back_at(start) ? "no" : "yes");
    printf("back at the start: %s\n", soon(is_back_at, start) ? "yes" : "no");
}

static void reuse(void)
{
    /* Much is in use, so that little that is free need not go back before more is pinned. */
    char *large = pin(64 * MIB, 0), *first = pin(3 * MIB, 0), *again, *other;
    CHECK(cuMemFreeHost(first));
    again = pin(3 * MIB, 0);
    printf("the same memory again: %s\n", first == again ? "yes" : "no");
    CHECK(cuMemFreeHost(again));
    other = pin(3 * MIB, CU_MEMHOSTALLOC_WRITECOMBINED);
    printf("the same memory with other flags: %s\n", first == other ? "yes" : "no");
    CHECK(cuMemFreeHost(other));
    again = pin(2 * MIB, 0);
    printf("a part of it: %s\n", first == again ? "yes" : "no");
    CHECK(cuMemFreeHost(again));
    CHECK(cuMemFreeHost(large));
}

static void limits(void)
{
    Simulator simulator = find_simulator();
    void *memory[8];
    for (int i = 0; i < 8; i++)
        use(memory[i] = pin(4 * MIB, 0), 4 * MIB, i);
    for (int i = 0; i < 8; i++)
        CHECK(cuMemFreeHost(memory[i]));
    if (simulator.trim)
        simulator.trim();
    puts("8 blocks used and freed");
}

static void forked(void)
{
    unsigned char *memory = pin(2 * MIB, 0);
    int status;
    use(memory, 2 * MIB, 3);
    fflush(stdout);
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        void *other;
        printf("child: allocation answers %d\n", cuMemHostAlloc(&other, 4096, 0));
        printf("child: free answers %d\n", cuMemFreeHost(memory));
        fflush(stdout);
        _exit(0);
    }
    REQUIRE(waitpid(child, &status, 0) == child && status == 0);
    use(memory, 2 * MIB, 4);
    SHOW(cuMemFreeHost(memory));
    SHOW(cuMemFreeHost(memory));
}

static void end_of_context(int reset)
{
    CUcontext first, own;
    unsigned flags;
    void *kept, *lost, *portable, *next;
    CHECK(cuCtxGetCurrent(&first));
    kept = pin(2 * MIB, 0);
    if (reset) {
        CHECK(cuDevicePrimaryCtxRetain(&own, 1));
        CHECK(cuCtxSetCurrent(own));
    } else {
        CHECK(cuCtxCreate_v2(&own, 0, 0));
    }
    lost = pin(2 * MIB, 0);
    portable = pin(4096, CU_MEMHOSTALLOC_PORTABLE);
    use(lost, 2 * MIB, 5);
    if (reset)
        CHECK(cuDevicePrimaryCtxReset_v2(1));
    else
        CHECK(cuCtxDestroy_v2(own));
    CHECK(cuCtxSetCurrent(first));
    SHOW(cuMemHostGetFlags(&flags, lost));
    SHOW(cuMemFreeHost(lost));
    SHOW(cuMemFreeHost(portable));
    use(kept, 2 * MIB, 6);
    use(next = pin(2 * MIB, 0), 2 * MIB, 7);
    use(kept, 2 * MIB, 6);
    SHOW(cuMemFreeHost(kept));
    SHOW(cuMemFreeHost(next));
}

static void capture(int mode)
{
    CUstream stream;
    CUgraph graph;
    void *held = pin(2 * MIB, 0), *ready = pin(3 * MIB, 0), *memory = NULL;
    unsigned flags;
    CUdeviceptr device;
    CHECK(cuMemFreeHost(ready));
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuStreamBeginCapture_v2(stream, mode));
    SHOW(cuMemHostGetFlags(&flags, held));
    SHOW(cuMemHostGetDevicePointer_v2(&device, held, 0));
    SHOW(cuMemHostAlloc(&memory, 3 * MIB, 0));
    if (memory)
        SHOW(cuMemFreeHost(memory));
    SHOW(cuStreamEndCapture(stream, &graph));
    CHECK(cuStreamBeginCapture_v2(stream, mode));
    SHOW(cuMemFreeHost(held));
    SHOW(cuStreamEndCapture(stream, &graph));
    CHECK(cuStreamDestroy_v2(stream));
    use(held = pin(2 * MIB, 0), 2 * MIB, 8);
    CHECK(cuMemFreeHost(held));
}

/* More than the pool has ready, while a capture is under way. */
static void capture_growth(void)
{
    CUstream stream;
    CUgraph graph;
    void *memory = NULL;
    CHECK(cuMemFreeHost(pin(1 * MIB, 0)));
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuStreamBeginCapture_v2(stream, CAPTURE_GLOBAL));
    SHOW(cuMemHostAlloc(&memory, 64 * MIB, 0));
    SHOW(cuStreamEndCapture(stream, &graph));
    CHECK(cuStreamDestroy_v2(stream));
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "";
    Simulator simulator = find_simulator();
    start_on(0);
    CHECK(cuMemAlloc_v2(&block, 4096));
    if (strcmp(name, "idle") == 0)
        idle();
    else if (strcmp(name, "reuse") == 0)
        reuse();
    else if (strcmp(name, "limits") == 0)
        limits();
    else if (strcmp(name, "fork") == 0)
        forked();
    else if (strcmp(name, "destroy") == 0)
        end_of_context(0);
    else if (strcmp(name, "reset") == 0)
        end_of_context(1);
    else if (strcmp(name, "capture") == 0)
        capture(CAPTURE_GLOBAL);
    else if (strcmp(name, "relaxed") == 0)
        capture(CAPTURE_RELAXED);
    else if (strcmp(name, "capture_growth") == 0)
        capture_growth();
    else
        return 2;
    if (simulator.trim)
        simulator.trim();
    return 0;
}
