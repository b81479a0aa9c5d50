/*
 * Memory of GPU 0 used from every other GPU: copies, memsets and, with peer access enabled, kernels. Prints a code and a
 * count for each, so that an answer that differs shows which it was. Needs two GPUs.
 */
#include "kernels.h"

#define BYTES (8 * MIB)
#define ELEMENTS (BYTES / 4)

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags);
CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer);

/* How many words of GPU 0's block are not start + index, as GPU 0 sees them. */
static unsigned long long wrong_at_home(CUcontext home, const Kernels *k, CUdeviceptr block, uint32_t start)
{
    CUcontext before;
    CHECK(cuCtxGetCurrent(&before));
    CHECK(cuCtxSetCurrent(home));
    unsigned long long wrong = count_wrong(k, block, ELEMENTS, start);
    CHECK(cuCtxSetCurrent(before));
    return wrong;
}

int main(void)
{
    CUcontext home, other;
    CUdeviceptr block, own;
    CUstream stream;
    int devices, linked;
    home = start_on(0);
    Kernels k = load_kernels();
    CHECK(cuDeviceGetCount(&devices));
    REQUIRE(devices > 1);
    CHECK(cuMemAlloc_v2(&block, BYTES));
    for (int i = 1; i < devices; i++) {
        other = start_on(i);
        Kernels at_other = load_kernels();
        CHECK(cuMemAlloc_v2(&own, BYTES));
        CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        uint32_t start = 1000u * (uint32_t)i;
        iota(&at_other, NULL, own, ELEMENTS, start);
        CHECK(cuCtxSynchronize());
        printf("GPU %d: copy to GPU 0: %d", i, cuMemcpyDtoD_v2(block, own, BYTES));
        printf(", %llu wrong\n", wrong_at_home(home, &k, block, start));
        CHECK(cuMemsetD8_v2(own, 0, BYTES));
        CHECK(cuCtxSynchronize());
        printf("GPU %d: copy from GPU 0: %d", i, cuMemcpyDtoDAsync_v2(own, block, BYTES, stream));
        printf(" %d", cuStreamSynchronize(stream));
        printf(", %llu wrong\n", (unsigned long long)count_wrong(&at_other, own, ELEMENTS, start));
        iota(&at_other, NULL, own, ELEMENTS, start + 1);
        CHECK(cuCtxSynchronize());
        printf("GPU %d: peer copy to GPU 0: %d", i, cuMemcpyPeer(block, home, own, other, BYTES));
        printf(", %llu wrong\n", wrong_at_home(home, &k, block, start + 1));
        CUresult enabled = CUDA_SUCCESS;
        CHECK(cuDeviceCanAccessPeer(&linked, i, 0));
        if (linked) {
            enabled = cuCtxEnablePeerAccess(home, 0);
            iota(&at_other, stream, block, ELEMENTS, start + 2);
            printf("GPU %d: peer access %d, kernel on GPU 0's memory: %d", i, enabled, cuStreamSynchronize(stream));
            printf(", %llu wrong\n", wrong_at_home(home, &k, block, start + 2));
            printf("GPU %d: memset of GPU 0's memory: %d\n", i, cuMemsetD32_v2(block, 7, 1));
        }
        printf("GPU %d: its context is alive: %d\n", i, cuCtxSynchronize());
        CHECK(cuStreamDestroy_v2(stream));
        CHECK(cuMemFree_v2(own));
    }
    CHECK(cuCtxSetCurrent(home));
    CHECK(cuMemFree_v2(block));
    return 0;
}
