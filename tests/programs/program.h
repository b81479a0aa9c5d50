/*
 * What every program here needs: a check that names the failed call, and the first GPU's primary context.
 * Programs print only what must be the same on any GPU, bare or under the shim: no addresses, no times.
 */
#ifndef PROGRAM_H
#define PROGRAM_H

#include "cuda_driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

static inline const char *error_name(CUresult result)
{
    const char *name = NULL;
    return cuGetErrorName(result, &name) == CUDA_SUCCESS && name ? name : "unknown error";
}

/* Ends the program, since every later line of its output would follow from this failure. */
#define CHECK(call)                                                                                                \
    do {                                                                                                           \
        CUresult check_result = (call);                                                                            \
        if (check_result != CUDA_SUCCESS) {                                                                        \
            printf("%s:%d: %s: %d %s\n", __FILE__, __LINE__, #call, check_result, error_name(check_result));       \
            exit(1);                                                                                               \
        }                                                                                                          \
    } while (0)

/* For a call whose answer, not its success, is the fact. */
#define SHOW(call)                                                                                                 \
    do {                                                                                                           \
        CUresult show_result = (call);                                                                             \
        printf("%s: %d %s\n", #call, show_result, error_name(show_result));                                        \
    } while (0)

#define REQUIRE(condition)                                                                                         \
    do {                                                                                                           \
        if (!(condition)) {                                                                                        \
            printf("%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);                                       \
            exit(1);                                                                                               \
        }                                                                                                          \
    } while (0)

static inline CUcontext start_on(int ordinal)
{
    CUdevice device;
    CUcontext context;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, ordinal));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    return context;
}

#endif
