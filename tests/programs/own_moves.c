/*
 * own_moves WHAT: memory that the program makes by cuMemCreate, while launches move it (GPUPOOL_MOVE=stress; simulated driver only for all but churn).
 *
 *   churn THREADS STEPS  threads map pieces one behind the other and in holes, fill and check them by kernels, and unmap them, all at random
 *   faults NTH           the NTH driver call after everything is mapped fails once, while an arena in parts and a piece beside it are read; 0: how many
 *                        calls there are
 *   remaps               while a move waits for a kernel to end, another thread unmaps what is to move and maps something smaller there
 *   stays                what is exported, mapped twice, compressed, for decompression engines, or was put where it is by hand does not move, and all else does
 */
#include "control.h"
#include "kernels.h"
#include "simulator.h"
#include "vmm.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <unistd.h>

enum { GRAIN = 2 * MIB, WINDOW = 48, MOST = 8 };

static Kernels kernels;
static CUcontext context;

static void grant(CUdeviceptr at, size_t bytes)
{
    CUmemAccessDesc access = {{ON_DEVICE, 0}, READ_WRITE};
    CHECK(cuMemSetAccess(at, bytes, &access, 1));
}

/* Memory of its own for an address, known by that alone from then on. */
static void back(CUdeviceptr at, size_t bytes)
{
    CUmemAllocationProp properties = on_device(0);
    uint64_t handle;
    CHECK(cuMemCreate(&handle, bytes, &properties, 0));
    CHECK(cuMemMap(at, bytes, 0, handle, 0));
    grant(at, bytes);
    CHECK(cuMemRelease(handle));
}

typedef struct {
    uint64_t random;
    int steps, number;
    unsigned long long checks, wrong;
} Thread;

static uint64_t below(Thread *it, uint64_t end)
{
    it->random = it->random * 6364136223846793005u + 1442695040888963407u;
    return (it->random >> 33) % end;
}

static void *churn(void *argument)
{
    Thread *it = argument;
    CUdeviceptr window;
    CUstream stream;
    /* By its first grain, how many grains a piece has, and what it begins with. */
    int grains[WINDOW] = {0};
    uint32_t begins[WINDOW];
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuStreamCreate(&stream, 1));
    CHECK(cuMemAddressReserve(&window, (size_t)WINDOW * GRAIN, 0, 0, 0));
    for (int step = 0; step < it->steps; step++) {
        int at = (int)below(it, WINDOW), count = 1 + (int)below(it, 4), piece = at;
        while (piece >= 0 && !(grains[piece] && piece + grains[piece] > at))
            piece--;
        if (piece < 0) {
            int room = 0;
            while (room < count && at + room < WINDOW && !grains[at + room])
                room++;
            back(window + (CUdeviceptr)at * GRAIN, (size_t)room * GRAIN);
            grains[at] = room;
            begins[at] = (uint32_t)(it->number << 24 | step << 8);
            iota(&kernels, stream, window + (CUdeviceptr)at * GRAIN, (uint64_t)room * GRAIN / 4, begins[at]);
            continue;
        }
        CUdeviceptr address = window + (CUdeviceptr)piece * GRAIN;
        CHECK(cuStreamSynchronize(stream));
        it->wrong += count_wrong(&kernels, address, (uint64_t)grains[piece] * GRAIN / 4, begins[piece]);
        it->checks++;
        if (below(it, 2)) {
            CHECK(cuMemUnmap(address, (size_t)grains[piece] * GRAIN));
            grains[piece] = 0;
        }
    }
    CHECK(cuStreamSynchronize(stream));
    for (int piece = 0; piece < WINDOW; piece++)
        if (grains[piece]) {
            CUdeviceptr address = window + (CUdeviceptr)piece * GRAIN;
            it->wrong += count_wrong(&kernels, address, (uint64_t)grains[piece] * GRAIN / 4, begins[piece]);
            CHECK(cuMemUnmap(address, (size_t)grains[piece] * GRAIN));
        }
    CHECK(cuMemAddressFree(window, (size_t)WINDOW * GRAIN));
    CHECK(cuStreamDestroy_v2(stream));
    return NULL;
}

