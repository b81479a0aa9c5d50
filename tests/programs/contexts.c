/*
 * contexts CASE: the ways in which a process gets contexts that it may not have wanted. It computes on the last of four
 * GPUs, unless the case says otherwise.
 */
#define _GNU_SOURCE
#include "diagnosed.h"
#include "green.h"
#include "simulator.h"
#include "vmm.h"

#include <dlfcn.h>

enum { FIRST = 0, LAST = 3 };

NAMED void look_at_first_gpu(void);
NAMED void look_at_first_gpu(void)
{
    size_t free_bytes, total;
    CHECK(cuCtxSetCurrent(retain(FIRST)));
    CHECK(cuMemGetInfo_v2(&free_bytes, &total));
}

NAMED void look_at_every_gpu(void);
NAMED void look_at_every_gpu(void)
{
    int count;
    CHECK(cuDeviceGetCount(&count));
    for (CUdevice device = 0; device < count; device++)
        CHECK(cuCtxSetCurrent(retain(device)));
}

/* As look_at_every_gpu, but each context goes before the next one comes. */
NAMED void visit_every_gpu(void);
NAMED void visit_every_gpu(void)
{
    int count;
    CHECK(cuDeviceGetCount(&count));
    for (CUdevice device = 0; device < count; device++) {
        CHECK(cuCtxSetCurrent(retain(device)));
        CHECK(cuCtxSetCurrent(NULL));
        CHECK(cuDevicePrimaryCtxRelease_v2(device));
    }
}

NAMED void reach_first_gpu(void);
NAMED void reach_first_gpu(void)
{
    CUcontext peer = retain(FIRST);
    CHECK(cuCtxSetCurrent(retain(LAST)));
    CHECK(cuCtxEnablePeerAccess(peer, 0));
}

NAMED void *stage_batches(void *device);
NAMED void *stage_batches(void *device)
{
    void *batch;
    CHECK(cuCtxSetCurrent(retain(*(CUdevice *)device)));
    CHECK(cuMemHostAlloc(&batch, 1 * MIB, 0));
    CHECK(cuMemFreeHost(batch));
    return NULL;
}

NAMED void *prefetch_worker(void *unused);
NAMED void *prefetch_worker(void *unused)
{
    CHECK(cuCtxSetCurrent(retain(FIRST)));
    return unused;
}

/* By the C library's own dlsym, as a runtime's private ways are: nothing of this can be seen. */
NAMED void retain_unseen(CUdevice device);
NAMED void retain_unseen(CUdevice device)
{
    CUcontext context;
    CUresult (*unseen)(CUcontext *, CUdevice);
    void *(*own_dlsym)(void *, const char *);
    *(void **)&own_dlsym = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!own_dlsym)
        *(void **)&own_dlsym = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    REQUIRE(own_dlsym);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    REQUIRE(driver);
    *(void **)&unseen = own_dlsym(driver, "cuDevicePrimaryCtxRetain");
    REQUIRE(unseen);
    CHECK(unseen(&context, device));
}

NAMED void make_and_destroy(void);
NAMED void make_and_destroy(void)
{
    CUcontext own;
    CHECK(cuCtxCreate_v2(&own, 0, 1));
    CHECK(cuCtxDestroy_v2(own));
    CHECK(cuCtxSetCurrent(retain(1)));
    CHECK(cuDevicePrimaryCtxRelease_v2(1));
    CHECK(cuCtxSetCurrent(retain(2)));
    CHECK(cuDevicePrimaryCtxReset_v2(2));
}

/* Numbers that differ from each other, so that none can be taken for another. */
static void use_a_little(void)
{
    CUdeviceptr blocks[5];
    void *pinned;
    CHECK(cuCtxSetCurrent(retain(LAST)));
    Kernels kernels = load_code();
    for (int i = 0; i < 5; i++)
        CHECK(cuMemAlloc_v2(&blocks[i], i == 0 ? 3 * MIB : 1024));
    for (int i = 0; i < 7; i++)
        iota(&kernels, NULL, blocks[0], 256, 0);
    for (int i = 0; i < 2; i++)
        CHECK(cuMemsetD8_v2(blocks[1], 1, 1024));
    CHECK(cuMemcpyDtoD_v2(blocks[2], blocks[1], 1024));
    CHECK(cuMemHostAlloc(&pinned, 4096, 0));
    CHECK(cuMemFreeHost(pinned));
    for (int i = 0; i < 5; i++)
        CHECK(cuMemFree_v2(blocks[i]));
    CHECK(cuModuleUnload(kernels.module));
}

/* Eight threads meet at the first use of a GPU, and each makes a hundred copies. */
static pthread_barrier_t start;

