/* Large ranges of addresses that a program reserves itself, before its first allocation and after. */
#include "vmm.h"

#define TIB (MIB << 20)

static void reserve(const char *when)
{
    CUdeviceptr range[2] = {0, 0};
    for (size_t tib = 1; tib <= 128; tib *= 2) {
        CUresult result = cuMemAddressReserve(&range[0], tib * TIB, 0, 0, 0);
        printf("%s, %zu TiB: %d\n", when, tib, result);
        if (result == CUDA_SUCCESS)
            CHECK(cuMemAddressFree(range[0], tib * TIB));
    }
    CHECK(cuMemAddressReserve(&range[0], 32 * TIB, 0, 0, 0));
    printf("%s, 32 TiB beside 32 TiB: %d\n", when, cuMemAddressReserve(&range[1], 32 * TIB, 0, 0, 0));
    for (int i = 0; i < 2; i++)
        if (range[i])
            CHECK(cuMemAddressFree(range[i], 32 * TIB));
}

int main(void)
{
    CUdeviceptr block;
    start_on(0);
    reserve("before");
    CHECK(cuMemAlloc_v2(&block, 16 * MIB));
    reserve("after");
    CHECK(cuMemFree_v2(block));
    return 0;
}
