/* What the driver says of the first bytes behind a block: whatever it rounds its memory up to, a block has the bytes asked for. */
#include "program.h"

static void asked(const char *what, CUdeviceptr block, CUdeviceptr pointer)
{
    CUdeviceptr base = 77, start = 77;
    size_t bytes = 77;
    int type = -1, together = -1;
    SHOW(cuMemGetAddressRange_v2(&base, &bytes, pointer));
    SHOW(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer));
    SHOW(cuPointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, pointer));
    int wanted[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE};
    void *data[] = {&together};
    SHOW(cuPointerGetAttributes(1, wanted, data, pointer));
    printf("%s: base %s, %zu bytes, type %d, together %d, range %s\n", what, base == block ? "of the block" : "none", bytes,
           type, together, start == block ? "of the block" : "none");
}

static void around(const char *kind, size_t bytes, CUdeviceptr block)
{
    printf("%s of %zu bytes\n", kind, bytes);
    asked("its last byte", block, block + bytes - 1);
    asked("the first behind it", block, block + bytes);
    asked("the next aligned to 512", block, (block + bytes + 511) & ~511ull);
}

int main(void)
{
    const size_t sizes[] = {100, 4096, MIB, MIB + 1, 3 * MIB, 3 * MIB + 5, 4 * MIB + 7, 33 * MIB + 12345};
    start_on(0);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        CUdeviceptr block;
        void *pinned;
        CHECK(cuMemAlloc_v2(&block, sizes[i]));
        around("a block", sizes[i], block);
        CHECK(cuMemHostAlloc(&pinned, sizes[i], 0));
        around("pinned memory", sizes[i], (CUdeviceptr)(uintptr_t)pinned);
        CHECK(cuMemFreeHost(pinned));
        CHECK(cuMemFree_v2(block));
    }
    return 0;
}
