/* What the driver says about pinned and registered memory: all that a program may ask, inside, behind and after it. */
#include "program.h"

static void attributes(const char *what, void *base, void *inside)
{
    CUdeviceptr pointer = (CUdeviceptr)(uintptr_t)inside, start = 0, device = 0, mapping = 0, range = 0;
    CUcontext context = NULL, current;
    int type = -1, ordinal = -1, managed = -1, mapped = -1;
    unsigned flags = 99;
    size_t size = 0, bytes = 0;
    void *host = NULL;
    unsigned long long id = 0, block_id = 0;
    CHECK(cuCtxGetCurrent(&current));
    printf("%s\n", what);
    SHOW(cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, pointer));
    SHOW(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer));
    SHOW(cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, pointer));
    SHOW(cuPointerGetAttribute(&host, CU_POINTER_ATTRIBUTE_HOST_POINTER, pointer));
    SHOW(cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, pointer));
    SHOW(cuPointerGetAttribute(&block_id, CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID, pointer));
    SHOW(cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, pointer));
    SHOW(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer));
    SHOW(cuPointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, pointer));
    SHOW(cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, pointer));
    SHOW(cuPointerGetAttribute(&mapping, CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, pointer));
    SHOW(cuPointerGetAttribute(&mapped, CU_POINTER_ATTRIBUTE_MAPPED, pointer));
    printf("  context %s, type %d, device pointer %s, host pointer %s, ids %s, managed %d, ordinal %d, mapped %d\n",
           context == current ? "current" : context ? "other" : "none", type, device == pointer ? "same" : "other",
           host == inside ? "same" : "other", id && block_id ? "set" : "0", managed, ordinal, mapped);
    printf("  range starts at the %s, %zu bytes; mapping base %s\n",
           start == (CUdeviceptr)(uintptr_t)base ? "start" : "other", size,
           mapping == (CUdeviceptr)(uintptr_t)base ? "there" : "elsewhere");
    SHOW(cuMemGetAddressRange_v2(&range, &bytes, pointer));
    printf("  address range at the %s, %zu bytes\n", range == (CUdeviceptr)(uintptr_t)base ? "start" : "other", bytes);
    SHOW(cuMemHostGetFlags(&flags, inside));
    SHOW(cuMemHostGetDevicePointer_v2(&device, inside, 0));
    printf("  flags %u, device pointer %s\n", flags, device == pointer ? "same" : device ? "other" : "0");

    int wanted[] = {CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                    CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_HOST_POINTER};
    ordinal = type = -1;
    size = 0;
    context = NULL;
    host = NULL;
    void *data[] = {&ordinal, &type, &size, &context, &host};
    SHOW(cuPointerGetAttributes(5, wanted, data, pointer));
    printf("  together: ordinal %d, type %d, size %zu, context %s, host pointer %s\n", ordinal, type, size,
           context == current ? "current" : context ? "other" : "none", host == inside ? "same" : host ? "other" : "0");
}

/* Addresses that are nobody's pinned memory. */
static void foreign(const char *what, void *address)
{
    CUdeviceptr pointer = (CUdeviceptr)(uintptr_t)address, base = 77, device = 77;
    int type = -1, ordinal = -1;
    size_t bytes = 77;
    unsigned flags = 99;
    printf("%s\n", what);
    SHOW(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer));
    SHOW(cuMemGetAddressRange_v2(&base, &bytes, pointer));
    SHOW(cuMemHostGetFlags(&flags, address));
    SHOW(cuMemHostGetDevicePointer_v2(&device, address, 0));
    SHOW(cuMemHostUnregister(address));
    SHOW(cuMemFreeHost(address));
    int wanted[] = {CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE};
    void *data[] = {&ordinal, &type};
    SHOW(cuPointerGetAttributes(2, wanted, data, pointer));
    printf("  flags %u, device pointer %s, ordinal %d, type %d\n", flags, device ? "set" : "0", ordinal, type);
}

/* Calls that are wrong for memory of the driver's own. */
static void mistakes(char *memory, size_t bytes)
{
    CUipcMemHandle handle;
    SHOW(cuMemHostRegister_v2(memory, bytes, 0));
    SHOW(cuMemHostRegister_v2(memory + bytes / 2, bytes / 4, 0));
    SHOW(cuMemHostUnregister(memory));
    SHOW(cuMemHostUnregister(memory + bytes / 2));
    SHOW(cuMemFreeHost(memory + bytes / 2));
    SHOW(cuMemFree_v2((CUdeviceptr)(uintptr_t)memory));
    SHOW(cuIpcGetMemHandle(&handle, (CUdeviceptr)(uintptr_t)memory));
}

