/*
 * small WHAT: memory in blocks smaller than 1 MiB, which share frames with each other.
 *   answers    what the driver says about such blocks, inside, at their ends and behind them, and about their frees
 *   threads    threads that allocate, write, read and free each other's blocks
 *   contexts   blocks of several contexts: freed elsewhere, and left behind when theirs ends
 *   fork       a child looks at its parent's blocks
 *   full       until the GPU has no room, and again
 *   graph      a graph that works on such blocks, and frees while a stream is being captured
 *   statistics what the C interface counts of such blocks
 *   loop       many allocations and frees of random sizes, with their contents
 */
#include "control.h"

#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#define LIVE 400

static const size_t SIZES[] = {1, 100, 512, 513, 4 * KIB, 65537, 300 * KIB, 512 * KIB + 1, MIB - 1};
enum { COUNT = sizeof SIZES / sizeof *SIZES };

static unsigned next(unsigned *seed) { return (*seed = *seed * 1664525 + 1013904223) >> 8; }

static void range(const char *what, CUdeviceptr base, CUdeviceptr pointer)
{
    CUdeviceptr start = 0;
    size_t bytes = 0;
    CUresult result = cuMemGetAddressRange_v2(&start, &bytes, pointer);
    printf("  %s: %d, %s, %zu bytes\n", what, result, result ? "nothing" : start == base ? "the block" : "elsewhere", bytes);
}

static unsigned long long number(CUdeviceptr pointer)
{
    unsigned long long id = 0;
    CHECK(cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, pointer));
    return id;
}

static void attributes(CUdeviceptr base, CUdeviceptr pointer)
{
    CUcontext context = NULL, current;
    int type = -1, ordinal = -1, managed = -1, mapped = -1, memops = -1, legacy = -1;
    CUdeviceptr device = 0, start = 0;
    size_t size = 0;
    void *host = NULL, *pool = &pool;
    uint64_t types = 9;
    CHECK(cuCtxGetCurrent(&current));
    CHECK(cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, pointer));
    CHECK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer));
    CHECK(cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, pointer));
    SHOW(cuPointerGetAttribute(&host, CU_POINTER_ATTRIBUTE_HOST_POINTER, pointer));
    CHECK(cuPointerGetAttribute(&memops, 6, pointer));
    CHECK(cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, pointer));
    CHECK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer));
    CHECK(cuPointerGetAttribute(&legacy, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, pointer));
    CHECK(cuPointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, pointer));
    CHECK(cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, pointer));
    CHECK(cuPointerGetAttribute(&mapped, CU_POINTER_ATTRIBUTE_MAPPED, pointer));
    SHOW(cuPointerGetAttribute(&pool, 17, pointer));
    CHECK(cuPointerGetAttribute(&types, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, pointer));
    printf("  context %s, type %d, pointer %s, memops %d, managed %d, GPU %d, handle %d, mapped %d, pool %s\n",
           context == current ? "current" : "other", type, device == pointer ? "same" : "other", memops, managed, ordinal,
           legacy, mapped, pool ? "some" : "none");
    printf("  handle types %llu, range %s, %zu bytes\n", (unsigned long long)types, start == base ? "at the block" : "elsewhere", size);
    int wanted[] = {CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_HOST_POINTER};
    void *data[] = {&size, &ordinal, &host};
    size = 0;
    SHOW(cuPointerGetAttributes(3, wanted, data, pointer));
    printf("  together: %zu bytes on GPU %d\n", size, ordinal);
}

static void memops(CUdeviceptr block, CUdeviceptr other)
{
    unsigned on = 1, first = 9, second = 9;
    SHOW(cuPointerSetAttribute(&on, 6, block + 8));
    CHECK(cuPointerGetAttribute(&first, 6, block));
    CHECK(cuPointerGetAttribute(&second, 6, other));
    printf("the block waits %u, another %u\n", first, second);
    CHECK(cuMemsetD8_v2(block, 3, 4));
}

