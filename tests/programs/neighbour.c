/*
 * neighbour [GPU [steps]]: a program beside others on the same GPUs. Does what the lines of its standard input say on that GPU (0), and answers each with one line.
 *   With "steps" it begins only as it is told to: first "init" (cuInit), then "context", and then the others.
 *   take MIB         a block that it fills; how long that took in ms, or the driver's error
 *   piece KIB        a block of so many KiB, the same way
 *   own MIB          the same of memory of its own (cuMemCreate)
 *   pin MIB          pinned memory, which it frees at once
 *   drop             frees the block that it took first
 *   check            all of them; how many words were not what they were
 *   churn S SEED MIB takes, checks and drops blocks at random for S seconds, MIB at most at once; rounds, wrong words, refusals, longest ms
 *   spin             a kernel that waits for the host; release: it ends
 *   faults LIST      the simulated driver's next calls fail so (SIMCUDA_FAULT)
 *   fork             a child that answers the driver's version, and ends
 *   fork and stand   another thread forks and stands in the middle of it, behind what the library does before; stands: whether it does; let: it goes on
 *   exit             it ends at once, with all that it has
 *   exec             it becomes such a program anew
 */
#define _GNU_SOURCE
#include "held.h"
#include "standing.h"
#include "vmm.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 64 };

typedef struct {
    CUdeviceptr at;
    size_t bytes;
    uint32_t start;
    uint64_t handle;
} Block;

static Gpu gpu;
static CUstream stream;
static Block blocks[MOST];
static int count;
static uint32_t starts;

static double milliseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

static void fill_block(Block *block)
{
    block->start = starts += 12345;
    iota(&gpu.kernels, stream, block->at, block->bytes / 4, block->start);
    CHECK(cuStreamSynchronize(stream));
}

static CUresult take(size_t bytes)
{
    REQUIRE(count < MOST);
    Block *block = &blocks[count];
    *block = (Block){.bytes = bytes};
    CUresult result = cuMemAlloc_v2(&block->at, bytes);
    if (result == CUDA_SUCCESS) {
        count++;
        fill_block(block);
    }
    return result;
}

static void drop(int number)
{
    Block *block = &blocks[number];
    if (block->handle) {
        CHECK(cuMemUnmap(block->at, block->bytes));
        CHECK(cuMemRelease(block->handle));
        CHECK(cuMemAddressFree(block->at, block->bytes));
    } else {
        CHECK(cuMemFree_v2(block->at));
    }
    memmove(block, block + 1, (size_t)(--count - number) * sizeof *block);
}

static uint64_t wrong(const Block *block)
{
    return count_wrong(&gpu.kernels, block->at, block->bytes / 4, block->start);
}

static atomic_int is_to_stand;

static void stand_if_asked(void)
{
    if (atomic_exchange(&is_to_stand, 0))
        stand();
}

/* What is registered last is called first before a fork, so this is registered before any library is. */
static void register_early(int arguments, char **values, char **environment)
{
    (void)arguments, (void)values, (void)environment;
    (void)pthread_atfork(stand_if_asked, NULL, NULL);
}
__attribute__((section(".preinit_array"), used)) static void (*const early)(int, char **, char **) = register_early;

static void *forks(void *unused)
{
    int status;
    (void)unused;
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0)
        _exit(0);
    REQUIRE(waitpid(child, &status, 0) == child);
    return NULL;
}

static void churn(int seconds, unsigned seed, size_t most)
{
    double ends = milliseconds() + seconds * 1e3, longest = 0;
    uint64_t rounds = 0, found = 0, refused = 0;
    while (milliseconds() < ends) {
        size_t held = 0;
        for (int number = 0; number < count; number++)
            held += blocks[number].bytes;
        seed = seed * 1664525 + 1013904223;
        size_t bytes = (size_t)((seed >> 8) % 8 + 1) * 2 * MIB;
        if (count && (held + bytes > most || (seed >> 16) % 3 == 0)) {
            int number = (int)((seed >> 10) % (unsigned)count);
            found += wrong(&blocks[number]);
            drop(number);
        } else if (count < MOST && held + bytes <= most) {
            double begun = milliseconds();
            refused += take(bytes) != CUDA_SUCCESS;
            double took = milliseconds() - begun;
            longest = took > longest ? took : longest;
        }
        rounds++;
    }
    for (int number = 0; number < count; number++)
        found += wrong(&blocks[number]);
    while (count)
        drop(0);
    printf("%llu %llu %llu %.0f\n", (unsigned long long)rounds, (unsigned long long)found, (unsigned long long)refused, longest);
}

