/*
 * managed_stripes MIB REPEATS [context]: one array, in mode managed, of which GPUPOOL_LIMIT leaves a part to GPU 1. Shows where its
 * stripes are meant to live and were sent, checks its data from both GPUs, and measures how fast a kernel on GPU 0 reads
 * each part, against memory that was created at the same place (cuMemCreate) and mapped for GPU 0: the same number of
 * bytes, in turn, first without and then with a context on GPU 1 ("context" makes it before anything else).
 */
#include "managed.h"

#include "kernels.h"
#include "streams.h"

#include <time.h>

enum { PAIRS = 7, DEVICE = 1, PINNED = 1, READ_WRITE = 3 };

typedef struct { int type, id; } CUmemLocation;
typedef struct {
    int type, handle_types;
    CUmemLocation location;
    void *metadata;
    unsigned char flags[8];
} CUmemAllocationProp;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;

CUresult cuMemAddressReserve(CUdeviceptr *start, size_t bytes, size_t alignment, CUdeviceptr wish, uint64_t flags);
CUresult cuMemCreate(uint64_t *handle, size_t bytes, const CUmemAllocationProp *properties, uint64_t flags);
CUresult cuMemMap(CUdeviceptr start, size_t bytes, size_t offset, uint64_t handle, uint64_t flags);
CUresult cuMemSetAccess(CUdeviceptr start, size_t bytes, const CUmemAccessDesc *grants, size_t count);

/*
 * Reads n words, n a multiple of 4, by loads of 16 bytes. The sum is used only where it is 1, which the compiler cannot
 * know never to be: all threads adding to one counter would take longer than the reading. The simulated driver runs its
 * own kernel of that name.
 */
