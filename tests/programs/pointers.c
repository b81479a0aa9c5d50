/*
 * pointers MIB...
 * Kernels that find memory by pointers in memory: a table of blocks of these sizes that are filled and summed, and a
 * list with a node in each block, gone through after the host let it.
 */
#include "pointer_kernels.h"

#define MOST 16

typedef struct {
    uint64_t next, value;
} Node;

static uint64_t result(CUdeviceptr counter)
{
    uint64_t value, zero = 0;
    CHECK(cuCtxSynchronize());
    CHECK(cuMemcpyDtoH_v2(&value, counter, sizeof value));
    CHECK(cuMemcpyHtoD_v2(counter, &zero, sizeof zero));
    return value;
}

int main(int argc, char **argv)
{
    CUdeviceptr blocks[MOST], table, counter;
    uint64_t count = (uint64_t)argc - 1, words = UINT64_MAX, zero = 0, seven = 7;
    uint32_t value = 3, one = 1;
    CUstream stream;
    void *flag;
    REQUIRE(count > 0 && count <= MOST);
    start_on(0);
    PointerKernels k = load_pointer_kernels();
    for (uint64_t i = 0; i < count; i++) {
        uint64_t bytes = strtoull(argv[i + 1], NULL, 0) * MIB;
        CHECK(cuMemAlloc_v2(&blocks[i], bytes));
        words = bytes / 4 < words ? bytes / 4 : words;
    }
    CHECK(cuMemAlloc_v2(&table, sizeof blocks));
    CHECK(cuMemAlloc_v2(&counter, sizeof zero));
    CHECK(cuMemcpyHtoD_v2(table, blocks, count * sizeof *blocks));
    CHECK(cuMemcpyHtoD_v2(counter, &zero, sizeof zero));
    launch(k.fill_table, NULL, (void *[]){&table, &count, &words, &value});
    launch(k.sum_table, NULL, (void *[]){&table, &count, &words, &counter});
    printf("the table's blocks: %s\n", result(counter) == count * words * value ? "right" : "WRONG");

    /* Each node at the end of its block. */
    CUdeviceptr node = 0;
    for (uint64_t i = 0; i < count; i++) {
        Node content = {node, i};
        node = blocks[i] + words * 4 - sizeof content;
        CHECK(cuMemcpyHtoD_v2(node, &content, sizeof content));
    }
    launch(k.add_list, NULL, (void *[]){&node, &seven});
    CHECK(cuCtxSynchronize());
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemHostAlloc(&flag, 4096, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    *(volatile uint32_t *)flag = 0;
    CUdeviceptr flag_on_device = (CUdeviceptr)(uintptr_t)flag;
    launch(k.sum_list, stream, (void *[]){&node, &counter, &flag_on_device});
    *(volatile uint32_t *)flag = one;
    printf("the list's nodes: %s\n", result(counter) == count * (count - 1) / 2 + count * seven ? "right" : "WRONG");
    for (uint64_t i = 0; i < count; i++)
        CHECK(cuMemFree_v2(blocks[i]));
    return 0;
}
