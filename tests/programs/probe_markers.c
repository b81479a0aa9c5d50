/*
 * Markers of quiet: does anybody wait because a context's end of work is marked (cuCtxRecordEvent) behind a kernel that spins?
 *   connections N   with CUDA_DEVICE_MAX_CONNECTIONS=N: launches on 40 streams and copies beside the spinner, by kind of marker
 *   latency         what calls cost while a marker, or a thread in cuCtxSynchronize, waits behind the spinner
 *   coverage        what a marker of the context waits for
 *   cost            of a marker and of asking streams, by how many streams there are
 */
#include "probe.h"

#include "green.h"

enum { STREAMS = 40, MOST = 200, REPEATED = 40 };

CUresult cuLaunchHostFunc(CUstream stream, void (*function)(void *), void *argument);
CUresult cuLaunchKernel_ptsz(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                             unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **parameters,
                             void **extra);

static Probed *gpu = &on_gpu[0];
static CUstream streams[MOST], copies[3];
static CUdeviceptr words;
static uint32_t *pinned;
static CUevent marker;

static void make_streams(int count)
{
    for (int i = 0; i < count; i++)
        if (!streams[i])
            CHECK(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
}

static void one_word(CUstream stream, int index)
{
    CUdeviceptr at = words + 4 * (unsigned)index;
    uint64_t n = 1;
    uint32_t value = 1;
    CHECK(cuLaunchKernel(gpu->kernels.fill, 1, 1, 1, 32, 1, 1, 0, stream, (void *[]){&at, &n, &value}, NULL));
}

/* How many streams are done while the spinner still runs, all of them or as many as ever will be. */
static int done_of(CUstream *list, int count)
{
    int done = 0;
    for (;;) {
        int now = 0;
        for (int i = 0; i < count; i++)
            now += cuStreamQuery(list[i]) == CUDA_SUCCESS;
        /* Asked behind them: what was done then did not wait for it. */
        if (cuStreamQuery(gpu->stream) != NOT_READY)
            return done;
        done = now;
        if (done == count)
            return done;
        sched_yield();
    }
}

typedef enum { NOTHING, OF_CONTEXT, MANY_OF_CONTEXT, PLAIN_BEHIND, PLAIN_AROUND, TIMING_AROUND } Kind;

static const char *const KINDS[] = {
    "nothing",
    "cuCtxRecordEvent",
    "100 times cuCtxRecordEvent",
    "an event behind the spinner",
    "events around each launch",
    "timing events around each launch",
};

static int beside_spinner(Kind kind, int copied[1])
{
    CUevent around[2 * STREAMS];
    char what[96];
    int pairs = kind == PLAIN_AROUND || kind == TIMING_AROUND;
    for (int i = 0; i < 2 * STREAMS; i++)
        CHECK(cuEventCreate(&around[i], kind == TIMING_AROUND ? 0 : CU_EVENT_DISABLE_TIMING));
    spin_in(gpu, gpu->stream, 1500);
    double since = now_us();
    if (kind == OF_CONTEXT)
        CHECK(cuCtxRecordEvent(gpu->context, marker));
    for (int i = 0; kind == MANY_OF_CONTEXT && i < 100; i++)
        CHECK(cuCtxRecordEvent(gpu->context, marker));
    if (kind == PLAIN_BEHIND)
        CHECK(cuEventRecord(marker, gpu->stream));
    double marked = now_us();
    for (int i = 0; i < STREAMS; i++) {
        if (pairs)
            CHECK(cuEventRecord(around[2 * i], streams[i]));
        one_word(streams[i], i);
        if (pairs)
            CHECK(cuEventRecord(around[2 * i + 1], streams[i]));
    }
    CHECK(cuMemcpyHtoDAsync_v2(words + 4096, pinned, 64, copies[0]));
    CHECK(cuMemcpyDtoHAsync_v2(pinned + 64, words + 8192, 64, copies[1]));
    CHECK(cuMemsetD32Async(words + 12288, 1, 16, copies[2]));
    double launched = now_us();
    int done = done_of(streams, STREAMS);
    *copied = done_of(copies, 3);
    double seen = now_us();
    let_go();
    CHECK(cuCtxSynchronize());
    for (int i = 0; i < 2 * STREAMS; i++)
        CHECK(cuEventDestroy_v2(around[i]));
    snprintf(what, sizeof what, "%s: marking, launching, until all are done", KINDS[kind]);
    printf("measured: {\"%s, us\": [%.1f, %.1f, %.1f]}\n", what, marked - since, launched - marked, seen - launched);
    return done;
}

static void connections(const char *count)
{
    int without[2] = {0, 0};
    make_streams(STREAMS);
    for (int i = 0; i < STREAMS; i++)
        one_word(streams[i], i);
    CHECK(cuCtxSynchronize());
    for (Kind kind = NOTHING; kind <= TIMING_AROUND; kind++) {
        int copied, done;
        now_asking = KINDS[kind];
        done = beside_spinner(kind, &copied);
        if (kind == NOTHING) {
            without[0] = done;
            without[1] = copied;
        }
        answer(kind <= MANY_OF_CONTEXT ? "A5, B1: a marker of the context makes nobody wait for a spinning kernel"
                                       : "B6: events beside a spinning kernel make nobody wait for it",
               done >= without[0] && copied >= without[1],
               "%s connections, %s: %d of %d streams and %d of 3 copies are done beside the spinner", count, KINDS[kind], done,
               STREAMS, copied);
    }
}

/* What is timed. Each leaves nothing behind that waits for the spinner. */
static CUstream made[REPEATED];
static CUdeviceptr blocks[REPEATED], chunk;
static uint64_t chunk_handle;
static int nth;

static void launches(void) { one_word(streams[0], 0); }
static void copies_in(void) { CHECK(cuMemcpyHtoDAsync_v2(words + 4096, pinned, 64, streams[1])); }
static void copies_now(void) { CHECK(cuMemcpyHtoD_v2(words + 4096, pinned, 64)); }
static void fills(void) { CHECK(cuMemsetD32Async(words + 4096, 1, 16, streams[1])); }
static void asks_stream(void) { REQUIRE(cuStreamQuery(gpu->stream) == NOT_READY); }
static void asks_event(void) { (void)cuEventQuery(marker); }
static void records(void) { CHECK(cuEventRecord(marker, streams[2])); }
static void makes_event(void)
{
    CUevent event;
    CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CHECK(cuEventDestroy_v2(event));
}
static void makes_stream(void) { CHECK(cuStreamCreate(&made[nth], CU_STREAM_NON_BLOCKING)); }
static void ends_stream(void) { CHECK(cuStreamDestroy_v2(made[nth])); }
static void allocates(void) { CHECK(cuMemAlloc_v2(&blocks[nth], 4 * MIB)); }
static void maps(void) { map_here(chunk, chunk_handle, 2 * MIB, 1); CHECK(cuMemUnmap(chunk, 2 * MIB)); }

static const struct {
    const char *name;
    void (*act)(void);
    /* The library does this itself, or a program that is not to notice a marker does. */
    int relied;
} CALLS[] = {
    {"a launch", launches, 1},
    {"cuMemcpyHtoDAsync", copies_in, 1},
    {"cuMemcpyHtoD", copies_now, 0},
    {"cuMemsetD32Async", fills, 1},
    {"cuStreamQuery", asks_stream, 1},
    {"cuEventQuery of the marker", asks_event, 1},
    {"cuEventRecord", records, 1},
    {"cuEventCreate and its end", makes_event, 1},
    {"cuStreamCreate", makes_stream, 0},
    {"cuStreamDestroy", ends_stream, 0},
    {"cuMemAlloc of 4 MiB", allocates, 0},
    {"map, access and unmap of 2 MiB", maps, 1},
};
enum { CALL_COUNT = sizeof CALLS / sizeof *CALLS };

static atomic_int calling, back;
static int by_event;

static void *waits(void *unused)
{
    (void)unused;
    CHECK(cuCtxSetCurrent(gpu->context));
    atomic_store(&calling, 1);
    if (by_event)
        CHECK(cuEventSynchronize(marker));
    else
        CHECK(cuCtxSynchronize());
    atomic_store(&back, 1);
    return NULL;
}

static void *frees(void *unused)
{
    (void)unused;
    CHECK(cuCtxSetCurrent(gpu->context));
    atomic_store(&calling, 1);
    CHECK(cuMemFree_v2(blocks[0]));
    atomic_store(&back, 1);
    return NULL;
}

static pthread_t beside(void *(*act)(void *))
{
    pthread_t thread;
    double since;
    atomic_store(&calling, 0);
    atomic_store(&back, 0);
    REQUIRE(pthread_create(&thread, NULL, act, NULL) == 0);
    while (!atomic_load(&calling))
        sched_yield();
    /* Nothing tells when it is inside the call; what is timed after this long certainly runs beside it. */
    for (since = now_us(); now_us() - since < 20e3 && !atomic_load(&back);)
        sched_yield();
    return thread;
}

typedef enum { ALONE, MARKED, WAITED_FOR, SYNCHRONISED } Meanwhile;
static const char *const MEANWHILE[] = {
    "a spinner alone",
    "cuCtxRecordEvent behind a spinner",
    "cuCtxRecordEvent behind a spinner and a thread that waits for it",
    "a thread in cuCtxSynchronize",
};

static void latency(void)
{
    chunk = reserve(2 * MIB);
    chunk_handle = physical(0, 2 * MIB);
    make_streams(3);
    for (int i = 0; i < 3; i++)
        one_word(streams[i], i);
    maps();
    CHECK(cuCtxSynchronize());
    for (Meanwhile meanwhile = ALONE; meanwhile <= SYNCHRONISED; meanwhile++) {
        int waiting = 0;
        char waiters[512] = "";
        for (int call = 0; call < CALL_COUNT; call++) {
            double times[REPEATED], worst = 0;
            char what[160];
            pthread_t thread;
            int count = 0;
            now_asking = CALLS[call].name;
            spin_in(gpu, gpu->stream, 1500);
            if (meanwhile == MARKED || meanwhile == WAITED_FOR)
                CHECK(cuCtxRecordEvent(gpu->context, marker));
            by_event = meanwhile == WAITED_FOR;
            if (meanwhile >= WAITED_FOR)
                thread = beside(waits);
            for (nth = 0; nth < REPEATED && worst < 300e3; nth++, count++) {
                double since = now_us();
                CALLS[call].act();
                times[nth] = now_us() - since;
                worst = times[nth] > worst ? times[nth] : worst;
            }
            let_go();
            if (meanwhile >= WAITED_FOR)
                REQUIRE(pthread_join(thread, NULL) == 0);
            CHECK(cuCtxSynchronize());
            /* A call that is over early because one waited has made fewer. */
            for (int i = count; i < REPEATED && CALLS[call].act == makes_stream; i++)
                CHECK(cuStreamCreate(&made[i], CU_STREAM_NON_BLOCKING));
            for (int i = 0; i < count && CALLS[call].act == allocates; i++)
                CHECK(cuMemFree_v2(blocks[i]));
            snprintf(what, sizeof what, "%s, beside %s", CALLS[call].name, MEANWHILE[meanwhile]);
            measured_all(what, "us", times, (size_t)count);
            if (worst >= 300e3) {
                size_t length = strlen(waiters);
                snprintf(waiters + length, sizeof waiters - length, "%s%s", length ? ", " : "", CALLS[call].name);
                waiting += CALLS[call].relied;
            }
        }
        answer("B1: while a marker waits, a program's calls do not", waiting == 0 || meanwhile == SYNCHRONISED,
               "beside %s these wait: %s", MEANWHILE[meanwhile], *waiters ? waiters : "none");
    }
    /* The free of the context's own memory, which waits for its kernels whatever is marked. */
    now_asking = "cuMemFree";
    CHECK(cuMemAlloc_v2(&blocks[0], 4 * MIB));
    spin_in(gpu, gpu->stream, 1000);
    CHECK(cuCtxRecordEvent(gpu->context, marker));
    pthread_t thread = beside(frees);
    tell("cuMemFree beside cuCtxRecordEvent behind a spinner: %s", atomic_load(&back) ? "returns" : "waits");
    let_go();
    REQUIRE(pthread_join(thread, NULL) == 0);
}

static atomic_int released;
static CUcontext other_context;
static CUstream other_stream;
static Probed other;

static void stays(void *unused)
{
    (void)unused;
    double since = now_us();
    while (!atomic_load(&released) && now_us() - since < 2e6)
        sched_yield();
}

static void hold_kernel(void) { spin_in(gpu, streams[0], 2000); }
static void hold_host_function(void) { CHECK(cuLaunchHostFunc(streams[0], stays, NULL)); }
static void hold_wait_value(void)
{
    CUresult (*wait)(CUstream, CUdeviceptr, uint32_t, unsigned);
    *(void **)&wait = optional("cuStreamWaitValue32_v2");
    /* Until the word is 1 or more, which let_go makes it, or the thread that ends the probe. */
    *flag = 0;
    CHECK(wait(streams[0], flag_at(), 1, 0));
}
static void *launch_in_own(void *unused)
{
    CUdeviceptr at = flag_at();
    uint64_t limit = 2000000000;
    double since = now_us();
    (void)unused;
    flag[0] = flag[1] = 0;
    CHECK(cuCtxSetCurrent(gpu->context));
    CHECK(cuLaunchKernel_ptsz(gpu->spin, 1, 1, 1, 1, 1, 1, 0, NULL, (void *[]){&at, &limit}, NULL));
    while (!flag[1] && now_us() - since < 10e6)
        sched_yield();
    atomic_store(&calling, 1);
    while (!atomic_load(&released))
        sched_yield();
    return NULL;
}
static pthread_t owner;
static void hold_own_of_thread(void)
{
    atomic_store(&calling, 0);
    REQUIRE(pthread_create(&owner, NULL, launch_in_own, NULL) == 0);
    while (!atomic_load(&calling))
        sched_yield();
}
static void hold_graph(void)
{
    CUgraph graph;
    CUgraphExec exec;
    CUdeviceptr at = flag_at();
    uint64_t limit = 2000000000;
    double since = now_us();
    CHECK(cuStreamBeginCapture_v2(streams[0], CAPTURE_RELAXED));
    CHECK(cuLaunchKernel(gpu->spin, 1, 1, 1, 1, 1, 1, 0, streams[0], (void *[]){&at, &limit}, NULL));
    CHECK(cuStreamEndCapture(streams[0], &graph));
    CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    flag[0] = flag[1] = 0;
    CHECK(cuGraphLaunch(exec, streams[0]));
    while (!flag[1] && now_us() - since < 10e6)
        sched_yield();
}
/* A stream of this context waits for an event of another context's kernel. */
static void hold_behind_other(void)
{
    CUevent event;
    CHECK(cuCtxSetCurrent(other_context));
    CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    spin_in(&other, other_stream, 2000);
    CHECK(cuEventRecord(event, other_stream));
    CHECK(cuCtxSetCurrent(gpu->context));
    CHECK(cuStreamWaitEvent(streams[0], event, 0));
    one_word(streams[0], 0);
}
static void hold_in_other(void)
{
    CHECK(cuCtxSetCurrent(other_context));
    spin_in(&other, other_stream, 2000);
    CHECK(cuCtxSetCurrent(gpu->context));
}
static CUstream green_stream;
static void hold_green(void) { spin_in(gpu, green_stream, 2000); }

static void covered(const char *what, void (*hold)(void), int expected)
{
    int pending = 1;
    now_asking = what;
    atomic_store(&released, 0);
    hold();
    CHECK(cuCtxRecordEvent(gpu->context, marker));
    for (double since = now_us(); pending && now_us() - since < 50e3;)
        pending = cuEventQuery(marker) == NOT_READY;
    answer("B1: a marker of the context waits for all of the context's work", pending || !expected, "a marker %s %s",
           pending ? "waits for" : "does not wait for", what);
    let_go();
    atomic_store(&released, 1);
    CHECK(cuEventSynchronize(marker));
    CHECK(cuCtxSetCurrent(other_context));
    CHECK(cuCtxSynchronize());
    CHECK(cuCtxSetCurrent(gpu->context));
    CHECK(cuCtxSynchronize());
}

static void coverage(void)
{
    make_streams(1);
    CHECK(cuCtxCreate_v2(&other_context, 0, 0));
    load_probe(&other);
    other_stream = other.stream;
    warm_up(&other, other_stream);
    CHECK(cuCtxSetCurrent(gpu->context));
    covered("a kernel in a stream", hold_kernel, 1);
    covered("a host function", hold_host_function, 1);
    if (optional("cuStreamWaitValue32_v2"))
        covered("cuStreamWaitValue32", hold_wait_value, 1);
    else
        not_asked("a marker behind cuStreamWaitValue32", "this driver has no such call");
    covered("a kernel in another thread's own stream", hold_own_of_thread, 1);
    REQUIRE(pthread_join(owner, NULL) == 0);
    covered("a kernel in a graph", hold_graph, 1);
    covered("a stream that waits for another context's kernel", hold_behind_other, 1);
    covered("a kernel of another context of the GPU", hold_in_other, 0);
    CUgreenCtx green = green_on(0);
    CHECK(cuGreenCtxStreamCreate(&green_stream, green, CU_STREAM_NON_BLOCKING, 0));
    covered("a kernel in a green context's stream", hold_green, 1);
    not_asked("a marker behind a sibling graph that a kernel launched", "needs the CUDA toolkit's device runtime");
}

static void cost(void)
{
    static const int counts[] = {1, 40, 200};
    static double times[200];
    CUevent behind;
    char what[96];
    CHECK(cuEventCreate(&behind, CU_EVENT_DISABLE_TIMING));
    for (int i = 0; i < 3; i++) {
        int count = counts[i];
        make_streams(count);
        for (int j = 0; j < count; j++)
            one_word(streams[j], j);
        CHECK(cuCtxSynchronize());
        for (int busy = 0; busy < 2; busy++) {
            int asked = 0;
            const char *state = busy ? "each with a kernel behind a spinner" : "idle";
            now_asking = state;
            if (busy) {
                spin_in(gpu, gpu->stream, 3000);
                CHECK(cuEventRecord(behind, gpu->stream));
                for (int j = 0; j < count; j++) {
                    CHECK(cuStreamWaitEvent(streams[j], behind, 0));
                    one_word(streams[j], j);
                }
            }
            for (int j = 0; j < 200; j++) {
                double since = now_us();
                CHECK(cuCtxRecordEvent(gpu->context, marker));
                times[j] = now_us() - since;
            }
            snprintf(what, sizeof what, "cuCtxRecordEvent with %d streams, %s", count, state);
            measured_all(what, "us", times, 200);
            for (int j = 0; j < 50; j++) {
                double since = now_us();
                for (int k = 0; k < count; k++)
                    asked += cuStreamQuery(streams[k]) == NOT_READY;
                times[j] = now_us() - since;
            }
            snprintf(what, sizeof what, "cuStreamQuery of %d streams, %s", count, state);
            measured_all(what, "us", times, 50);
            double all = times[25];
            REQUIRE(busy ? asked == 50 * count : asked == 0);
            if (count == 200)
                answer("B1: asking 200 streams costs less than 1 ms", all < 1000, "%d streams, %s: asked within 1 ms: %s", count,
                       state, all < 1000 ? "yes" : "no");
            if (!busy)
                for (int j = 0; j < 50; j++) {
                    double since = now_us();
                    CHECK(cuCtxRecordEvent(gpu->context, marker));
                    while (cuEventQuery(marker) == NOT_READY)
                        ;
                    times[j] = now_us() - since;
                }
            if (!busy) {
                snprintf(what, sizeof what, "cuCtxRecordEvent with %d streams, %s, until it is reached", count, state);
                measured_all(what, "us", times, 50);
                answer("B1: an idle context is proven quiet within 200 us", times[25] < 200,
                       "%d streams, %s: a marker is reached within 200 us: %s", count, state, times[25] < 200 ? "yes" : "no");
            }
            let_go();
            CHECK(cuCtxSynchronize());
        }
    }
}

int main(int argc, char **argv)
{
    const char *part = argc > 1 ? argv[1] : "";
    /* The driver reads it once. */
    if (strcmp(part, "connections") == 0 && argc > 2)
        setenv("CUDA_DEVICE_MAX_CONNECTIONS", argv[2], 1);
    begin_probe(90);
    CHECK(cuMemAlloc_v2(&words, 64 * KIB));
    CHECK(cuMemsetD8_v2(words, 0, 64 * KIB));
    void *page;
    CHECK(cuMemHostAlloc(&page, 4096, CU_MEMHOSTALLOC_PORTABLE));
    pinned = page;
    CHECK(cuEventCreate(&marker, CU_EVENT_DISABLE_TIMING));
    for (int i = 0; i < 3; i++)
        CHECK(cuStreamCreate(&copies[i], CU_STREAM_NON_BLOCKING));
    warm_up(gpu, gpu->stream);
    if (strcmp(part, "connections") == 0 && argc > 2)
        connections(argv[2]);
    else if (strcmp(part, "latency") == 0)
        latency();
    else if (strcmp(part, "coverage") == 0)
        coverage();
    else if (strcmp(part, "cost") == 0)
        cost();
    else {
        printf("usage: probe_markers connections N | latency | coverage | cost\n");
        return 2;
    }
    return end_probe();
}
