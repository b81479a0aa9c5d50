/*
 * steps STEP...: a script of allocations, for tests of settings and of placement. Sizes are in MiB.
 *   a:SIZE  allocate and mark every 2 MiB      r:SIZE  the same, and once more after OUT_OF_MEMORY, like a caching allocator
 *   b:BYTES allocate so many bytes, without marks
 *   f:I     free the block of step I (from 0)  c:I     check its marks
 *   g:N     work on GPU N                      i       free and total memory as the program is told
 *   s       synchronise                        t       trim the pool
 *   u       bytes used on each GPU and the host (simulated driver only)
 */
#include "simulator.h"

#include "program.h"

#define MOST 64

static CUdeviceptr address[MOST];
static size_t size[MOST];
static int count;

static uint64_t mark(int block, size_t offset) { return ((uint64_t)block << 48) ^ offset ^ 0xa5a5; }

static CUresult allocate(size_t mib)
{
    REQUIRE(count < MOST);
    CUresult result = cuMemAlloc_v2(&address[count], mib * MIB);
    printf("allocate %zu: %d\n", mib, result);
    if (result != CUDA_SUCCESS)
        return result;
    size[count] = mib * MIB;
    for (size_t at = 0; at < size[count]; at += 2 * MIB) {
        uint64_t word = mark(count, at);
        CHECK(cuMemcpyHtoD_v2(address[count] + at, &word, sizeof word));
    }
    count++;
    return result;
}

static void check(int block)
{
    uint64_t wrong = 0, word;
    REQUIRE(block < count);
    for (size_t at = 0; at < size[block]; at += 2 * MIB) {
        CHECK(cuMemcpyDtoH_v2(&word, address[block] + at, sizeof word));
        wrong += word != mark(block, at);
    }
    printf("block %d: %llu wrong\n", block, (unsigned long long)wrong);
}

int main(int argc, char **argv)
{
    CUdevice device = 0;
    CUcontext context;
    size_t free_bytes, total, device_total;
    int devices;
    start_on(0);
    CHECK(cuDeviceGetCount(&devices));
    Simulator simulator = find_simulator();
    for (int i = 1; i < argc; i++) {
        size_t value = strlen(argv[i]) > 2 ? strtoull(argv[i] + 2, NULL, 0) : 0;
        switch (argv[i][0]) {
        case 'a':
            allocate(value);
            break;
        case 'b':
            REQUIRE(count < MOST);
            printf("allocate %zu bytes: %d\n", value, cuMemAlloc_v2(&address[count++], value));
            break;
        case 'r':
            if (allocate(value) == CUDA_ERROR_OUT_OF_MEMORY)
                allocate(value);
            break;
        case 'f':
            printf("free %zu: %d\n", value, cuMemFree_v2(address[value]));
            break;
        case 'c':
            check((int)value);
            break;
        case 'g':
            device = (CUdevice)value;
            CHECK(cuDevicePrimaryCtxRetain(&context, device));
            CHECK(cuCtxSetCurrent(context));
            break;
        case 'i':
            CHECK(cuMemGetInfo_v2(&free_bytes, &total));
            CHECK(cuDeviceTotalMem_v2(&device_total, device));
            printf("memory: free %zu, total %zu, device %zu\n", free_bytes / MIB, total / MIB, device_total / MIB);
            break;
        case 's':
            CHECK(cuCtxSynchronize());
            break;
        case 't':
            if (simulator.trim)
                simulator.trim();
            break;
        case 'u':
            print_used(&simulator, devices, 1);
            break;
        default:
            fprintf(stderr, "steps: %s is not a step\n", argv[i]);
            return 2;
        }
        fflush(stdout);
    }
    return 0;
}
