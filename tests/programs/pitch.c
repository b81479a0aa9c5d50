/* Pitched allocations: the pitch and codes the driver answers, rows that don't touch each other, and sizes it refuses. */
#include "program.h"

static void rows(size_t width, size_t height, unsigned element)
{
    CUdeviceptr array = 0;
    size_t pitch = 0;
    uint32_t *row = malloc(width);
    CUresult result = cuMemAllocPitch_v2(&array, &pitch, width, height, element);
    printf("%zu x %zu of %u: %d, pitch %zu\n", width, height, element, result, pitch);
    if (result != CUDA_SUCCESS) {
        free(row);
        return;
    }
    CHECK(cuMemsetD8_v2(array, 0xee, pitch * height));
    for (size_t y = 0; y < height; y++)
        CHECK(cuMemsetD2D32_v2(array + y * pitch, pitch, (unsigned)y, width / 4, 1));
    uint64_t wrong = 0;
    for (size_t y = 0; y < height; y++) {
        unsigned char gap = 0xee;
        CHECK(cuMemcpyDtoH_v2(row, array + y * pitch, width));
        for (size_t x = 0; x < width / 4; x++)
            wrong += row[x] != y;
        if (pitch > width)
            CHECK(cuMemcpyDtoH_v2(&gap, array + y * pitch + pitch - 1, 1));
        wrong += gap != 0xee;
    }
    printf("  %llu wrong\n", (unsigned long long)wrong);
    CHECK(cuMemFree_v2(array));
    free(row);
}

int main(void)
{
    CUdeviceptr array = 0;
    size_t pitch = 0;
    start_on(0);
    rows(4, 3, 4);
    rows(512, 5, 8);
    rows(516, 64, 4);
    rows(100000, 100, 16);
    rows(4096, 8192, 4);
    SHOW(cuMemAllocPitch_v2(&array, &pitch, 4096, 4096, 3));
    SHOW(cuMemAllocPitch_v2(&array, &pitch, 4096, 4096, 0));
    SHOW(cuMemAllocPitch_v2(&array, &pitch, 0, 4096, 4));
    SHOW(cuMemAllocPitch_v2(&array, &pitch, 4096, 0, 4));
    SHOW(cuMemAllocPitch_v2(NULL, &pitch, 4096, 4096, 4));
    SHOW(cuMemAllocPitch_v2(&array, NULL, 4096, 4096, 4));
    printf("outputs after refusals: %s, %s\n", array ? "written" : "untouched", pitch ? "written" : "untouched");
    return 0;
}
