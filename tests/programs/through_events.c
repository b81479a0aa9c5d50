/*
 * A kernel on GPU 1 is held and works on memory of GPU 0 afterwards; a stream of GPU 0, which has nothing else to do and was
 * waited for a moment ago, waits for an event behind it. Whoever frees the memory in GPU 0's context waits for that, too.
 * Needs two GPUs that reach each other.
 */
#include "held.h"
#include "streams.h"

#include <stdatomic.h>

CUresult cuEventDestroy_v2(CUevent event);
CUresult cuStreamQuery(CUstream stream);
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);

enum { NOT_READY = 600, BYTES = 4 * MIB, WORDS = BYTES / 4, QUESTIONS = 2000 };

typedef enum { DEVICE, PINNED } Kind;

static Gpu gpus[2];
static CUdeviceptr block;
static void *pinned;
static atomic_int begun;
static int was_held;

static void *frees(void *kind)
{
    CHECK(cuCtxSetCurrent(gpus[0].context));
    atomic_store(&begun, 1);
    if ((Kind)(uintptr_t)kind == PINNED)
        CHECK(cuMemFreeHost(pinned));
    else
        CHECK(cuMemFree_v2(block));
    was_held = *gpus[1].flag == 0;
    return NULL;
}

static void ask(const char *what, Kind kind)
{
    pthread_t thread;
    CUevent behind;
    CHECK(cuCtxSetCurrent(gpus[0].context));
    if (kind == PINNED)
        CHECK(cuMemHostAlloc(&pinned, BYTES, CU_MEMHOSTALLOC_PORTABLE));
    else
        CHECK(cuMemAlloc_v2(&block, BYTES));
    CHECK(cuCtxSetCurrent(gpus[1].context));
    CHECK(cuEventCreate(&behind, CU_EVENT_DISABLE_TIMING));
    hold(&gpus[1]);
    if (kind == DEVICE)
        iota(&gpus[1].kernels, gpus[1].stream, block, WORDS, 1);
    CHECK(cuEventRecord(behind, gpus[1].stream));
    CHECK(cuCtxSetCurrent(gpus[0].context));
    CHECK(cuCtxSynchronize());
    CHECK(cuStreamWaitEvent(gpus[0].stream, behind, 0));
    atomic_store(&begun, 0);
    REQUIRE(pthread_create(&thread, NULL, frees, (void *)(uintptr_t)kind) == 0);
    /* A free that does not wait has the time of these questions to return in. */
    for (int asked = 0; asked < QUESTIONS; asked += atomic_load(&begun))
        REQUIRE(cuStreamQuery(gpus[1].stream) == (CUresult)NOT_READY);
    let_go(&gpus[1]);
    REQUIRE(pthread_join(thread, NULL) == 0);
    printf("%s: %s\n", what, was_held ? "returned while the kernel was held" : "waited");
    CHECK(cuEventDestroy_v2(behind));
}

int main(void)
{
    open_gpu(&gpus[0], 0);
    open_gpu(&gpus[1], 1);
    CHECK(cuCtxEnablePeerAccess(gpus[0].context, 0));
    CHECK(cuCtxSetCurrent(gpus[0].context));
    CHECK(cuCtxEnablePeerAccess(gpus[1].context, 0));
    for (int round = 0; round < 3; round++) {
        ask("a block of 4 MiB", DEVICE);
        ask("pinned memory", PINNED);
    }
    return 0;
}
