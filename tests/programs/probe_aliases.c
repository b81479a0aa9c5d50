/*
 * A second mapping of a chunk beside the one that programs use: who sees what was written through the other one, and what it costs to
 * remap a chunk while kernels of the same context work on other memory.
 */
#include "probe.h"

enum { CHUNK = 32 * MIB, OTHER = 64 * MIB };

static Probed *gpu = &on_gpu[0];
static CUdeviceptr mapped, alias, source, target, neighbour;
static uint64_t words = CHUNK / 4;
static CUstream engine;

static const char A10[] = "B4: what a finished writer wrote through one mapping is seen through the other";

/* A kernel writes through the mapping, and the copy engine reads through the alias: 0 after the host waited, 1 in the same stream,
 * 2 in another stream that waits for an event. */
static void kernel_then_copy(int how, uint32_t start)
{
    static const char *const ways[] = {"after the host waited", "in the same stream", "in a stream that waits for an event"};
    CUevent written;
    CUstream reader = how == 1 ? gpu->stream : engine;
    now_asking = ways[how];
    CHECK(cuEventCreate(&written, CU_EVENT_DISABLE_TIMING));
    iota(&gpu->kernels, gpu->stream, mapped, words, start);
    CHECK(cuEventRecord(written, gpu->stream));
    if (how == 0)
        CHECK(cuStreamSynchronize(gpu->stream));
    if (how == 2)
        CHECK(cuStreamWaitEvent(engine, written, 0));
    CHECK(cuMemcpyDtoDAsync_v2(target, alias, CHUNK, reader));
    CHECK(cuStreamSynchronize(reader));
    uint64_t wrong = wrong_at(gpu, target, CHUNK, start);
    answer(A10, !wrong, "a kernel wrote, and %s a copy through the alias finds %llu words wrong", ways[how], (unsigned long long)wrong);
}

static void copy_then_kernel(int how, uint32_t start)
{
    static const char *const ways[] = {"after the host waited", "in the same stream", "in a stream that waits for an event"};
    CUevent written;
    CUstream writer = how == 1 ? gpu->stream : engine;
    uint64_t wrong;
    now_asking = ways[how];
    CHECK(cuEventCreate(&written, CU_EVENT_DISABLE_TIMING));
    iota(&gpu->kernels, gpu->stream, source, words, start);
    CHECK(cuMemsetD32Async(gpu->wrong, 0, 2, gpu->stream));
    /* So that the old words are in every cache that might keep them. */
    uint32_t old = start - 1;
    launch(gpu->kernels.check_iota, gpu->stream, (void *[]){&mapped, &words, &old, &gpu->wrong});
    CHECK(cuMemsetD32Async(gpu->wrong, 0, 2, gpu->stream));
    CHECK(cuStreamSynchronize(gpu->stream));
    CHECK(cuMemcpyDtoDAsync_v2(alias, source, CHUNK, writer));
    CHECK(cuEventRecord(written, writer));
    if (how == 0)
        CHECK(cuStreamSynchronize(writer));
    if (how == 2)
        CHECK(cuStreamWaitEvent(gpu->stream, written, 0));
    launch(gpu->kernels.check_iota, gpu->stream, (void *[]){&mapped, &words, &start, &gpu->wrong});
    CHECK(cuStreamSynchronize(gpu->stream));
    CHECK(cuMemcpyDtoH_v2(&wrong, gpu->wrong, 8));
    answer(A10, !wrong, "a copy wrote through the alias, and %s a kernel finds %llu words wrong", ways[how], (unsigned long long)wrong);
}

/* A kernel that runs until let_go, on every multiprocessor or some of them. */
static void run_on(CUdeviceptr at, size_t bytes, uint32_t start, unsigned blocks, double milliseconds)
{
    uint64_t n = bytes / 4, limit = (uint64_t)(milliseconds * 1e6);
    CUdeviceptr held = flag_at();
    double since = now_us();
    flag[0] = flag[1] = 0;
    CHECK(cuLaunchKernel(gpu->check_until, blocks, 1, 1, 256, 1, 1, 0, gpu->stream,
                         (void *[]){&at, &n, &start, &held, &limit, &gpu->wrong}, NULL));
    while (!flag[1]) {
        sched_yield();
        REQUIRE(now_us() - since < 10e6);
    }
}