static void answers(void)
{
    CUdeviceptr blocks[COUNT], pointer;
    int aligned = 1, ordinal = -1;
    start_on(0);
    for (int i = 0; i < COUNT; i++) {
        CHECK(cuMemAlloc_v2(&blocks[i], SIZES[i]));
        CHECK(cuMemsetD8_v2(blocks[i], (unsigned char)(i + 1), SIZES[i]));
        aligned &= blocks[i] % 512 == 0;
    }
    printf("addresses are %saligned\n", aligned ? "" : "not ");
    for (int i = 0; i < COUNT; i++) {
        unsigned char ends[2] = {0};
        printf("%zu bytes\n", SIZES[i]);
        CHECK(cuMemcpyDtoH_v2(&ends[0], blocks[i], 1));
        CHECK(cuMemcpyDtoH_v2(&ends[1], blocks[i] + SIZES[i] - 1, 1));
        printf("  contents %d %d\n", ends[0], ends[1]);
        range("first byte", blocks[i], blocks[i]);
        range("last byte", blocks[i], blocks[i] + SIZES[i] - 1);
        if (SIZES[i] % 512)
            range("behind it", blocks[i], blocks[i] + SIZES[i]);
        attributes(blocks[i], blocks[i] + SIZES[i] / 2);
    }
    for (int i = 1; i < COUNT; i++)
        REQUIRE(number(blocks[i]) != number(blocks[i - 1]));
    memops(blocks[4], blocks[5]);

    printf("frees of what is none\n");
    SHOW(cuMemFree_v2(blocks[5] + 8));
    SHOW(cuMemFree_v2(blocks[5] + 512));
    SHOW(cuMemFree_v2(blocks[6] + 100 * KIB));
    range("the block after them", blocks[5], blocks[5]);
    SHOW(cuMemFree_v2(blocks[5]));
    SHOW(cuMemFree_v2(blocks[5]));
    range("the block after that", blocks[5], blocks[5]);
    SHOW(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, blocks[5]));
    for (int i = 0; i < COUNT; i++) {
        unsigned char last = 0;
        if (i == 5)
            continue;
        CHECK(cuMemcpyDtoH_v2(&last, blocks[i] + SIZES[i] - 1, 1));
        printf("neighbour of %zu bytes holds %d\n", SIZES[i], last);
    }
    unsigned long long before = number(blocks[4]);
    SHOW(cuMemFree_v2(blocks[4]));
    CHECK(cuMemAlloc_v2(&pointer, SIZES[4]));
    printf("the next block has %s number\n", number(pointer) == before ? "the same" : "another");
    unsigned on = 9;
    CHECK(cuPointerGetAttribute(&on, 6, pointer));
    printf("it waits %u\n", on);
    SHOW(cuMemFree_v2(pointer));
    pointer = 1;
    SHOW(cuMemAlloc_v2(&pointer, 0));
    SHOW(cuMemAllocPitch_v2(&pointer, &(size_t){0}, 100, 10, 4));
    range("pitched", pointer, pointer + 512);
    SHOW(cuMemFree_v2(pointer));
    for (int i = 0; i < COUNT; i++)
        if (i != 4 && i != 5)
            CHECK(cuMemFree_v2(blocks[i]));
}

/* What a thread made last, for another one to free. */
static _Atomic(CUdeviceptr) shelf[64];
static CUcontext shared;

static void *work(void *argument)
{
    unsigned seed = (unsigned)(uintptr_t)argument;
    uintptr_t wrong = 0;
    CHECK(cuCtxSetCurrent(shared));
    for (int i = 0; i < 1500; i++) {
        CUdeviceptr made = 0, base = 0;
        size_t bytes = 4 + next(&seed) % (1 << (3 + next(&seed) % 17)), found = 0;
        unsigned mark = next(&seed), read[2];
        CHECK(cuMemAlloc_v2(&made, bytes));
        CHECK(cuMemGetAddressRange_v2(&base, &found, made + bytes - 1));
        wrong += base != made || found != bytes;
        CHECK(cuMemcpyHtoD_v2(made, &mark, 4));
        CHECK(cuMemcpyHtoD_v2(made + bytes - 4, &mark, 4));
        CHECK(cuMemcpyDtoH_v2(&read[1], made + bytes - 4, 4));
        CHECK(cuMemcpyDtoH_v2(&read[0], made, 4));
        wrong += (bytes >= 8 && read[0] != mark) || read[1] != mark;
        CUdeviceptr other = __atomic_exchange_n((CUdeviceptr *)&shelf[next(&seed) % 64], made, __ATOMIC_ACQ_REL);
        if (other)
            CHECK(cuMemFree_v2(other));
    }
    return (void *)wrong;
}

