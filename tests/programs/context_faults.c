/*
 * context_faults CALL WHERE BYTES: memory of GPU 0's primary context is freed while a kernel is to write to it, from elsewhere, and the call of the driver that is named fails at
 * once. `WHERE` is what is current then: `other`, a context of another GPU; `second`, another one of GPU 0; `none`. What was freed goes to the driver if the free has succeeded.
 * context_faults range CALL BYTES: where a block begins and how long it is, while that call fails.
 * context_faults stays CALL BYTES: which context is current behind a free from elsewhere and behind a prefetch, while that call fails.
 */
#define _GNU_SOURCE
#include "control.h"
#include "kernels.h"
#include "simulator.h"
#include "streams.h"

#include <unistd.h>

static Simulator simulator;
static CUcontext first, other;

static CUdeviceptr block_of(size_t bytes)
{
    CUdeviceptr block;
    CHECK(cuCtxSetCurrent(first));
    CHECK(cuMemAlloc_v2(&block, bytes));
    return block;
}

static void arm(const char *call)
{
    REQUIRE(simulator.arm(call) == 0);
}

static void has_struck(void)
{
    REQUIRE(simulator.faults_left() == 0);
    arm("");
}

static void frees(const char *call, const char *where, size_t bytes)
{
    CUcontext second;
    CUdeviceptr flag_on_device;
    CUstream stream;
    void *flag;
    size_t words = bytes / 4;
    Kernels kernels = load_kernels();
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUdeviceptr block = block_of(bytes);
    CHECK(cuMemHostAlloc(&flag, 4096, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    *(volatile uint32_t *)flag = 0;
    CHECK(cuMemHostGetDevicePointer_v2(&flag_on_device, flag, 0));
    iota(&kernels, stream, block, words, 1);
    CHECK(cuStreamSynchronize(stream));
    launch(kernels.wait_flag, stream, (void *[]){&flag_on_device});
    iota(&kernels, stream, block, words, 5);
    if (strcmp(where, "second") == 0)
        CHECK(cuCtxCreate_v2(&second, 0, 0));
    else
        CHECK(cuCtxSetCurrent(strcmp(where, "none") == 0 ? NULL : other));
    arm(call);
    CUresult freed = cuMemFree_v2(block);
    if (freed == CUDA_SUCCESS && simulator.trim)
        simulator.trim();
    has_struck();
    printf("free: %d, while the kernel waits\n", freed);
    *(volatile uint32_t *)flag = 1;
    CHECK(cuCtxSetCurrent(first));
    CHECK(cuStreamSynchronize(stream));
    if (freed != CUDA_SUCCESS) {
        printf("%llu words wrong\n", (unsigned long long)count_wrong(&kernels, block, words, 5));
        SHOW(cuMemFree_v2(block));
    }
}

static void range(const char *call, size_t bytes)
{
    CUdeviceptr before = block_of(bytes), block = block_of(bytes), base = 0;
    size_t size = 0;
    arm(call);
    CUresult answer = cuMemGetAddressRange_v2(&base, &size, block + 1000);
    has_struck();
    printf("range: %d, begins %lld before it, %zu bytes\n", answer, (long long)(block - base), size);
    CHECK(cuMemFree_v2(block));
    CHECK(cuMemFree_v2(before));
}

static void is_current(const char *what, CUresult answer, CUcontext wanted)
{
    CUcontext current, popped;
    has_struck();
    CHECK(cuCtxGetCurrent(&current));
    printf("%s: %d, %s context is current", what, answer, current == wanted ? "the same" : "another");
    CHECK(cuCtxPopCurrent_v2(&popped));
    CHECK(cuCtxGetCurrent(&current));
    printf(", with %s below it\n", current ? "one" : "none");
}

static void stays(const char *call, size_t bytes)
{
    Control control = find_control(RTLD_DEFAULT);
    CUdeviceptr block = block_of(bytes);
    CHECK(cuCtxSetCurrent(other));
    arm(call);
    is_current("free", cuMemFree_v2(block), other);
    block = block_of(bytes);
    CHECK(cuCtxSetCurrent(other));
    arm(call);
    is_current("prefetch", control.prefetch(as_pointer(block), bytes, 1, NULL), other);
}

int main(int argc, char **argv)
{
    REQUIRE(argc == 4);
    simulator = find_simulator();
    first = start_on(0);
    CHECK(cuDevicePrimaryCtxRetain(&other, 1));
    /* What waits for the kernel waits for good. */
    alarm(20);
    size_t bytes = strtoull(argv[3], NULL, 10);
    if (strcmp(argv[1], "range") == 0)
        range(argv[2], bytes);
    else if (strcmp(argv[1], "stays") == 0)
        stays(argv[2], bytes);
    else
        frees(argv[1], argv[2], bytes);
    return 0;
}
