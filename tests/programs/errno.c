/*
 * errno: what successful calls leave in errno, the first ones of a process among them.
 */
#include "kernels.h"

#include <errno.h>

#define KEEPS(call)                                                                                                \
    do {                                                                                                           \
        errno = 77;                                                                                                \
        CHECK(call);                                                                                               \
        printf("%s: errno %d\n", #call, errno);                                                                    \
    } while (0)

int main(void)
{
    CUdeviceptr small, large;
    CUcontext context;
    size_t free_bytes, total;
    void *pinned;
    KEEPS(cuInit(0));
    KEEPS(cuDevicePrimaryCtxRetain(&context, 0));
    KEEPS(cuCtxSetCurrent(context));
    KEEPS(cuMemGetInfo_v2(&free_bytes, &total));
    KEEPS(cuMemHostAlloc(&pinned, 4096, 0));
    KEEPS(cuMemAlloc_v2(&small, 4096));
    KEEPS(cuMemAlloc_v2(&large, 5 * MIB));
    KEEPS(cuMemsetD8_v2(large, 1, 5 * MIB));
    KEEPS(cuMemFree_v2(large));
    KEEPS(cuMemFree_v2(small));
    KEEPS(cuMemFreeHost(pinned));
    return 0;
}
