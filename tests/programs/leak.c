/*
 * leak [MIB]: after every block is freed, and the pool trimmed where there is one, the driver reports the memory it had
 * at the start. With an argument one of the blocks is that large, so that it stands on several GPUs and the host.
 */
#include "simulator.h"

#include "program.h"

int main(int argc, char **argv)
{
    enum { BLOCKS = 40 };
    CUdeviceptr blocks[BLOCKS];
    size_t free_before, free_after, total;
    int devices;
    start_on(0);
    Simulator simulator = find_simulator();
    CHECK(cuDeviceGetCount(&devices));

    for (int round = 0; round < 3; round++) {
        CHECK(cuMemGetInfo_v2(&free_before, &total));
        uint64_t used_before = physical_use(&simulator, devices);
        for (int i = 0; i < BLOCKS; i++) {
            size_t bytes = i == 7 && argc > 1 ? strtoull(argv[1], NULL, 0) * MIB : (size_t)1000003 * (size_t)(i + 1);
            CHECK(cuMemAlloc_v2(&blocks[i], bytes));
            CHECK(cuMemsetD8_v2(blocks[i] + bytes - 1, 1, 1));
        }
        /* Every second one first, so that the pool is left with holes. */
        for (int i = 0; i < BLOCKS; i += 2)
            CHECK(cuMemFree_v2(blocks[i]));
        for (int i = 1; i < BLOCKS; i += 2)
            CHECK(cuMemFree_v2(blocks[i]));
        if (simulator.trim)
            simulator.trim();
        CHECK(cuMemGetInfo_v2(&free_after, &total));
        uint64_t used_after = physical_use(&simulator, devices);
        printf("round %d: free memory %s, physical memory %s\n", round,
               free_after == free_before ? "as before" : "differs",
               used_after == used_before ? "as before" : "differs");
        if (free_after != free_before || used_after != used_before)
            fprintf(stderr, "free %zu before, %zu after; physical use %llu before, %llu after\n", free_before, free_after,
                    (unsigned long long)used_before, (unsigned long long)used_after);
    }
    if (simulator.handles && (simulator.handles() || simulator.mapped()))
        printf("handles or mappings are left\n");
    return 0;
}
