/* Mappings of memory from cuMemAlloc are not the program's to end or change: it is told so, and the memory stays as it was. */
#include "kernels.h"
#include "vmm.h"

#define BYTES (20 * MIB)

int main(void)
{
    CUdeviceptr block;
    start_on(0);
    Kernels k = load_kernels();
    for (int round = 0; round < 2; round++) {
        CHECK(cuMemAlloc_v2(&block, BYTES));
        CUmemAccessDesc read_only = {{ON_DEVICE, 0}, 1};
        SHOW(cuMemSetAccess(block, BYTES, &read_only, 1));
        SHOW(cuMemUnmap(block, BYTES));
        SHOW(cuMemUnmap(block, 2 * MIB));
        SHOW(cuMemAddressFree(block, BYTES));
        iota(&k, NULL, block, BYTES / 4, (uint32_t)round);
        SHOW(cuCtxSynchronize());
        printf("round %d: %llu wrong\n", round, (unsigned long long)count_wrong(&k, block, BYTES / 4, (uint32_t)round));
        CHECK(cuMemFree_v2(block));
    }
    return 0;
}
