/*
 * graphs PART
 *   captures   what allocation and free do to a capture, in every mode, from the capturing thread and from another
 *   replay     a graph over memory allocated before, replayed after other blocks were freed, reused and overwritten
 *   inside     the same with memory that was allocated while capturing
 *   nodes      a graph that allocates and frees for itself, replayed
 *   room       such a graph on a GPU whose memory was freed and may be kept by somebody
 */
#include "kernels.h"
#include "streams.h"
#include "vmm.h"

#include <pthread.h>

#define BYTES (6 * MIB)
#define ELEMENTS (BYTES / 4)

static CUcontext context;
static Kernels kernels;

/* What is done while a stream is being captured. */
typedef struct {
    const char *name;
    CUresult (*act)(void);
} Call;

static CUdeviceptr large, small;

static CUresult allocate_large(void)
{
    CUdeviceptr address;
    return cuMemAlloc_v2(&address, BYTES);
}
static CUresult allocate_small(void)
{
    CUdeviceptr address;
    return cuMemAlloc_v2(&address, 4096);
}
static CUresult free_large(void) { return cuMemFree_v2(large); }
static CUresult free_small(void) { return cuMemFree_v2(small); }
static CUresult own_memory(void)
{
    uint64_t handle;
    CUmemAllocationProp properties = on_device(0);
    CUresult result = cuMemCreate(&handle, 2 * MIB, &properties, 0);
    if (result == CUDA_SUCCESS) {
        map_for(0, handle, 2 * MIB);
        result = cuMemRelease(handle);
    }
    return result;
}
static CUresult ask(void)
{
    int ordinal;
    size_t free_bytes, total;
    CHECK(cuMemGetInfo_v2(&free_bytes, &total));
    return cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, large);
}
static CUresult synchronise(void) { return cuCtxSynchronize(); }

static const Call CALLS[] = {
    {"allocate 6 MiB", allocate_large}, {"allocate 4 KiB", allocate_small}, {"free 6 MiB", free_large},
    {"free 4 KiB", free_small},         {"memory of its own", own_memory},  {"questions", ask},
    {"synchronise", synchronise},
};

static void *elsewhere(void *argument)
{
    const Call *call = argument;
    CHECK(cuCtxSetCurrent(context));
    return (void *)(intptr_t)call->act();
}

static void captures(void)
{
    static const char *const MODES[] = {"global", "thread local", "relaxed"};
    for (int mode = CAPTURE_GLOBAL; mode <= CAPTURE_RELAXED; mode++)
        for (int other = 0; other < 2; other++)
            for (size_t i = 0; i < sizeof CALLS / sizeof *CALLS; i++) {
                CUstream stream;
                CUgraph graph;
                pthread_t thread;
                void *answer;
                CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
                CHECK(cuMemAlloc_v2(&large, BYTES));
                CHECK(cuMemAlloc_v2(&small, 4096));
                CHECK(cuStreamBeginCapture_v2(stream, mode));
                iota(&kernels, stream, large, 1024, 1);
                if (other) {
                    REQUIRE(pthread_create(&thread, NULL, elsewhere, (void *)(uintptr_t)&CALLS[i]) == 0);
                    REQUIRE(pthread_join(thread, &answer) == 0);
                } else {
                    answer = (void *)(intptr_t)CALLS[i].act();
                }
                printf("%s, %s, %s: %d, end of the capture: %d\n", MODES[mode], other ? "another thread" : "its own thread",
                       CALLS[i].name, (int)(intptr_t)answer, cuStreamEndCapture(stream, &graph));
                CHECK(cuStreamDestroy_v2(stream));
            }
}

static CUgraphExec captured(CUstream stream)
{
    CUgraph graph;
    CUgraphExec exec;
    CHECK(cuStreamEndCapture(stream, &graph));
    CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    CHECK(cuGraphDestroy(graph));
    return exec;
}

static CUdeviceptr block(uint32_t start)
{
    CUdeviceptr address;
    CHECK(cuMemAlloc_v2(&address, BYTES));
    iota(&kernels, NULL, address, ELEMENTS, start);
    CHECK(cuCtxSynchronize());
    return address;
}