static void churns(int threads, int steps)
{
    pthread_t running[MOST];
    Thread all[MOST];
    REQUIRE(threads <= MOST);
    for (int i = 0; i < threads; i++) {
        all[i] = (Thread){.random = (uint64_t)i * 77 + 5, .steps = steps, .number = i};
        REQUIRE(pthread_create(&running[i], NULL, churn, &all[i]) == 0);
    }
    for (int i = 0; i < threads; i++) {
        REQUIRE(pthread_join(running[i], NULL) == 0);
        printf("thread %d: %llu checks, %llu wrong\n", i, all[i].checks, all[i].wrong);
    }
}

/* Reads memory by a kernel, whatever that answers. */
static CUresult read_it(CUdeviceptr from, size_t bytes, CUdeviceptr out)
{
    uint64_t n = bytes / 4;
    uint32_t start = 7;
    return cuLaunchKernel(kernels.check_iota, 64, 1, 1, 256, 1, 1, 0, NULL, (void *[]){&from, &n, &start, &out}, NULL);
}

static void faults(int nth)
{
    enum { ARENA = 24 * MIB, PIECE = 4 * MIB, READS = 6 };
    Simulator simulator = find_simulator();
    CUdeviceptr arena, piece, out;
    char fault[32] = "";
    CHECK(cuMemAlloc_v2(&out, 8));
    CHECK(cuMemAddressReserve(&arena, ARENA + PIECE, 0, 0, 0));
    piece = arena + ARENA;
    back(arena, ARENA);
    back(piece, PIECE);
    CHECK(cuMemsetD32_v2(out, 0, 2));
    iota(&kernels, NULL, arena, (ARENA + PIECE) / 4, 7);
    CHECK(cuCtxSynchronize());
    uint64_t handles = simulator.handles(), calls = simulator.calls();
    if (nth)
        snprintf(fault, sizeof fault, "*:%d=999", nth);
    REQUIRE(simulator.arm(fault) == 0);
    int refused = 0;
    for (int i = 0; i < READS; i++)
        refused += read_it(i % 2 ? piece : arena, PIECE, out) != 0;
    REQUIRE(simulator.arm("") == 0);
    calls = simulator.calls() - calls;
    CHECK(cuCtxSynchronize());
    printf("%d wrong\n", (int)count_wrong(&kernels, arena, (ARENA + PIECE) / 4, 7));
    if (!nth)
        printf("calls: %llu\n", (unsigned long long)calls);
    if (simulator.handles() > handles)
        printf("%d handles more\n", (int)(simulator.handles() - handles));
    if (refused > 1)
        printf("%d launches refused\n", refused);
}

enum { BEFORE = 8 * MIB, SINCE = 4 * MIB };
static CUdeviceptr changing;
static uint32_t *flag;
static atomic_int waits, has_changed;

/* In the middle of a call of the library's, so that another thread does it. */
static void ask_for_change(void)
{
    atomic_store(&waits, 1);
    while (!atomic_load(&has_changed))
        sched_yield();
}

static void *change(void *unused)
{
    CHECK(cuCtxSetCurrent(context));
    while (!atomic_load(&waits))
        sched_yield();
    CHECK(cuMemUnmap(changing, BEFORE));
    back(changing, SINCE);
    *(volatile uint32_t *)flag = 1;
    atomic_store(&has_changed, 1);
    return unused;
}

