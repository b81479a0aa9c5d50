/*
 * Included before a program (-include, and --wrap=NAME for each name): its calls go to the functions that
 * cuGetProcAddress gives, as those of the CUDA runtime do, and not to the symbols that it is linked with.
 */
#ifndef BY_PROC_ADDRESS_H
#define BY_PROC_ADDRESS_H

#include <stdio.h>
#include <stdlib.h>
#include <stdint.h>

int cuGetProcAddress_v2(const char *symbol, void **pfn, int version, uint64_t flags, int *status);

static void *by_proc_address(const char *name)
{
    void *found = NULL;
    int status;
    if (cuGetProcAddress_v2(name, &found, 12020, 0, &status) != 0 || !found) {
        printf("cuGetProcAddress has no %s\n", name);
        exit(1);
    }
    return found;
}

int __wrap_cuGraphLaunch(void *exec, void *stream);
int __wrap_cuGraphLaunch(void *exec, void *stream)
{
    int (*function)(void *, void *);
    *(void **)&function = by_proc_address("cuGraphLaunch");
    return function(exec, stream);
}

int __wrap_cuMemAlloc_v2(unsigned long long *address, size_t bytes);
int __wrap_cuMemAlloc_v2(unsigned long long *address, size_t bytes)
{
    int (*function)(unsigned long long *, size_t);
    *(void **)&function = by_proc_address("cuMemAlloc");
    return function(address, bytes);
}

int __wrap_cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **parameters, void **extra);
int __wrap_cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **parameters, void **extra)
{
    int (*function)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
    *(void **)&function = by_proc_address("cuLaunchKernel");
    return function(f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
}

#endif