/* Replays: from is written anew each time, to is a copy of it, and what others hold is as they left it. */
static void check_replays(CUgraphExec exec, CUstream stream, CUdeviceptr from, CUdeviceptr to)
{
    for (uint32_t round = 0; round < 4; round++) {
        CUdeviceptr others[3];
        for (uint32_t i = 0; i < 3; i++)
            others[i] = block(1000 * round + i);
        iota(&kernels, stream, from, ELEMENTS, 77 * round);
        CHECK(cuGraphLaunch(exec, stream));
        /* Freed while the graph may be running. */
        CHECK(cuMemFree_v2(others[0]));
        CHECK(cuStreamSynchronize(stream));
        printf("replay %u: %llu wrong, of others %llu and %llu\n", round,
               (unsigned long long)wrong_on_host(to, BYTES, 77 * round),
               (unsigned long long)wrong_on_host(others[1], BYTES, 1000 * round + 1),
               (unsigned long long)wrong_on_host(others[2], BYTES, 1000 * round + 2));
        CHECK(cuMemFree_v2(others[1]));
        CHECK(cuMemFree_v2(others[2]));
    }
}

static void replay(CUstream stream)
{
    CUdeviceptr from = block(0), to = block(0), freed = block(0);
    CHECK(cuStreamBeginCapture_v2(stream, CAPTURE_GLOBAL));
    copy(&kernels, stream, to, from, ELEMENTS);
    CUgraphExec exec = captured(stream);
    CHECK(cuMemFree_v2(freed));
    check_replays(exec, stream, from, to);
    CHECK(cuGraphExecDestroy(exec));
    CHECK(cuMemFree_v2(from));
    CHECK(cuMemFree_v2(to));
}

static void inside(CUstream stream)
{
    CUdeviceptr from = block(0), to = block(0), freed = block(0), between;
    CHECK(cuStreamBeginCapture_v2(stream, CAPTURE_GLOBAL));
    CHECK(cuMemFree_v2(freed));
    CHECK(cuMemAlloc_v2(&between, BYTES));
    copy(&kernels, stream, between, from, ELEMENTS);
    copy(&kernels, stream, to, between, ELEMENTS);
    CUgraphExec exec = captured(stream);
    check_replays(exec, stream, from, to);
}

static void nodes(CUstream stream)
{
    CUdeviceptr from = block(0), to = block(0), between;
    CHECK(cuStreamBeginCapture_v2(stream, CAPTURE_GLOBAL));
    CHECK(cuMemAllocAsync(&between, BYTES, stream));
    copy(&kernels, stream, between, from, ELEMENTS);
    copy(&kernels, stream, to, between, ELEMENTS);
    CHECK(cuMemFreeAsync(between, stream));
    CUgraphExec exec = captured(stream);
    check_replays(exec, stream, from, to);
    CHECK(cuGraphExecDestroy(exec));
}

static void room(CUstream stream)
{
    CUdeviceptr most, between;
    CHECK(cuMemAlloc_v2(&most, 40 * MIB));
    CHECK(cuMemFree_v2(most));
    CHECK(cuStreamBeginCapture_v2(stream, CAPTURE_GLOBAL));
    CHECK(cuMemAllocAsync(&between, 32 * MIB, stream));
    iota(&kernels, stream, between, 1024, 5);
    CHECK(cuMemFreeAsync(between, stream));
    CUgraphExec exec = captured(stream);
    SHOW(cuGraphLaunch(exec, stream));
    SHOW(cuStreamSynchronize(stream));
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(CUstream);
    } PARTS[] = {{"replay", replay}, {"inside", inside}, {"nodes", nodes}, {"room", room}};
    REQUIRE(argc == 2);
    CUstream stream;
    context = start_on(0);
    kernels = load_kernels();
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    if (strcmp(argv[1], "captures") == 0)
        captures();
    for (size_t i = 0; i < sizeof PARTS / sizeof *PARTS; i++)
        if (strcmp(argv[1], PARTS[i].name) == 0)
            PARTS[i].run(stream);
    return 0;
}
