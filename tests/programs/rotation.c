/*
 * rotation COUNT MIB TIMES ROUNDS [HOW]: arrays that are read in turn, each by a kernel that goes through it TIMES times; what they add up to.
 * On stderr the GPU's time for each round, in microseconds, and how often the process looked which files it has open.
 * HOW is graphs: each array's kernel is launched in a graph of its own. Or copies: there is a graph that copies all arrays and fills
 * memory. Or gone: there was such a graph. Or set: of that one node was set anew. Or past: behind the first copy that is not the program's a kernel is launched past all
 * hooks, which waits until the program's launch has returned. Or fills: where something is about to be unmapped a word of each array is filled past all
 * hooks, by a two-dimensional fill that waits so. Or persistent: in the first half of the rounds a kernel runs beside all
 * others. Or dlsym, address: in the middle of the rounds a function of the driver is looked up that may submit work and is not hooked. Or ahead: the rounds are not waited for. Or what the program says of its memory before: kept (what is near is anchored or
 * prefetched to where it is), away (what is far stays there), taken_back (the same, and then not any more). Or two: the second GPU has a
 * context as well. Or the arrays lie in memory that the program makes by cuMemCreate: segments (in pieces of 4 MiB, mapped one behind the
 * other as each array is made), mixed (the same, and the first piece of each array is for the second GPU), arena (in one piece that is made for all). Or something goes on beside it: forks (a thread
 * forks, and the children end), stops (a process stops this one and lets it go on), traces (a process does so with each thread of this one, as a debugger), loads (a thread loads and unloads modules), leaves (a thread
 * launches kernels while the process ends). Or wait: for the end of its input, before it frees the arrays; each line of that is
 * answered by a line of numbers (numbers.h).
 */
#include "simulator.h"

#include "control.h"
#include "kernels.h"
#include "numbers.h"

#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "streams.h"
#include "sum_again.h"
#include "vmm.h"

#define MOST 64

CUresult cuEventElapsedTime(float *milliseconds, CUevent begin, CUevent end);

static int looks;

/* The executable comes first in the search order, so everybody calls this one. */
DIR *opendir(const char *name)
{
    DIR *(*next)(const char *) = (DIR *(*)(const char *))dlsym(RTLD_NEXT, "opendir");
    looks += strcmp(name, "/proc/self/fd") == 0;
    return next(name);
}

static struct {
    CUresult (*launch)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **,
                       void **);
    CUresult (*fill)(CUdeviceptr, size_t, unsigned, size_t, size_t, CUstream);
    CUfunction wait;
    CUstream stream;
    uint32_t *flag;
    const CUdeviceptr *arrays;
    int count;
} past;

static void launch_past(void)
{
    CUdeviceptr flag = (CUdeviceptr)past.flag;
    *past.flag = 0;
    CHECK(past.launch(past.wait, 1, 1, 1, 1, 1, 1, 0, past.stream, (void *[]){&flag}, NULL));
}

/* The driver's own functions, as somebody has them whom no hook sees. */
static void prepare_beside(const Kernels *k)
{
    past.wait = k->wait_flag;
    CHECK(cuStreamCreate(&past.stream, 1));
    CHECK(cuMemHostAlloc((void **)&past.flag, sizeof *past.flag, 0));
    past.launch = cuLaunchKernel;
}

/* The word that is there already. */
static void fill_past(void)
{
    launch_past();
    for (int i = 0; i < past.count; i++)
        CHECK(past.fill(past.arrays[i], 4, (unsigned)i, 1, 1, past.stream));
}

static void prepare_past(const Kernels *k, const char *how, const CUdeviceptr *arrays, int count)
{
    prepare_beside(k);
    past.arrays = arrays;
    past.count = count;
    void *(*look_up)(void *, const char *) = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!look_up)
        look_up = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    REQUIRE(look_up);
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    *(void **)&past.launch = look_up(library, "cuLaunchKernel");
    *(void **)&past.fill = look_up(library, "cuMemsetD2D32Async");
    Simulator simulator = find_simulator();
    REQUIRE(past.launch && past.fill && simulator.after);
    if (strcmp(how, "fills") == 0)
        simulator.before("cuMemUnmap", fill_past);
    else
        simulator.after("cuMemcpyDtoDAsync_v2", launch_past);
}