static void threads(void)
{
    pthread_t all[6];
    uintptr_t wrong = 0;
    shared = start_on(0);
    for (uintptr_t i = 0; i < 6; i++)
        REQUIRE(pthread_create(&all[i], NULL, work, (void *)(i + 1)) == 0);
    for (int i = 0; i < 6; i++) {
        void *of_thread;
        REQUIRE(pthread_join(all[i], &of_thread) == 0);
        wrong += (uintptr_t)of_thread;
    }
    for (int i = 0; i < 64; i++)
        if (shelf[i])
            CHECK(cuMemFree_v2(shelf[i]));
    printf("%zu wrong\n", (size_t)wrong);
}

static void contexts(void)
{
    CUcontext first = start_on(0), second;
    CUdeviceptr in_first, in_second[3], again;
    CUdevice device;
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuMemAlloc_v2(&in_first, 5000));
    CHECK(cuCtxCreate_v2(&second, 0, 0));
    for (int i = 0; i < 3; i++)
        CHECK(cuMemAlloc_v2(&in_second[i], 5000));
    printf("frames are %sshared between contexts\n", in_first >> 21 == in_second[0] >> 21 ? "" : "not ");
    SHOW(cuMemFree_v2(in_first));
    CHECK(cuCtxSetCurrent(first));
    SHOW(cuMemFree_v2(in_second[0]));
    CHECK(cuMemAlloc_v2(&in_first, 5000));
    CHECK(cuCtxDestroy_v2(second));
    SHOW(cuMemFree_v2(in_second[1]));
    range("of the context that is gone", 0, in_second[2]);
    range("of the one that is not", in_first, in_first);
    CHECK(cuCtxCreate_v2(&second, 0, 0));
    CHECK(cuMemAlloc_v2(&again, 5000));
    range("of the next one", again, again);
    CHECK(cuCtxDestroy_v2(second));
    CHECK(cuCtxSetCurrent(first));
    CHECK(cuDevicePrimaryCtxReset_v2(device));
    CHECK(cuDevicePrimaryCtxRetain(&first, device));
    CHECK(cuCtxSetCurrent(first));
    SHOW(cuMemFree_v2(in_first));
    range("after a reset", 0, in_first);
    CHECK(cuMemAlloc_v2(&again, 5000));
    CHECK(cuMemsetD8_v2(again, 7, 5000));
    SHOW(cuMemFree_v2(again));
}

static void in_a_child(void)
{
    CUdeviceptr block, more = 0;
    unsigned char first = 0;
    start_on(0);
    CHECK(cuMemAlloc_v2(&block, 5000));
    CHECK(cuMemsetD8_v2(block, 9, 5000));
    fflush(stdout);
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (!child) {
        SHOW(cuMemAlloc_v2(&more, 5000));
        SHOW(cuMemFree_v2(block));
        fflush(stdout);
        _exit(0);
    }
    int status;
    REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status));
    CHECK(cuMemcpyDtoH_v2(&first, block + 4999, 1));
    printf("the parent's holds %d\n", first);
    SHOW(cuMemFree_v2(block));
}

static void full(void)
{
    static CUdeviceptr blocks[100000];
    size_t counts[2];
    start_on(0);
    for (int round = 0; round < 2; round++) {
        size_t count = 0;
        CUresult result;
        while (!(result = cuMemAlloc_v2(&blocks[count], 700 * KIB)) && count < 99999)
            count++;
        printf("then %d, and the pointer is %s\n", result, blocks[count] ? "set" : "0");
        SHOW(cuMemAlloc_v2(&blocks[count], 700 * KIB));
        for (size_t i = 0; i < count; i++)
            CHECK(cuMemsetD8_v2(blocks[i] + 700 * KIB - 1, (unsigned char)i, 1));
        for (size_t i = 0; i < count; i++) {
            unsigned char last;
            CHECK(cuMemcpyDtoH_v2(&last, blocks[i] + 700 * KIB - 1, 1));
            REQUIRE(last == (unsigned char)i);
            CHECK(cuMemFree_v2(blocks[i]));
        }
        counts[round] = count;
    }
    printf("the second time %s\n", counts[1] + 4 >= counts[0] ? "as many" : "fewer");
}

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream);
CUresult cuGraphInstantiateWithFlags(void **exec, CUgraph graph, unsigned long long flags);
CUresult cuGraphLaunch(void *exec, CUstream stream);

