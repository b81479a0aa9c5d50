/*
 * Contexts that come when there is memory already, by ways that the library sees, and by such that it does not.
 */
#ifndef LATE_H
#define LATE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "green.h"
#include "kernels.h"

#include <dlfcn.h>
#include <string.h>

/* By the C library's own dlsym, as a runtime's private ways are: nothing of this can be seen. */
static inline void *unseen(const char *name)
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

/* Makes a context on a GPU in this way (retain, create, green, unseen, or any other word: its being current is not to be seen either), and makes it current. */
static inline CUcontext come(const char *way, int gpu, CUgreenCtx *green)
{
    CUcontext context;
    if (strcmp(way, "retain") == 0)
        return start_on(gpu);
    if (strcmp(way, "create") == 0) {
        CHECK(cuCtxCreate_v2(&context, 0, gpu));
        return context;
    }
    if (strcmp(way, "green") == 0) {
        *green = green_on(gpu);
        CHECK(cuCtxFromGreenCtx(&context, *green));
        CHECK(cuCtxSetCurrent(context));
        return context;
    }
    CUresult (*retain)(CUcontext *, CUdevice), (*set_current)(CUcontext);
    *(void **)&retain = unseen("cuDevicePrimaryCtxRetain");
    *(void **)&set_current = unseen("cuCtxSetCurrent");
    CHECK(retain(&context, gpu));
    CHECK((strcmp(way, "unseen") == 0 ? cuCtxSetCurrent : set_current)(context));
    return context;
}

/* Ends it. */
static inline void go(const char *way, int gpu, CUcontext context, CUgreenCtx green)
{
    if (strcmp(way, "create") == 0)
        CHECK(cuCtxDestroy_v2(context));
    else if (green)
        CHECK(cuGreenCtxDestroy(green));
    else
        CHECK(cuDevicePrimaryCtxRelease_v2(gpu));
}

#endif