/* A function that copies, from before the versions that are hooked. Nobody calls it. */
static void look_up(const char *how)
{
    void *found = NULL;
    int status;
    if (strcmp(how, "dlsym") == 0)
        found = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuMemcpyDtoD");
    else if (strcmp(how, "address") == 0)
        CHECK(cuGetProcAddress_v2("cuMemcpyDtoD", &found, 3010, 0, &status));
    else
        return;
    REQUIRE(found);
}

typedef struct {
    CUdeviceptr address;
    size_t pitch;
    unsigned value, element;
    size_t width, height;
} Fill;

typedef struct CUgraphNode_st *CUgraphNode;

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count);
CUresult cuGraphMemsetNodeGetParams(CUgraphNode node, Fill *fill);
CUresult cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node, const Fill *fill, CUcontext context);

/* A graph that is launched once, and changes nothing of the arrays. */
static void copying_graph(CUstream stream, const CUdeviceptr *arrays, int count, size_t bytes, const char *how)
{
    CUgraph graph;
    CUgraphExec exec;
    CUgraphNode nodes[MOST];
    size_t found = MOST;
    CUdeviceptr copies;
    CUcontext context;
    Fill fill;
    CHECK(cuCtxGetCurrent(&context));
    CHECK(cuMemAlloc_v2(&copies, bytes));
    CHECK(cuStreamBeginCapture_v2(stream, CAPTURE_RELAXED));
    CHECK(cuMemsetD32Async(copies, 0, 2, stream));
    for (int i = 0; i < count; i++)
        CHECK(cuMemcpyDtoDAsync_v2(copies, arrays[i], bytes, stream));
    CHECK(cuStreamEndCapture(stream, &graph));
    CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    CHECK(cuGraphGetNodes(graph, nodes, &found));
    REQUIRE(found == (size_t)count + 1);
    CHECK(cuGraphMemsetNodeGetParams(nodes[0], &fill));
    REQUIRE(fill.address == copies && fill.element * fill.width == 8 && fill.height == 1);
    if (strcmp(how, "set") == 0)
        CHECK(cuGraphExecMemsetNodeSetParams(exec, nodes[0], &fill, context));
    CHECK(cuGraphLaunch(exec, stream));
    CHECK(cuStreamSynchronize(stream));
    if (strcmp(how, "copies") != 0)
        CHECK(cuGraphExecDestroy(exec));
}

/* The arrays' own memory: addresses for all, and where the next one begins. */
static struct {
    CUdeviceptr begin, at;
    uint64_t handle;
} own;

enum { SEGMENT = 4 * MIB };

static void map_own(uint64_t handle, CUdeviceptr at, size_t bytes)
{
    CUmemAccessDesc access = {{ON_DEVICE, 0}, READ_WRITE};
    CHECK(cuMemMap(at, bytes, 0, handle, 0));
    CHECK(cuMemSetAccess(at, bytes, &access, 1));
}

static void begin_own(const char *how, size_t all)
{
    CUmemAllocationProp properties = on_device(0);
    CHECK(cuMemAddressReserve(&own.begin, all, 0, 0, 0));
    own.at = own.begin;
    if (strcmp(how, "arena") == 0) {
        CHECK(cuMemCreate(&own.handle, all, &properties, 0));
        map_own(own.handle, own.begin, all);
    }
}

static CUdeviceptr make_own(const char *how, size_t bytes)
{
    CUmemAllocationProp properties = on_device(0);
    CUdeviceptr array = own.at;
    for (; own.at < array + bytes; own.at += SEGMENT) {
        uint64_t handle;
        if (strcmp(how, "arena") == 0)
            continue;
        properties.location.id = strcmp(how, "mixed") == 0 && own.at == array;
        CHECK(cuMemCreate(&handle, SEGMENT, &properties, 0));
        map_own(handle, own.at, SEGMENT);
        /* As an allocator does that knows its memory by its addresses. */
        CHECK(cuMemRelease(handle));
    }
    return array;
}

