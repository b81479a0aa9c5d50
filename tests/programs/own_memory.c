/*
 * own_memory STEP...: a script of a program with its own virtual memory management. Sizes are in MiB, I counts handles
 * from 0.
 *   g:N     work on GPU N, and ask for memory on it        c:SIZE  create a handle (k:SIZE: not to be exported)
 *   d:N     ask for memory on GPU N from where the work is
 *   C:SIZE  the same, asking for less and less until served (a tenth each time)     e:I  export it
 *   m:I     map it, for this GPU alone, and write it with a kernel
 *   x:I     check it on the host                           o:I     copy it to every other GPU's context and check it there
 *   p:I     what the program is told about it              R:I     retain it by its address, and release that handle
 *   r:I     release it                                     u:I     unmap it and give the addresses back
 *   h:I     unmap, and give access to, two fifths of it, and the rest
 *   n:I     grant nothing but reading                      a:SIZE  cuMemAlloc
 *   f       cuMemFree of the last of these                 s       what each place holds (simulated driver only)
 */
#include "simulator.h"

#include "kernels.h"
#include "vmm.h"

#define MOST 64

static struct {
    uint64_t handle;
    size_t bytes;
    CUdeviceptr address;
    int device;
} own[MOST];
static int count, devices, device;
static CUdeviceptr plain;
static CUcontext contexts[8];
static Kernels kernels[8];

static void work_on(int ordinal)
{
    device = ordinal;
    if (!contexts[device]) {
        CHECK(cuDevicePrimaryCtxRetain(&contexts[device], device));
        CHECK(cuCtxSetCurrent(contexts[device]));
        kernels[device] = load_kernels();
    }
    CHECK(cuCtxSetCurrent(contexts[device]));
}

static CUresult create(size_t mib, int types)
{
    REQUIRE(count < MOST);
    CUmemAllocationProp properties = on_device(device);
    properties.handle_types = types;
    own[count].bytes = mib * MIB;
    own[count].device = device;
    CUresult result = cuMemCreate(&own[count].handle, own[count].bytes, &properties, 0);
    count += result == CUDA_SUCCESS;
    return result;
}

static uint32_t start_of(int i) { return (uint32_t)(1000003 * (i + 1)); }

static void copy_everywhere(int i)
{
    int home = device;
    for (int other = 0; other < devices; other++) {
        if (other == home)
            continue;
        CUdeviceptr block;
        work_on(other);
        CHECK(cuMemAlloc_v2(&block, own[i].bytes));
        CHECK(cuMemcpyPeer(block, contexts[other], own[i].address, contexts[home], own[i].bytes));
        printf("handle %d in GPU %d's context: %llu wrong\n", i, other,
               (unsigned long long)wrong_on_host(block, own[i].bytes, start_of(i)));
        CHECK(cuMemFree_v2(block));
    }
    work_on(home);
}

static void tell(int i)
{
    CUmemAllocationProp properties;
    int ordinal = -1;
    unsigned type = 0;
    CHECK(cuMemGetAllocationPropertiesFromHandle(&properties, own[i].handle));
    printf("handle %d is at %d %d", i, properties.location.kind, properties.location.id);
    if (own[i].address) {
        CHECK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, own[i].address + 8));
        CHECK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, own[i].address + 8));
        int both[] = {CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE};
        int again = -1;
        unsigned type_again = 0;
        CHECK(cuPointerGetAttributes(2, both, (void *[]){&again, &type_again}, own[i].address));
        REQUIRE(again == ordinal && type_again == type);
        CHECK(cuPointerGetAttributes(2, both, (void *[]){&again, &type_again}, own[i].address + own[i].bytes - 1));
        REQUIRE(again == ordinal && type_again == type);
        CUdeviceptr base;
        size_t bytes;
        CHECK(cuMemGetAddressRange_v2(&base, &bytes, own[i].address + own[i].bytes - 1));
        REQUIRE(base == own[i].address && bytes == own[i].bytes);
        /* A handle is mapped in one piece, whichever of its bytes is asked about. */
        for (int step = 0; step < 5; step++) {
            CUdeviceptr at = step == 4 ? own[i].address + own[i].bytes - 1 : own[i].address + step * own[i].bytes / 4;
            CHECK(cuPointerGetAttribute(&base, CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, at));
            CHECK(cuPointerGetAttribute(&bytes, CU_POINTER_ATTRIBUTE_MAPPING_SIZE, at));
            REQUIRE(base == own[i].address && bytes == own[i].bytes);
            int of_mapping[] = {CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, CU_POINTER_ATTRIBUTE_MAPPING_SIZE};
            base = bytes = 0;
            CHECK(cuPointerGetAttributes(2, of_mapping, (void *[]){&base, &bytes}, at));
            REQUIRE(base == own[i].address && bytes == own[i].bytes);
        }
        printf(", memory type %u of GPU %d, access", type, ordinal);
        for (int d = 0; d < devices; d++) {
            uint64_t flags = 9;
            CUmemLocation location = {ON_DEVICE, d};
            CHECK(cuMemGetAccess(&flags, &location, own[i].address));
            printf(" %llu", (unsigned long long)flags);
        }
        void *host = NULL;
        printf(", host pointer %d", cuPointerGetAttribute(&host, CU_POINTER_ATTRIBUTE_HOST_POINTER, own[i].address));
    }
    printf("\n");
}

