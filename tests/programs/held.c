/*
 * held free MIB..   a kernel is held on GPU 1 while blocks of GPU 0 of these sizes are freed, allocated anew and used
 * held turns        a kernel is held on each GPU in turn while a thread works on the other one, which then lets it go
 * held contexts     a kernel is held in another context of GPU 0 while a block and pinned memory of its primary context are freed,
 *                   and the other way round
 * held borrowed MIB a block of GPU 1, of which that has no room for the whole, is freed while a held kernel there is still
 *                   to read it, and GPU 0 takes and overwrites all memory that it gets; with pinned memory too. Where
 *                   frees wait this would never end.
 * held asked MIB    the same block is freed without a wait, and GPU 0 asks whether GPU 1 is done with it: in the middle of that, when
 *      CALL MODE GPU that call was made, another thread begins a capture on one of the two (simulated driver)
 * held refused      a block is freed whose context is about to be waited for when a capture begins there (simulated driver); a
 *                   kernel that is held until then is still to read the block
 * held again MIB beside MODE GPU
 *                   a block of GPU 0 is freed and allocated anew while another thread captures
 */
#define _GNU_SOURCE
#include "beside.h"
#include "held.h"
#include "simulator.h"

static Gpu gpus[2];

static void frees(int count, char **sizes)
{
    CUdeviceptr blocks[8];
    REQUIRE(count > 0 && count <= 8);
    CHECK(cuCtxSetCurrent(gpus[0].context));
    for (int i = 0; i < count; i++)
        CHECK(cuMemAlloc_v2(&blocks[i], strtoull(sizes[i], NULL, 10) * MIB));
    hold(&gpus[1]);
    pthread_t guard = watch("free, allocation or use on GPU 0");
    CHECK(cuCtxSetCurrent(gpus[0].context));
    for (int i = 0; i < count; i++)
        CHECK(cuMemFree_v2(blocks[i]));
    for (int i = count - 1; i >= 0; i--) {
        uint64_t words = strtoull(sizes[i], NULL, 10) * MIB / 4;
        CHECK(cuMemAlloc_v2(&blocks[i], words * 4));
        iota(&gpus[0].kernels, gpus[0].stream, blocks[i], words, (uint32_t)i);
        CHECK(cuStreamSynchronize(gpus[0].stream));
        printf("%s MiB: %llu wrong\n", sizes[i],
               (unsigned long long)count_wrong(&gpus[0].kernels, blocks[i], words, (uint32_t)i));
    }
    for (int i = 0; i < count; i++)
        CHECK(cuMemFree_v2(blocks[i]));
    watch_ends(guard);
    let_go(&gpus[1]);
}

/* Allocates and frees on one GPU while a kernel is held on the other; what that waits for is that this gets on. */
static void *work(void *argument)
{
    Gpu *own = argument, *other = &gpus[own == &gpus[0]];
    CHECK(cuCtxSetCurrent(own->context));
    for (size_t i = 0; i < 40; i++) {
        CUdeviceptr block;
        CHECK(cuMemAlloc_v2(&block, (1 + i % 7) * MIB));
        CHECK(cuMemsetD32Async(block, (unsigned)i, (1 + i % 7) * MIB / 4, own->stream));
        CHECK(cuMemFree_v2(block));
    }
    *other->flag = 1;
    return NULL;
}

static void turns(void)
{
    pthread_t guard = watch("work on the one GPU while the other is busy");
    for (int turn = 0; turn < 4; turn++) {
        pthread_t thread;
        hold(&gpus[turn % 2]);
        REQUIRE(pthread_create(&thread, NULL, work, &gpus[(turn + 1) % 2]) == 0);
        CHECK(cuStreamSynchronize(gpus[turn % 2].stream));
        REQUIRE(pthread_join(thread, NULL) == 0);
    }
    watch_ends(guard);
    printf("every turn ended\n");
}