static void end_own(const char *how, size_t all)
{
    CHECK(cuMemUnmap(own.begin, all));
    if (strcmp(how, "arena") == 0)
        CHECK(cuMemRelease(own.handle));
    CHECK(cuMemAddressFree(own.begin, all));
}

/* Where all of an array lies; -9: at several places. */
static int place_of(const Control *c, CUdeviceptr array, size_t bytes)
{
    gpupool_piece pieces[MOST];
    size_t count = MOST;
    REQUIRE(c->pieces((void *)array, bytes, pieces, &count) == 0 && count <= MOST);
    return count == 1 ? pieces[0].place : -9;
}

static void say(const char *how, int i, CUdeviceptr array, size_t bytes)
{
    Control c = find_control(RTLD_DEFAULT);
    void *pointer = (void *)array;
    int place = place_of(&c, array, bytes);
    REQUIRE(place != -9);
    if (strcmp(how, "kept") == 0 && place == 0)
        REQUIRE((i % 2 ? c.anchor(pointer, bytes) : c.prefetch(pointer, bytes, place, NULL)) == 0);
    if (strcmp(how, "away") == 0 || strcmp(how, "taken_back") == 0)
        REQUIRE(place == 0 || c.advise(pointer, bytes, GPUPOOL_PREFERRED_LOCATION, place) == 0);
    if (strcmp(how, "taken_back") == 0)
        REQUIRE(place == 0 || c.advise(pointer, bytes, GPUPOOL_NO_PREFERRED_LOCATION, 0) == 0);
}

/* What goes on beside the rounds. */
static struct {
    pthread_t thread;
    pid_t process;
    CUcontext context;
    CUfunction function;
    CUdeviceptr array, out;
    atomic_int is_over, times;
} beside;

static void *forks(void *unused)
{
    (void)unused;
    while (!atomic_load(&beside.is_over)) {
        int status;
        pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0)
            _exit(7);
        REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7);
        atomic_fetch_add(&beside.times, 1);
    }
    return NULL;
}

static void *loads(void *unused)
{
    (void)unused;
    CHECK(cuCtxSetCurrent(beside.context));
    while (!atomic_load(&beside.is_over)) {
        CHECK(cuModuleUnload(load_kernels().module));
        atomic_fetch_add(&beside.times, 1);
    }
    return NULL;
}

/* As many as the stream takes, until the process is gone. */
static void *launches(void *unused)
{
    (void)unused;
    uint64_t n = 1, times = 1;
    CHECK(cuCtxSetCurrent(beside.context));
    for (;;) {
        /* The driver may be gone already. */
        if (cuLaunchKernel(beside.function, 1, 1, 1, 1, 1, 1, 0, NULL, (void *[]){&beside.array, &n, &times, &beside.out}, NULL) != 0)
            return NULL;
        atomic_fetch_add(&beside.times, 1);
    }
}

static int is_stopped(pid_t process)
{
    char path[64], text[512] = "";
    snprintf(path, sizeof path, "/proc/%d/stat", (int)process);
    FILE *file = fopen(path, "r");
    if (!file || !fgets(text, sizeof text, file))
        return -1;
    fclose(file);
    const char *state = strrchr(text, ')');
    return state && state[2] == 'T';
}

/* Said to that process, which ends when it has let this one go on: killed in between it would leave this one standing. */
static _Atomic int *stops_no_more;
/* How many of its threads stood for a debugger. */
static _Atomic int *stops;

/* By a signal, until it is seen to stand. */
static void stop_by_signal(pid_t process)
{
    int stopped;
    kill(process, SIGSTOP);
    while (getppid() == process && (stopped = is_stopped(process)) == 0)
        sched_yield();
    kill(process, SIGCONT);
}

