/*
 * Weights that one phase of a program does not need lie on another GPU, or on the host where there is none, until the next phase:
 *
 *   cc -I.. -o placing placing.c -l:libcuda.so.1 -ldl && gpupool run -- ./placing
 *
 * The functions are looked up, so that the program runs without gpupool as well, and then moves nothing.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

#include "gpupool.h"

typedef unsigned long long CUdeviceptr;
int cuInit(unsigned flags);
int cuDeviceGetCount(int *count);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxSetCurrent(void *context);
int cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes);
int cuMemFree_v2(CUdeviceptr pointer);

static void say_labels(void)
{
    gpupool_label_usage labels[8];
    size_t (*list)(gpupool_label_usage *, size_t) = (size_t(*)(gpupool_label_usage *, size_t))dlsym(RTLD_DEFAULT, "gpupool_labels");
    size_t count = list ? list(labels, 8) : 0;
    for (size_t i = 0; i < count && i < 8; i++)
        printf("%s: %llu MiB on its GPU, %llu elsewhere\n", labels[i].label, (unsigned long long)labels[i].at_home >> 20,
               (unsigned long long)(labels[i].on_peers + labels[i].on_host) >> 20);
}

int main(void)
{
    const size_t bytes = 64 << 20;
    void *context;
    int gpus;
    CUdeviceptr weights;
    int (*prefetch)(const void *, size_t, int, void *) =
        (int (*)(const void *, size_t, int, void *))dlsym(RTLD_DEFAULT, "gpupool_prefetch");
    int (*label)(const void *, const char *) = (int (*)(const void *, const char *))dlsym(RTLD_DEFAULT, "gpupool_label");
    if (cuInit(0) || cuDeviceGetCount(&gpus) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context) ||
        cuMemAlloc_v2(&weights, bytes))
        return 1;
    const void *pointer = (const void *)(size_t)weights;
    if (label && prefetch) {
        int away = gpus > 1 ? 1 : -1; /* -1 is the host's first node */
        printf("named: %d\n", label(pointer, "weights"));
        /* Nothing works on them now. */
        printf("away: %d\n", prefetch(pointer, bytes, away, NULL));
        say_labels();
        printf("back: %d\n", prefetch(pointer, bytes, 0, NULL));
        say_labels();
    }
    return cuMemFree_v2(weights);
}
