/*
 * unmap_without_context
 * Physical memory that this process mapped is unmapped and released by a thread that never had a context: while the GPU is
 * idle, while a kernel elsewhere on it runs, and while a stream is captured. The memory is free at once, the calls do not wait
 * for the kernel, and the capture lives on.
 */
#include "kernels.h"
#include "streams.h"
#include "vmm.h"

#include <pthread.h>

#define BYTES (64 * MIB)

typedef struct {
    CUdeviceptr address;
    uint64_t handle;
    CUresult context, unmapped, released;
    int had_context;
} Work;

static void *without_context(void *argument)
{
    Work *w = argument;
    CUcontext current = NULL;
    w->context = cuCtxGetCurrent(&current);
    w->had_context = current != NULL;
    w->unmapped = cuMemUnmap(w->address, BYTES);
    w->released = cuMemRelease(w->handle);
    return NULL;
}

static size_t free_bytes(void)
{
    size_t free, total;
    CHECK(cuMemGetInfo_v2(&free, &total));
    return free;
}

static void go(const char *when)
{
    Work w = {0};
    CUmemAllocationProp properties = on_device(0);
    pthread_t thread;
    CHECK(cuMemCreate(&w.handle, BYTES, &properties, 0));
    w.address = map_for(0, w.handle, BYTES);
    size_t before = free_bytes();
    REQUIRE(pthread_create(&thread, NULL, without_context, &w) == 0 && pthread_join(thread, NULL) == 0);
    printf("%s: current %d %d, unmap %d, release %d, free at once: %d\n", when, w.context, w.had_context, w.unmapped,
           w.released, free_bytes() >= before + BYTES);
    CHECK(cuMemAddressFree(w.address, BYTES));
}

int main(void)
{
    start_on(0);
    go("idle");
    CUstream stream;
    CUgraph graph;
    CHECK(cuStreamCreate(&stream, 1));
    for (int mode = CAPTURE_GLOBAL; mode <= CAPTURE_RELAXED; mode++) {
        CHECK(cuStreamBeginCapture_v2(stream, mode));
        go("capturing");
        SHOW(cuStreamEndCapture(stream, &graph));
        CHECK(cuGraphDestroy(graph));
    }
    CUmodule module;
    CUfunction wait_flag;
    CHECK(cuModuleLoadData(&module, KERNELS));
    CHECK(cuModuleGetFunction(&wait_flag, module, "wait_flag"));
    CUdeviceptr flag;
    uint32_t *host;
    CHECK(cuMemHostAlloc((void **)&host, 4096, 2));
    *host = 0;
    CHECK(cuMemHostGetDevicePointer_v2(&flag, host, 0));
    void *arguments[] = {&flag};
    CHECK(cuLaunchKernel(wait_flag, 1, 1, 1, 1, 1, 1, 0, stream, arguments, NULL));
    go("a kernel runs");
    *(volatile uint32_t *)host = 1;
    CHECK(cuCtxSynchronize());
    return 0;
}
