/*
 * pinned_chunk BYTES: a large block ends, one of BYTES is made where that was, and then one is wanted that has room beside it alone. Says whether
 * it was served, and whether the small one has what was written to it.
 */
#include "program.h"

int main(int argc, char **argv)
{
    size_t bytes = argc > 1 ? strtoull(argv[1], NULL, 0) : 100;
    CUdeviceptr large, small, wanted;
    unsigned char first = 0, last = 0;

    start_on(0);
    CHECK(cuMemAlloc_v2(&large, 64 * MIB));
    CHECK(cuMemFree_v2(large));
    CHECK(cuMemAlloc_v2(&small, bytes));
    CHECK(cuMemsetD8_v2(small, 7, bytes));
    CUresult result = cuMemAlloc_v2(&wanted, 80 * MIB);
    CHECK(cuMemcpyDtoH_v2(&first, small, 1));
    CHECK(cuMemcpyDtoH_v2(&last, small + bytes - 1, 1));
    printf("%s, and the small block is %s\n", result == CUDA_SUCCESS ? "served" : error_name(result),
           first == 7 && last == 7 ? "right" : "wrong");
    return 0;
}
