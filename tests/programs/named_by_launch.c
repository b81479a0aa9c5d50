/*
 * Managed blocks that were moved to the host, and launches that name them in every way. No kernel here has anything to do
 * (n is 0), so a block that is back at its GPU afterwards was moved there before the launch.
 *
 * named_by_launch [until-back [own]]: the last step launches until the block is back; blocks are from cuMemAllocManaged.
 */
#include "managed.h"

#include "kernels.h"

typedef struct CUlib_st *CUlibrary;
typedef struct CUkern_st *CUkernel;
typedef struct {
    unsigned grid[3], block[3], shared;
    CUstream stream;
    void *attributes;
    unsigned count;
} CUlaunchConfig;

CUresult cuLibraryLoadData(CUlibrary *library, const void *code, int *jit, void **jit_values, unsigned jit_count,
                           int *options, void **values, unsigned count);
CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name);
CUresult cuLibraryUnload(CUlibrary library);
CUresult cuLaunchKernel_ptsz(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                             unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **parameters,
                             void **extra);
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra);
CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                   CUstream stream, void **parameters);

enum { BLOCK = 8, THREAD_LOCAL = 1 };

/* Empty kernels: the third parameter of one is a structure with pointers, of the other an odd one without. */
static const char STRUCTURES[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry takes_structure(.param .u32 takes_structure_0, .param .align 8 .b8 takes_structure_1[32])\n{\n"
    " ret;\n}\n"
    ".visible .entry takes_bytes(.param .align 1 .b8 takes_bytes_0[16])\n{\n ret;\n}\n";

static CUdeviceptr block;
static CUstream stream;
static int devices, own;

/* A new block, sent to the host. */
static void away(void)
{
    CHECK(own ? cuMemAllocManaged(&block, BLOCK * MIB, CU_MEM_ATTACH_GLOBAL) : cuMemAlloc_v2(&block, BLOCK * MIB));
    CHECK(cuCtxSynchronize());
    CHECK(cuMemPrefetchAsync(block, BLOCK * MIB, CU_DEVICE_CPU, NULL));
    CHECK(cuCtxSynchronize());
    REQUIRE(residence(block, BLOCK * MIB, devices) == CU_DEVICE_CPU);
}

static void tell(const char *how)
{
    CHECK(cuCtxSynchronize());
    printf("%s:", how);
    print_place(residence(block, BLOCK * MIB, devices), BLOCK);
    printf("\n");
}

int main(int argc, char **argv)
{
    CUlibrary library;
    CUkernel kernel;
    CUmodule module;
    CUfunction function;
    CUgraph graph;
    CUdeviceptr other;
    uint64_t n = 0;
    uint32_t value = 1;
    own = argc > 2 && !strcmp(argv[2], "own");
    start_on(0);
    CHECK(cuDeviceGetCount(&devices));
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemAlloc_v2(&other, BLOCK * MIB));
    Kernels k = load_kernels();

    away();
    CHECK(cuLaunchKernel(k.fill, 1, 1, 1, 1, 1, 1, 0, stream, (void *[]){&other, &n, &value}, NULL));
    tell("not named");
    CHECK(cuLaunchKernel(k.fill, 1, 1, 1, 1, 1, 1, 0, stream, (void *[]){&block, &n, &value}, NULL));
    tell("a pointer");

    away();
    CUdeviceptr inner = block + BLOCK * MIB - 4;
    CHECK(cuLaunchKernel(k.copy, 1, 1, 1, 1, 1, 1, 0, stream, (void *[]){&other, &inner, &n}, NULL));
    tell("the last word, as the second parameter");

    away();
    CUdeviceptr behind = block + BLOCK * MIB;
    CHECK(cuLaunchKernel(k.fill, 1, 1, 1, 1, 1, 1, 0, stream, (void *[]){&behind, &n, &value}, NULL));
    tell("behind its end");
    struct { CUdeviceptr to; uint64_t n; uint32_t value; } packed = {block, 0, 1};
    size_t size = sizeof packed;
    void *extra[] = {(void *)1, &packed, (void *)2, &size, NULL};
    CHECK(cuLaunchKernel(k.fill, 1, 1, 1, 1, 1, 1, 0, stream, NULL, extra));
    tell("a buffer of arguments");

    CHECK(cuModuleLoadData(&module, STRUCTURES));
    CHECK(cuModuleGetFunction(&function, module, "takes_structure"));
    struct { uint64_t count; CUdeviceptr first, second; uint64_t unused; } arrays = {1, other, 0, 0};
    away();
    arrays.second = block;
    cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, (void *[]){&value, &arrays}, NULL);
    tell("in a structure");

    away();
    arrays.second = block;
    CHECK(cuModuleGetFunction(&function, module, "takes_bytes"));
    cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, (void *[]){&arrays.first}, NULL);
    tell("in bytes");

    CHECK(cuModuleUnload(module));
    CHECK(cuModuleLoadData(&module, STRUCTURES));
    CHECK(cuModuleGetFunction(&function, module, "takes_bytes"));
    away();
    arrays.second = block;
    cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, (void *[]){&arrays.first}, NULL);
    tell("after the module was loaded again");

    CHECK(cuLibraryLoadData(&library, KERNELS, NULL, NULL, 0, NULL, NULL, 0));
    CHECK(cuLibraryGetKernel(&kernel, library, "fill_u32"));
    away();
    CHECK(cuLaunchKernel((CUfunction)kernel, 1, 1, 1, 1, 1, 1, 0, stream, (void *[]){&block, &n, &value}, NULL));
    tell("by a kernel of a library");
    CHECK(cuLibraryUnload(library));

    away();
    CUlaunchConfig config = {.grid = {1, 1, 1}, .block = {1, 1, 1}, .stream = stream};
    CHECK(cuLaunchKernelEx(&config, k.fill, (void *[]){&block, &n, &value}, NULL));
    tell("cuLaunchKernelEx");
    away();
    CHECK(cuLaunchCooperativeKernel(k.fill, 1, 1, 1, 1, 1, 1, 0, stream, (void *[]){&block, &n, &value}));
    tell("cuLaunchCooperativeKernel");
    away();
    CHECK(cuLaunchKernel_ptsz(k.fill, 1, 1, 1, 1, 1, 1, 0, NULL, (void *[]){&block, &n, &value}, NULL));
    tell("cuLaunchKernel_ptsz");

    away();
    CHECK(cuStreamBeginCapture_v2(stream, THREAD_LOCAL));
    CHECK(cuLaunchKernel(k.fill, 1, 1, 1, 1, 1, 1, 0, stream, (void *[]){&block, &n, &value}, NULL));
    CHECK(cuStreamEndCapture(stream, &graph));
    tell("in a capture");
    CHECK(cuLaunchKernel(k.fill, 1, 1, 1, 1, 1, 1, 0, stream, (void *[]){&block, &n, &value}, NULL));
    tell("after it");

    CHECK(cuMemPrefetchAsync(block, BLOCK * MIB, CU_DEVICE_CPU, stream));
    do
        CHECK(cuLaunchKernel(k.fill, 1, 1, 1, 1, 1, 1, 0, stream, (void *[]){&block, &n, &value}, NULL));
    while (argc > 1 && (cuStreamSynchronize(stream), residence(block, BLOCK * MIB, devices) != 0));
    tell("by many launches");

    SHOW(cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
    SHOW(cuLaunchKernel(k.fill, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
    return 0;
}
