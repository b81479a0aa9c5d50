/*
 * pinned_faults CODE KIB: one pinned allocation and its free, with the driver call number n failing with CODE, for every n
 * until a round makes fewer calls; in each second round with memory that the pool has ready. Each round gets memory that
 * works, or an error, and afterwards nothing is left behind. Runs on the simulated driver only.
 */
#include "simulator.h"

#include "program.h"

static Simulator simulator;
static CUdeviceptr target;

static void use(unsigned char *memory, size_t bytes)
{
    unsigned char back;
    memset(memory, 7, bytes);
    CHECK(cuMemcpyHtoD_v2(target, memory + bytes - 1, 1));
    CHECK(cuMemcpyDtoH_v2(&back, target, 1));
    REQUIRE(back == 7);
}

static uint64_t fault_round(int code, uint64_t n, size_t bytes, int ready)
{
    char fault[64];
    unsigned char *memory = NULL;
    CHECK(cuMemHostAlloc((void **)&memory, bytes, 0));
    CHECK(cuMemFreeHost(memory));
    if (!ready)
        simulator.trim();
    snprintf(fault, sizeof fault, "*:%llu=%d", (unsigned long long)n, code);
    REQUIRE(simulator.arm(fault) == 0);
    uint64_t start = simulator.calls();
    memory = NULL;
    CUresult allocated = cuMemHostAlloc((void **)&memory, bytes, 0);
    uint64_t calls = simulator.calls() - start;
    REQUIRE((allocated == CUDA_SUCCESS) == (memory != NULL));
    if (allocated != CUDA_SUCCESS) {
        REQUIRE(n <= calls);
        printf("%llu: allocation answers %d\n", (unsigned long long)n, allocated);
    } else {
        if (n <= calls) {
            REQUIRE(simulator.arm("") == 0);
            use(memory, bytes);
        }
        start = simulator.calls();
        CUresult freed = cuMemFreeHost(memory);
        calls += simulator.calls() - start;
        if (freed != CUDA_SUCCESS) {
            /* Still the program's, as it is when the driver's own free fails. */
            printf("%llu: free answers %d\n", (unsigned long long)n, freed);
            REQUIRE(simulator.arm("") == 0);
            use(memory, bytes);
            CHECK(cuMemFreeHost(memory));
        }
    }
    REQUIRE(simulator.arm("") == 0);
    simulator.trim();
    if (simulator.host_used() || simulator.violations())
        printf("%llu: LEFT BEHIND %llu bytes, %llu violations\n", (unsigned long long)n,
               (unsigned long long)simulator.host_used(), (unsigned long long)simulator.violations());
    return calls;
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    int code = atoi(argv[1]);
    size_t bytes = strtoull(argv[2], NULL, 0) * KIB;
    start_on(0);
    simulator = find_simulator();
    REQUIRE(simulator.arm && simulator.calls && simulator.trim);
    CHECK(cuMemAlloc_v2(&target, 4096));
    for (int ready = 0; ready < 2; ready++) {
        uint64_t n = 1;
        while (fault_round(code, n, bytes, ready) >= n)
            n++;
        printf("swept %llu calls%s\n", (unsigned long long)(n - 1), ready ? " with memory ready" : "");
    }
    return 0;
}
