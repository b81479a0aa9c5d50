/*
 * Memory of cuMemCreate that one GPU may write and another one may only read, granted by two calls, in both orders: who writes still can, and the other one reads
 * what was written. The first argument is MiB of other memory that is made before, so that there may be no room left on the GPU.
 */
#include "kernels.h"
#include "vmm.h"

enum { BYTES = 20 * MIB, READ_ONLY = 1 };

int main(int argc, char **argv)
{
    REQUIRE(argc == 2);
    CUcontext contexts[2] = {start_on(0), NULL};
    CHECK(cuDevicePrimaryCtxRetain(&contexts[1], 1));
    CUmemAllocationProp properties = on_device(0);
    uint64_t before, handle, words = BYTES / 4;
    CHECK(cuMemCreate(&before, (size_t)atoi(argv[1]) * MIB, &properties, 0));
    CHECK(cuMemCreate(&handle, BYTES, &properties, 0));
    for (int writer = 0; writer < 2; writer++) {
        CUdeviceptr at;
        CHECK(cuMemAddressReserve(&at, BYTES, 0, 0, 0));
        CHECK(cuMemMap(at, BYTES, 0, handle, 0));
        CUmemAccessDesc writes = {{ON_DEVICE, writer}, READ_WRITE}, reads = {{ON_DEVICE, !writer}, READ_ONLY};
        CHECK(cuMemSetAccess(at, BYTES, &writes, 1));
        CHECK(cuMemSetAccess(at, BYTES, &reads, 1));
        for (int gpu = 0; gpu < 2; gpu++) {
            uint64_t flags = 9;
            CHECK(cuMemGetAccess(&flags, &(CUmemLocation){ON_DEVICE, gpu}, at));
            printf("GPU %d writes: access of GPU %d is %d\n", writer, gpu, (int)flags);
        }
        CHECK(cuCtxSetCurrent(contexts[writer]));
        Kernels kernels = load_kernels();
        iota(&kernels, NULL, at, words, (uint32_t)(7 + writer));
        CHECK(cuCtxSynchronize());
        CHECK(cuMemsetD32_v2(at, 5, 1));
        CHECK(cuMemsetD32_v2(at, (unsigned)(7 + writer), 1));
        CHECK(cuCtxSetCurrent(contexts[!writer]));
        kernels = load_kernels();
        printf("GPU %d reads: %llu wrong\n", !writer, (unsigned long long)count_wrong(&kernels, at, words, (uint32_t)(7 + writer)));
        CHECK(cuMemUnmap(at, BYTES));
        CHECK(cuMemAddressFree(at, BYTES));
    }
    CHECK(cuMemRelease(handle));
    CHECK(cuMemRelease(before));
    return 0;
}
