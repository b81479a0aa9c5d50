/*
 * Blocks of two GPUs' contexts: copies between them by every call that crosses GPUs, in both directions, and whose memory
 * each block is said to be. Needs two GPUs.
 */
#include "kernels.h"

#define BYTES (40 * MIB)
#define ELEMENTS (BYTES / 4)

int main(void)
{
    CUcontext context[2];
    CUdeviceptr block[2];
    Kernels k[2];
    CUstream stream;
    int ordinal;
    CHECK(cuInit(0));
    for (int i = 0; i < 2; i++) {
        context[i] = start_on(i);
        k[i] = load_kernels();
        CHECK(cuMemAlloc_v2(&block[i], BYTES));
        iota(&k[i], NULL, block[i], ELEMENTS, (uint32_t)(1000 * (i + 1)));
        CHECK(cuCtxSynchronize());
        CHECK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, block[i]));
        printf("block %d is of GPU %d\n", i, ordinal);
    }

    CHECK(cuMemcpyPeer(block[1], context[1], block[0], context[0], BYTES));
    printf("peer copy 0 to 1: %llu wrong\n", (unsigned long long)count_wrong(&k[1], block[1], ELEMENTS, 1000));
    iota(&k[1], NULL, block[1], ELEMENTS, 5);
    CHECK(cuCtxSynchronize());
    CHECK(cuMemcpyDtoD_v2(block[0], block[1], BYTES));
    CHECK(cuCtxSetCurrent(context[0]));
    printf("copy 1 to 0 from a context on 1: %llu wrong\n",
           (unsigned long long)count_wrong(&k[0], block[0], ELEMENTS, 5));
    iota(&k[0], NULL, block[0], ELEMENTS, 9);
    CHECK(cuCtxSynchronize());
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemcpyDtoDAsync_v2(block[1], block[0], BYTES, stream));
    CHECK(cuStreamSynchronize(stream));
    CHECK(cuStreamDestroy_v2(stream));
    CHECK(cuCtxSetCurrent(context[1]));
    printf("async copy 0 to 1 from a context on 0: %llu wrong\n",
           (unsigned long long)count_wrong(&k[1], block[1], ELEMENTS, 9));

    /* GPU 0's block is freed while GPU 1's context is current. */
    CHECK(cuMemFree_v2(block[0]));
    CHECK(cuMemFree_v2(block[1]));
    for (int i = 0; i < 2; i++) {
        CHECK(cuCtxSetCurrent(context[i]));
        CHECK(cuMemAlloc_v2(&block[i], BYTES));
        CHECK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, block[i]));
        printf("new block %d is of GPU %d\n", i, ordinal);
        CHECK(cuMemFree_v2(block[i]));
    }
    return 0;
}