/* As a debugger that is attached: every thread, until all of them stand, and then none any more. */
static void stop_as_debugger(pid_t process)
{
    pid_t threads[MOST];
    char path[64];
    int count = 0, status, signals[MOST] = {0};
    snprintf(path, sizeof path, "/proc/%d/task", (int)process);
    DIR *tasks = opendir(path);
    for (struct dirent *task; tasks && count < MOST && (task = readdir(tasks));) {
        pid_t thread = atoi(task->d_name);
        /* One may have ended meanwhile. */
        if (thread && ptrace(PTRACE_SEIZE, thread, NULL, NULL) == 0)
            threads[count++] = thread;
    }
    if (tasks)
        closedir(tasks);
    for (int i = 0; i < count; i++)
        ptrace(PTRACE_INTERRUPT, threads[i], NULL, NULL);
    for (int i = 0; i < count; i++)
        if (waitpid(threads[i], &status, __WALL) == threads[i] && WIFSTOPPED(status)) {
            ++*stops;
            /* One that was about to get a signal has stopped for that, and gets it from us or not at all. */
            signals[i] = status >> 16 == PTRACE_EVENT_STOP ? 0 : WSTOPSIG(status);
        }
    for (int i = 0; i < count; i++)
        ptrace(PTRACE_DETACH, threads[i], NULL, (void *)(uintptr_t)signals[i]);
}