/* A list of faults is long. */
static char line[1 << 16];

/* Whether the next line is this one; it is the only one that may come now. */
static int is_told(const char *step)
{
    if (!fgets(line, sizeof line, stdin))
        return 0;
    line[strcspn(line, "\n")] = 0;
    REQUIRE(strcmp(line, step) == 0);
    return 1;
}

int main(int arguments, char **values)
{
    int device = arguments > 1 ? atoi(values[1]) : 0;
    if (arguments > 2 && strcmp(values[2], "steps") == 0) {
        if (!is_told("init"))
            return 0;
        CHECK(cuInit(0));
        puts("begun");
        fflush(stdout);
        if (!is_told("context"))
            return 0;
        CUdevice gpu_number;
        CUcontext context;
        CHECK(cuDeviceGet(&gpu_number, device));
        CHECK(cuDevicePrimaryCtxRetain(&context, gpu_number));
        puts("there");
        fflush(stdout);
    }
    open_gpu(&gpu, device);
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    while (fgets(line, sizeof line, stdin)) {
        int number = 0, most = 0;
        unsigned seed = 0;
        line[strcspn(line, "\n")] = 0;
        double begun = milliseconds();
        int is_piece = sscanf(line, "piece %d", &number) == 1;
        if (is_piece || sscanf(line, "take %d", &number) == 1) {
            CUresult result = take((size_t)number * (is_piece ? 1024 : MIB));
            if (result)
                printf("error %d\n", result);
            else
                printf("%.0f\n", milliseconds() - begun);
        } else if (sscanf(line, "own %d", &number) == 1) {
            Block *block = &blocks[count];
            *block = (Block){.bytes = (size_t)number * MIB};
            CUmemAllocationProp properties = on_device(device);
            CHECK(cuMemCreate(&block->handle, block->bytes, &properties, 0));
            block->at = map_for(device, block->handle, block->bytes);
            count++;
            fill_block(block);
            puts("made");
        } else if (sscanf(line, "pin %d", &number) == 1) {
            void *pinned = NULL;
            CHECK(cuMemHostAlloc(&pinned, (size_t)number * MIB, 0));
            CHECK(cuMemFreeHost(pinned));
            puts("unpinned");
        } else if (strcmp(line, "drop") == 0) {
            drop(0);
            puts("dropped");
        } else if (strcmp(line, "check") == 0) {
            uint64_t found = 0;
            for (number = 0; number < count; number++)
                found += wrong(&blocks[number]);
            printf("%llu\n", (unsigned long long)found);
        } else if (sscanf(line, "churn %d %u %d", &number, &seed, &most) == 3) {
            churn(number, seed, (size_t)most * MIB);
        } else if (strcmp(line, "spin") == 0) {
            hold(&gpu);
            puts("it spins");
        } else if (strcmp(line, "release") == 0) {
            let_go(&gpu);
            puts("it ends");
        } else if (strncmp(line, "faults ", 7) == 0) {
            REQUIRE(find_simulator().arm(line + 7) == 0);
            puts("armed");
        } else if (strcmp(line, "fork and stand") == 0) {
            pthread_t thread;
            atomic_store(&goes_on, 0);
            atomic_store(&is_to_stand, 1);
            REQUIRE(pthread_create(&thread, NULL, forks, NULL) == 0 && pthread_detach(thread) == 0);
            puts("it will");
        } else if (orders_a_call(line)) {
        } else if (strcmp(line, "fork") == 0) {
            int status;
            fflush(stdout);
            pid_t child = fork();
            REQUIRE(child >= 0);
            if (child == 0) {
                int version;
                _exit(cuDriverGetVersion(&version) == CUDA_SUCCESS ? 7 : 8);
            }
            REQUIRE(waitpid(child, &status, 0) == child);
            printf("child ended with %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
        } else if (strcmp(line, "exit") == 0) {
            exit(0);
        } else if (strcmp(line, "exec") == 0) {
            /* What comes behind this line is for the one that follows. */
            puts("it goes");
            fflush(stdout);
            execv("/proc/self/exe", values);
            printf("error %d\n", errno);
        } else {
            printf("what is %s?\n", line);
        }
        fflush(stdout);
    }
    while (count)
        drop(0);
    return 0;
}
