/*
 * waits_again rows      whether a free waits behind each function that submits work, and behind some that do not
 * waits_again own       whether it waits behind waits of the program's own, and behind work elsewhere
 * waits_again lazy      how often the driver is asked whether work is over, where frees do not wait for it
 * waits_again threads   threads that submit work and free its memory beside others that only free
 * waits_again WHAT      whether a second free waits once the program did WHAT: dlsym or address (looked up a function that
 *                       has no hook and copies), table (took a private table), context (made one past the hooks), cancel
 *                       (cancelled a thread), nothing
 *
 * A free waits where the driver is asked to; the simulated driver says so.
 */
#define _GNU_SOURCE
#include "green.h"
#include "kernels.h"
#include "simulator.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

enum { BYTES = 2 * MIB, WORDS = BYTES / 4 };

CUresult cuGetExportTable(const void **table, const unsigned char id[16]);

static Simulator simulator;
static CUcontext context;
static Kernels kernels;
static atomic_int waited;

static void note(void) { atomic_store(&waited, 1); }

/* Whether the free of a block waits that nobody has used. */
static int free_waits(void)
{
    CUdeviceptr block;
    CHECK(cuMemAlloc_v2(&block, BYTES));
    atomic_store(&waited, 0);
    simulator.after("cuCtxSynchronize", note);
    CHECK(cuMemFree_v2(block));
    simulator.after(NULL, NULL);
    return atomic_load(&waited);
}

static const char *told(int waits) { return waits ? "waits" : "no wait"; }

static int begins_with_one_of(const char *name, const char *const *beginnings)
{
    for (; *beginnings; beginnings++)
        if (strncmp(name, *beginnings, strlen(*beginnings)) == 0)
            return 1;
    return 0;
}

static void does_nothing(void *one, void *two, int three, void *four) { (void)one, (void)two, (void)three, (void)four; }

/* Called without anything to do, most of them fail: that they were called is what counts. */
static void rows(void)
{
    static const char *const submit[] = {
        "cuLaunch", "cuGraphLaunch", "cuGraphUpload", "cuMemcpy", "cuMemset", "cuStreamWrite", "cuStreamWaitValue",
        "cuStreamWaitEvent", "cuCtxWaitEvent", "cuGreenCtxWaitEvent", "cuStreamBatch", "cuStreamAttach", "cuStreamAddCallback", "cuEventRecord", "cuMemPrefetch", "cuMemDiscard",
        "cuMemBatchDecompress", "cuMemAllocAsync", "cuMemAllocFromPool", "cuMemFreeAsync", "cuSignalExternal",
        "cuWaitExternal", "cuGraphicsMap", "cuGraphicsUnmap", "cuMemMapArrayAsync", "cuModuleLoad", "cuLibraryLoad", NULL};
    static const char *const with_function[] = {"cuLaunchHostFunc", "cuStreamAddCallback", NULL};
    const char *(*names)(void);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    size_t called = 0, too_many = 0, too_few = 0;
    *(void **)&names = dlsym(RTLD_DEFAULT, "gpupool_hook_names");
    REQUIRE(driver && names);
    for (const char *name = names(); *name; name += strlen(name) + 1) {
        CUresult (*call)(uint64_t, void *, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                         uint64_t, uint64_t);
        if (!begins_with_one_of(name, submit) || !(*(void **)&call = dlsym(driver, name)))
            continue;
        free_waits();
        if (free_waits()) {
            printf("%s: the free before it waits\n", name);
            too_many++;
        }
        call(0, begins_with_one_of(name, with_function) ? (void *)does_nothing : NULL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
        called++;
        if (!free_waits()) {
            printf("%s: the free behind it does not wait\n", name);
            too_few++;
        }
    }
    REQUIRE(called > 100);

    CUdeviceptr block, base;
    size_t bytes, free_bytes;
    void *pinned;
    int kind;
    CHECK(cuMemAlloc_v2(&block, BYTES));
    free_waits();
    CHECK(cuMemGetInfo_v2(&free_bytes, &bytes));
    CHECK(cuPointerGetAttribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, block));
    CHECK(cuMemGetAddressRange_v2(&base, &bytes, block));
    CHECK(cuCtxSetCurrent(NULL));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuMemHostAlloc(&pinned, BYTES, 0));
    CHECK(cuMemFreeHost(pinned));
    CHECK(cuStreamSynchronize(NULL));
    too_many += (size_t)free_waits();
    CHECK(cuMemFree_v2(block));
    printf("waits: %zu too many, %zu too few\n", too_many, too_few);
}

static void work(CUstream stream, CUdeviceptr at) { iota(&kernels, stream, at, WORDS, 1); }

static void lazy(void)
{
    CUdeviceptr block, other;
    CHECK(cuMemAlloc_v2(&block, BYTES));
    for (int round = 0; round < 3; round++) {
        /* What is over is known to nobody by a wait for this stream alone. */
        work(NULL, block);
        CHECK(cuStreamSynchronize(NULL));
        int asked = 0;
        for (int pair = 0; pair < 100; pair++) {
            atomic_store(&waited, 0);
            simulator.after("cuCtxRecordEvent", note);
            CHECK(cuMemAlloc_v2(&other, BYTES));
            CHECK(cuMemFree_v2(other));
            asked += atomic_load(&waited);
        }
        simulator.after(NULL, NULL);
        printf("behind work that is over: asked in %d of 100 pairs\n", asked);
    }
    CHECK(cuMemFree_v2(block));
}