static void *copy_a_hundred_times(void *unused)
{
    CUdeviceptr block;
    pthread_barrier_wait(&start);
    CHECK(cuCtxSetCurrent(retain(LAST)));
    CHECK(cuMemAlloc_v2(&block, 1024));
    for (int i = 0; i < 100; i++)
        CHECK(cuMemsetD8_v2(block, 1, 1024));
    CHECK(cuMemFree_v2(block));
    return unused;
}

static void use_from_threads(void)
{
    pthread_t threads[8];
    REQUIRE(pthread_barrier_init(&start, NULL, 8) == 0);
    for (int i = 0; i < 8; i++)
        REQUIRE(pthread_create(&threads[i], NULL, copy_a_hundred_times, NULL) == 0);
    for (int i = 0; i < 8; i++)
        REQUIRE(pthread_join(threads[i], NULL) == 0);
}

CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream);
CUresult cuMemsetD8Async(CUdeviceptr pointer, unsigned char value, size_t count, CUstream stream);
CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority);
CUresult cuLaunchHostFunc(CUstream stream, void (*function)(void *), void *data);
CUresult cuMemPrefetchAsync(CUdeviceptr pointer, size_t bytes, CUdevice device, CUstream stream);

static void nothing(void *unused)
{
    (void)unused;
}

/* Each is one way to use the first GPU's context and no other. */
static void use_otherwise(const char *way)
{
    CUdeviceptr block;
    CUevent event;
    CHECK(cuCtxSetCurrent(retain(FIRST)));
    if (strcmp(way, "async") == 0) {
        CHECK(cuMemAllocAsync(&block, 4096, NULL));
    } else if (strcmp(way, "event") == 0) {
        CHECK(cuEventCreate(&event, 0));
        CHECK(cuEventRecord(event, NULL));
    } else if (strcmp(way, "host_function") == 0) {
        CHECK(cuLaunchHostFunc(NULL, nothing, NULL));
    } else if (strcmp(way, "prefetch") == 0) {
        CHECK(cuMemAllocManaged(&block, 4096, 1));
        CHECK(cuMemPrefetchAsync(block, 4096, FIRST, NULL));
    } else if (strcmp(way, "handle") == 0) {
        CUmemAllocationProp properties = on_device(FIRST);
        uint64_t handle;
        CHECK(cuMemCreate(&handle, 2 * MIB, &properties, 0));
    } else if (strcmp(way, "managed") == 0) {
        CHECK(cuMemAllocManaged(&block, 4096, 1));
    } else if (strcmp(way, "green") == 0) {
        size_t bytes = 4096;
        CUgreenCtx green = green_on(FIRST);
        CUstream stream;
        CHECK(cuGreenCtxStreamCreate(&stream, green, 1, 0));
        CHECK(cuCtxSetCurrent(retain(LAST)));
        CHECK(cuMemAlloc_v2(&block, bytes));
        CHECK(cuMemsetD8Async(block, 1, bytes, stream));
        CHECK(cuStreamSynchronize(stream));
    } else if (strcmp(way, "refused") == 0) {
        REQUIRE(cuMemsetD8_v2(64, 1, 16) != CUDA_SUCCESS);
        REQUIRE(cuMemcpyDtoD_v2(64, 128, 16) != CUDA_SUCCESS);
    }
}

/* Work on a stream of the first GPU, submitted while the last one's context is current. */
static void use_from_elsewhere(int priority)
{
    CUdeviceptr block;
    CUstream stream;
    CHECK(cuCtxSetCurrent(retain(FIRST)));
    if (priority)
        CHECK(cuStreamCreateWithPriority(&stream, 1, 0));
    else
        CHECK(cuStreamCreate(&stream, 1));
    CHECK(cuCtxSetCurrent(retain(LAST)));
    CHECK(cuMemAlloc_v2(&block, 3 * MIB));
    for (int i = 0; i < 3; i++)
        CHECK(cuMemsetD8Async(block, 1, 3 * MIB, stream));
    CHECK(cuStreamSynchronize(stream));
}

/* One after the other, more than any table has places for; the last frees what it allocates. */
static void make_many(void)
{
    CUcontext one;
    CUdeviceptr block;
    CHECK(cuCtxSetCurrent(retain(LAST)));
    for (int i = 0; i < 600; i++) {
        CHECK(cuCtxCreate_v2(&one, 0, FIRST));
        if (i + 1 < 600)
            CHECK(cuCtxDestroy_v2(one));
    }
    for (int i = 0; i < 5; i++) {
        CHECK(cuMemAlloc_v2(&block, 4 * MIB));
        CHECK(cuMemFree_v2(block));
    }
}

