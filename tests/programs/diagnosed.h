/*
 * What the programs about diagnosis share. Functions that a finding has to name are NAMED: exported by -rdynamic, and
 * never inlined, because the log knows only the names that the loader knows.
 */
#ifndef DIAGNOSED_H
#define DIAGNOSED_H

#include "kernels.h"

#include <pthread.h>

#define NAMED __attribute__((noinline, visibility("default")))

enum { CU_LIMIT_STACK_SIZE = 0, CU_LIMIT_MALLOC_HEAP_SIZE = 2 };

CUresult cuCtxSetLimit(int limit, size_t value);
CUresult cuCtxGetLimit(size_t *value, int limit);
CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags);
CUresult cuModuleLoad(CUmodule *module, const char *path);
CUresult cuLibraryLoadData(void **library, const void *code, int *jit, void **jit_values, unsigned jit_count,
                           int *options, void **values, unsigned count);
CUresult cuLibraryUnload(void *library);

/* Inlined always, so that the line which asked is the frame next to the driver. */
__attribute__((always_inline)) static inline CUcontext retain(CUdevice device)
{
    CUcontext context;
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    return context;
}

NAMED Kernels load_code(void);
NAMED Kernels load_code(void)
{
    return load_kernels();
}

/* Two launches, two copies, two allocations and a module, and the result is checked. */
NAMED void compute_on(CUdevice device);
NAMED void compute_on(CUdevice device)
{
    CUdeviceptr array;
    CHECK(cuCtxSetCurrent(retain(device)));
    Kernels kernels = load_code();
    CHECK(cuMemAlloc_v2(&array, 4096));
    iota(&kernels, NULL, array, 1024, 7);
    printf("computed on GPU %d: %llu wrong\n", device, (unsigned long long)count_wrong(&kernels, array, 1024, 7));
    CHECK(cuMemFree_v2(array));
}

static inline void in_thread(void *(*function)(void *), void *argument)
{
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, function, argument) == 0);
    REQUIRE(pthread_join(thread, NULL) == 0);
}

#endif
