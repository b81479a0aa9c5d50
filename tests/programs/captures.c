/*
 * captures [elsewhere | free]
 * What waiting for a context does to a capture in it: the call fails and the capture is broken, in every mode, from the
 * thread that captures and from another. With `elsewhere`, which needs two GPUs, what waiting for another context does:
 * nothing. With `free`, what a free does, as the mode says.
 */
#include "streams.h"

#include <pthread.h>

typedef struct {
    CUcontext context;
    CUdeviceptr block;
    CUresult answer;
} Call;

static CUgraph graph;

static void *synchronize(void *argument)
{
    Call *c = argument;
    CHECK(cuCtxSetCurrent(c->context));
    c->answer = cuCtxSynchronize();
    return NULL;
}

static void *free_block(void *argument)
{
    Call *c = argument;
    CHECK(cuCtxSetCurrent(c->context));
    c->answer = cuMemFree_v2(c->block);
    return NULL;
}

static CUresult in_thread(void *(*body)(void *), Call *c)
{
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, body, c) == 0);
    REQUIRE(pthread_join(thread, NULL) == 0);
    return c->answer;
}

static void elsewhere(Call *c, CUstream stream)
{
    CUcontext other = start_on(1);
    for (int mode = CAPTURE_GLOBAL; mode <= CAPTURE_RELAXED; mode += CAPTURE_RELAXED) {
        CHECK(cuCtxSetCurrent(c->context));
        CHECK(cuStreamBeginCapture_v2(stream, mode));
        CHECK(cuCtxSetCurrent(other));
        CUresult answer = cuCtxSynchronize();
        CHECK(cuCtxSetCurrent(c->context));
        printf("%s: cuCtxSynchronize of GPU 1's context %d, end %d\n", mode == CAPTURE_GLOBAL ? "global" : "relaxed",
               answer, cuStreamEndCapture(stream, &graph));
    }
}

static void frees(Call *c, CUstream stream)
{
    CHECK(cuMemAlloc_v2(&c->block, 4 * MIB));
    CHECK(cuStreamBeginCapture_v2(stream, CAPTURE_RELAXED));
    CUresult answer = cuMemFree_v2(c->block);
    printf("relaxed: cuMemFree %d, end %d\n", answer, cuStreamEndCapture(stream, &graph));
    CHECK(cuMemAlloc_v2(&c->block, 4 * MIB));
    CHECK(cuStreamBeginCapture_v2(stream, CAPTURE_GLOBAL));
    answer = in_thread(free_block, c);
    printf("global: another thread's cuMemFree %d, end %d\n", answer, cuStreamEndCapture(stream, &graph));
}

int main(int argc, char **argv)
{
    static const char *const modes[] = {"global", "thread-local", "relaxed"};
    Call c = {.context = start_on(0)};
    CUstream stream;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    if (argc > 1 && strcmp(argv[1], "elsewhere") == 0) {
        elsewhere(&c, stream);
        return 0;
    }
    if (argc > 1 && strcmp(argv[1], "free") == 0) {
        frees(&c, stream);
        return 0;
    }
    for (int mode = CAPTURE_GLOBAL; mode <= CAPTURE_RELAXED; mode++) {
        CHECK(cuStreamBeginCapture_v2(stream, mode));
        CUresult answer = cuCtxSynchronize();
        printf("%s: cuCtxSynchronize %d, end %d\n", modes[mode], answer, cuStreamEndCapture(stream, &graph));
        CHECK(cuStreamBeginCapture_v2(stream, mode));
        answer = in_thread(synchronize, &c);
        printf("%s: from another thread %d, end %d\n", modes[mode], answer, cuStreamEndCapture(stream, &graph));
    }
    CHECK(cuCtxSynchronize());
    CHECK(cuStreamDestroy_v2(stream));
    return 0;
}