static const char WIDE_SUM[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry sum_u32(.param .u64 sum_u32_0, .param .u64 sum_u32_1, .param .u64 sum_u32_2)\n{\n"
    PTX_REGISTERS PTX_GLOBAL("sum_u32", "0", "%rd1") PTX_LOAD("sum_u32", "1", "u64", "%rd2")
    PTX_GLOBAL("sum_u32", "2", "%rd3") PTX_INDEX "shr.u64 %rd2, %rd2, 2;\n mov.u64 %rd14, 0;\n"
    PTX_LOOP("%rd2", "shl.b64 %rd11, %rd8, 4;\n add.s64 %rd11, %rd11, %rd1;\n"
             "ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%rd11];\n"
             "cvt.u64.u32 %rd12, %r5;\n add.s64 %rd14, %rd14, %rd12;\n"
             "cvt.u64.u32 %rd12, %r6;\n add.s64 %rd14, %rd14, %rd12;\n"
             "cvt.u64.u32 %rd12, %r7;\n add.s64 %rd14, %rd14, %rd12;\n"
             "cvt.u64.u32 %rd12, %r8;\n add.s64 %rd14, %rd14, %rd12;\n")
    "setp.eq.u64 %p2, %rd14, 1;\n @%p2 red.global.add.u64 [%rd3], %rd14;\n ret;\n}\n";

static CUfunction sum;
static CUdeviceptr total;
static int repeats;

/* GB/s at which the kernel reads these bytes. */
static double bandwidth(CUdeviceptr from, size_t bytes)
{
    struct timespec begin, end;
    uint64_t words = bytes / 4;
    CHECK(cuCtxSynchronize());
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int i = 0; i < repeats; i++)
        CHECK(cuLaunchKernel(sum, 1056, 1, 1, 512, 1, 1, 0, NULL, (void *[]){&from, &words, &total}, NULL));
    CHECK(cuCtxSynchronize());
    clock_gettime(CLOCK_MONOTONIC, &end);
    double seconds = (double)(end.tv_sec - begin.tv_sec) + (double)(end.tv_nsec - begin.tv_nsec) * 1e-9;
    return (double)bytes * repeats / seconds * 1e-9;
}

static void pairs(const char *when, CUdeviceptr managed, CUdeviceptr native, size_t bytes)
{
    bandwidth(managed, bytes), bandwidth(native, bytes); /* warm */
    printf("measured: {\"what\": \"%s\", \"pairs\": [", when);
    for (int i = 0; i < PAIRS; i++) {
        double one = i % 2 ? 0 : bandwidth(managed, bytes), other = bandwidth(native, bytes);
        if (i % 2)
            one = bandwidth(managed, bytes);
        printf("%s[%.1f, %.1f]", i ? ", " : "", one, other);
    }
    printf("]}\n");
}

static CUdeviceptr native_on_peer(size_t bytes)
{
    CUmemAllocationProp properties = {.type = PINNED, .location = {DEVICE, 1}};
    CUmemAccessDesc grants[] = {{{DEVICE, 0}, READ_WRITE}, {{DEVICE, 1}, READ_WRITE}};
    CUdeviceptr start;
    uint64_t handle;
    CHECK(cuMemAddressReserve(&start, bytes, 0, 0, 0));
    CHECK(cuMemCreate(&handle, bytes, &properties, 0));
    CHECK(cuMemMap(start, bytes, 0, handle, 0));
    CHECK(cuMemSetAccess(start, bytes, grants, 2));
    CHECK(cuMemsetD32_v2(start, 1, bytes / 4));
    return start;
}

/* Stream-ordered, because handles of the program's own would count against the limit that sends half of the array away. */
static CUdeviceptr native_at_home(size_t bytes)
{
    CUdeviceptr start;
    CHECK(cuMemAllocAsync(&start, bytes, NULL));
    CHECK(cuMemsetD32_v2(start, 1, bytes / 4));
    return start;
}

/* Rows of neighbours with the same answer: `gpu0 512, gpu1 512`. The start of the first part on GPU 1, or 0. */
static CUdeviceptr show(const char *what, int attribute, CUdeviceptr array, size_t bytes)
{
    CUdeviceptr on_peer = 0;
    size_t begin = 0;
    int current = range_attribute(attribute, array, 2 * MIB);
    printf("%s:", what);
    for (size_t at = 0; at <= bytes; at += 2 * MIB) {
        int next = at < bytes ? range_attribute(attribute, array + at, 2 * MIB) : -100;
        if (next == 1 && !on_peer)
            on_peer = array + at;
        if (next != current) {
            print_place(current, (at - begin) / MIB);
            begin = at;
            current = next;
        }
    }
    printf("\n");
    return on_peer;
}

static void show_accessors(CUdeviceptr array, size_t bytes)
{
    int list[8];
    CHECK(cuMemRangeGetAttribute(list, sizeof list, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, array, bytes));
    printf("mapped for:");
    for (int i = 0; i < 8 && list[i] != CU_DEVICE_INVALID; i++)
        printf(" gpu%d", list[i]);
    printf("\n");
}

int main(int argc, char **argv)
{
    CUdeviceptr array;
    CUcontext peer, home = start_on(0);
    CUmodule module;
    int managed;
    REQUIRE(argc == 3 || (argc == 4 && !strcmp(argv[3], "context")));
    size_t bytes = strtoull(argv[1], NULL, 0) * MIB;
    repeats = atoi(argv[2]);
    Kernels k = load_kernels();
    CHECK(cuModuleLoadData(&module, WIDE_SUM));
    CHECK(cuModuleGetFunction(&sum, module, "sum_u32"));
    if (argc == 4) {
        CHECK(cuDevicePrimaryCtxRetain(&peer, 1));
        CHECK(cuCtxSetCurrent(home));
    }
    CHECK(cuMemAlloc_v2(&total, 8));
    CHECK(cuMemAlloc_v2(&array, bytes));
    CHECK(cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, array));
    if (!managed) {
        printf("the array is not managed memory: run this with GPUPOOL_MODE=managed\n");
        return 1;
    }

    CHECK(cuCtxSynchronize());
    CUdeviceptr on_peer = show("preferred", CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, array, bytes);
    show("prefetched", CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, array, bytes);
    show_accessors(array, bytes);
    if (!on_peer) {
        printf("no part of the array is on GPU 1: set GPUPOOL_LIMIT so that it does not fit on GPU 0\n");
        return 1;
    }
    size_t half = on_peer - array, rest = bytes - half;
    iota(&k, NULL, array, bytes / 4, 7);
    printf("GPU 0: %llu wrong\n", (unsigned long long)count_wrong(&k, array, bytes / 4, 7));

    CUdeviceptr native = native_on_peer(rest), local = native_at_home(half);
    pairs(argc == 4 ? "a context on the peer from the start" : "no context on the peer", on_peer, native, rest);
    pairs("the part at home", array, local, half);

    CHECK(cuDevicePrimaryCtxRetain(&peer, 1));
    CHECK(cuCtxSetCurrent(peer));
    show_accessors(array, bytes);
    Kernels there = load_kernels();
    printf("GPU 1: %llu wrong\n", (unsigned long long)count_wrong(&there, array, bytes / 4, 7));
    CHECK(cuCtxSetCurrent(home));
    pairs("a context on the peer", on_peer, native, rest);
    printf("GPU 0: %llu wrong\n", (unsigned long long)count_wrong(&k, array, bytes / 4, 7));
    SHOW(cuMemFree_v2(array));
    return 0;
}
