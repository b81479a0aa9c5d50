/*
 * What the driver's own checkpoint (cuCheckpointProcess*) does to a process, by the memory that the process has: each kind in a process of its own, which is
 * locked, taken off the GPUs, brought back and unlocked, and then looks at every word. `gpupool suspend --process` relies on what is asked here.
 *
 * probe_checkpoint [MIB]   so much memory of each kind (256)
 *
 * The rules are of the driver alone. With the library preloaded the memory of some kinds is the pool's, so that all is told and nothing falls.
 */
#include "probe.h"

#include "nvml.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags);

enum { LINE = 512, CALLS_MS = 10000, START_MS = 60000, LOOK_MS = 30000, SECONDS = 170 };
enum { ILLEGAL_STATE = 401 };

/* What becomes of a process. */
typedef enum { RIGHT, LOST, REFUSED } After;

/* In the process itself. */

static size_t bytes;
static uint32_t *on_host;
static uint64_t kept_handle;

/* Memory that counts up from `start`, and who reads it. */
typedef struct {
    CUdeviceptr memory;
    Probed *reader;
    uint32_t start;
} Known;

static Known known[4];
static int count_known;

static uint64_t words(void) { return bytes / 4; }

static void knows(CUdeviceptr memory, Probed *reader, uint32_t start)
{
    REQUIRE(count_known < 4);
    known[count_known++] = (Known){memory, reader, start};
}

/* Fills memory by a GPU that may write to it. */
static void filled(CUdeviceptr memory, Probed *by)
{
    uint32_t start = (uint32_t)(1000 * count_known);
    CHECK(cuCtxSetCurrent(by->context));
    iota(&by->kernels, NULL, memory, words(), start);
    CHECK(cuCtxSynchronize());
    CHECK(cuCtxSetCurrent(on_gpu[0].context));
    knows(memory, by, start);
}

static CUdeviceptr allocated(Probed *by)
{
    CUdeviceptr memory;
    CHECK(cuCtxSetCurrent(by->context));
    CHECK(cuMemAlloc_v2(&memory, bytes));
    filled(memory, by);
    return memory;
}

static void plain(void) { allocated(&on_gpu[0]); }

static void streams(void)
{
    CUdeviceptr memory;
    CHECK(cuMemAllocAsync(&memory, bytes, NULL));
    filled(memory, &on_gpu[0]);
}

