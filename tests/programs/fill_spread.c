/*
 * fill_spread MIB...: one array of each size, all written by kernels before any is read, then checked by a kernel, by
 * copies to the host, and after copies between arrays and a memset over the middle.
 */
#include "kernels.h"

#define MOST 16

static uint32_t start_of(int array) { return 0x10000000u * (uint32_t)(array + 1); }

/* Head, tail and every 32 MiB: through the copy engine, not the kernels that wrote. */
static uint64_t wrong_on_host(CUdeviceptr array, uint64_t n, uint32_t start)
{
    uint32_t page[1024];
    uint64_t wrong = 0;
    for (uint64_t at = 0; at < n; at += 8 * MIB) {
        uint64_t first = at + 1024 <= n ? at : n - 1024;
        CHECK(cuMemcpyDtoH_v2(page, array + 4 * first, sizeof page));
        for (uint64_t i = 0; i < 1024; i++)
            wrong += page[i] != (uint32_t)(start + first + i);
    }
    return wrong;
}

int main(int argc, char **argv)
{
    CUdeviceptr arrays[MOST];
    uint64_t elements[MOST];
    int count = argc - 1 < MOST ? argc - 1 : MOST;
    start_on(0);
    Kernels k = load_kernels();

    for (int i = 0; i < count; i++) {
        size_t bytes = strtoull(argv[i + 1], NULL, 0) * MIB;
        elements[i] = bytes / 4;
        CUresult result = cuMemAlloc_v2(&arrays[i], bytes);
        printf("array of %zu MiB: %d %s\n", bytes / MIB, result, error_name(result));
        if (result != CUDA_SUCCESS)
            return 1;
    }
    for (int i = 0; i < count; i++)
        iota(&k, NULL, arrays[i], elements[i], start_of(i));
    for (int i = 0; i < count; i++) {
        printf("array %d: %llu wrong by kernel", i,
               (unsigned long long)count_wrong(&k, arrays[i], elements[i], start_of(i)));
        printf(", %llu by copy\n", (unsigned long long)wrong_on_host(arrays[i], elements[i], start_of(i)));
    }
    for (int i = 0; i + 1 < count; i++) {
        uint64_t n = elements[i] < elements[i + 1] ? elements[i] : elements[i + 1];
        CHECK(cuMemcpyDtoD_v2(arrays[i], arrays[i + 1], 4 * n));
        printf("array %d after a copy of array %d: %llu wrong\n", i, i + 1,
               (unsigned long long)count_wrong(&k, arrays[i], n, start_of(i + 1)));
    }
    for (int i = 0; i < count; i++) {
        uint64_t quarter = elements[i] / 4;
        uint32_t edge[4];
        iota(&k, NULL, arrays[i], elements[i], 7);
        CHECK(cuMemsetD32_v2(arrays[i] + 4 * quarter, 0xabcdef01u, 2 * quarter));
        CHECK(cuMemcpyDtoH_v2(&edge[0], arrays[i] + 4 * (quarter - 1), 8));
        CHECK(cuMemcpyDtoH_v2(&edge[2], arrays[i] + 4 * (3 * quarter - 1), 8));
        REQUIRE(edge[0] == (uint32_t)(7 + quarter - 1) && edge[1] == 0xabcdef01u);
        REQUIRE(edge[2] == 0xabcdef01u && edge[3] == (uint32_t)(7 + 3 * quarter));
        printf("array %d: memset of the middle has right edges, head %llu wrong\n", i,
               (unsigned long long)count_wrong(&k, arrays[i], quarter, 7));
    }
    for (int i = 0; i < count; i++)
        CHECK(cuMemFree_v2(arrays[i]));
    CHECK(cuCtxSynchronize());
    printf("freed\n");
    return 0;
}
