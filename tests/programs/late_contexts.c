/*
 * A GPU that gets its context after another one's memory was allocated reads and writes that memory all the same: in a context
 * that was made in this way, by kernels and by copies, and again in the GPU's next context. Needs two GPUs.
 *
 *   late_contexts retain|create|green|unseen|unseen_work|unseen_launch [access]
 *
 * With "access" it also says whom the driver lets at the first block of GPU 0, which is meant for the library's memory alone.
 */
#define _GNU_SOURCE
#include "late.h"
#include "vmm.h"

enum { BLOCKS = 5 };
static const size_t SIZES[BLOCKS] = {2 * MIB, 10 * MIB, 12 * MIB, 3 * MIB, 34 * MIB};

/* How many words of a block are wrong, by a launch that is the first call in its context that can be seen. Peer access is what the
 * driver's own memory needs for it, and changes nothing for the library's. */
static uint64_t wrong_by_first_launch(CUcontext owner, CUdeviceptr block, uint64_t words, uint32_t start)
{
    CUresult (*load)(CUmodule *, const void *), (*find)(CUfunction *, CUmodule, const char *);
    CUresult (*allocate)(CUdeviceptr *, size_t), (*fill)(CUdeviceptr, unsigned char, size_t);
    *(void **)&load = unseen("cuModuleLoadData");
    *(void **)&find = unseen("cuModuleGetFunction");
    *(void **)&allocate = unseen("cuMemAlloc_v2");
    *(void **)&fill = unseen("cuMemsetD8_v2");
    CUresult (*enable)(CUcontext, unsigned);
    *(void **)&enable = unseen("cuCtxEnablePeerAccess");
    CHECK(enable(owner, 0));
    CUmodule module;
    CUfunction check;
    CUdeviceptr counter;
    uint64_t wrong;
    CHECK(load(&module, KERNELS));
    CHECK(find(&check, module, "check_iota_u32"));
    CHECK(allocate(&counter, sizeof wrong));
    CHECK(fill(counter, 0, sizeof wrong));
    launch(check, NULL, (void *[]){&block, &words, &start, &counter});
    CHECK(cuMemcpyDtoH_v2(&wrong, counter, sizeof wrong));
    CHECK(cuMemFree_v2(counter));
    return wrong;
}

/* Whom the driver lets at this memory, asked past the library. */
static void say_access(CUdeviceptr block, const char *when)
{
    CUresult (*get_access)(uint64_t *, const CUmemLocation *, CUdeviceptr);
    *(void **)&get_access = unseen("cuMemGetAccess");
    printf("%s:", when);
    for (int gpu = 0; gpu < 2; gpu++) {
        CUmemLocation location = {ON_DEVICE, gpu};
        uint64_t flags;
        CHECK(get_access(&flags, &location, block));
        printf(" GPU %d %s%s", gpu, flags == READ_WRITE ? "yes" : "no", gpu == 0 ? "," : "\n");
    }
}

int main(int argc, char **argv)
{
    const char *way = argc > 1 ? argv[1] : "retain";
    CUdeviceptr blocks[BLOCKS];
    CUcontext first = start_on(0);
    Kernels here = load_kernels();
    for (int i = 0; i < BLOCKS; i++)
        CHECK(cuMemAlloc_v2(&blocks[i], SIZES[i]));
    for (int life = 1; life <= 2; life++) {
        /* Some are new in each life, and lie where freed ones did or are new to the driver as well. */
        CHECK(cuMemFree_v2(blocks[2]));
        CHECK(cuMemFree_v2(blocks[3]));
        CHECK(cuMemAlloc_v2(&blocks[3], SIZES[3]));
        CHECK(cuMemAlloc_v2(&blocks[2], SIZES[2] * (size_t)life));
        for (int i = 0; i < BLOCKS; i++)
            iota(&here, NULL, blocks[i], SIZES[i] / 4, (uint32_t)(life * 100 + i));
        CHECK(cuCtxSynchronize());
        if (argc > 2)
            say_access(blocks[2], "alone");

        CUgreenCtx green = NULL;
        CUcontext second = come(way, 1, &green);
        uint64_t wrong = 0;
        int launches_first = strcmp(way, "unseen_launch") == 0;
        if (launches_first)
            wrong = wrong_by_first_launch(first, blocks[4], SIZES[4] / 4, (uint32_t)(life * 100 + 4));
        CUdeviceptr copy;
        CUresult (*allocate)(CUdeviceptr *, size_t);
        *(void **)&allocate = unseen("cuMemAlloc_v2");
        CHECK(allocate(&copy, SIZES[1]));
        CHECK(cuMemcpyDtoD_v2(copy, blocks[1], SIZES[1]));
        if (!launches_first)
            CHECK(cuCtxEnablePeerAccess(first, 0));
        if (argc > 2)
            say_access(blocks[2], "both");
        Kernels there = load_kernels();
        printf("life %d: copied %llu wrong; read by kernels:", life,
               (unsigned long long)(wrong + count_wrong(&there, copy, SIZES[1] / 4, (uint32_t)(life * 100 + 1))));
        for (int i = 0; i < BLOCKS; i++) {
            printf(" %llu", (unsigned long long)count_wrong(&there, blocks[i], SIZES[i] / 4, (uint32_t)(life * 100 + i)));
            iota(&there, NULL, blocks[i], SIZES[i] / 4, (uint32_t)(life * 1000 + i));
        }
        CHECK(cuCtxSynchronize());
        CHECK(cuMemFree_v2(copy));
        go(way, 1, second, green);
        CHECK(cuCtxSetCurrent(first));
        printf("; and after it wrote:");
        for (int i = 0; i < BLOCKS; i++)
            printf(" %llu", (unsigned long long)count_wrong(&here, blocks[i], SIZES[i] / 4, (uint32_t)(life * 1000 + i)));
        printf("\n");
    }
    for (int i = 0; i < BLOCKS; i++)
        CHECK(cuMemFree_v2(blocks[i]));
    return 0;
}