static void pinned(void)
{
    void *memory;
    CHECK(cuMemHostAlloc(&memory, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    on_host = memory;
    filled((CUdeviceptr)(uintptr_t)memory, &on_gpu[0]);
}

static void registered(void)
{
    CUdeviceptr memory;
    on_host = aligned_alloc(2 * MIB, bytes);
    REQUIRE(on_host != NULL);
    CHECK(cuMemHostRegister_v2(on_host, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    CHECK(cuMemHostGetDevicePointer_v2(&memory, on_host, 0));
    filled(memory, &on_gpu[0]);
}

static void exported(void)
{
    CUipcMemHandle handle;
    CHECK(cuIpcGetMemHandle(&handle, allocated(&on_gpu[0])));
}

static void second_context(void)
{
    allocated(&on_gpu[0]);
    allocated(&on_gpu[1]);
}

static void peers(void)
{
    second_context();
    CHECK(cuCtxEnablePeerAccess(on_gpu[1].context, 0));
    CHECK(cuCtxSetCurrent(on_gpu[1].context));
    CHECK(cuCtxEnablePeerAccess(on_gpu[0].context, 0));
    CHECK(cuCtxSetCurrent(on_gpu[0].context));
    knows(known[1].memory, &on_gpu[0], known[1].start);
}

/* Memory of a place, mapped with access for `mask`, of which bit 0 is GPU 0. */
static CUdeviceptr created(int place, int types, unsigned mask)
{
    CUmemAllocationProp properties = {
        .kind = 1, .handle_types = types, .location = {place == HOST ? ON_HOST_NODE : ON_DEVICE, place == HOST ? 0 : place}};
    CUdeviceptr memory = reserve(bytes);
    CHECK(cuMemCreate(&kept_handle, bytes, &properties, 0));
    CHECK(cuMemMap(memory, bytes, 0, kept_handle, 0));
    for (int gpu = 0; gpu < 2; gpu++) {
        CUmemAccessDesc access = {{ON_DEVICE, gpu}, READ_WRITE};
        if (mask >> gpu & 1)
            CHECK(cuMemSetAccess(memory, bytes, &access, 1));
    }
    filled(memory, mask & 1 ? &on_gpu[0] : &on_gpu[1]);
    return memory;
}

static void own(void) { created(0, 0, 1); }
static void typed(void) { created(0, POSIX_FD, 1); }

static void given(void)
{
    int descriptor = -1;
    created(0, POSIX_FD, 1);
    CHECK(cuMemExportToShareableHandle(&descriptor, kept_handle, POSIX_FD, 0));
}

static void both(void) { created(0, 0, 3); }
static void second_both(void) { created(1, 0, 3); }
static void second_near(void) { created(1, 0, 2); }
static void second_far(void) { created(1, 0, 1); }
static void host_mapped(void) { created(HOST, 0, 1); }

static void host_unmapped(void)
{
    allocated(&on_gpu[0]);
    kept_handle = physical(HOST, bytes);
}

/* Ranges that have no memory, and one whose memory is gone, are mapped after it. */
static CUdeviceptr empty[4];
static int count_empty;

static void reserved(void)
{
    /* The largest may be more than the address space has. */
    static const size_t gib[] = {64, 1024, 65536};
    allocated(&on_gpu[0]);
    for (size_t i = 0; i < 3; i++) {
        CUresult result = cuMemAddressReserve(&empty[count_empty], gib[i] << 30, 0, 0, 0);
        if (result == CUDA_SUCCESS)
            count_empty++;
        else
            fprintf(stderr, "a reservation of %zu GiB: %d\n", gib[i], result);
    }
}

static void unmapped(void)
{
    allocated(&on_gpu[0]);
    empty[count_empty] = reserve(bytes);
    uint64_t handle = physical(0, bytes);
    map_here(empty[count_empty], handle, bytes, gpus);
    iota(&on_gpu[0].kernels, NULL, empty[count_empty], words(), 5);
    CHECK(cuCtxSynchronize());
    CHECK(cuMemUnmap(empty[count_empty], bytes));
    CHECK(cuMemRelease(handle));
    count_empty++;
}

static CUdeviceptr taken_at;

static void taken(void)
{
    CUmemAccessDesc nobody = {{ON_DEVICE, 1}, 0};
    taken_at = created(0, 0, 3);
    CHECK(cuMemSetAccess(taken_at, bytes, &nobody, 1));
}

static void managed(void)
{
    CUdeviceptr memory;
    CHECK(cuMemAllocManaged(&memory, bytes, 1));
    filled(memory, &on_gpu[0]);
}

typedef struct {
    const char *name;
    void (*make)(void);
    int needs, has_second, checkpoint, restore;
    After after;
    int rounds;
} Case;

/* needs: GPUs; has_second: whether the second one has a context. */
static const Case cases[] = {
    {"cuMemAlloc", plain, 1, 0, 0, 0, RIGHT, 2},
    {"cuMemAllocAsync", streams, 1, 0, 0, 0, RIGHT, 1},
    {"pinned memory", pinned, 1, 0, 0, 0, RIGHT, 1},
    {"registered memory", registered, 1, 0, 0, 0, RIGHT, 1},
    {"cuMemAlloc with a handle for other processes", exported, 1, 0, 0, 0, RIGHT, 1},
    {"contexts on two GPUs", second_context, 2, 1, 0, 0, RIGHT, 1},
    {"contexts on two GPUs, with peer access", peers, 2, 1, 0, 0, RIGHT, 1},
    {"cuMemCreate, for its own GPU", own, 1, 0, 0, 0, RIGHT, 1},
    {"cuMemCreate, with a type of handles", typed, 1, 0, 0, 0, RIGHT, 1},
    {"cuMemCreate, whose descriptor is open", given, 1, 0, 0, 0, RIGHT, 1},
    {"reservations of 64 GiB, 1 TiB and 64 TiB", reserved, 1, 0, 0, 0, RIGHT, 1},
    {"a reservation whose memory was unmapped", unmapped, 1, 1, 0, 0, RIGHT, 1},
    {"cuMemCreate of GPU 0, for both GPUs", both, 2, 1, 0, 1, LOST, 1},
    {"cuMemCreate of GPU 1, for both GPUs", second_both, 2, 1, 0, 1, LOST, 1},
    {"cuMemCreate of GPU 1, for GPU 1", second_near, 2, 1, 0, 0, RIGHT, 1},
    {"cuMemCreate of GPU 1, for GPU 0", second_far, 2, 1, 0, 1, LOST, 1},
    {"cuMemCreate for both GPUs, taken from GPU 1", taken, 2, 1, 0, 0, RIGHT, 1},
    {"cuMemCreate of the host", host_mapped, 1, 0, 0, 999, LOST, 1},
    {"cuMemCreate of the host, not mapped", host_unmapped, 1, 0, 0, 999, LOST, 1},
    {"managed memory", managed, 1, 0, NOT_SUPPORTED, 0, REFUSED, 1},
};
enum { CASES = sizeof cases / sizeof *cases };

/* What of it is as it was, a line. The first call that fails ends the process with a line of its own. */
static void look(void)
{
    uint64_t wrong = 0, remapped = 0;
    int again = -1;
    for (const Known *one = known; one < known + count_known; one++)
        wrong += wrong_at(one->reader, one->memory, bytes, one->start);
    for (size_t i = 0; on_host && i < words(); i++)
        wrong += on_host[i] != (uint32_t)i;
    for (int i = 0; i < count_empty; i++) {
        map_here(empty[i], physical(0, bytes), bytes, 1);
        iota(&on_gpu[0].kernels, NULL, empty[i], words(), 7);
        remapped += wrong_at(&on_gpu[0], empty[i], bytes, 7);
    }
    if (taken_at) {
        CUmemAccessDesc access = {{ON_DEVICE, 1}, READ_WRITE};
        again = cuMemSetAccess(taken_at, bytes, &access, 1);
    }
    printf("looked %llu %llu %d %d\n", (unsigned long long)wrong, (unsigned long long)remapped, count_empty, again);
    count_empty = 0;
}

static int be(const Case *one)
{
    char line[LINE];
    begin_probe(SECONDS);
    if (gpus < one->needs) {
        printf("needs two GPUs that reach each other\n");
        return 0;
    }
    if (one->has_second)
        begin_second();
    one->make();
    printf("ready\n");
    while (fgets(line, sizeof line, stdin))
        look();
    return 0;
}

/* In the process that asks, which never makes a context: none of these calls needs one. */

typedef CUresult (*Act)(int process, void *arguments);
static Act lock, checkpoint, restore, unlock;
static int has_nvml, is_pooled;

typedef struct {
    pid_t process;
    int to, from;
    char said[LINE];
    int has_ended;
} Other;

static Other others[CASES];

static Other start(int number, const char *mib)
{
    int to[2], from[2];
    char name[16];
    Other other = {0};
    snprintf(name, sizeof name, "%d", number);
    REQUIRE(pipe(to) == 0 && pipe(from) == 0);
    other.process = fork();
    REQUIRE(other.process >= 0);
    if (other.process == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(to[0], 0);
        dup2(from[1], 1);
        /* An end that another process has as well would never be closed. */
        for (int descriptor = 3; descriptor < 256; descriptor++)
            close(descriptor);
        execl("/proc/self/exe", "probe_checkpoint", mib, name, (char *)NULL);
        _exit(127);
    }
    close(to[0]);
    close(from[1]);
    other.to = to[1];
    other.from = from[0];
    return other;
}

/* Its next line, or why there is none. */
static const char *hear(Other *other, int milliseconds)
{
    double until = now_us() + milliseconds * 1e3;
    size_t length = 0;
    for (;;) {
        struct pollfd poll_for = {other->from, POLLIN, 0};
        int left = (int)((until - now_us()) / 1e3);
        if (left <= 0 || poll(&poll_for, 1, left) == 0)
            return "says nothing";
        char letter;
        if (read(other->from, &letter, 1) != 1) {
            other->has_ended = 1;
            return "has ended";
        }
        if (letter == '\n')
            break;
        if (length < LINE - 1)
            other->said[length++] = letter;
    }
    other->said[length] = 0;
    return other->said;
}

/* One that is lost may wait for the driver for ever; nobody waits for it. */
static void end(Other *other)
{
    if (other->process <= 0)
        return;
    kill(other->process, SIGKILL);
    for (int tries = 0; tries < 500 && waitpid(other->process, NULL, WNOHANG) == 0; tries++)
        usleep(10000);
    close(other->to);
    close(other->from);
    other->process = 0;
}

static double used_mib(void)
{
    double sum = 0;
    unsigned count = 0;
    if (!has_nvml || NVML("nvmlDeviceGetCount_v2", unsigned *)(&count))
        return 0;
    for (unsigned gpu = 0; gpu < count; gpu++)
        sum += (double)nvml_memory(gpu).used / (double)MIB;
    return sum;
}

typedef struct {
    CUresult locked, gone, back, unlocked;
    double seconds[2], used[3];
} Told;

static double seconds_since(double begun) { return (now_us() - begun) * 1e-6; }

static Told freeze(pid_t process)
{
    uint64_t to_lock[8] = {CALLS_MS}, none[8] = {0};
    Told told = {.gone = -1, .back = -1, .unlocked = -1, .used = {used_mib()}};
    told.locked = lock(process, to_lock);
    if (told.locked)
        return told;
    double begun = now_us();
    told.gone = checkpoint(process, none);
    told.seconds[0] = seconds_since(begun);
    told.used[1] = used_mib();
    if (told.gone == 0) {
        begun = now_us();
        told.back = restore(process, none);
        told.seconds[1] = seconds_since(begun);
    }
    told.unlocked = unlock(process, none);
    told.used[2] = used_mib();
    return told;
}

/* RESULTS.md has what holds. Under the library what lies where is the library's, and nothing but the start is asked for. */
static void judge(const Case *one, int holds, const char *what)
{
    char rule[LINE];
    snprintf(rule, sizeof rule, "P10: the driver's checkpoint does to %s as it did", one->name);
    answer(rule, holds, "%s: %s", one->name, what);
}

static void ask(const Case *one, Other *other)
{
    for (int round = 0; round < one->rounds; round++) {
        char what[LINE * 3];
        unsigned long long wrong = 0, remapped = 0;
        int mapped = 0, again = -1;
        const char *seen = "not asked";
        now_asking = one->name;
        Told told = freeze(other->process);
        CUresult refusal = told.locked ? told.locked : told.gone;
        int is_lost = !refusal && (told.back || told.unlocked), is_right = 0;
        if (!is_lost) {
            REQUIRE(write(other->to, "look\n", 5) == 5);
            seen = hear(other, LOOK_MS);
            is_right = sscanf(seen, "looked %llu %llu %d %d", &wrong, &remapped, &mapped, &again) == 4 && !wrong && !remapped;
        }
        snprintf(what, sizeof what, "lock %d, checkpoint %d, restore %d, unlock %d; %s", told.locked, told.gone, told.back, told.unlocked,
                 is_lost ? "lost" : is_right ? "right" : seen);
        if (again >= 0)
            snprintf(what + strlen(what), sizeof what - strlen(what), "; access for GPU 1 again: %d", again);
        if (mapped)
            snprintf(what + strlen(what), sizeof what - strlen(what), "; %d ranges mapped again", mapped);
        int holds = one->after == LOST      ? is_lost && told.back == (CUresult)one->restore && told.unlocked == ILLEGAL_STATE
                    : one->after == REFUSED ? refusal == (CUresult)one->checkpoint && is_right
                                            : !refusal && !is_lost && is_right;
        /* It lies where it lay, but what was taken away cannot be given again. */
        if (one->make == taken)
            holds = holds && again == 400;
        judge(one, holds || is_pooled, what);
        if (told.gone == 0) {
            char numbers[LINE];
            snprintf(numbers, sizeof numbers, "%s: seconds out, back; MiB of all GPUs before, meanwhile, after", one->name);
            printf("measured: {\"%s\": [%.2f, %.2f, %.0f, %.0f, %.0f]}\n", numbers, told.seconds[0], told.seconds[1], told.used[0], told.used[1],
                   told.used[2]);
        }
        if (is_lost || other->has_ended)
            return;
    }
}

int main(int count, char **arguments)
{
    const char *mib = count > 1 ? arguments[1] : "256";
    pthread_t thread;
    bytes = (size_t)atoi(mib) * MIB;
    REQUIRE(bytes > 0);
    if (count > 2) {
        int number = atoi(arguments[2]);
        REQUIRE(number >= 0 && number < CASES);
        return be(&cases[number]);
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    signal(SIGPIPE, SIG_IGN);
    REQUIRE(pthread_create(&thread, NULL, end_late, (void *)(intptr_t)SECONDS) == 0);
    *(void **)&lock = optional("cuCheckpointProcessLock");
    *(void **)&checkpoint = optional("cuCheckpointProcessCheckpoint");
    *(void **)&restore = optional("cuCheckpointProcessRestore");
    *(void **)&unlock = optional("cuCheckpointProcessUnlock");
    if (!lock || !checkpoint || !restore || !unlock) {
        not_asked("all of it", "this driver has no cuCheckpointProcess*; they came with driver 570");
        return end_probe();
    }
    is_pooled = dlsym(RTLD_DEFAULT, "gpupool_trim") != NULL;
    has_nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW) != NULL && NVML("nvmlInit_v2", void)() == 0;
    /* All at once: most of the time is the start of contexts. */
    for (int i = 0; i < CASES; i++)
        others[i] = start(i, mib);
    for (int i = 0; i < CASES; i++) {
        const char *said = hear(&others[i], START_MS);
        if (strcmp(said, "ready") == 0)
            continue;
        if (strncmp(said, "needs ", 6) == 0)
            not_asked(cases[i].name, said);
        else
            judge(&cases[i], 0, said);
        end(&others[i]);
    }
    for (int i = 0; i < CASES; i++) {
        if (others[i].process <= 0)
            continue;
        ask(&cases[i], &others[i]);
        end(&others[i]);
    }
    return end_probe();
}
