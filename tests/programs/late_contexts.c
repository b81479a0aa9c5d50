/*
 * A GPU that gets its context after another one's memory was allocated reads and writes that memory all the same: in a context
 * that was made in this way, by kernels and by copies, and again in the GPU's next context. Needs two GPUs.
 *
 *   late_contexts retain|create|green|unseen|unseen_work [access]
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
               (unsigned long long)count_wrong(&there, copy, SIZES[1] / 4, (uint32_t)(life * 100 + 1)));
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
