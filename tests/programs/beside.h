/*
 * A stream that is captured on a thread of its own while other threads go on. `stream`, of `context`, and `mode` are set before
 * it begins.
 */
#ifndef BESIDE_H
#define BESIDE_H

#include "streams.h"

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>

typedef struct {
    CUcontext context;
    CUstream stream;
    int mode;
    pthread_t thread;
    atomic_int begun;
    sem_t over;
    CUresult ended;
} Beside;

static void *capture_beside(void *argument)
{
    Beside *b = argument;
    CUgraph graph = NULL;
    CHECK(cuCtxSetCurrent(b->context));
    CHECK(cuStreamBeginCapture_v2(b->stream, b->mode));
    atomic_store(&b->begun, 1);
    while (sem_wait(&b->over) != 0)
        ;
    b->ended = cuStreamEndCapture(b->stream, &graph);
    return NULL;
}

static inline void begin_beside(Beside *b)
{
    atomic_store(&b->begun, 0);
    REQUIRE(sem_init(&b->over, 0, 0) == 0);
    REQUIRE(pthread_create(&b->thread, NULL, capture_beside, b) == 0);
    while (!atomic_load(&b->begun))
        sched_yield();
}

static inline void end_beside(Beside *b)
{
    REQUIRE(sem_post(&b->over) == 0);
    REQUIRE(pthread_join(b->thread, NULL) == 0);
}

/* What the last words of the program are about, `beside MODE GPU`: a stream in that GPU's primary context. Without them nothing is
 * captured. The current context stays. */
static inline void prepare_told(Beside *b, int count, char **words)
{
    CUcontext before;
    b->mode = -1;
    if (count < 4 || strcmp(words[count - 3], "beside") != 0)
        return;
    CHECK(cuCtxGetCurrent(&before));
    b->mode = atoi(words[count - 2]);
    b->context = start_on(atoi(words[count - 1]));
    CHECK(cuStreamCreate(&b->stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuCtxSetCurrent(before));
}

static inline void begin_told(Beside *b)
{
    if (b->mode >= 0)
        begin_beside(b);
}

static inline void end_told(Beside *b)
{
    if (b->mode < 0)
        return;
    end_beside(b);
    printf("end of the capture: %d\n", b->ended);
}

#endif
