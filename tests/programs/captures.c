/*
 * What waiting for a context does to a capture in it: the call fails and the capture is broken, in every mode, from the
 * thread that captures and from another.
 */
#include "streams.h"

#include <pthread.h>

typedef struct {
    CUcontext context;
    CUresult answer;
} Waiting;

static void *synchronize(void *argument)
{
    Waiting *w = argument;
    CHECK(cuCtxSetCurrent(w->context));
    w->answer = cuCtxSynchronize();
    return NULL;
}

int main(void)
{
    static const char *const modes[] = {"global", "thread-local", "relaxed"};
    Waiting w = {.context = start_on(0)};
    CUstream stream;
    CUgraph graph;
    pthread_t thread;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (int mode = CAPTURE_GLOBAL; mode <= CAPTURE_RELAXED; mode++) {
        CHECK(cuStreamBeginCapture_v2(stream, mode));
        CUresult answer = cuCtxSynchronize();
        printf("%s: cuCtxSynchronize %d, end %d\n", modes[mode], answer, cuStreamEndCapture(stream, &graph));
        CHECK(cuStreamBeginCapture_v2(stream, mode));
        REQUIRE(pthread_create(&thread, NULL, synchronize, &w) == 0);
        REQUIRE(pthread_join(thread, NULL) == 0);
        printf("%s: from another thread %d, end %d\n", modes[mode], w.answer, cuStreamEndCapture(stream, &graph));
    }
    CHECK(cuCtxSynchronize());
    CHECK(cuStreamDestroy_v2(stream));
    return 0;
}
