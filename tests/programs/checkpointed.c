/*
 * checkpointed: does what the lines of its standard input say, and answers each with one line.
 *   begin N          N threads, each with memory of every kind on a GPU (in turn) that it writes all the time, the kinds one after the other
 *   where N          the addresses of the kinds of thread N
 *   rounds           how often all of them have written
 *   rest             the threads stand still between two rounds; work: they go on
 *   contexts         from now on one thread makes a context on the last GPU, allocates in it, and ends it, again and again; how many so far
 *   spin             a kernel that waits for the host; release: it ends
 *   allocate MIB     memory that stays; its address
 *   on-host MIB      memory of the program's own on the host (cuMemCreate), mapped nowhere; released: it is given back
 *   refused MIB      what the driver answers to a request for memory that there is no room for
 *   name N K A S     a new block, of which K KiB from A KiB on are called N once all of it counts up from S: what gpupool_name answered, the first
 *                    word of the range, and how many others of it do not count up from there
 *   block K S        a new block of K KiB that counts up from S; its address
 *   own K S          the same of memory that it makes itself; it stays
 *   shut A K         that is mapped for nobody from here on; open A K: for its GPU again
 *   drop A           the block at this address is freed; drop-later A: in the order of a stream
 *   unname A         the names of what begins there are taken back: what gpupool_name answered
 *   put A W          the word at address A becomes W; swap A B: the words at two addresses change places
 *   look A K         the first word of K KiB at an address, and how many others do not count up from there
 *   restore          what gpupool_restore answered, and how many bytes it says
 *   spoil A N        just before the Nth copy to the host from here on, whoever makes it, another word is written to this address
 *   hold CALL        the next call of the driver of this name stands at its end; stands: whether one does; let: it goes on
 *   fault N C        from now on the Nth call of the driver answers C; calls so far
 *   late N C         the same within the next gpupool_name or gpupool_restore alone; made: calls of the driver that the last of these made
 *   calls            calls of the driver so far
 *   used             bytes that all processes of the machine have on its first two GPUs
 *   free             what has a name is freed
 *   end              the threads end, and free what they have
 */
#define _GNU_SOURCE
#include "control.h"
#include "held.h"
#include "simulator.h"
#include "standing.h"
#include "streams.h"
#include "vmm.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

enum { MOST = 16, KINDS = 4 };

/* The last one is the program's own; the one before it shares its frames with others. */
static uint64_t on_host;
static const size_t sizes[KINDS] = {2 * MIB + 20480, MIB, 40 << 10, 2 * MIB};
static CUdeviceptr blocks[MOST][KINDS];
static pthread_t workers[MOST];
static int working;
static atomic_int ends, ready, rests, resting;
static atomic_long rounds;

static void *work(void *argument)
{
    int number = (int)(uintptr_t)argument, gpus = 0;
    uint64_t handle = 0;
    CUdeviceptr *own = blocks[number];
    CHECK(cuDeviceGetCount(&gpus));
    int device = number % gpus;
    CUcontext context;
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    Kernels kernels = load_kernels();
    CUstream stream;
    CHECK(cuStreamCreate(&stream, 1));
    for (int kind = 0; kind < KINDS - 1; kind++)
        CHECK(cuMemAlloc_v2(&own[kind], sizes[kind]));
    CUmemAllocationProp properties = on_device(device);
    CHECK(cuMemCreate(&handle, sizes[KINDS - 1], &properties, 0));
    own[KINDS - 1] = map_for(device, handle, sizes[KINDS - 1]);
    atomic_fetch_add(&ready, 1);
    for (uint32_t round = 0; !atomic_load(&ends); round++) {
        for (int kind = 0; kind < KINDS; kind++)
            iota(&kernels, stream, own[kind], sizes[kind] / 4, round * 1000);
        /* What comes and goes while others are being looked at. */
        CUdeviceptr passing;
        CHECK(cuMemAlloc_v2(&passing, (1 + round % 3) * MIB));
        CHECK(cuMemsetD32Async(passing, round, MIB / 4, stream));
        CHECK(cuStreamSynchronize(stream));
        CHECK(cuMemFree_v2(passing));
        atomic_fetch_add(&rounds, 1);
        if (!atomic_load(&rests))
            continue;
        atomic_fetch_add(&resting, 1);
        while (atomic_load(&rests))
            usleep(1000);
        atomic_fetch_sub(&resting, 1);
    }
    for (int kind = 0; kind < KINDS - 1; kind++)
        CHECK(cuMemFree_v2(own[kind]));
    CHECK(cuMemUnmap(own[KINDS - 1], sizes[KINDS - 1]));
    CHECK(cuMemRelease(handle));
    CHECK(cuMemAddressFree(own[KINDS - 1], sizes[KINDS - 1]));
    CHECK(cuStreamDestroy_v2(stream));
    return NULL;
}