/*
 * Two threads see at the same time that a context appeared on the first GPU: while the first one writes that down, the
 * second does it all.
 */
static void *look_again(void *unused)
{
    CHECK(cuCtxSetCurrent(retain(2)));
    return unused;
}

static void see_it_too(void)
{
    in_thread(look_again, NULL);
}

static void appear_for_two(void)
{
    Simulator simulator = find_simulator();
    CHECK(cuCtxSetCurrent(retain(1)));
    retain(2);
    CHECK(cuCtxSetCurrent(NULL));
    retain_unseen(FIRST);
    if (simulator.after)
        simulator.after("cuDeviceGetUuid", see_it_too);
    retain(2);
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "";
    CUdevice first = FIRST, last = LAST;
    CUcontext own;
    CHECK(cuInit(0));
    if (strcmp(name, "stray") == 0) {
        look_at_first_gpu();
        compute_on(LAST);
    } else if (strcmp(name, "one") == 0) {
        compute_on(LAST);
    } else if (strcmp(name, "first") == 0) {
        compute_on(FIRST);
    } else if (strcmp(name, "late") == 0) {
        look_at_first_gpu();
        compute_on(LAST);
        compute_on(FIRST);
    } else if (strcmp(name, "idle") == 0) {
        look_at_first_gpu();
    } else if (strcmp(name, "sweep") == 0) {
        look_at_every_gpu();
        compute_on(LAST);
    } else if (strcmp(name, "visit") == 0) {
        visit_every_gpu();
        compute_on(LAST);
    } else if (strcmp(name, "visit_while_working") == 0) {
        compute_on(LAST);
        visit_every_gpu();
    } else if (strcmp(name, "again") == 0) {
        look_at_first_gpu();
        CHECK(cuDevicePrimaryCtxRelease_v2(FIRST));
        look_at_first_gpu();
        compute_on(LAST);
    } else if (strcmp(name, "all") == 0) {
        look_at_every_gpu();
        for (CUdevice device = FIRST; device <= LAST; device++)
            compute_on(device);
    } else if (strcmp(name, "peers") == 0) {
        reach_first_gpu();
        compute_on(LAST);
    } else if (strcmp(name, "working_peers") == 0) {
        reach_first_gpu();
        compute_on(LAST);
        compute_on(FIRST);
    } else if (strcmp(name, "pinned") == 0) {
        in_thread(stage_batches, &first);
        compute_on(LAST);
    } else if (strcmp(name, "pinned_there") == 0) {
        in_thread(stage_batches, &last);
        compute_on(LAST);
    } else if (strcmp(name, "thread") == 0) {
        in_thread(prefetch_worker, NULL);
        compute_on(LAST);
    } else if (strcmp(name, "unseen") == 0) {
        retain_unseen(FIRST);
        compute_on(LAST);
    } else if (strcmp(name, "unseen_current") == 0) {
        CUcontext found;
        retain_unseen(LAST);
        CHECK(cuDevicePrimaryCtxRetain(&found, LAST));
        CHECK(cuCtxSetCurrent(found));
        compute_on(LAST);
    } else if (strcmp(name, "destroyed") == 0) {
        make_and_destroy();
        compute_on(LAST);
    } else if (strcmp(name, "used") == 0) {
        use_a_little();
    } else if (strcmp(name, "threads") == 0) {
        use_from_threads();
    } else if (strcmp(name, "elsewhere") == 0) {
        use_from_elsewhere(0);
    } else if (strcmp(name, "elsewhere_priority") == 0) {
        use_from_elsewhere(1);
    } else if (strncmp(name, "only_", 5) == 0) {
        use_otherwise(name + 5);
        compute_on(LAST);
    } else if (strcmp(name, "many") == 0) {
        make_many();
    } else if (strcmp(name, "appeared_twice") == 0) {
        appear_for_two();
    } else if (strcmp(name, "created") == 0) {
        /* A context made on purpose: nobody makes these by accident. */
        CHECK(cuCtxCreate_v2(&own, 0, FIRST));
        compute_on(LAST);
    } else if (strcmp(name, "two") == 0) {
        compute_on(LAST);
        CHECK(cuCtxCreate_v2(&own, 0, LAST));
    } else if (strcmp(name, "denied") == 0) {
        SHOW(cuDevicePrimaryCtxRetain(&own, FIRST));
        SHOW(cuCtxCreate_v2(&own, 0, FIRST));
        SHOW(cuDevicePrimaryCtxRetain(&own, LAST));
        SHOW(cuCtxCreate_v2(&own, 0, LAST));
        compute_on(LAST);
    } else {
        printf("contexts: no case %s\n", name);
        return 2;
    }
    return 0;
}
