/*
 * never_stuck PART: programs that would stand still if somebody waited for the GPU to be idle, or held their calls until it is.
 *   persistent    a kernel that runs until the end, while memory is allocated and other streams work
 *   host          kernels that wait for the host, one after the other, each let go by what a later call says
 *   functions     host functions that call the driver, and that wait for the thread that launched behind them
 *   value         cuStreamWaitValue, where the driver has it
 *   flags         each GPU's kernel waits for what the other's writes, launched one after the other
 *   capture       a capture that stays open while other threads allocate and launch
 *   ahead         200 ms of work are queued while memory is allocated and used
 *   connections   one hardware queue for all streams
 * Every kernel that waits ends by itself after 20 s, which fails the program.
 */
#include "probe.h"

#include "beside.h"

/* Blocks are large enough to be the pool's, and looked at in part. */
enum { BYTES = 4 * MIB, USED = 256 * KIB, WORDS = USED / 4, TURNS = 12, LIMIT = 20000 };

CUresult cuLaunchHostFunc(CUstream stream, void (*function)(void *), void *argument);

static Probed *gpu = &on_gpu[0];
static CUstream other;
static CUdeviceptr kept[TURNS];
static uint64_t wrong;

/* A new block, written in another stream and looked at there. */
static void use_new(int turn)
{
    uint64_t n = WORDS, found;
    uint32_t start = (uint32_t)turn;
    CHECK(cuMemAlloc_v2(&kept[turn], BYTES));
    iota(&gpu->kernels, other, kept[turn], n, start);
    CHECK(cuMemsetD32Async(gpu->wrong, 0, 2, other));
    launch(gpu->kernels.check_iota, other, (void *[]){&kept[turn], &n, &start, &gpu->wrong});
    CHECK(cuMemcpyDtoHAsync_v2(&found, gpu->wrong, sizeof found, other));
    CHECK(cuStreamSynchronize(other));
    wrong += found;
}

static void still_runs(CUstream stream) { REQUIRE(cuStreamQuery(stream) == NOT_READY); }

static void over(int turns)
{
    let_go();
    CHECK(cuCtxSynchronize());
    for (int i = 0; i < turns; i++)
        CHECK(cuMemFree_v2(kept[i]));
    printf("%d blocks used meanwhile, %llu words wrong\n", turns, (unsigned long long)wrong);
}

static void persistent(void)
{
    spin_in(gpu, gpu->stream, LIMIT);
    for (int turn = 0; turn < TURNS; turn++)
        use_new(turn);
    still_runs(gpu->stream);
    over(TURNS);
}

static void host(void)
{
    for (int turn = 0; turn < TURNS; turn++) {
        spin_in(gpu, gpu->stream, LIMIT);
        use_new(turn);
        still_runs(gpu->stream);
        let_go();
        CHECK(cuStreamSynchronize(gpu->stream));
    }
    over(TURNS);
}

static atomic_int may_return, in_function;
static CUresult answered;

static void asks(void *stream)
{
    /* The driver refuses such calls, which is the program's business. */
    answered = cuStreamQuery(stream);
    atomic_store(&in_function, 1);
    while (!atomic_load(&may_return))
        sched_yield();
}

static void functions(void)
{
    CHECK(cuLaunchHostFunc(gpu->stream, asks, other));
    while (!atomic_load(&in_function))
        sched_yield();
    for (int turn = 0; turn < TURNS; turn++)
        use_new(turn);
    still_runs(gpu->stream);
    atomic_store(&may_return, 1);
    CHECK(cuStreamSynchronize(gpu->stream));
    printf("a call in a host function: %d\n", answered);
    over(TURNS);
}

static void value(void)
{
    CUresult (*wait)(CUstream, CUdeviceptr, uint32_t, unsigned);
    *(void **)&wait = optional("cuStreamWaitValue32_v2");
    *flag = 0;
    CUresult result = wait ? wait(gpu->stream, flag_at(), 1, 0) : NOT_SUPPORTED;
    printf("cuStreamWaitValue32: %d\n", result);
    for (int turn = 0; turn < TURNS; turn++)
        use_new(turn);
    if (!result)
        still_runs(gpu->stream);
    over(TURNS);
}