static Simulator simulator;
static CUdeviceptr spoilt;
static int copies_before;

/* As work of the program does that nobody knew of: of another context, or of another process. */
static void spoil(void)
{
    if (--copies_before > 0)
        simulator.before("cuMemcpyDtoHAsync_v2", spoil);
    else
        CHECK(cuMemsetD32_v2(spoilt, 0xdeadbeef, 1));
}

static Gpu spinning;

static unsigned late_call, late_code;
static unsigned long long calls_before, calls_made;

static void arm(unsigned call, unsigned code)
{
    char specification[64];
    snprintf(specification, sizeof specification, "*:%u=%u", call, code);
    REQUIRE(simulator.arm(call ? specification : "") == 0);
}

static void begin_late(void)
{
    if (late_call)
        arm(late_call, late_code);
    calls_before = simulator.calls();
}

static void end_late(void)
{
    calls_made = simulator.calls() - calls_before;
    if (late_call)
        arm(0, 0);
    late_call = 0;
}

enum { NAMED = 16 };
static CUdeviceptr named[NAMED];
static int names;

/* Of a range that counts up from its first word. */
static void say_named(const char *name, size_t bytes, size_t at, uint32_t seed)
{
    Control control = find_control(RTLD_DEFAULT);
    CUdeviceptr block;
    start_on(0);
    Kernels kernels = load_kernels();
    REQUIRE(names < NAMED);
    CHECK(cuMemAlloc_v2(&block, at + bytes));
    named[names++] = block;
    /* Not waited for here: gpupool_name does. */
    iota(&kernels, NULL, block, (at + bytes) / 4, seed);
    begin_late();
    int code = control.name(as_pointer(block + at), bytes, name);
    end_late();
    uint32_t first;
    CHECK(cuMemcpyDtoH_v2(&first, block + at, 4));
    printf("%d %u %llu\n", code, first, (unsigned long long)count_wrong(&kernels, block + at, bytes / 4, first));
}

static pthread_t maker;
static atomic_long contexts;

static void *make_contexts(void *argument)
{
    int device = *(int *)argument;
    while (!atomic_load(&ends)) {
        CUcontext context;
        CUdeviceptr block;
        CHECK(cuCtxCreate_v2(&context, 0, device));
        CHECK(cuMemAlloc_v2(&block, 3 * MIB));
        CHECK(cuMemsetD32_v2(block, 1, MIB));
        /* What is left of it goes with its context. */
        if (atomic_fetch_add(&contexts, 1) % 2)
            CHECK(cuMemFree_v2(block));
        CHECK(cuCtxDestroy_v2(context));
    }
    return NULL;
}