int main(int argc, char **argv)
{
    CHECK(cuInit(0));
    CHECK(cuDeviceGetCount(&devices));
    REQUIRE(devices <= 8);
    Simulator simulator = find_simulator();
    work_on(0);
    for (int step = 1; step < argc; step++) {
        size_t value = strlen(argv[step]) > 2 ? strtoull(argv[step] + 2, NULL, 0) : 0;
        int i = (int)value;
        uint64_t again;
        switch (argv[step][0]) {
        case 'g':
            work_on(i);
            break;
        case 'd':
            device = i;
            break;
        case 'c':
        case 'k':
            printf("create %zu: %d\n", value, create(value, argv[step][0] == 'c' ? POSIX_FD : 0));
            break;
        case 'C':
            while (create(value, POSIX_FD) != CUDA_SUCCESS && value > 1)
                value = value * 9 / 10 & ~(size_t)1;
            printf("created %zu\n", value);
            break;
        case 'm':
            own[i].address = map_for(device, own[i].handle, own[i].bytes);
            iota(&kernels[device], NULL, own[i].address, own[i].bytes / 4, start_of(i));
            CHECK(cuCtxSynchronize());
            break;
        case 'x':
            printf("handle %d: %llu wrong\n", i,
                   (unsigned long long)wrong_on_host(own[i].address, own[i].bytes, start_of(i)));
            break;
        case 'o':
            copy_everywhere(i);
            break;
        case 'p':
            tell(i);
            break;
        case 'R':
            CHECK(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)(own[i].address + own[i].bytes - 1)));
            REQUIRE(again == own[i].handle);
            CHECK(cuMemRelease(again));
            break;
        case 'r':
            printf("release %d: %d\n", i, cuMemRelease(own[i].handle));
            break;
        case 'e': {
            int descriptor = -1;
            printf("export %d: %d\n", i, cuMemExportToShareableHandle(&descriptor, own[i].handle, POSIX_FD, 0));
            break;
        }
        case 'u':
            CHECK(cuMemUnmap(own[i].address, own[i].bytes));
            CHECK(cuMemAddressFree(own[i].address, own[i].bytes));
            own[i].address = 0;
            break;
        case 'h': {
            CUmemAccessDesc access = {{ON_DEVICE, device}, 0};
            size_t first = own[i].bytes / 5 * 2, rest = own[i].bytes - first;
            CUdeviceptr from = own[i].address + first;
            CUresult unmapped[] = {cuMemUnmap(own[i].address, first), cuMemUnmap(from, rest)};
            CUresult granted[] = {cuMemSetAccess(own[i].address, first, &access, 1), cuMemSetAccess(from, rest, &access, 1)};
            printf("two fifths of handle %d, and the rest: unmap %d %d, access %d %d\n", i, unmapped[0], unmapped[1], granted[0],
                   granted[1]);
            break;
        }
        case 'n': {
            CUmemAccessDesc access = {{ON_DEVICE, device}, 1};
            CHECK(cuMemSetAccess(own[i].address, own[i].bytes, &access, 1));
            break;
        }
        case 'a':
            printf("allocate %zu: %d\n", value, cuMemAlloc_v2(&plain, value * MIB));
            break;
        case 'f':
            CHECK(cuMemFree_v2(plain));
            break;
        case 's':
            print_used(&simulator, devices, 1);
            break;
        default:
            fprintf(stderr, "own_memory: %s is not a step\n", argv[step]);
            return 2;
        }
        fflush(stdout);
    }
    return 0;
}