static void graph(void)
{
    CUdeviceptr from, to, more;
    CUstream stream;
    CUgraph graph;
    void *exec;
    unsigned char last = 0;
    start_on(0);
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemAlloc_v2(&from, 3000));
    CHECK(cuMemAlloc_v2(&to, 3000));
    CHECK(cuMemsetD8_v2(from, 5, 3000));
    /* The stream does not wait for the fill, nor does this thread. */
    CHECK(cuCtxSynchronize());
    CHECK(cuStreamBeginCapture_v2(stream, 2));
    CHECK(cuMemcpyDtoDAsync_v2(to, from, 3000, stream));
    CHECK(cuStreamEndCapture(stream, &graph));
    CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    CHECK(cuGraphLaunch(exec, stream));
    CHECK(cuStreamSynchronize(stream));
    CHECK(cuMemcpyDtoH_v2(&last, to + 2999, 1));
    printf("the graph copied %d\n", last);
    SHOW(cuMemFreeAsync(from, stream));
    SHOW(cuMemFreeAsync(from + 512, stream));
    CHECK(cuStreamSynchronize(stream));
    CHECK(cuMemAlloc_v2(&more, 3000));
    CHECK(cuMemsetD8_v2(more, 6, 3000));
    CHECK(cuMemcpyDtoH_v2(&last, to + 2999, 1));
    printf("its neighbour holds %d\n", last);
    SHOW(cuMemFree_v2(more));
    SHOW(cuMemFree_v2(to));
}

static void loop(void)
{
    static CUdeviceptr blocks[LIVE];
    static size_t sizes[LIVE];
    static unsigned marks[LIVE];
    unsigned seed = 7, wrong = 0;
    start_on(0);
    for (int i = 0; i < 8000; i++) {
        unsigned at = next(&seed) % LIVE, read;
        if (blocks[at]) {
            CHECK(cuMemcpyDtoH_v2(&read, blocks[at] + sizes[at] - 4, 4));
            wrong += read != marks[at];
            CHECK(cuMemFree_v2(blocks[at]));
        }
        sizes[at] = 4 + next(&seed) % (MIB - 4);
        marks[at] = next(&seed);
        CHECK(cuMemAlloc_v2(&blocks[at], sizes[at]));
        CHECK(cuMemcpyHtoD_v2(blocks[at] + sizes[at] - 4, &marks[at], 4));
    }
    for (int i = 0; i < LIVE; i++)
        if (blocks[i])
            CHECK(cuMemFree_v2(blocks[i]));
    printf("%u wrong\n", wrong);
}

/* Ten at once at most, beside a large one, and half of them are freed. */
static void statistics(void)
{
    CUdeviceptr blocks[10], large;
    Control c = find_control(RTLD_DEFAULT);
    gpupool_statistics s = {.size = sizeof s};
    start_on(0);
    for (int i = 0; i < 10; i++)
        CHECK(cuMemAlloc_v2(&blocks[i], 1000));
    CHECK(cuMemAlloc_v2(&large, 3 * MIB));
    CHECK(cuMemFree_v2(large));
    for (int i = 0; i < 5; i++)
        CHECK(cuMemFree_v2(blocks[i]));
    REQUIRE(c.statistics(&s) == 0);
    printf("%llu blocks, %llu bytes, %llu at most, %llu allocations, %llu without new memory\n", (unsigned long long)s.live_blocks,
           (unsigned long long)s.live_bytes, (unsigned long long)s.peak_live_bytes, (unsigned long long)s.allocations,
           (unsigned long long)s.reuses);
}

int main(int count, char **arguments)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } ALL[] = {{"answers", answers}, {"threads", threads}, {"contexts", contexts}, {"fork", in_a_child},
               {"full", full},       {"graph", graph},     {"loop", loop},
               {"statistics", statistics}};
    for (size_t i = 0; count == 2 && i < sizeof ALL / sizeof *ALL; i++)
        if (!strcmp(arguments[1], ALL[i].name)) {
            ALL[i].run();
            return 0;
        }
    fprintf(stderr, "usage: small answers|threads|contexts|fork|full|graph|loop|statistics\n");
    return 2;
}
