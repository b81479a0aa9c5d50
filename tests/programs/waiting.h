/*
 * Who waits for whom: memory of each kind and the call that gives it back, a kernel that is held in some context until the
 * host lets it go, and a thread that makes the call meanwhile.
 */
#ifndef WAITING_H
#define WAITING_H

#include "kernels.h"
#include "streams.h"
#include "vmm.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

typedef struct {
    const char *name;
    CUcontext context;
    /* Kernels are held in `stream`; memory of a stream's order is of `own`. */
    CUstream stream, own;
    Kernels kernels;
} Place;

/* One kind of memory: `make` makes it in the current context, `give_back` ends what was made last. */
typedef struct {
    const char *what;
    void (*make)(size_t bytes, unsigned flags);
    void (*give_back)(size_t bytes);
    size_t bytes;
    unsigned flags;
} Case;

enum { MANAGED_GLOBAL = 1 };

static CUdeviceptr block;
static void *host;
static uint64_t handle;
static CUstream own_stream;
/* What held kernels wait for. */
static volatile uint32_t *flag;

static inline void make_plain(size_t bytes, unsigned flags)
{
    (void)flags;
    CHECK(cuMemAlloc_v2(&block, bytes));
}

static inline void free_plain(size_t bytes)
{
    (void)bytes;
    CHECK(cuMemFree_v2(block));
}

static inline void make_managed(size_t bytes, unsigned flags)
{
    CHECK(cuMemAllocManaged(&block, bytes, flags));
}

static inline void make_pinned(size_t bytes, unsigned flags)
{
    CHECK(cuMemHostAlloc(&host, bytes, flags));
}

static inline void free_pinned(size_t bytes)
{
    (void)bytes;
    CHECK(cuMemFreeHost(host));
}

static inline void make_registered(size_t bytes, unsigned flags)
{
    host = aligned_alloc(4 * KIB, bytes);
    REQUIRE(host != NULL);
    CHECK(cuMemHostRegister_v2(host, bytes, flags));
}

static inline void unregister(size_t bytes)
{
    (void)bytes;
    CHECK(cuMemHostUnregister(host));
    free(host);
}

static inline void make_mapped(size_t bytes, unsigned device)
{
    CUmemAllocationProp properties = on_device((int)device);
    CHECK(cuMemCreate(&handle, bytes, &properties, 0));
    block = map_for(0, handle, bytes);
}

static inline void unmap(size_t bytes)
{
    CHECK(cuMemUnmap(block, bytes));
    CHECK(cuMemRelease(handle));
    CHECK(cuMemAddressFree(block, bytes));
}

static inline void make_ordered(size_t bytes, unsigned flags)
{
    (void)flags;
    CHECK(cuMemAllocAsync(&block, bytes, own_stream));
    CHECK(cuStreamSynchronize(own_stream));
}

static inline void free_ordered(size_t bytes)
{
    (void)bytes;
    CHECK(cuMemFreeAsync(block, own_stream));
    CHECK(cuStreamSynchronize(own_stream));
}

/* In the current context. */
static inline Place place_here(const char *name)
{
    Place place = {.name = name, .kernels = load_kernels()};
    CHECK(cuCtxGetCurrent(&place.context));
    CHECK(cuStreamCreate(&place.stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuStreamCreate(&place.own, CU_STREAM_NON_BLOCKING));
    return place;
}

/* Two GPUs, the first one's context current, and the word that all kernels are held by. */
static inline void open_both(Place gpus[2])
{
    void *word;
    for (int gpu = 1; gpu >= 0; gpu--) {
        start_on(gpu);
        gpus[gpu] = place_here(gpu == 0 ? "GPU 0" : "GPU 1");
    }
    CHECK(cuMemHostAlloc(&word, 4096, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    flag = word;
}

/* Something is made in `owner`, and then a kernel is held in `busy`. */
static inline void make_and_hold(const Case *of, Place *owner, Place *busy)
{
    CUdeviceptr on_device = (CUdeviceptr)(uintptr_t)flag;
    CHECK(cuCtxSetCurrent(owner->context));
    own_stream = owner->own;
    of->make(of->bytes, of->flags);
    *flag = 0;
    CHECK(cuCtxSetCurrent(busy->context));
    CHECK(cuLaunchKernel(busy->kernels.wait_flag, 1, 1, 1, 1, 1, 1, 0, busy->stream, (void *[]){&on_device}, NULL));
}

/* A thread that gives it back, with `context` current. */
typedef struct {
    CUcontext context;
    const Case *of;
    pthread_t thread;
    atomic_int calling, returned;
} Call;

static void *make_call(void *argument)
{
    Call *call = argument;
    CHECK(cuCtxSetCurrent(call->context));
    atomic_store(&call->calling, 1);
    call->of->give_back(call->of->bytes);
    atomic_store(&call->returned, 1);
    return NULL;
}

static inline void begin_call(Call *call)
{
    REQUIRE(pthread_create(&call->thread, NULL, make_call, call) == 0);
    while (!atomic_load(&call->calling))
        sched_yield();
}

/* Lets the kernel go, and waits for it and for the thread. */
static inline void end_call(Call *call, Place *busy)
{
    *flag = 1;
    REQUIRE(pthread_join(call->thread, NULL) == 0);
    CHECK(cuCtxSetCurrent(busy->context));
    CHECK(cuStreamSynchronize(busy->stream));
}

/* Whether the call returned while the kernel was still held. One that does not wait has long to return, so that a busy
 * machine changes nothing; one that waits has enough to show if it did not. */
static inline int has_returned(Call *call, int expected)
{
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; !atomic_load(&call->returned); i++) {
        sched_yield();
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (expected ? now.tv_sec - start.tv_sec > 5 : i > 2000)
            break;
    }
    return atomic_load(&call->returned);
}

#endif