/* A word of each GPU: its kernel waits for it, and the other GPU's kernel writes it. */
static void flags(void)
{
    CUdeviceptr word[2];
    uint64_t limit = (uint64_t)LIMIT * 1000000, one = 1;
    uint32_t set = 1;
    begin_second();
    for (int i = 0; i < 2; i++) {
        CHECK(cuCtxSetCurrent(on_gpu[i].context));
        CHECK(cuCtxEnablePeerAccess(on_gpu[!i].context, 0));
        warm_up(&on_gpu[i], on_gpu[i].stream);
        CHECK(cuMemAlloc_v2(&word[i], BYTES));
        CHECK(cuMemsetD8_v2(word[i], 0, BYTES));
        CHECK(cuCtxSynchronize());
    }
    for (int turn = 0; turn < TURNS; turn++) {
        double since = now_us();
        int first = turn % 2, second = !first;
        CHECK(cuCtxSetCurrent(on_gpu[first].context));
        CHECK(cuLaunchKernel(on_gpu[first].spin, 1, 1, 1, 1, 1, 1, 0, on_gpu[first].stream, (void *[]){&word[first], &limit}, NULL));
        /* Half of a pair is under way, and the program goes about its business. */
        CHECK(cuCtxSetCurrent(gpu->context));
        use_new(turn);
        CHECK(cuCtxSetCurrent(on_gpu[second].context));
        launch(on_gpu[second].kernels.fill, on_gpu[second].stream, (void *[]){&word[first], &one, &set});
        CHECK(cuStreamSynchronize(on_gpu[second].stream));
        CHECK(cuCtxSetCurrent(on_gpu[first].context));
        CHECK(cuStreamSynchronize(on_gpu[first].stream));
        REQUIRE(now_us() - since < LIMIT * 1e3);
        CHECK(cuMemsetD8_v2(word[first], 0, 8));
    }
    CHECK(cuCtxSetCurrent(gpu->context));
    over(TURNS);
}

static void capture(void)
{
    Beside beside = {.context = gpu->context, .mode = CAPTURE_RELAXED};
    CHECK(cuStreamCreate(&beside.stream, CU_STREAM_NON_BLOCKING));
    begin_beside(&beside);
    for (int turn = 0; turn < TURNS; turn++)
        use_new(turn);
    end_beside(&beside);
    printf("end of the capture: %d\n", beside.ended);
    over(TURNS);
}

static void ahead(void)
{
    CUdeviceptr at = flag_at();
    uint64_t limit = 200000000 / TURNS;
    *flag = 0;
    for (int turn = 0; turn < TURNS; turn++) {
        CHECK(cuLaunchKernel(gpu->spin, 1, 1, 1, 1, 1, 1, 0, gpu->stream, (void *[]){&at, &limit}, NULL));
        use_new(turn);
        copy(&gpu->kernels, gpu->stream, kept[turn], kept[0], WORDS);
    }
    CHECK(cuStreamSynchronize(gpu->stream));
    for (int turn = 0; turn < TURNS; turn++)
        wrong += wrong_at(gpu, kept[turn], USED, 0);
    over(TURNS);
}

static void connections(void)
{
    CUstream streams[8];
    uint64_t n = WORDS;
    for (int i = 0; i < 8; i++) {
        uint32_t start = 5;
        CHECK(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
        CHECK(cuMemAlloc_v2(&kept[i], BYTES));
        iota(&gpu->kernels, streams[i], kept[i], n, start);
    }
    /* Last, because what is behind it in the only queue would wait for it. */
    spin_in(gpu, gpu->stream, LIMIT);
    for (int i = 0; i < 8; i++)
        CHECK(cuStreamSynchronize(streams[i]));
    let_go();
    for (int i = 0; i < 8; i++)
        wrong += wrong_at(gpu, kept[i], USED, 5);
    over(8);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*part)(void);
    } parts[] = {{"persistent", persistent}, {"host", host},       {"functions", functions}, {"value", value},
                 {"flags", flags},           {"capture", capture}, {"ahead", ahead},         {"connections", connections}};
    if (argc > 1 && strcmp(argv[1], "connections") == 0)
        setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
    begin_probe(60);
    CHECK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    warm_up(gpu, gpu->stream);
    for (size_t i = 0; argc > 1 && i < sizeof parts / sizeof *parts; i++)
        if (strcmp(argv[1], parts[i].name) == 0) {
            now_asking = argv[1];
            parts[i].part();
            return 0;
        }
    printf("usage: never_stuck persistent | host | functions | value | flags | capture | ahead | connections\n");
    return 2;
}
