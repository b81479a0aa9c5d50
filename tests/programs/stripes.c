/*
 * stripes STEP...: where managed memory is meant to live, and where it is. Sizes are in MiB.
 *   a:SIZE  allocate device memory            m:SIZE  allocate managed memory (M: attached to the host)
 *   S:SIZE  allocate in the order of a stream  V:SIZE  make a handle on GPU 0
 *   w:I     a kernel writes block I           c:I     a kernel checks it      h:I  the processor reads and checks it
 *   p:I     its preferred locations           r:I     where it is (simulated driver only)
 *   x:I     the GPUs it is mapped for         o:I     move it to the host, as a program may
 *   f:I     free it      F:I  in a stream     g:N     work on GPU N           d:N  destroy the context of g:N
 *   b, e    begin and end a capture           s       synchronise             i    memory as the program is told
 */
#include "managed.h"

#include "kernels.h"
#include "vmm.h"

#define MOST 32

enum { RELAXED = 2 };
CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream);
CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream);

static CUstream stream;
static CUdeviceptr address[MOST];
static size_t size[MOST];
static int count, devices;

static void allocate(char kind, size_t mib)
{
    CUresult result;
    REQUIRE(count < MOST);
    if (kind == 'a')
        result = cuMemAlloc_v2(&address[count], mib * MIB);
    else if (kind == 'S')
        result = cuMemAllocAsync(&address[count], mib * MIB, stream);
    else
        result = cuMemAllocManaged(&address[count], mib * MIB, kind == 'm' ? CU_MEM_ATTACH_GLOBAL : CU_MEM_ATTACH_HOST);
    printf("allocate %zu%s: %d\n", mib, kind == 'S' ? " in a stream" : "", result);
    size[count] = mib * MIB;
    count += result == CUDA_SUCCESS;
}

/* One word for each row of neighbours that are at one place: `gpu0 100, gpu1 50`. */
static void print_stripes(int block, const char *what, int (*place_of)(CUdeviceptr))
{
    size_t begin = 0;
    int current = place_of(address[block]);
    printf("block %d %s", block, what);
    for (size_t at = 2 * MIB; at <= size[block]; at += 2 * MIB) {
        int next = at < size[block] ? place_of(address[block] + at) : -100;
        if (next != current) {
            print_place(current, (at - begin) / MIB);
            begin = at;
            current = next;
        }
    }
    printf("\n");
}

static int preferred(CUdeviceptr at) { return range_attribute(CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, at, 2 * MIB); }
static int resident(CUdeviceptr at) { return residence(at, 2 * MIB, devices); }

static void print_accessors(int block)
{
    int list[8];
    CHECK(cuMemRangeGetAttribute(list, sizeof list, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, address[block], size[block]));
    printf("block %d mapped for", block);
    for (int i = 0; i < 8 && list[i] != CU_DEVICE_INVALID; i++)
        printf(" %d", list[i]);
    printf("\n");
}

int main(int argc, char **argv)
{
    CUcontext context;
    CUgraph graph;
    size_t free_bytes, total;
    Kernels k[8];
    int gpu = 0, capturing = 0;
    start_on(0);
    CHECK(cuDeviceGetCount(&devices));
    REQUIRE(devices <= 8);
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    k[0] = load_kernels();
    for (int i = 1; i < argc; i++) {
        size_t value = strlen(argv[i]) > 2 ? strtoull(argv[i] + 2, NULL, 0) : 0;
        int block = (int)value;
        if (strchr("wchprxofF", argv[i][0]))
            REQUIRE(block < count);
        switch (argv[i][0]) {
        case 'a': case 'm': case 'M': case 'S':
            allocate(argv[i][0], value);
            break;
        case 'V': {
            CUmemAllocationProp on_gpu0 = on_device(0);
            uint64_t handle;
            printf("handle of %zu: %d\n", (size_t)value, cuMemCreate(&handle, (size_t)value * MIB, &on_gpu0, 0));
            break;
        }
        case 'w':
            iota(&k[gpu], NULL, address[block], size[block] / 4, (uint32_t)block << 24);
            break;
        case 'c':
            printf("block %d: %llu wrong on GPU %d\n", block,
                   (unsigned long long)count_wrong(&k[gpu], address[block], size[block] / 4, (uint32_t)block << 24), gpu);
            break;
        case 'h': {
            const volatile uint32_t *words = (const uint32_t *)(uintptr_t)address[block];
            uint64_t wrong = 0;
            CHECK(cuCtxSynchronize());
            for (size_t at = 0; at < size[block] / 4; at++)
                wrong += words[at] != ((uint32_t)block << 24) + (uint32_t)at;
            printf("block %d: %llu wrong for the processor\n", block, (unsigned long long)wrong);
            break;
        }
        case 'p':
            print_stripes(block, "prefers", preferred);
            break;
        case 'r':
            /* It would break a capture, in which nothing runs that had to be waited for. */
            if (!capturing)
                CHECK(cuCtxSynchronize());
            print_stripes(block, "is at", resident);
            break;
        case 'x':
            print_accessors(block);
            break;
        case 'o':
            CHECK(cuMemPrefetchAsync(address[block], size[block], CU_DEVICE_CPU, NULL));
            break;
        case 'f':
            printf("free %d: %d\n", block, cuMemFree_v2(address[block]));
            break;
        case 'F':
            printf("free %d in a stream: %d\n", block, cuMemFreeAsync(address[block], stream));
            break;
        case 'g':
            gpu = (int)value;
            REQUIRE(gpu < devices);
            CHECK(cuDevicePrimaryCtxRetain(&context, gpu));
            CHECK(cuCtxSetCurrent(context));
            k[gpu] = load_kernels();
            break;
        case 'd':
            CHECK(cuDevicePrimaryCtxReset_v2((CUdevice)value));
            break;
        case 'b':
            CHECK(cuStreamBeginCapture_v2(stream, RELAXED));
            capturing = 1;
            break;
        case 'e':
            printf("end of the capture: %d\n", cuStreamEndCapture(stream, &graph));
            capturing = 0;
            break;
        case 's':
            CHECK(cuCtxSynchronize());
            break;
        case 'i':
            CHECK(cuMemGetInfo_v2(&free_bytes, &total));
            printf("memory: free %zu, total %zu\n", free_bytes / MIB, total / MIB);
            break;
        default:
            fprintf(stderr, "stripes: %s is not a step\n", argv[i]);
            return 2;
        }
        fflush(stdout);
    }
    return 0;
}
