/*
 * A GPU that gets its context after another one's memory was allocated reads and writes that memory all the same: in a context
 * that was made in this way, by kernels and by copies, and again in the GPU's next context. Needs two GPUs.
 *
 *   late_contexts retain|create|green|unseen|unseen_work|unseen_launch [access]
 *
 * With "access" it also says whom the driver lets at the first block of GPU 0, which is meant for the library's memory alone.
 */
#define _GNU_SOURCE
#include "green.h"
#include "kernels.h"
#include "vmm.h"

#include <dlfcn.h>

enum { BLOCKS = 5 };
static const size_t SIZES[BLOCKS] = {2 * MIB, 10 * MIB, 12 * MIB, 3 * MIB, 34 * MIB};

/* By the C library's own dlsym, as a runtime's private ways are: nothing of this can be seen. */
static void *unseen(const char *name)
{
    typedef void *(*Lookup)(void *, const char *);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    Lookup lookup = (Lookup)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!lookup)
        lookup = (Lookup)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    REQUIRE(driver && lookup);
    void *function = lookup(driver, name);
    REQUIRE(function);
    return function;
}

/* Makes a context on GPU 1 in this way, and makes it current. */
static CUcontext come(const char *way, CUgreenCtx *green)
{
    CUcontext context;
    if (strcmp(way, "retain") == 0)
        return start_on(1);
    if (strcmp(way, "create") == 0) {
        CHECK(cuCtxCreate_v2(&context, 0, 1));
        return context;
    }
    if (strcmp(way, "green") == 0) {
        *green = green_on(1);
        CHECK(cuCtxFromGreenCtx(&context, *green));
        CHECK(cuCtxSetCurrent(context));
        return context;
    }
    CUresult (*retain)(CUcontext *, CUdevice), (*set_current)(CUcontext);
    *(void **)&retain = unseen("cuDevicePrimaryCtxRetain");
    *(void **)&set_current = unseen("cuCtxSetCurrent");
    CHECK(retain(&context, 1));
    CHECK((strcmp(way, "unseen") == 0 ? cuCtxSetCurrent : set_current)(context));
    return context;
}

/* How many words of a block are wrong, by a launch that is the first call in its context that can be seen. */
static uint64_t wrong_by_first_launch(CUdeviceptr block, uint64_t words, uint32_t start)
{
    CUresult (*load)(CUmodule *, const void *), (*find)(CUfunction *, CUmodule, const char *);
    CUresult (*allocate)(CUdeviceptr *, size_t), (*fill)(CUdeviceptr, unsigned char, size_t);
    *(void **)&load = unseen("cuModuleLoadData");
    *(void **)&find = unseen("cuModuleGetFunction");
    *(void **)&allocate = unseen("cuMemAlloc_v2");
    *(void **)&fill = unseen("cuMemsetD8_v2");
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

static void go(const char *way, CUcontext context, CUgreenCtx green)
{
    if (strcmp(way, "create") == 0)
        CHECK(cuCtxDestroy_v2(context));
    else if (green)
        CHECK(cuGreenCtxDestroy(green));
    else
        CHECK(cuDevicePrimaryCtxRelease_v2(1));
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
        CUcontext second = come(way, &green);
        uint64_t wrong = 0;
        if (strcmp(way, "unseen_launch") == 0)
            wrong = wrong_by_first_launch(blocks[4], SIZES[4] / 4, (uint32_t)(life * 100 + 4));
        CUdeviceptr copy;
        CUresult (*allocate)(CUdeviceptr *, size_t);
        *(void **)&allocate = unseen("cuMemAlloc_v2");
        CHECK(allocate(&copy, SIZES[1]));
        CHECK(cuMemcpyDtoD_v2(copy, blocks[1], SIZES[1]));
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
        go(way, second, green);
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
