/*
 * late_ranks: says after the first call of the driver, in which another thread might be, that it is one of several ranks.
 * Two blocks, of which GPU 0 has room for one; then what is used where (simulated driver).
 */
#include "simulator.h"

#include "program.h"

int main(void)
{
    CUdeviceptr first, second;
    Simulator simulator = find_simulator();
    CHECK(cuInit(0));
    REQUIRE(setenv("LOCAL_WORLD_SIZE", "8", 1) == 0);
    start_on(0);
    CHECK(cuMemAlloc_v2(&first, 150 * MIB));
    CHECK(cuMemAlloc_v2(&second, 150 * MIB));
    print_used(&simulator, 2, 1);
    return 0;
}