static void remaps(void)
{
    CUdeviceptr out, word;
    CUstream beside;
    pthread_t other;
    CHECK(cuMemAlloc_v2(&out, 8));
    CHECK(cuMemAddressReserve(&changing, BEFORE, 0, 0, 0));
    back(changing, BEFORE);
    CHECK(cuStreamCreate(&beside, 1));
    CHECK(cuMemHostAlloc((void **)&flag, sizeof *flag, 0));
    *flag = 0;
    word = (CUdeviceptr)flag;
    CHECK(cuLaunchKernel(kernels.wait_flag, 1, 1, 1, 1, 1, 1, 0, beside, (void *[]){&word}, NULL));
    REQUIRE(pthread_create(&other, NULL, change, NULL) == 0);
    find_simulator().after("cuCtxRecordEvent", ask_for_change);
    /* Under stress one of a launch's operands moves, by chance. */
    for (int i = 0; i < 1000 && !atomic_load(&has_changed); i++)
        CHECK(read_it(changing, 4, out));
    REQUIRE(atomic_load(&has_changed));
    REQUIRE(pthread_join(other, NULL) == 0);
    CHECK(cuCtxSynchronize());
    printf("changed\n");
}

static int lies_at(CUdeviceptr at)
{
    CUmemAllocationProp properties;
    uint64_t handle;
    CHECK(cuMemRetainAllocationHandle(&handle, (void *)at));
    CHECK(cuMemGetAllocationPropertiesFromHandle(&properties, handle));
    CHECK(cuMemRelease(handle));
    return properties.location.id;
}

static void stays(void)
{
    enum { PIECE = 8 * MIB, PIECES = 6, ROUNDS = 30, HW_DECOMPRESS = 2 };
    static const char *const names[PIECES] = {"plain", "exported", "mapped twice", "put by hand", "compressed", "for decompression"};
    Control control = find_control(RTLD_DEFAULT);
    Simulator simulator = find_simulator();
    CUdeviceptr window, second, out;
    CUmemAllocationProp properties = on_device(0);
    int moved[PIECES] = {0}, shared;
    CHECK(cuMemAlloc_v2(&out, 8));
    CHECK(cuMemAddressReserve(&window, (size_t)PIECES * PIECE, 0, 0, 0));
    CHECK(cuMemAddressReserve(&second, PIECE, 0, 0, 0));
    for (int i = 0; i < PIECES; i++) {
        CUdeviceptr at = window + (CUdeviceptr)i * PIECE;
        uint64_t handle;
        properties.compression = i == 4;
        properties.usage = i == 5 ? HW_DECOMPRESS : 0;
        CHECK(cuMemCreate(&handle, PIECE, &properties, 0));
        CHECK(cuMemMap(at, PIECE, 0, handle, 0));
        grant(at, PIECE);
        if (i == 1)
            CHECK(cuMemExportToShareableHandle(&shared, handle, POSIX_FD, 0));
        if (i == 2)
            CHECK(cuMemMap(second, PIECE, 0, handle, 0));
        if (i == 3)
            REQUIRE(control.advise((void *)at, PIECE, GPUPOOL_PREFERRED_LOCATION, 0) == 0);
        CHECK(cuMemRelease(handle));
    }
    iota(&kernels, NULL, window, (uint64_t)PIECES * PIECE / 4, 7);
    CHECK(cuCtxSynchronize());
    uint64_t before = simulator.used(0);
    for (int i = 0; i < PIECES; i++)
        for (int round = 0; round < ROUNDS; round++) {
            CHECK(read_it(window + (CUdeviceptr)i * PIECE, PIECE, out));
            CHECK(cuCtxSynchronize());
            moved[i] += simulator.used(0) != before;
            before = simulator.used(0);
        }
    for (int i = 0; i < PIECES; i++)
        printf("%s: %s\n", names[i], moved[i] ? "moves" : "stays");
    printf("told to be on GPU %d; %d wrong\n", lies_at(window), (int)count_wrong(&kernels, window, (uint64_t)PIECES * PIECE / 4, 7));
}

int main(int count, char **arguments)
{
    REQUIRE(count >= 2);
    context = start_on(0);
    kernels = load_kernels();
    if (!strcmp(arguments[1], "churn") && count == 4)
        churns(atoi(arguments[2]), atoi(arguments[3]));
    else if (!strcmp(arguments[1], "faults") && count == 3)
        faults(atoi(arguments[2]));
    else if (!strcmp(arguments[1], "remaps"))
        remaps();
    else
        stays();
    return 0;
}
