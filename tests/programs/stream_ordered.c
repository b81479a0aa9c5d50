/*
 * stream_ordered STEP...: a script of stream-ordered allocations. Sizes are in MiB, I counts allocations from 0.
 *   a:SIZE  cuMemAllocAsync on the stream           z:SIZE  cuMemAllocAsync_ptsz on the thread's own stream
 *   p:SIZE  from a pool of the program's on GPU 0   q:SIZE  from one on GPU 1
 *   l:SIZE  from a pool of at most 8 MiB            b:SIZE  cuMemAlloc
 *   k:I     a kernel on the stream writes it        x:I     check that, after the stream
 *   f:I     cuMemFreeAsync on the stream            F:I     cuMemFree
 *   w       hold the stream                         W       let it go on
 *   C:MODE  begin to capture the stream             E       end that
 *   i       whether the stream is being captured    s       synchronise
 *   t:I     what its pointer tells: whether it is a context's, and of which pool it is
 *   u       what each place holds (simulated driver only)
 */
#include "simulator.h"

#include "kernels.h"
#include "streams.h"

#define MOST 32

static CUdeviceptr address[MOST];
static size_t size[MOST];
static int count;
static CUstream stream;
static Kernels kernels;

static void note(const char *call, size_t mib, CUresult result)
{
    printf("%s %zu: %d\n", call, mib, result);
    if (result != CUDA_SUCCESS)
        return;
    size[count++] = mib * MIB;
}

static uint32_t start_of(int i) { return (uint32_t)(7777777 * (i + 1)); }

static uint64_t wrong(int i)
{
    static uint32_t words[4096];
    uint64_t sum = 0;
    for (size_t at = 0; at < size[i]; at += sizeof words) {
        size_t bytes = size[i] - at < sizeof words ? size[i] - at : sizeof words;
        CHECK(cuMemcpyDtoH_v2(words, address[i] + at, bytes));
        for (size_t w = 0; w < bytes / 4; w++)
            sum += words[w] != start_of(i) + (uint32_t)(at / 4 + w);
    }
    return sum;
}

int main(int argc, char **argv)
{
    int devices;
    CUmemoryPool plain[2] = {NULL, NULL}, limited = NULL;
    volatile uint32_t *flag;
    CUdeviceptr flag_on_device;
    CUgraph graph;
    start_on(0);
    CHECK(cuDeviceGetCount(&devices));
    Simulator simulator = find_simulator();
    kernels = load_kernels();
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemHostAlloc((void **)&flag, 4096, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    flag_on_device = (CUdeviceptr)(uintptr_t)flag;
    for (int step = 1; step < argc; step++) {
        size_t value = strlen(argv[step]) > 2 ? strtoull(argv[step] + 2, NULL, 0) : 0;
        int i = (int)value, status = -1;
        CUdeviceptr *to = &address[count];
        REQUIRE(count < MOST);
        switch (argv[step][0]) {
        case 'a':
            note("allocate async", value, cuMemAllocAsync(to, value * MIB, stream));
            break;
        case 'z':
            note("allocate async for the thread", value, cuMemAllocAsync_ptsz(to, value * MIB, NULL));
            break;
        case 'p':
        case 'q': {
            int on = argv[step][0] == 'q';
            if (!plain[on])
                plain[on] = pool_on(on, 0);
            note("allocate from a pool", value, cuMemAllocFromPoolAsync(to, value * MIB, plain[on], stream));
            break;
        }
        case 'l':
            if (!limited)
                limited = pool_on(0, 8 * MIB);
            note("allocate from a limited pool", value, cuMemAllocFromPoolAsync(to, value * MIB, limited, stream));
            break;
        case 'b':
            note("allocate", value, cuMemAlloc_v2(to, value * MIB));
            break;
        case 'k':
            iota(&kernels, stream, address[i], size[i] / 4, start_of(i));
            break;
        case 'x':
            CHECK(cuStreamSynchronize(stream));
            printf("allocation %d: %llu wrong\n", i, (unsigned long long)wrong(i));
            break;
        case 'f':
            printf("free async %d: %d\n", i, cuMemFreeAsync(address[i], stream));
            break;
        case 'F':
            printf("free %d: %d\n", i, cuMemFree_v2(address[i]));
            break;
        case 'w':
            *flag = 0;
            CHECK(cuLaunchKernel(kernels.wait_flag, 1, 1, 1, 1, 1, 1, 0, stream, (void *[]){&flag_on_device}, NULL));
            break;
        case 'W':
            *flag = 1;
            break;
        case 'C':
            printf("begin: %d\n", cuStreamBeginCapture_v2(stream, i));
            break;
        case 'E':
            printf("end: %d\n", cuStreamEndCapture(stream, &graph));
            break;
        case 'i':
            CHECK(cuStreamIsCapturing(stream, &status));
            printf("capturing: %d\n", status);
            break;
        case 's':
            CHECK(cuCtxSynchronize());
            break;
        case 't': {
            CUmemoryPool default_pool, pool[2] = {NULL, NULL};
            CUcontext owner[2] = {NULL, NULL};
            int attributes[] = {CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE};
            CHECK(cuDeviceGetDefaultMemPool(&default_pool, 0));
            CHECK(cuPointerGetAttribute(&owner[0], CU_POINTER_ATTRIBUTE_CONTEXT, address[i] + 5));
            CHECK(cuPointerGetAttribute(&pool[0], CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address[i] + 5));
            CHECK(cuPointerGetAttributes(2, attributes, (void *[]){&owner[1], &pool[1]}, address[i]));
            REQUIRE(owner[0] == owner[1] && pool[0] == pool[1]);
            printf("pointer %d: of %s, of %s\n", i, owner[0] ? "a context" : "no context",
                   !pool[0]                  ? "no pool"
                   : pool[0] == default_pool ? "the default pool"
                   : pool[0] == plain[0]     ? "the program's pool"
                                             : "another pool");
            break;
        }
        case 'u':
            print_used(&simulator, devices, 0);
            break;
        default:
            fprintf(stderr, "stream_ordered: %s is not a step\n", argv[step]);
            return 2;
        }
        fflush(stdout);
    }
    return 0;
}
