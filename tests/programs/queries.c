/* What the driver says about a block: all that a program may ask of memory that the pool serves, inside and outside. */
#include "program.h"

static void attributes(const char *what, CUdeviceptr base, CUdeviceptr pointer)
{
    CUcontext context = NULL, current;
    int type = -1, ordinal = -1, managed = -1, mapped = -1;
    CUdeviceptr device = 0, start = 0;
    size_t size = 0;
    void *host = NULL;
    unsigned long long id = 0;
    CHECK(cuCtxGetCurrent(&current));
    printf("%s\n", what);
    SHOW(cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, pointer));
    SHOW(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer));
    SHOW(cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, pointer));
    SHOW(cuPointerGetAttribute(&host, CU_POINTER_ATTRIBUTE_HOST_POINTER, pointer));
    SHOW(cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, pointer));
    SHOW(cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, pointer));
    SHOW(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer));
    SHOW(cuPointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, pointer));
    SHOW(cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, pointer));
    SHOW(cuPointerGetAttribute(&mapped, CU_POINTER_ATTRIBUTE_MAPPED, pointer));
    printf("  context %s, type %d, device pointer %s, buffer id %s, managed %d, ordinal %d, mapped %d\n",
           context == current ? "current" : "other", type, device == pointer ? "same" : "other", id ? "set" : "0",
           managed, ordinal, mapped);
    printf("  range starts %lld before, %zu bytes\n", (long long)(pointer - start), size);

    CUdeviceptr range = 0;
    size_t bytes = 0;
    SHOW(cuMemGetAddressRange_v2(&range, &bytes, pointer));
    printf("  address range at block %s, %zu bytes\n", range == base ? "start" : "elsewhere", bytes);
    SHOW(cuMemGetAddressRange_v2(NULL, &bytes, pointer));
    SHOW(cuMemGetAddressRange_v2(&range, NULL, pointer));
    SHOW(cuMemGetAddressRange_v2(NULL, NULL, pointer));

    int wanted[] = {CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                    CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_HOST_POINTER};
    ordinal = type = -1;
    size = 0;
    context = NULL;
    void *data[] = {&ordinal, &type, &size, &context, &host};
    SHOW(cuPointerGetAttributes(5, wanted, data, pointer));
    printf("  together: ordinal %d, type %d, size %zu, context %s\n", ordinal, type, size,
           context == current ? "current" : context ? "other" : "none");
}

/* Pointers that are nobody's block: the same answer with and without the pool. */
static void foreign(const char *what, CUdeviceptr pointer)
{
    int type = -1, ordinal = -1;
    CUdeviceptr base = 0;
    size_t bytes = 0;
    printf("%s\n", what);
    SHOW(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer));
    SHOW(cuMemGetAddressRange_v2(&base, &bytes, pointer));
    int wanted[] = {CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE};
    void *data[] = {&ordinal, &type};
    SHOW(cuPointerGetAttributes(2, wanted, data, pointer));
    printf("  ordinal %d, type %d\n", ordinal, type);
}

int main(void)
{
    CUdeviceptr large, other, small;
    unsigned long long first_id, second_id;
    size_t free_bytes = 0, total = 0, free_only = 0, device_total = 0;
    int stack = 0, type;
    void *heap = malloc(64);
    start_on(0);
    CHECK(cuMemAlloc_v2(&large, 48 * MIB));
    CHECK(cuMemAlloc_v2(&other, 6 * MIB));
    CHECK(cuMemAlloc_v2(&small, 4096));
    attributes("a large block", large, large);
    attributes("inside it", large, large + 33 * MIB + 12345);
    attributes("its last byte", large, large + 48 * MIB - 1);
    attributes("a small block", small, small);
    attributes("a medium block", other, other + 1);
    CHECK(cuPointerGetAttribute(&first_id, CU_POINTER_ATTRIBUTE_BUFFER_ID, large));
    CHECK(cuPointerGetAttribute(&second_id, CU_POINTER_ATTRIBUTE_BUFFER_ID, other));
    printf("buffer ids differ: %d\n", first_id != second_id);

    SHOW(cuPointerGetAttribute(&type, 9999, large));
    SHOW(cuPointerGetAttribute(NULL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, large));
    foreign("a stack address", (CUdeviceptr)(uintptr_t)&stack);
    foreign("a heap address", (CUdeviceptr)(uintptr_t)heap);
    foreign("null", 0);
    CHECK(cuMemFree_v2(other));
    CHECK(cuMemFree_v2(large));
    CHECK(cuMemFree_v2(small));
    foreign("a freed block", large);

    CHECK(cuMemGetInfo_v2(&free_bytes, &total));
    CHECK(cuDeviceTotalMem_v2(&device_total, 0));
    printf("free is at most total: %d, total is the device's: %d\n", free_bytes <= total, total == device_total);
    SHOW(cuMemGetInfo_v2(&free_only, NULL));
    SHOW(cuMemGetInfo_v2(NULL, &total));
    SHOW(cuDeviceTotalMem_v2(&device_total, 12345));
    free(heap);
    return 0;
}