static void every_flag(void)
{
    for (unsigned flags = 0; flags < 8; flags++) {
        unsigned told = 99, inside = 99;
        char *memory;
        CHECK(cuMemHostAlloc((void **)&memory, 5000, flags));
        CHECK(cuMemHostGetFlags(&told, memory));
        CHECK(cuMemHostGetFlags(&inside, memory + 4999));
        memset(memory, (int)flags, 5000);
        printf("flags %u: %u, inside %u\n", flags, told, inside);
        CHECK(cuMemFreeHost(memory));
    }
}

static void refusals(void)
{
    void *memory = &memory;
    SHOW(cuMemHostAlloc(&memory, 0, 0));
    printf("  %s\n", memory ? "set" : "null");
    SHOW(cuMemAllocHost_v2(&memory, 0));
    memory = &memory;
    SHOW(cuMemHostAlloc(&memory, 4096, 8));
    SHOW(cuMemHostAlloc(NULL, 4096, 0));
    memory = &memory;
    SHOW(cuMemHostAlloc(&memory, (size_t)1 << 50, 0));
    printf("  %s\n", memory ? "set" : "null");
    SHOW(cuMemFreeHost(NULL));
    SHOW(cuMemHostRegister_v2(NULL, 4096, 0));
}

static void registered(void)
{
    char *memory = aligned_alloc(4096, 64 * KIB);
    REQUIRE(memory);
    SHOW(cuMemHostRegister_v2(memory + 4096, 8192, 0));
    attributes("registered memory", memory + 4096, memory + 5000);
    SHOW(cuMemHostRegister_v2(memory + 4096, 8192, 0));
    SHOW(cuMemHostRegister_v2(memory, 8192, 0));
    SHOW(cuMemHostRegister_v2(memory + 12288, 4096, 0));
    SHOW(cuMemHostUnregister(memory + 5000));
    SHOW(cuMemFreeHost(memory + 4096));
    SHOW(cuMemHostUnregister(memory + 4096));
    SHOW(cuMemHostUnregister(memory + 4096));
    SHOW(cuMemHostUnregister(memory + 12288));
    free(memory);
}

static void without_a_context(CUcontext context, void *memory)
{
    unsigned flags;
    CUdeviceptr device;
    void *other;
    int type;
    CHECK(cuCtxSetCurrent(NULL));
    SHOW(cuMemHostAlloc(&other, 4096, 0));
    SHOW(cuMemHostGetFlags(&flags, memory));
    SHOW(cuMemHostGetDevicePointer_v2(&device, memory, 0));
    SHOW(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(uintptr_t)memory));
    SHOW(cuMemFreeHost(memory));
    CHECK(cuCtxSetCurrent(context));
}

int main(void)
{
    char *small, *pages, *large, *plain;
    CUcontext own, first = start_on(0);
    CUdeviceptr device_block;
    int stack = 0;
    unsigned flags = 99;
    every_flag();
    refusals();
    CHECK(cuMemHostAlloc((void **)&small, 1000, 1));
    attributes("a small block", small, small);
    attributes("inside it", small, small + 999);
    CHECK(cuMemHostAlloc((void **)&pages, 600 * 1000, 0));
    CHECK(cuMemHostAlloc((void **)&large, 3 * MIB + 1, 2));
    attributes("some pages", pages, pages + 300 * 1000);
    attributes("a large block", large, large);
    attributes("its last byte", large, large + 3 * MIB);
    CHECK(cuMemAllocHost_v2((void **)&plain, 64 * MIB));
    attributes("a plain one", plain, plain + 12345);
    CHECK(cuMemHostGetFlags(&flags, plain));
    printf("flags of the plain one: %u\n", flags);
    mistakes(large, 3 * MIB);
    mistakes(small, 1000);
    registered();

    /* Of another context than the one that asks. */
    CHECK(cuCtxCreate_v2(&own, 0, 0));
    attributes("from another context", pages, pages);
    SHOW(cuMemFreeHost(pages));
    CHECK(cuCtxDestroy_v2(own));
    CHECK(cuCtxSetCurrent(first));
    without_a_context(first, plain);

    foreign("a stack address", &stack);
    CHECK(cuMemFreeHost(small));
    foreign("a freed small block", small);
    CHECK(cuMemFreeHost(large));
    foreign("a freed large block", large);

    /* Device memory is no pinned memory, whatever it is made of. */
    CHECK(cuMemAlloc_v2(&device_block, 4 * MIB));
    flags = 99;
    SHOW(cuMemHostGetFlags(&flags, (void *)(uintptr_t)device_block));
    CUdeviceptr device = 77;
    SHOW(cuMemHostGetDevicePointer_v2(&device, (void *)(uintptr_t)device_block, 0));
    printf("  flags %u, device pointer %s\n", flags, device ? "set" : "0");
    SHOW(cuMemFreeHost((void *)(uintptr_t)device_block));
    CHECK(cuMemFree_v2(device_block));
    return 0;
}
