/*
 * Who waits for whom: memory is given back while a kernel somewhere waits for the host. A free waits for the context that
 * owns the memory and for nobody else: not for another context of the same GPU, not for another GPU, whatever peer access
 * there is and whichever context is current. Needs two GPUs.
 */
#include "kernels.h"
#include "vmm.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

typedef struct {
    const char *name;
    CUcontext context;
    CUstream stream;
    Kernels kernels;
} Place;

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
static volatile uint32_t *flag;

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

static void make_pinned(size_t bytes, unsigned flags)
{
    CHECK(cuMemHostAlloc(&host, bytes, flags));
}

static void free_pinned(size_t bytes)
{
    (void)bytes;
    CHECK(cuMemFreeHost(host));
}

static void make_registered(size_t bytes, unsigned flags)
{
    host = aligned_alloc(4 * KIB, bytes);
    REQUIRE(host != NULL);
    CHECK(cuMemHostRegister_v2(host, bytes, flags));
}

static void unregister(size_t bytes)
{
    (void)bytes;
    CHECK(cuMemHostUnregister(host));
    free(host);
}

static void make_mapped(size_t bytes, unsigned device)
{
    CUmemAllocationProp properties = on_device((int)device);
    CHECK(cuMemCreate(&handle, bytes, &properties, 0));
    block = map_for((int)device, handle, bytes);
}

static void unmap(size_t bytes)
{
    CHECK(cuMemUnmap(block, bytes));
    CHECK(cuMemRelease(handle));
    CHECK(cuMemAddressFree(block, bytes));
}

static const Case PLAIN[] = {
    {"cuMemFree, 4 KiB", make_plain, free_plain, 4 * KIB, 0},
    {"cuMemFree, 64 MiB", make_plain, free_plain, 64 * MIB, 0},
};

static const Case OTHERS[] = {
    {"cuMemFreeHost, 4 KiB", make_pinned, free_pinned, 4 * KIB, 0},
    {"cuMemFreeHost, 64 MiB", make_pinned, free_pinned, 64 * MIB, 0},
    {"cuMemFreeHost, 4 KiB, portable", make_pinned, free_pinned, 4 * KIB, CU_MEMHOSTALLOC_PORTABLE},
    {"cuMemFreeHost, 64 MiB, portable", make_pinned, free_pinned, 64 * MIB, CU_MEMHOSTALLOC_PORTABLE},
    {"cuMemHostUnregister, 64 MiB", make_registered, unregister, 64 * MIB, 0},
    {"cuMemUnmap and cuMemRelease, 64 MiB", make_mapped, unmap, 64 * MIB, 0},
};

typedef struct {
    CUcontext context;
    const Case *of;
    atomic_int calling, returned;
} Call;

static void *call(void *argument)
{
    Call *c = argument;
    CHECK(cuCtxSetCurrent(c->context));
    atomic_store(&c->calling, 1);
    c->of->give_back(c->of->bytes);
    atomic_store(&c->returned, 1);
    return NULL;
}

/* Whether the call returned while the kernel was still held. One that does not wait has long to return, so that a busy
 * machine changes nothing; one that waits has enough to show if it did not. */
static int returned(Call *c, int expected)
{
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (int i = 0; !atomic_load(&c->returned); i++) {
        sched_yield();
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (expected ? now.tv_sec - start.tv_sec > 5 : i > 20000)
            break;
    }
    return atomic_load(&c->returned);
}

/* Memory of `owner` is given back by a thread with `current` while a kernel is held in `busy`. */
static void ask(const Case *of, Place *owner, Place *busy, Place *current)
{
    Call c = {.context = current->context, .of = of};
    CUdeviceptr on_device = (CUdeviceptr)(uintptr_t)flag;
    pthread_t thread;
    int waits = owner == busy && of->give_back != unmap;
    CHECK(cuCtxSetCurrent(owner->context));
    of->make(of->bytes, of->flags);
    *flag = 0;
    CHECK(cuCtxSetCurrent(busy->context));
    CHECK(cuLaunchKernel(busy->kernels.wait_flag, 1, 1, 1, 1, 1, 1, 0, busy->stream, (void *[]){&on_device}, NULL));
    REQUIRE(pthread_create(&thread, NULL, call, &c) == 0);
    while (!atomic_load(&c.calling))
        sched_yield();
    printf("  %s, of %s, which is current: %s, a kernel in %s: %s\n", of->what, owner->name,
           owner == current ? "yes" : "no", busy->name, returned(&c, !waits) ? "does not wait" : "waits");
    *flag = 1;
    REQUIRE(pthread_join(thread, NULL) == 0);
    CHECK(cuStreamSynchronize(busy->stream));
}

static void equip(Place *place, const char *name)
{
    place->name = name;
    place->kernels = load_kernels();
    CHECK(cuStreamCreate(&place->stream, CU_STREAM_NON_BLOCKING));
}

int main(void)
{
    static const char *const access[] = {"no peer access", "access from 0 to 1", "access both ways"};
    Place gpus[2], created;
    void *word;
    for (int gpu = 1; gpu >= 0; gpu--) {
        gpus[gpu].context = start_on(gpu);
        equip(&gpus[gpu], gpu == 0 ? "GPU 0" : "GPU 1");
    }
    CHECK(cuMemHostAlloc(&word, 4096, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    flag = word;

    for (size_t i = 0; i < sizeof OTHERS / sizeof *OTHERS; i++)
        for (int busy = 0; busy < 2; busy++)
            ask(&OTHERS[i], &gpus[0], &gpus[busy], &gpus[0]);

    puts("another context of GPU 0");
    CHECK(cuCtxCreate_v2(&created.context, 0, 0));
    equip(&created, "another context");
    ask(&PLAIN[0], &gpus[0], &created, &gpus[0]);
    ask(&PLAIN[1], &gpus[0], &created, &gpus[0]);
    ask(&PLAIN[1], &gpus[0], &gpus[0], &created);
    ask(&PLAIN[1], &created, &gpus[0], &created);
    ask(&PLAIN[1], &created, &created, &gpus[1]);
    ask(&OTHERS[1], &gpus[0], &created, &gpus[0]);
    CHECK(cuCtxDestroy_v2(created.context));

    for (int peer = 0; peer < 3; peer++) {
        if (peer > 0) {
            CHECK(cuCtxSetCurrent(gpus[peer - 1].context));
            CHECK(cuCtxEnablePeerAccess(gpus[2 - peer].context, 0));
        }
        puts(access[peer]);
        for (int busy = 0; busy < 2; busy++)
            for (int i = 0; i < 2; i++)
                ask(&PLAIN[i], &gpus[0], &gpus[busy], &gpus[0]);
    }
    CHECK(cuCtxSetCurrent(gpus[0].context));
    CHECK(cuMemFreeHost(word));
    return 0;
}
