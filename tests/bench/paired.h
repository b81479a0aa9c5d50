/*
 * Two ways to the same driver function in one process: `hooked` as the program gets it with the shim preloaded, `bare`
 * past the shim, through the C library's own dlsym. Timing both in alternation cancels what a noisy machine does.
 */
#ifndef PAIRED_H
#define PAIRED_H
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static void *driver_handle;

static void open_driver(void) {
    driver_handle = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver_handle) {
        fprintf(stderr, "no libcuda.so.1: run this under `gpupool sim` or on a machine with a GPU\n");
        exit(1);
    }
}

__attribute__((unused)) static void *hooked(const char *name) { return dlsym(driver_handle, name); }

__attribute__((unused)) static void *bare(const char *name) {
    typedef void *(*lookup)(void *, const char *);
    static lookup real;
    if (!real) real = (lookup)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!real) real = (lookup)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    return real(driver_handle, name);
}

__attribute__((unused)) static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The value below which this share of the samples lies; sorts them. */
__attribute__((unused)) static double quantile(double *samples, size_t count, double share) {
    qsort(samples, count, sizeof *samples, ascending);
    size_t index = (size_t)(share * (double)(count - 1) + 0.5);
    return samples[index];
}

static void require(int result, const char *what) {
    if (result) {
        fprintf(stderr, "%s failed with %d\n", what, result);
        exit(1);
    }
}

/* Opens the driver; the first GPU's primary context, which is current from then on. */
__attribute__((unused)) static void *open_first_gpu(void) {
    void *context;
    open_driver();
    require(((int (*)(unsigned))hooked("cuInit"))(0), "cuInit");
    require(((int (*)(void **, int))hooked("cuDevicePrimaryCtxRetain"))(&context, 0), "cuDevicePrimaryCtxRetain");
    require(((int (*)(void *))hooked("cuCtxSetCurrent"))(context), "cuCtxSetCurrent");
    return context;
}
#endif
