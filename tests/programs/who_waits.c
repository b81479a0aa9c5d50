/*
 * Who waits for whom: whether a call that gives memory of GPU 0 back returns while a kernel that waits for the host runs on
 * GPU 0, or on GPU 1; without peer access, with access from 0 to 1, and with access both ways. Needs two GPUs. Each call is
 * made by a thread of its own. When that has not returned after a while the kernel is let go, so nothing here hangs.
 *
 * What was measured of these is in waits.c. Of managed memory, of memory of a stream's order and with peer access, only
 * this program asks.
 */
#include "kernels.h"
#include "streams.h"
#include "vmm.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

typedef struct {
    CUcontext context;
    CUstream stream;
    Kernels kernels;
} Gpu;

/* One kind of memory. What is made before the kernel is held is what `give_back` ends. */
typedef struct {
    const char *what;
    void (*make)(size_t bytes, unsigned flags);
    void (*give_back)(size_t bytes);
    size_t bytes;
    unsigned flags;
} Case;

static CUdeviceptr block;
static void *host;
static uint64_t handle;
static CUstream own_stream;

static void make_plain(size_t bytes, unsigned flags)
{
    (void)flags;
    CHECK(cuMemAlloc_v2(&block, bytes));
}

static void free_plain(size_t bytes)
{
    (void)bytes;
    CHECK(cuMemFree_v2(block));
}

static void make_host(size_t bytes, unsigned flags)
{
    CHECK(cuMemHostAlloc(&host, bytes, flags));
}

static void free_host(size_t bytes)
{
    (void)bytes;
    CHECK(cuMemFreeHost(host));
}

static void make_managed(size_t bytes, unsigned flags)
{
    CHECK(cuMemAllocManaged(&block, bytes, flags));
}

static void make_mapped(size_t bytes, unsigned flags)
{
    CUmemAllocationProp properties = on_device((int)flags);
    CHECK(cuMemCreate(&handle, bytes, &properties, 0));
    block = map_for(0, handle, bytes);
}

static void unmap(size_t bytes)
{
    CHECK(cuMemUnmap(block, bytes));
    CHECK(cuMemRelease(handle));
    CHECK(cuMemAddressFree(block, bytes));
}

static void make_ordered(size_t bytes, unsigned flags)
{
    (void)flags;
    CHECK(cuMemAllocAsync(&block, bytes, own_stream));
    CHECK(cuStreamSynchronize(own_stream));
}

static void free_ordered(size_t bytes)
{
    (void)bytes;
    CHECK(cuMemFreeAsync(block, own_stream));
    CHECK(cuStreamSynchronize(own_stream));
}

enum { GLOBAL = 1 };

static const Case CASES[] = {
    {"cuMemFree, 4 KiB", make_plain, free_plain, 4 * KIB, 0},
    {"cuMemFree, 64 MiB", make_plain, free_plain, 64 * MIB, 0},
    {"cuMemFreeHost, 4 KiB", make_host, free_host, 4 * KIB, 0},
    {"cuMemFreeHost, 4 KiB, portable", make_host, free_host, 4 * KIB, CU_MEMHOSTALLOC_PORTABLE},
    {"cuMemFreeHost, 64 MiB", make_host, free_host, 64 * MIB, 0},
    {"cuMemFreeHost, 64 MiB, portable", make_host, free_host, 64 * MIB, CU_MEMHOSTALLOC_PORTABLE},
    {"cuMemFree of managed memory, 64 MiB", make_managed, free_plain, 64 * MIB, GLOBAL},
    {"cuMemUnmap and cuMemRelease, 64 MiB", make_mapped, unmap, 64 * MIB, 0},
    {"cuMemFreeAsync and wait for its stream, 64 MiB", make_ordered, free_ordered, 64 * MIB, 0},
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t returned = PTHREAD_COND_INITIALIZER;
static int has_returned;

typedef struct {
    CUcontext context;
    const Case *of;
    atomic_int calling;
} Call;

static void *call(void *argument)
{
    Call *c = argument;
    CHECK(cuCtxSetCurrent(c->context));
    atomic_store(&c->calling, 1);
    c->of->give_back(c->of->bytes);
    pthread_mutex_lock(&lock);
    has_returned = 1;
    pthread_cond_signal(&returned);
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* Whether the call returned within so many milliseconds. */
static int returns_within(long milliseconds)
{
    struct timespec limit;
    int answer;
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += milliseconds / 1000;
    limit.tv_nsec += milliseconds % 1000 * 1000000;
    if (limit.tv_nsec >= 1000000000) {
        limit.tv_sec++;
        limit.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&lock);
    while (!has_returned && pthread_cond_timedwait(&returned, &lock, &limit) != ETIMEDOUT)
        ;
    answer = has_returned;
    pthread_mutex_unlock(&lock);
    return answer;
}

static void ask(const Case *of, Gpu *gpus, int busy, volatile uint32_t *flag, long milliseconds)
{
    CUdeviceptr on_device = (CUdeviceptr)(uintptr_t)flag;
    Call c = {.context = gpus[0].context, .of = of};
    pthread_t thread;
    int waits;
    CHECK(cuCtxSetCurrent(gpus[0].context));
    of->make(of->bytes, of->flags);
    *flag = 0;
    has_returned = 0;
    CHECK(cuCtxSetCurrent(gpus[busy].context));
    CHECK(cuLaunchKernel(gpus[busy].kernels.wait_flag, 1, 1, 1, 1, 1, 1, 0, gpus[busy].stream, (void *[]){&on_device},
                         NULL));
    REQUIRE(pthread_create(&thread, NULL, call, &c) == 0);
    while (!atomic_load(&c.calling))
        sched_yield();
    waits = !returns_within(milliseconds);
    *flag = 1;
    REQUIRE(pthread_join(thread, NULL) == 0);
    CHECK(cuStreamSynchronize(gpus[busy].stream));
    printf("  %s, a kernel on GPU %d: waits: %s\n", of->what, busy, waits ? "yes" : "no");
}

/* who_waits [MILLISECONDS [free]]: how long a call has to return; with "free" only cuMemFree is asked about. */
int main(int argc, char **argv)
{
    static const char *const access[] = {"no peer access", "access from 0 to 1", "access both ways"};
    long milliseconds = argc > 1 ? atol(argv[1]) : 500;
    size_t count = argc > 2 && strcmp(argv[2], "free") == 0 ? 2 : sizeof CASES / sizeof *CASES;
    Gpu gpus[2];
    void *flag;
    for (int i = 0; i < 2; i++) {
        gpus[i].context = start_on(i);
        gpus[i].kernels = load_kernels();
        CHECK(cuStreamCreate(&gpus[i].stream, CU_STREAM_NON_BLOCKING));
    }
    CHECK(cuMemHostAlloc(&flag, 4096, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    CHECK(cuCtxSetCurrent(gpus[0].context));
    CHECK(cuStreamCreate(&own_stream, CU_STREAM_NON_BLOCKING));
    for (int peer = 0; peer < 3; peer++) {
        if (peer > 0) {
            CHECK(cuCtxSetCurrent(gpus[peer - 1].context));
            CHECK(cuCtxEnablePeerAccess(gpus[2 - peer].context, 0));
        }
        printf("%s\n", access[peer]);
        for (size_t i = 0; i < count; i++)
            for (int busy = 0; busy < 2; busy++)
                ask(&CASES[i], gpus, busy, flag, milliseconds);
    }
    CHECK(cuCtxSetCurrent(gpus[0].context));
    CHECK(cuStreamDestroy_v2(own_stream));
    CHECK(cuMemFreeHost(flag));
    return 0;
}