static uint64_t found(void)
{
    uint64_t wrong;
    let_go();
    CHECK(cuStreamSynchronize(gpu->stream));
    CHECK(cuMemcpyDtoH_v2(&wrong, gpu->wrong, 8));
    CHECK(cuMemsetD8_v2(gpu->wrong, 0, 8));
    return wrong;
}

/* Written through the alias while a kernel works on other memory; a kernel that begins afterwards reads. */
static void copy_beside_kernel(uint32_t start)
{
    now_asking = "a copy through the alias beside a kernel";
    iota(&gpu->kernels, gpu->stream, source, words, start);
    iota(&gpu->kernels, gpu->stream, neighbour, OTHER / 4, 9);
    CHECK(cuCtxSynchronize());
    run_on(neighbour, OTHER, 9, 64, 2000);
    CHECK(cuMemcpyDtoDAsync_v2(alias, source, CHUNK, engine));
    CHECK(cuStreamSynchronize(engine));
    int runs = cuStreamQuery(gpu->stream) == NOT_READY;
    uint64_t disturbed = found();
    uint64_t wrong = wrong_at(gpu, mapped, CHUNK, start);
    answer(A10, !wrong && !disturbed,
           "written through the alias while a kernel works on other memory (it still ran: %s): the next kernel finds %llu words wrong, "
           "the running one %llu of its own",
           runs ? "yes" : "no", (unsigned long long)wrong, (unsigned long long)disturbed);
}

/* A grid that is there before and after the write: nothing relies on what it reads. */
static void present_grid(uint32_t start)
{
    now_asking = "a grid that was there before";
    uint64_t wrong;
    iota(&gpu->kernels, gpu->stream, mapped, words, start);
    iota(&gpu->kernels, gpu->stream, source, words, start + 1);
    CHECK(cuCtxSynchronize());
    run_on(mapped, 64 * KIB, start, 8, 2000);
    CHECK(cuMemcpyDtoDAsync_v2(alias, source, CHUNK, engine));
    CHECK(cuStreamSynchronize(engine));
    for (double since = now_us(); now_us() - since < 20e3;)
        sched_yield();
    wrong = found();
    tell("a grid that was there before something was written through the alias: %s", wrong ? "reads other words" : "sees nothing");
}

typedef enum { IDLE, SPINNER, STREAMING } Beside;
static const char *const BESIDE[] = {"nothing", "a kernel that spins", "kernels that read 64 MiB"};

/*
 * Whether a remap waits is no question of how long it takes, which on a busy machine may be any time: one that waits for a kernel returns when
 * that is over, and the kernel runs for as long as nobody lets it go, which is done behind the last remap. Its own limit ends it where one waits.
 */
enum { KERNEL_MS = 20000 };
static int has_waited;