static void contexts(void)
{
    Gpu both[2] = {gpus[0]};
    CHECK(cuCtxCreate_v2(&both[1].context, 0, 0));
    both[1].kernels = load_kernels();
    CHECK(cuStreamCreate(&both[1].stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemHostAlloc((void **)&both[1].flag, 4096, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    for (int busy = 0; busy < 2; busy++) {
        CUdeviceptr block;
        void *pinned;
        CHECK(cuCtxSetCurrent(both[!busy].context));
        CHECK(cuMemAlloc_v2(&block, 8 * MIB));
        CHECK(cuMemHostAlloc(&pinned, 8 * MIB, CU_MEMHOSTALLOC_PORTABLE));
        hold(&both[busy]);
        pthread_t guard = watch(busy ? "free of the primary context's memory" : "free of a created context's memory");
        /* Whichever context is current. */
        CHECK(cuMemFree_v2(block));
        CHECK(cuMemFreeHost(pinned));
        watch_ends(guard);
        let_go(&both[busy]);
        printf("%s context busy: the other one's memory is freed\n", busy ? "created" : "primary");
    }
    CHECK(cuCtxDestroy_v2(both[1].context));
}

static void borrowed(size_t bytes)
{
    enum { PINNED = 8 * MIB };
    CUdeviceptr lent, target, pinned_target, taken[64];
    uint32_t *pinned, *next;
    uint64_t words = bytes / 4;
    int count = 0;
    CHECK(cuCtxSetCurrent(gpus[1].context));
    CHECK(cuMemAlloc_v2(&target, bytes));
    CHECK(cuMemAlloc_v2(&pinned_target, PINNED));
    CHECK(cuMemAlloc_v2(&lent, bytes));
    CHECK(cuMemHostAlloc((void **)&pinned, PINNED, CU_MEMHOSTALLOC_PORTABLE));
    for (uint32_t i = 0; i < PINNED / 4; i++)
        pinned[i] = i + 5;
    iota(&gpus[1].kernels, gpus[1].stream, lent, words, 3);
    CHECK(cuStreamSynchronize(gpus[1].stream));
    hold(&gpus[1]);
    copy(&gpus[1].kernels, gpus[1].stream, target, lent, words);
    CHECK(cuMemcpyHtoDAsync_v2(pinned_target, pinned, PINNED, gpus[1].stream));

    pthread_t guard = watch("free by GPU 1, or allocation by GPU 0");
    CHECK(cuMemFree_v2(lent));
    CHECK(cuMemFreeHost(pinned));
    CHECK(cuCtxSetCurrent(gpus[0].context));
    /* All that there is, in pieces that get smaller. */
    for (size_t size = 256 * MIB; size >= 2 * MIB;) {
        CUresult result = count < 64 ? cuMemAlloc_v2(&taken[count], size) : CUDA_ERROR_OUT_OF_MEMORY;
        if (result == CUDA_ERROR_OUT_OF_MEMORY) {
            size /= 2;
            continue;
        }
        CHECK(result);
        CHECK(cuMemsetD32Async(taken[count], 0xffffffffu, size / 4, gpus[0].stream));
        CHECK(cuStreamSynchronize(gpus[0].stream));
        count++;
    }
    REQUIRE(count > 0 && count < 64);
    for (int i = 0; i < count; i++)
        CHECK(cuMemFree_v2(taken[i]));
    watch_ends(guard);

    let_go(&gpus[1]);
    CHECK(cuMemHostAlloc((void **)&next, PINNED, CU_MEMHOSTALLOC_PORTABLE));
    memset(next, 0xff, PINNED);
    printf("%llu words of the block and %llu of the pinned memory overwritten\n",
           (unsigned long long)count_wrong(&gpus[1].kernels, target, words, 3),
           (unsigned long long)count_wrong(&gpus[1].kernels, pinned_target, PINNED / 4, 5));
    CHECK(cuMemFreeHost(next));
    /* With the kernel gone, GPU 1 has again what GPU 0 freed without waiting, though nobody waited for that. */
    CHECK(cuMemAlloc_v2(&lent, bytes));
    CHECK(cuMemsetD32_v2(lent, 1, words));
    for (CUdeviceptr *block = (CUdeviceptr[]){lent, target, pinned_target, 0}; *block; block++)
        CHECK(cuMemFree_v2(*block));
}

static Beside capture;

static void begin_capture(void) { begin_beside(&capture); }

/* It is begun behind the next such call, whoever makes that. */
static void capture_after(const char *call, Gpu *gpu, int mode)
{
    Simulator simulator = find_simulator();
    REQUIRE(simulator.after);
    capture.context = gpu->context;
    capture.mode = mode;
    CHECK(cuCtxSetCurrent(gpu->context));
    CHECK(cuStreamCreate(&capture.stream, CU_STREAM_NON_BLOCKING));
    simulator.after(call, begin_capture);
}

static void asked(size_t bytes, const char *call, int mode, int gpu)
{
    CUdeviceptr beside, lent, taken[64];
    int count = 0;
    CHECK(cuCtxSetCurrent(gpus[1].context));
    CHECK(cuMemAlloc_v2(&beside, bytes));
    CHECK(cuMemAlloc_v2(&lent, bytes));
    CHECK(cuMemFree_v2(lent));
    capture_after(call, &gpus[gpu], mode);
    CHECK(cuCtxSetCurrent(gpus[0].context));
    while (!atomic_load(&capture.begun) && count < 64)
        CHECK(cuMemAlloc_v2(&taken[count++], 32 * MIB));
    REQUIRE(atomic_load(&capture.begun));
    end_beside(&capture);
    printf("end of the capture: %d\n", capture.ended);
    while (count > 0)
        CHECK(cuMemFree_v2(taken[--count]));
    CHECK(cuMemFree_v2(beside));
}

static void *let_go_then(void *unused)
{
    (void)unused;
    while (!atomic_load(&capture.begun))
        sched_yield();
    *gpus[0].flag = 1;
    return NULL;
}

static void refused(void)
{
    enum { BYTES = 8 * MIB };
    CUcontext other;
    CUdeviceptr target, block, next;
    pthread_t thread;
    uint64_t words = BYTES / 4;
    CHECK(cuCtxCreate_v2(&other, 0, 0));
    CHECK(cuCtxSetCurrent(gpus[0].context));
    CHECK(cuMemAlloc_v2(&target, BYTES));
    CHECK(cuMemAlloc_v2(&block, BYTES));
    iota(&gpus[0].kernels, gpus[0].stream, block, words, 3);
    CHECK(cuStreamSynchronize(gpus[0].stream));
    hold(&gpus[0]);
    copy(&gpus[0].kernels, gpus[0].stream, target, block, words);
    capture_after("cuCtxPushCurrent_v2", &gpus[0], CAPTURE_RELAXED);
    CHECK(cuCtxSetCurrent(other));
    REQUIRE(pthread_create(&thread, NULL, let_go_then, NULL) == 0);
    CHECK(cuMemFree_v2(block));
    REQUIRE(atomic_load(&capture.begun));
    CHECK(cuMemAlloc_v2(&next, BYTES));
    CHECK(cuMemsetD32Async(next, 0xffffffffu, words, NULL));
    REQUIRE(pthread_join(thread, NULL) == 0);
    end_beside(&capture);
    let_go(&gpus[0]);
    printf("%llu words of the block overwritten\n",
           (unsigned long long)count_wrong(&gpus[0].kernels, target, words, 3));
    CHECK(cuMemFree_v2(next));
    CHECK(cuMemFree_v2(target));
    CHECK(cuCtxDestroy_v2(other));
}

static void again(size_t bytes, int argc, char **argv)
{
    CUdeviceptr block;
    CHECK(cuCtxSetCurrent(gpus[0].context));
    prepare_told(&capture, argc, argv);
    begin_told(&capture);
    for (int i = 0; i < 3; i++) {
        CUresult result = cuMemAlloc_v2(&block, bytes);
        printf("allocation %d: %d\n", i, result);
        if (result == CUDA_SUCCESS) {
            CHECK(cuMemsetD32Async(block, (unsigned)i, bytes / 4, gpus[0].stream));
            CHECK(cuMemFree_v2(block));
        }
    }
    end_told(&capture);
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    for (int i = 0; i < 2; i++)
        open_gpu(&gpus[i], i);
    if (strcmp(what, "free") == 0)
        frees(argc - 2, argv + 2);
    else if (strcmp(what, "turns") == 0)
        turns();
    else if (strcmp(what, "contexts") == 0)
        contexts();
    else if (strcmp(what, "borrowed") == 0 && argc > 2)
        borrowed(strtoull(argv[2], NULL, 10) * MIB);
    else if (strcmp(what, "asked") == 0 && argc > 5)
        asked(strtoull(argv[2], NULL, 10) * MIB, argv[3], atoi(argv[4]), atoi(argv[5]));
    else if (strcmp(what, "refused") == 0)
        refused();
    else if (strcmp(what, "again") == 0 && argc > 2)
        again(strtoull(argv[2], NULL, 10) * MIB, argc, argv);
    else
        return 2;
    printf("done\n");
    return 0;
}