static void own(void)
{
    CUdeviceptr block;
    CUcontext of_green, other;
    CHECK(cuMemAlloc_v2(&block, BYTES));
    work(NULL, block);
    CHECK(cuCtxSynchronize());
    printf("behind cuCtxSynchronize: %s\n", told(free_waits()));

    CUgreenCtx green = green_on(0);
    CHECK(cuCtxFromGreenCtx(&of_green, green));
    work(NULL, block);
    CHECK(cuCtxSetCurrent(of_green));
    CHECK(cuCtxSynchronize());
    printf("behind cuCtxSynchronize in a green context: %s\n", told(free_waits()));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuGreenCtxDestroy(green));

    free_waits();
    other = start_on(1);
    Kernels of_other = load_kernels();
    CUdeviceptr there;
    CHECK(cuMemAlloc_v2(&there, BYTES));
    CHECK(cuCtxSetCurrent(context));
    free_waits();
    REQUIRE(!free_waits());
    CHECK(cuCtxSetCurrent(other));
    iota(&of_other, NULL, there, WORDS, 1);
    CHECK(cuCtxSetCurrent(context));
    printf("behind work on another GPU: %s\n", told(free_waits()));
    REQUIRE(!free_waits());
    CHECK(cuCtxCreate_v2(&other, 0, 0));
    CHECK(cuCtxSetCurrent(context));
    printf("behind a context more: %s\n", told(free_waits()));
    CHECK(cuCtxDestroy_v2(other));
    CHECK(cuMemFree_v2(there));
    CHECK(cuMemFree_v2(block));
}

enum { SUBMITTERS = 2, FREERS = 2, ROUNDS = 150 };
static atomic_int submitting = SUBMITTERS;
static atomic_ullong wrong;

/* Its copy out of a block is over when the free of that is back. */
static void *submits(void *argument)
{
    uint32_t start = (uint32_t)(uintptr_t)argument;
    CUdeviceptr kept;
    CUstream stream;
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemAlloc_v2(&kept, BYTES));
    for (uint32_t i = 0; i < ROUNDS; i++) {
        CUdeviceptr block;
        uint32_t last;
        CHECK(cuMemAlloc_v2(&block, BYTES));
        iota(&kernels, stream, block, WORDS, start + i);
        copy(&kernels, stream, kept, block, WORDS);
        CHECK(cuMemFree_v2(block));
        CHECK(cuMemcpyDtoH_v2(&last, kept + BYTES - 4, 4));
        if (last != start + i + WORDS - 1)
            atomic_fetch_add(&wrong, 1);
        if (i % 16 == 0)
            atomic_fetch_add(&wrong, count_wrong(&kernels, kept, WORDS, start + i));
    }
    CHECK(cuMemFree_v2(kept));
    CHECK(cuStreamDestroy_v2(stream));
    atomic_fetch_sub(&submitting, 1);
    return NULL;
}

static void *frees(void *unused)
{
    (void)unused;
    CHECK(cuCtxSetCurrent(context));
    while (atomic_load(&submitting)) {
        CUdeviceptr block;
        CHECK(cuMemAlloc_v2(&block, BYTES));
        CHECK(cuMemFree_v2(block));
    }
    return NULL;
}

static void threads(void)
{
    pthread_t all[SUBMITTERS + FREERS];
    for (size_t i = 0; i < SUBMITTERS + FREERS; i++)
        REQUIRE(pthread_create(&all[i], NULL, i < SUBMITTERS ? submits : frees, (void *)(i << 20)) == 0);
    for (size_t i = 0; i < SUBMITTERS + FREERS; i++)
        REQUIRE(pthread_join(all[i], NULL) == 0);
    printf("%llu words overwritten\n", atomic_load(&wrong));
}

static void *is_cancelled(void *unused)
{
    (void)unused;
    for (;;)
        pause();
    return NULL;
}

static void unseen(const char *way)
{
    void *found = NULL;
    int status = 0;
    if (strcmp(way, "dlsym") == 0)
        REQUIRE(dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuMemcpyDtoD"));
    else if (strcmp(way, "address") == 0)
        REQUIRE(cuGetProcAddress_v2("cuMemcpyDtoD", &found, 3010, 0, &status) == CUDA_SUCCESS && found);
    else if (strcmp(way, "table") == 0)
        CHECK(cuGetExportTable((const void **)&found, (const unsigned char[16]){1}));
    else if (strcmp(way, "cancel") == 0) {
        pthread_t thread;
        REQUIRE(pthread_create(&thread, NULL, is_cancelled, NULL) == 0);
        REQUIRE(pthread_cancel(thread) == 0);
        REQUIRE(pthread_join(thread, NULL) == 0);
    }
    else if (strcmp(way, "context") == 0) {
        void *(*look_up)(void *, const char *);
        CUresult (*retain)(CUcontext *, CUdevice);
        CUcontext other;
        *(void **)&look_up = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
        if (!look_up)
            *(void **)&look_up = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
        REQUIRE(look_up);
        *(void **)&retain = look_up(dlopen("libcuda.so.1", RTLD_NOW), "cuDevicePrimaryCtxRetain");
        CHECK(retain(&other, 1));
        CHECK(cuCtxSetCurrent(other));
        CHECK(cuCtxSetCurrent(context));
    }
    free_waits();
    printf("a second free: %s\n", told(free_waits()));
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    simulator = find_simulator();
    REQUIRE(simulator.after);
    context = start_on(0);
    kernels = load_kernels();
    if (strcmp(what, "rows") == 0)
        rows();
    else if (strcmp(what, "lazy") == 0)
        lazy();
    else if (strcmp(what, "own") == 0)
        own();
    else if (strcmp(what, "threads") == 0)
        threads();
    else
        unseen(what);
    printf("done\n");
    return 0;
}
