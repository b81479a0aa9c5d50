/*
 * home: does what the lines of its standard input say, and answers each with one line. Sizes are in MiB.
 *   init             CUDA and the first GPU's context
 *   allocate SIZE    a block, which stays; free: the last one; clear: all of them
 *   used GPU         what NVML says is used of a GPU by all processes; asks CUDA nothing
 *   turns N SIZE MS  N times: two blocks that are freed in the order they came, then a pause
 *   capture          begins one, finish: ends it
 *   trim             gpupool_trim
 *   arm N CODE       the Nth driver call from now on fails with this code; faults: how many were armed and did not happen yet
 *   violations       how often the driver was used in a way that it forbids
 *   forks N          N children one after the other, each of which asks the driver for memory and ends; what they answered
 */
#include "simulator.h"
#include "nvml.h"
#include "streams.h"

#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static CUdeviceptr blocks[256];
static int count;
static CUstream stream;

static void clear(void)
{
    while (count)
        CHECK(cuMemFree_v2(blocks[--count]));
}

static void pause_for(size_t milliseconds)
{
    struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    nanosleep(&time, NULL);
}

static void turns(size_t turns, size_t mib, size_t milliseconds)
{
    for (size_t i = 0; i < turns; i++) {
        CUdeviceptr first, second;
        CHECK(cuMemAlloc_v2(&first, mib * MIB));
        CHECK(cuMemAlloc_v2(&second, mib * MIB / 2));
        CHECK(cuMemFree_v2(first));
        CHECK(cuMemFree_v2(second));
        pause_for(milliseconds);
    }
}

static void forks(size_t wanted)
{
    int same = 0;
    for (size_t i = 0; i < wanted; i++) {
        int status;
        pid_t child = fork();
        REQUIRE(child >= 0);
        if (!child) {
            CUdeviceptr pointer;
            _exit((int)cuMemAlloc_v2(&pointer, MIB));
        }
        REQUIRE(waitpid(child, &status, 0) == child);
        same += WIFEXITED(status) && WEXITSTATUS(status) == 3;
    }
    printf("%d of %zu not initialised\n", same, wanted);
}

int main(void)
{
    char line[256];
    setvbuf(stdout, NULL, _IOLBF, 0);
    setvbuf(stdin, NULL, _IONBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        char word[32] = "";
        size_t n[3] = {0};
        sscanf(line, "%31s %zu %zu %zu", word, &n[0], &n[1], &n[2]);
        if (strcmp(word, "used") == 0) {
            NVML("nvmlInitWithFlags", unsigned)(0);
            printf("%llu\n", nvml_memory((unsigned)n[0]).used / MIB);
            continue;
        }
        if (strcmp(word, "forks") == 0) {
            forks(n[0]);
            continue;
        }
        if (strcmp(word, "faults") == 0 || strcmp(word, "violations") == 0) {
            Simulator simulator = find_simulator();
            printf("%llu\n", (unsigned long long)(word[0] == 'f' ? simulator.faults_left() : simulator.violations()));
            continue;
        }
        if (strcmp(word, "arm") == 0) {
            char fault[64];
            snprintf(fault, sizeof fault, "*:%zu=%zu", n[0], n[1]);
            REQUIRE(find_simulator().arm(fault) == 0);
        } else if (strcmp(word, "init") == 0) {
            start_on(0);
            CHECK(cuStreamCreate(&stream, 1));
        } else if (strcmp(word, "allocate") == 0) {
            CHECK(cuMemAlloc_v2(&blocks[count++], n[0] * MIB));
        } else if (strcmp(word, "free") == 0) {
            CHECK(cuMemFree_v2(blocks[--count]));
        } else if (strcmp(word, "clear") == 0) {
            clear();
        } else if (strcmp(word, "trim") == 0) {
            uint64_t (*trim)(void);
            *(void **)&trim = dlsym(RTLD_DEFAULT, "gpupool_trim");
            REQUIRE(trim);
            trim();
        } else if (strcmp(word, "turns") == 0) {
            turns(n[0], n[1], n[2]);
        } else if (strcmp(word, "capture") == 0) {
            CHECK(cuStreamBeginCapture_v2(stream, CAPTURE_GLOBAL));
        } else if (strcmp(word, "finish") == 0) {
            CUgraph graph;
            CHECK(cuStreamEndCapture(stream, &graph));
        }
        printf("done\n");
    }
    return 0;
}