/* A process that stops this one, sees that it stands, and lets it go on, until it ends. Begun before there is a driver. */
static void begin_to_stop(void (*stop)(pid_t process))
{
    pid_t parent = getpid();
    stops_no_more = mmap(NULL, 2 * sizeof *stops_no_more, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(stops_no_more != MAP_FAILED);
    stops = stops_no_more + 1;
    beside.process = fork();
    REQUIRE(beside.process >= 0);
    if (beside.process > 0) {
        /* Some systems let only processes trace this one that it names. */
        prctl(PR_SET_PTRACER, beside.process, 0, 0, 0);
        return;
    }
    while (getppid() == parent && !*stops_no_more) {
        stop(parent);
        struct timespec moment = {0, 1000000};
        nanosleep(&moment, NULL);
    }
    _exit(0);
}

static void begin_beside(const char *how, const CUdeviceptr *arrays, CUdeviceptr out, CUfunction function)
{
    void *(*act)(void *) = strcmp(how, "forks") == 0 ? forks : strcmp(how, "loads") == 0 ? loads : NULL;
    CHECK(cuCtxGetCurrent(&beside.context));
    beside.function = function;
    beside.array = arrays[0];
    beside.out = out;
    if (act)
        REQUIRE(pthread_create(&beside.thread, NULL, act, NULL) == 0);
}

static void end_beside(const char *how)
{
    if (beside.process > 0) {
        *stops_no_more = 1;
        REQUIRE(waitpid(beside.process, NULL, 0) == beside.process);
        REQUIRE(strcmp(how, "traces") != 0 || *stops > 0);
    }
    if (strcmp(how, "forks") != 0 && strcmp(how, "loads") != 0)
        return;
    atomic_store(&beside.is_over, 1);
    REQUIRE(pthread_join(beside.thread, NULL) == 0);
    REQUIRE(atomic_load(&beside.times) > 0);
}

int main(int argc, char **argv)
{
    REQUIRE(argc == 5 || argc == 6);
    int count = atoi(argv[1]), rounds = atoi(argv[4]);
    uint64_t n = strtoull(argv[2], NULL, 0) * MIB / 4, times = strtoull(argv[3], NULL, 0), sum = 0, expected = 0;
    CUdeviceptr arrays[MOST], out;
    CUfunction sum_again;
    CUstream stream;
    CUevent begin, end;
    REQUIRE(count <= MOST);
    if (argc == 6 && strcmp(argv[5], "stops") == 0)
        begin_to_stop(stop_by_signal);
    if (argc == 6 && strcmp(argv[5], "traces") == 0)
        begin_to_stop(stop_as_debugger);
    start_on(0);
    if (argc == 6 && strcmp(argv[5], "two") == 0) {
        CUdevice second;
        CUcontext other;
        CHECK(cuDeviceGet(&second, 1));
        CHECK(cuDevicePrimaryCtxRetain(&other, second));
    }
    Kernels k = load_kernels();
    sum_again = load_sum_again();
    CHECK(cuStreamCreate(&stream, 1));
    CHECK(cuEventCreate(&begin, 0));
    CHECK(cuEventCreate(&end, 0));
    CHECK(cuMemAlloc_v2(&out, sizeof sum));
    CHECK(cuMemsetD32_v2(out, 0, 2));
    const char *how = argc == 6 ? argv[5] : "";
    int is_own = strcmp(how, "segments") == 0 || strcmp(how, "mixed") == 0 || strcmp(how, "arena") == 0;
    if (is_own)
        begin_own(how, 4 * n * count);
    for (int i = 0; i < count; i++) {
        if (is_own)
            arrays[i] = make_own(how, 4 * n);
        else
            CHECK(cuMemAlloc_v2(&arrays[i], 4 * n));
        iota(&k, stream, arrays[i], n, (uint32_t)i);
        for (uint64_t at = 0; at < n; at++)
            expected += times * (uint32_t)(at + (uint64_t)i);
    }
    CHECK(cuStreamSynchronize(stream));
    for (int i = 0; i < count && (strcmp(how, "kept") == 0 || strcmp(how, "away") == 0 || strcmp(how, "taken_back") == 0); i++)
        say(how, i, arrays[i], 4 * n);
    if (strcmp(how, "past") == 0 || strcmp(how, "fills") == 0)
        prepare_past(&k, how, arrays, count);
    if (strcmp(how, "persistent") == 0) {
        prepare_beside(&k);
        launch_past();
    }
    CUgraphExec graphs[MOST];
    for (int i = 0; i < count && strcmp(how, "graphs") == 0; i++) {
        CUgraph graph;
        CHECK(cuStreamBeginCapture_v2(stream, CAPTURE_RELAXED));
        launch(sum_again, stream, (void *[]){&arrays[i], &n, &times, &out});
        CHECK(cuStreamEndCapture(stream, &graph));
        CHECK(cuGraphInstantiateWithFlags(&graphs[i], graph, 0));
        CHECK(cuGraphDestroy(graph));
    }
    if (strcmp(how, "copies") == 0 || strcmp(how, "gone") == 0 || strcmp(how, "set") == 0)
        copying_graph(stream, arrays, count, 4 * n, how);
    begin_beside(how, arrays, out, sum_again);
    for (int round = 0; round < rounds; round++) {
        float milliseconds;
        if (2 * round == rounds)
            look_up(how);
        CHECK(cuEventRecord(begin, stream));
        for (int i = 0; i < count; i++) {
            if (strcmp(how, "graphs") == 0)
                CHECK(cuGraphLaunch(graphs[i], stream));
            else
                launch(sum_again, stream, (void *[]){&arrays[i], &n, &times, &out});
            if (past.flag && (strcmp(how, "persistent") != 0 || 2 * round >= rounds))
                __atomic_store_n(past.flag, 1, __ATOMIC_RELEASE);
            if (strcmp(how, "ahead") == 0)
                continue;
            /* What is moved before a launch then waits for no other, however slow the machine is. */
            CHECK(cuStreamSynchronize(stream));
        }
        CHECK(cuEventRecord(end, stream));
        CHECK(cuStreamSynchronize(stream));
        CHECK(cuEventElapsedTime(&milliseconds, begin, end));
        fprintf(stderr, "round %d: %.0f us\n", round, milliseconds * 1e3);
        CHECK(cuMemcpyDtoH_v2(&sum, out, sizeof sum));
        printf("round %d: sums %s\n", round, sum == expected * (uint64_t)(round + 1) ? "right" : "WRONG");
    }
    end_beside(how);
    for (int i = 0; i < count; i++)
        printf("array %d: %llu wrong\n", i, (unsigned long long)count_wrong(&k, arrays[i], n, (uint32_t)i));
    fflush(stdout);
    if (strcmp(how, "leaves") == 0) {
        REQUIRE(pthread_create(&beside.thread, NULL, launches, NULL) == 0);
        while (atomic_load(&beside.times) < 100)
            sched_yield();
        return 0;
    }
    char line[64];
    while (strcmp(how, "wait") == 0 && fgets(line, sizeof line, stdin)) {
        print_numbers(arrays, count);
        fflush(stdout);
    }
    if (is_own)
        end_own(how, 4 * n * count);
    for (int i = 0; i < count && !is_own; i++)
        CHECK(cuMemFree_v2(arrays[i]));
    fprintf(stderr, "looked %d times\n", looks);
    return 0;
}