int main(void)
{
    char line[256], word[256];
    unsigned bytes, at, seed;
    unsigned long long address, other;
    CHECK(cuInit(0));
    simulator = find_simulator();
    while (fgets(line, sizeof line, stdin)) {
        int number = 0;
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, "begin %d", &number) == 1) {
            REQUIRE(number <= MOST);
            for (working = 0; working < number; working++)
                REQUIRE(pthread_create(&workers[working], NULL, work, (void *)(uintptr_t)working) == 0);
            while (atomic_load(&ready) < number)
                sched_yield();
            puts("begun");
        } else if (sscanf(line, "where %d", &number) == 1) {
            for (int kind = 0; kind < KINDS; kind++)
                printf("%llu%s", (unsigned long long)blocks[number][kind], kind < KINDS - 1 ? " " : "\n");
        } else if (strcmp(line, "rounds") == 0) {
            printf("%ld\n", atomic_load(&rounds));
        } else if (strcmp(line, "rest") == 0) {
            atomic_store(&rests, 1);
            while (atomic_load(&resting) < working)
                usleep(1000);
            puts("all do");
        } else if (strcmp(line, "work") == 0) {
            atomic_store(&rests, 0);
            puts("they do");
        } else if (strcmp(line, "contexts") == 0) {
            static int last;
            if (!maker) {
                CHECK(cuDeviceGetCount(&last));
                last--;
                REQUIRE(pthread_create(&maker, NULL, make_contexts, &last) == 0);
            }
            printf("%ld\n", atomic_load(&contexts));
        } else if (strcmp(line, "spin") == 0) {
            open_gpu(&spinning, 0);
            hold(&spinning);
            puts("it spins");
        } else if (strcmp(line, "release") == 0) {
            let_go(&spinning);
            puts("it ended");
        } else if (sscanf(line, "allocate %d", &number) == 1) {
            CUdeviceptr block;
            start_on(0);
            CHECK(cuMemAlloc_v2(&block, (size_t)number * MIB));
            CHECK(cuMemsetD32_v2(block, 7, (size_t)number * MIB / 4));
            printf("%llu\n", (unsigned long long)block);
        } else if (sscanf(line, "on-host %d", &number) == 1) {
            CUmemAllocationProp properties = on_device(0);
            properties.location.kind = ON_HOST_NODE;
            CHECK(cuMemCreate(&on_host, (size_t)number << 20, &properties, 0));
            puts("made");
        } else if (strcmp(line, "released") == 0) {
            CHECK(cuMemRelease(on_host));
            puts("released");
        } else if (sscanf(line, "refused %d", &number) == 1) {
            CUdeviceptr none;
            start_on(0);
            printf("%d\n", cuMemAlloc_v2(&none, (size_t)number * MIB));
        } else if (sscanf(line, "name %255s %u %u %u", word, &bytes, &at, &seed) == 4) {
            say_named(word, (size_t)bytes << 10, (size_t)at << 10, seed);
        } else if (sscanf(line, "block %u %u", &bytes, &seed) == 2) {
            CUdeviceptr block;
            start_on(0);
            Kernels kernels = load_kernels();
            CHECK(cuMemAlloc_v2(&block, (size_t)bytes << 10));
            iota(&kernels, NULL, block, ((size_t)bytes << 10) / 4, seed);
            CHECK(cuCtxSynchronize());
            printf("%llu\n", (unsigned long long)block);
        } else if (sscanf(line, "own %u %u", &bytes, &seed) == 2) {
            uint64_t handle;
            start_on(0);
            Kernels kernels = load_kernels();
            CUmemAllocationProp properties = on_device(0);
            CHECK(cuMemCreate(&handle, (size_t)bytes << 10, &properties, 0));
            CUdeviceptr own = map_for(0, handle, (size_t)bytes << 10);
            iota(&kernels, NULL, own, ((size_t)bytes << 10) / 4, seed);
            CHECK(cuCtxSynchronize());
            printf("%llu\n", (unsigned long long)own);
        } else if (sscanf(line, "shut %llu %u", &address, &bytes) == 2) {
            uint64_t handle;
            start_on(0);
            CHECK(cuMemRetainAllocationHandle(&handle, as_pointer((CUdeviceptr)address)));
            CHECK(cuMemUnmap((CUdeviceptr)address, (size_t)bytes << 10));
            CHECK(cuMemMap((CUdeviceptr)address, (size_t)bytes << 10, 0, handle, 0));
            CHECK(cuMemRelease(handle));
            puts("shut");
        } else if (sscanf(line, "open %llu %u", &address, &bytes) == 2) {
            CUmemAccessDesc access = {{ON_DEVICE, 0}, READ_WRITE};
            CHECK(cuMemSetAccess((CUdeviceptr)address, (size_t)bytes << 10, &access, 1));
            puts("open");
        } else if (sscanf(line, "drop-later %llu", &address) == 1) {
            start_on(0);
            CHECK(cuMemFreeAsync((CUdeviceptr)address, NULL));
            CHECK(cuCtxSynchronize());
            puts("dropped");
        } else if (sscanf(line, "drop %llu", &address) == 1) {
            start_on(0);
            CHECK(cuMemFree_v2((CUdeviceptr)address));
            puts("dropped");
        } else if (sscanf(line, "unname %llu", &address) == 1) {
            Control control = find_control(RTLD_DEFAULT);
            printf("%d\n", control.name(as_pointer((CUdeviceptr)address), 0, NULL));
        } else if (sscanf(line, "put %llu %u", &address, &seed) == 2) {
            start_on(0);
            CHECK(cuMemsetD32_v2((CUdeviceptr)address, seed, 1));
            CHECK(cuCtxSynchronize());
            puts("put");
        } else if (sscanf(line, "swap %llu %llu", &address, &other) == 2) {
            uint32_t first, second;
            start_on(0);
            CHECK(cuMemcpyDtoH_v2(&first, (CUdeviceptr)address, 4));
            CHECK(cuMemcpyDtoH_v2(&second, (CUdeviceptr)other, 4));
            CHECK(cuMemsetD32_v2((CUdeviceptr)address, second, 1));
            CHECK(cuMemsetD32_v2((CUdeviceptr)other, first, 1));
            CHECK(cuCtxSynchronize());
            puts("swapped");
        } else if (sscanf(line, "look %llu %u", &address, &bytes) == 2) {
            uint32_t first;
            start_on(0);
            Kernels kernels = load_kernels();
            CHECK(cuMemcpyDtoH_v2(&first, (CUdeviceptr)address, 4));
            printf("%u %llu\n", first, (unsigned long long)count_wrong(&kernels, (CUdeviceptr)address, ((size_t)bytes << 10) / 4, first));
        } else if (strcmp(line, "restore") == 0) {
            size_t restored = 4711;
            Control control = find_control(RTLD_DEFAULT);
            begin_late();
            int code = control.restore(&restored);
            end_late();
            printf("%d %zu\n", code, restored);
        } else if (sscanf(line, "spoil %llu %d", &address, &copies_before) == 2) {
            spoilt = (CUdeviceptr)address;
            simulator.before("cuMemcpyDtoHAsync_v2", spoil);
            puts("it will");
        } else if (orders_a_call(line)) {
            /* It is answered. */
        } else if (sscanf(line, "fault %u %u", &at, &seed) == 2) {
            arm(at, seed);
            printf("%llu\n", (unsigned long long)simulator.calls());
        } else if (sscanf(line, "late %u %u", &late_call, &late_code) == 2) {
            puts("it will");
        } else if (strcmp(line, "made") == 0) {
            printf("%llu\n", calls_made);
        } else if (strcmp(line, "calls") == 0) {
            printf("%llu\n", (unsigned long long)simulator.calls());
        } else if (strcmp(line, "used") == 0) {
            printf("%llu\n", (unsigned long long)(simulator.used(0) + simulator.used(1)));
        } else if (strcmp(line, "free") == 0) {
            while (names)
                CHECK(cuMemFree_v2(named[--names]));
            puts("freed");
        } else if (strcmp(line, "end") == 0) {
            atomic_store(&ends, 1);
            while (working)
                REQUIRE(pthread_join(workers[--working], NULL) == 0);
            if (maker)
                REQUIRE(pthread_join(maker, NULL) == 0);
            puts("ended");
        } else {
            printf("what is %s?\n", line);
        }
        fflush(stdout);
    }
    return 0;
}
