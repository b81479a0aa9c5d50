/*
 * A kernel that is held on one GPU until the host lets it go, and a watch over calls that must not wait for it: a call
 * that does would wait for ever, and the watch ends the program instead.
 */
#ifndef HELD_H
#define HELD_H

#include "kernels.h"

#include <errno.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    CUcontext context;
    CUstream stream;
    Kernels kernels;
    volatile uint32_t *flag;
} Gpu;

static inline void open_gpu(Gpu *gpu, int ordinal)
{
    gpu->context = start_on(ordinal);
    gpu->kernels = load_kernels();
    CHECK(cuStreamCreate(&gpu->stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemHostAlloc((void **)&gpu->flag, 4096, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
}

/* What is submitted to the GPU's stream from here on waits until let_go. */
static inline void hold(Gpu *gpu)
{
    CUdeviceptr flag = (CUdeviceptr)(uintptr_t)gpu->flag;
    *gpu->flag = 0;
    CHECK(cuCtxSetCurrent(gpu->context));
    CHECK(cuLaunchKernel(gpu->kernels.wait_flag, 1, 1, 1, 1, 1, 1, 0, gpu->stream, (void *[]){&flag}, NULL));
}

static inline void let_go(Gpu *gpu)
{
    *gpu->flag = 1;
    CHECK(cuCtxSetCurrent(gpu->context));
    CHECK(cuStreamSynchronize(gpu->stream));
}

static pthread_mutex_t watch_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t watch_over = PTHREAD_COND_INITIALIZER;
static const char *watched;

/* Not a time that anything takes: the limit after which it never will. */
static void *watch_calls(void *unused)
{
    struct timespec limit;
    (void)unused;
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += 20;
    pthread_mutex_lock(&watch_lock);
    while (watched)
        if (pthread_cond_timedwait(&watch_over, &watch_lock, &limit) == ETIMEDOUT && watched) {
            printf("%s: waits for what it must not wait for\n", watched);
            fflush(stdout);
            _exit(1);
        }
    pthread_mutex_unlock(&watch_lock);
    return NULL;
}

static inline pthread_t watch(const char *what)
{
    pthread_t thread;
    watched = what;
    REQUIRE(pthread_create(&thread, NULL, watch_calls, NULL) == 0);
    return thread;
}

static inline void watch_ends(pthread_t thread)
{
    pthread_mutex_lock(&watch_lock);
    watched = NULL;
    pthread_cond_signal(&watch_over);
    pthread_mutex_unlock(&watch_lock);
    REQUIRE(pthread_join(thread, NULL) == 0);
}

#endif
