/*
 * fault_sweep CODE FIRST MIB: one allocation (of so many KiB where a k stands behind the number) and one free, with the driver call number n failing with CODE, for every n from
 * FIRST until a round makes fewer calls. Each round gets its memory or an error, the block it gets works, and afterwards
 * nothing is left behind. FIRST 0 does one round, after n further arguments, for sweeps in fresh processes:
 * fault_sweep CODE 0 MIB N. Runs on the simulated driver only.
 */
#include "simulator.h"

#include "program.h"

static Simulator simulator;
static int devices;

static void write_and_read(CUdeviceptr block, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += 2 * MIB) {
        uint64_t word = at ^ 0x1234, back = 0;
        CHECK(cuMemcpyHtoD_v2(block + at, &word, sizeof word));
        CHECK(cuMemcpyDtoH_v2(&back, block + at, sizeof back));
        REQUIRE(back == word);
    }
}

static uint64_t armed_calls(uint64_t since) { return simulator.calls() - since; }

/* Calls made while the fault was armed: a fault at a later number has not happened. */
static uint64_t fault_round(int code, uint64_t n, size_t bytes)
{
    char fault[64];
    CUdeviceptr block = 0;
    uint64_t before = physical_use(&simulator, devices), calls;
    snprintf(fault, sizeof fault, "*:%llu=%d", (unsigned long long)n, code);
    REQUIRE(simulator.arm(fault) == 0);
    uint64_t start = simulator.calls();
    CUresult allocated = cuMemAlloc_v2(&block, bytes);
    calls = armed_calls(start);
    if (allocated == CUDA_SUCCESS && n <= calls)
        printf("%llu: allocation survives\n", (unsigned long long)n);
    if (allocated != CUDA_SUCCESS)
        printf("%llu: allocation answers %d%s\n", (unsigned long long)n, allocated, n <= calls ? "" : " without a fault");
    REQUIRE(allocated == CUDA_SUCCESS || block == 0);

    if (allocated == CUDA_SUCCESS) {
        if (n <= calls)
            REQUIRE(simulator.arm("") == 0);
        uint64_t written = simulator.calls();
        if (n <= calls)
            write_and_read(block, bytes);
        written = simulator.calls() - written;
        CUresult freed = cuMemFree_v2(block);
        calls = armed_calls(start) - written;
        if (n <= calls && freed != CUDA_SUCCESS) {
            /* Still the program's, as it is when the driver's own free fails: works, and can be freed. */
            printf("%llu: free answers %d\n", (unsigned long long)n, freed);
            REQUIRE(simulator.arm("") == 0);
            write_and_read(block, bytes);
            CHECK(cuMemFree_v2(block));
        }
    }
    REQUIRE(simulator.arm("") == 0);
    if (simulator.trim)
        simulator.trim();
    uint64_t after = physical_use(&simulator, devices);
    if (after != before || simulator.handles() || simulator.mapped() || simulator.violations())
        printf("%llu: LEFT BEHIND %lld bytes, %llu handles, %llu mapped bytes, %llu violations\n", (unsigned long long)n,
               (long long)(after - before), (unsigned long long)simulator.handles(),
               (unsigned long long)simulator.mapped(), (unsigned long long)simulator.violations());
    return calls;
}

int main(int argc, char **argv)
{
    if (argc < 4)
        return 2;
    int code = atoi(argv[1]);
    uint64_t first = strtoull(argv[2], NULL, 0);
    char *unit;
    size_t bytes = strtoull(argv[3], &unit, 0);
    bytes *= *unit == 'k' ? KIB : MIB;
    start_on(0);
    CHECK(cuDeviceGetCount(&devices));
    simulator = find_simulator();
    REQUIRE(simulator.arm && simulator.calls && simulator.used);
    if (first == 0) {
        uint64_t n = argc > 4 ? strtoull(argv[4], NULL, 0) : 1;
        printf("calls: %llu\n", (unsigned long long)fault_round(code, n, bytes));
        return 0;
    }
    uint64_t n = first;
    while (fault_round(code, n, bytes) >= n)
        n++;
    printf("swept %llu calls\n", (unsigned long long)(n - first));
    return 0;
}
