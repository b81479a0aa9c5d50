/*
 * CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, which libraries for GPUDirect RDMA set on all memory that a network adapter is to reach: who
 * may set it, what is read back, and that a fill or copy which is not asynchronous is over when it returns, there and nowhere else.
 */
#include "waiting.h"

enum { SYNC_MEMOPS = 6 };

CUresult cuMemsetD16_v2(CUdeviceptr pointer, unsigned short value, size_t count);

static int value_at(CUdeviceptr pointer)
{
    unsigned value = 77, together = 77;
    int wanted[] = {SYNC_MEMOPS};
    void *data[] = {&together};
    if (cuPointerGetAttribute(&value, SYNC_MEMOPS, pointer) != CUDA_SUCCESS)
        return -1;
    CHECK(cuPointerGetAttributes(1, wanted, data, pointer));
    return value == together ? (int)value : -2;
}

static CUresult set(CUdeviceptr pointer, unsigned value) { return cuPointerSetAttribute(&value, SYNC_MEMOPS, pointer); }

static void attribute(const char *what, CUdeviceptr memory, size_t bytes)
{
    unsigned one = 1;
    CUcontext context;
    printf("%s begins with %d; ", what, value_at(memory));
    printf("set %d, ", set(memory, 1));
    printf("%d at its last byte; ", value_at(memory + bytes - 1));
    printf("cleared in its middle %d, ", set(memory + bytes / 2, 0));
    printf("%d; ", value_at(memory));
    printf("set to 2: %d, ", set(memory, 2));
    printf("%d\n", value_at(memory));
    printf("  no value %d, another attribute %d, none %d, behind it %d\n", cuPointerSetAttribute(NULL, SYNC_MEMOPS, memory),
           cuPointerSetAttribute(&one, CU_POINTER_ATTRIBUTE_BUFFER_ID, memory), cuPointerSetAttribute(&one, 99, memory),
           set(memory + bytes, 1));
    CHECK(cuCtxGetCurrent(&context));
    CHECK(cuCtxSetCurrent(NULL));
    printf("  without a context: %d\n", set(memory, 1));
    CHECK(cuCtxSetCurrent(context));
}

static void attributes(void)
{
    const size_t sizes[] = {4096, 3 * MIB + 5, 8 * MIB};
    char name[64];
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        make_plain(sizes[i], 0);
        snprintf(name, sizeof name, "a block of %zu bytes", sizes[i]);
        attribute(name, block, sizes[i]);
        free_plain(sizes[i]);
        printf("  freed: %d\n", set(block, 1));
        make_plain(sizes[i], 0);
        printf("  the next one there begins with %d\n", value_at(block));
        free_plain(sizes[i]);
    }
    make_pinned(2 * MIB, 0);
    printf("pinned memory: set %d, ", set((CUdeviceptr)(uintptr_t)host, 1));
    printf("%d\n", value_at((CUdeviceptr)(uintptr_t)host));
    free_pinned(2 * MIB);
    make_mapped(2 * MIB, 0);
    printf("memory of the program's own mapping: set %d, ", set(block, 1));
    printf("%d\n", value_at(block));
    unmap(2 * MIB);
}

static CUdeviceptr other;

static void fill_bytes(size_t bytes) { CHECK(cuMemsetD8_v2(block, 1, bytes)); }
static void fill_halves(size_t bytes) { CHECK(cuMemsetD16_v2(block + bytes / 2, 1, bytes / 4)); }
static void fill_words(size_t bytes) { CHECK(cuMemsetD32_v2(block, 1, bytes / 4)); }
static void fill_other(size_t bytes) { CHECK(cuMemsetD8_v2(other, 1, bytes)); }
static void copy_to(size_t bytes) { CHECK(cuMemcpyDtoD_v2(block, other, bytes)); }
static void copy_from(size_t bytes) { CHECK(cuMemcpyDtoD_v2(other, block, bytes)); }

static void begins_behind(const char *what, void (*act)(size_t), size_t bytes, Place *busy, int waits)
{
    Case of = {what, NULL, act, bytes, 0};
    Call call = {.context = busy->context, .of = &of};
    CUdeviceptr on_device = (CUdeviceptr)(uintptr_t)flag;
    *flag = 0;
    CHECK(cuLaunchKernel(busy->kernels.wait_flag, 1, 1, 1, 1, 1, 1, 0, busy->stream, (void *[]){&on_device}, NULL));
    begin_call(&call);
    printf("%s: %s\n", what, has_returned(&call, !waits) ? "does not wait" : "waits");
    end_call(&call, busy);
}

int main(void)
{
    const size_t bytes = 8 * MIB;
    void *word;
    start_on(0);
    attributes();
    Place here = place_here("GPU 0");
    CUstream beside = here.stream;
    CHECK(cuMemHostAlloc(&word, 4096, CU_MEMHOSTALLOC_DEVICEMAP));
    flag = word;
    CHECK(cuMemAlloc_v2(&block, bytes));
    CHECK(cuMemAlloc_v2(&other, bytes));
    /* In the default stream, which fills and copies follow. */
    here.stream = NULL;
    begins_behind("a fill of unmarked memory", fill_bytes, bytes, &here, 0);
    CHECK(set(block, 1));
    begins_behind("a fill", fill_bytes, bytes, &here, 1);
    begins_behind("a fill by 16 bits", fill_halves, bytes, &here, 1);
    begins_behind("a fill by 32 bits", fill_words, bytes, &here, 1);
    begins_behind("a copy into it", copy_to, bytes, &here, 1);
    begins_behind("a copy out of it", copy_from, bytes, &here, 1);
    begins_behind("a fill of the other block", fill_other, bytes, &here, 0);
    here.stream = beside;
    begins_behind("a fill beside a stream that is not followed", fill_bytes, bytes, &here, 0);
    here.stream = NULL;
    CHECK(set(block, 0));
    begins_behind("a fill after all", fill_bytes, bytes, &here, 0);
    CHECK(cuMemFree_v2(block));
    CHECK(cuMemFree_v2(other));
    return 0;
}
