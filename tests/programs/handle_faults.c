/*
 * handle_faults MIB: makes a handle, maps it, takes references on it and lets go again, while the Nth driver call of all that fails
 * (simulated driver only), for every N. What succeeded holds its data, and in the end nothing is left.
 */
#include "simulator.h"

#include "vmm.h"

enum { VALUE = 0x5eed };

static size_t bytes;
static CUdeviceptr window;
static uint64_t handle;

/* One reference less; whether there was one. */
static int release(int *references, uint64_t which)
{
    if (*references == 0 || cuMemRelease(which) != CUDA_SUCCESS)
        return 0;
    --*references;
    return 1;
}

static void use(void)
{
    CUmemAllocationProp properties = on_device(0);
    CUmemAccessDesc access = {{ON_DEVICE, 0}, READ_WRITE};
    uint64_t again = 0;
    int references = cuMemCreate(&handle, bytes, &properties, 0) == CUDA_SUCCESS;
    int mapped = references && cuMemMap(window, bytes, 0, handle, 0) == CUDA_SUCCESS;
    int usable = mapped && cuMemSetAccess(window, bytes, &access, 1) == CUDA_SUCCESS;
    usable = usable && cuMemsetD32_v2(window, VALUE, bytes / 4) == CUDA_SUCCESS;
    if (mapped && cuMemRetainAllocationHandle(&again, (void *)(window + bytes - 1)) == CUDA_SUCCESS) {
        REQUIRE(again == handle);
        references++;
        release(&references, again);
    }
    release(&references, handle);
    /* Where nobody has a reference any more. */
    if (mapped && cuMemRetainAllocationHandle(&again, (void *)window) == CUDA_SUCCESS) {
        REQUIRE(again == handle);
        references++;
    }
    if (usable) {
        unsigned words[2] = {VALUE, VALUE};
        CUresult first = cuMemcpyDtoH_v2(&words[0], window, 4), last = cuMemcpyDtoH_v2(&words[1], window + bytes - 4, 4);
        REQUIRE(first || words[0] == VALUE);
        REQUIRE(last || words[1] == VALUE);
    }
    if (mapped && cuMemUnmap(window, bytes) != CUDA_SUCCESS)
        CHECK(cuMemUnmap(window, bytes));
    while (references)
        REQUIRE(release(&references, handle) || release(&references, handle));
}

int main(int argc, char **argv)
{
    REQUIRE(argc == 2);
    bytes = (size_t)atoi(argv[1]) * MIB;
    Simulator simulator = find_simulator();
    start_on(0);
    CHECK(cuMemAddressReserve(&window, bytes, 0, 0, 0));
    use();
    REQUIRE(simulator.handles() == 0 && simulator.mapped() == 0);
    uint64_t before = simulator.used(0), start = simulator.calls();
    use();
    uint64_t calls = simulator.calls() - start;
    for (uint64_t call = 1; call <= calls; call++) {
        char fault[64];
        snprintf(fault, sizeof fault, "*:%llu=999", (unsigned long long)call);
        REQUIRE(simulator.arm(fault) == 0);
        use();
        REQUIRE(simulator.arm("") == 0);
        if (simulator.handles() || simulator.mapped() || simulator.used(0) != before || simulator.used(1)) {
            printf("the %lluth call: %d handles, %d bytes mapped, %d and %d bytes used\n", (unsigned long long)call,
                   (int)simulator.handles(), (int)simulator.mapped(), (int)(simulator.used(0) - before), (int)simulator.used(1));
            return 1;
        }
    }
    printf("swept %llu\n", (unsigned long long)calls);
    return 0;
}