static void remap_beside(Beside beside, int place, size_t bytes, int with_alias)
{
    enum { TURNS = 20 };
    double times[3][TURNS];
    static const char *const calls[] = {"unmap", "map", "access"};
    CUdeviceptr at = reserve(bytes), seconds[2] = {reserve(bytes), reserve(bytes)};
    uint64_t chunks[2] = {physical(place, bytes), physical(place, bytes)};
    char what[160];
    int turns = 0, runs = 1;
    now_asking = BESIDE[beside];
    if (with_alias)
        for (int i = 0; i < 2; i++)
            map_here(seconds[i], chunks[i], bytes, 1);
    map_here(at, chunks[0], bytes, 1);
    CHECK(cuCtxSynchronize());
    if (beside == SPINNER)
        spin_in(gpu, gpu->stream, KERNEL_MS);
    if (beside == STREAMING)
        run_on(neighbour, OTHER, 9, 1024, KERNEL_MS);
    for (; turns < TURNS && runs; turns++) {
        CUmemAccessDesc access = {{ON_DEVICE, 0}, READ_WRITE};
        double t0 = now_us();
        CHECK(cuMemUnmap(at, bytes));
        double t1 = now_us();
        CHECK(cuMemMap(at, bytes, 0, chunks[(turns + 1) % 2], 0));
        double t2 = now_us();
        CHECK(cuMemSetAccess(at, bytes, &access, 1));
        double t3 = now_us();
        times[0][turns] = t1 - t0;
        times[1][turns] = t2 - t1;
        times[2][turns] = t3 - t2;
        runs = beside == IDLE || cuStreamQuery(gpu->stream) == NOT_READY;
    }
    let_go();
    CHECK(cuCtxSynchronize());
    CHECK(cuMemsetD8_v2(gpu->wrong, 0, 8));
    for (int i = 0; i < 3; i++) {
        snprintf(what, sizeof what, "%s of %zu MiB of %s%s, beside %s", calls[i], bytes / MIB, place_name(place),
                 with_alias ? " with an alias" : "", BESIDE[beside]);
        measured_all(what, "us", times[i], (size_t)turns);
    }
    if (beside != IDLE)
        answer("A10, B4: exchanging memory waits for no kernel on other memory", runs, "%zu MiB of %s%s, beside %s: a remap waits: %s",
               bytes / MIB, place_name(place), with_alias ? " with an alias" : "", BESIDE[beside], runs ? "no" : "yes");
    has_waited |= !runs;
    CHECK(cuMemUnmap(at, bytes));
    for (int i = 0; i < 2; i++) {
        if (with_alias)
            CHECK(cuMemUnmap(seconds[i], bytes));
        CHECK(cuMemRelease(chunks[i]));
        CHECK(cuMemAddressFree(seconds[i], bytes));
    }
    CHECK(cuMemAddressFree(at, bytes));
}

int main(int argc, char **argv)
{
    size_t largest = argc > 1 ? (size_t)atoi(argv[1]) * MIB : 512 * MIB;
    begin_probe(90);
    CHECK(cuStreamCreate(&engine, CU_STREAM_NON_BLOCKING));
    uint64_t chunk = physical(0, CHUNK);
    mapped = reserve(CHUNK + OTHER);
    neighbour = mapped + CHUNK;
    alias = reserve(CHUNK);
    map_here(mapped, chunk, CHUNK, 1);
    map_here(alias, chunk, CHUNK, 1);
    map_here(neighbour, physical(0, OTHER), OTHER, 1);
    CHECK(cuMemAlloc_v2(&source, CHUNK));
    CHECK(cuMemAlloc_v2(&target, CHUNK));
    iota(&gpu->kernels, gpu->stream, neighbour, OTHER / 4, 9);
    warm_up(gpu, gpu->stream);
    for (int how = 0; how < 3; how++) {
        kernel_then_copy(how, 100 + 10 * (uint32_t)how);
        copy_then_kernel(how, 101 + 10 * (uint32_t)how);
    }
    copy_beside_kernel(200);
    present_grid(300);
    if (gpus > 1) {
        /* The other GPU writes through the alias, and this one reads. */
        begin_second();
        grant(mapped, CHUNK, 2);
        grant(alias, CHUNK, 2);
        CHECK(cuCtxSetCurrent(on_gpu[1].context));
        iota(&on_gpu[1].kernels, on_gpu[1].stream, alias, words, 400);
        CHECK(cuStreamSynchronize(on_gpu[1].stream));
        CHECK(cuCtxSetCurrent(gpu->context));
        uint64_t wrong = wrong_at(gpu, mapped, CHUNK, 400);
        answer(A10, !wrong, "GPU 1 wrote through the alias, and GPU 0 finds %llu words wrong", (unsigned long long)wrong);
    } else {
        not_asked("written by another GPU through the alias", "there is one GPU");
    }
    for (Beside beside = IDLE; beside <= STREAMING; beside++)
        for (size_t bytes = 2 * MIB; bytes <= largest; bytes *= 16)
            for (int place = 0; place < gpus; place++)
                for (int with_alias = 0; with_alias < 2 && !has_waited; with_alias++)
                    remap_beside(beside, place, bytes, with_alias);
    return end_probe();
}
