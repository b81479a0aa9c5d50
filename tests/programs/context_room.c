/*
 * context_room: blocks of 100 MiB until there is no room, all freed, and then a context on GPU 1, where some of them may have lain.
 */
#include "program.h"

enum { MOST = 60 };

int main(void)
{
    static CUdeviceptr blocks[MOST];
    CUcontext first = start_on(0), second;
    int count = 0;
    while (count < MOST && cuMemAlloc_v2(&blocks[count], 100 * MIB) == CUDA_SUCCESS)
        count++;
    while (count > 0)
        CHECK(cuMemFree_v2(blocks[--count]));
    SHOW(cuDevicePrimaryCtxRetain(&second, 1));
    CHECK(cuDevicePrimaryCtxRelease_v2(1));
    SHOW(cuCtxCreate_v2(&second, 0, 1));
    CHECK(cuCtxSetCurrent(first));
    return 0;
}
