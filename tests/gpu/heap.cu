/*
 * A kernel that allocates 100 MiB with device malloc, in 100 blocks that live together. The driver's heap for it has
 * 8 MiB unless somebody makes it larger before the kernel is loaded. Prints how many blocks there were, and whether
 * they hold what was written to them.
 */
#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                                                                                \
    do {                                                                                                           \
        cudaError_t check_result = (call);                                                                         \
        if (check_result != cudaSuccess) {                                                                         \
            printf("%d: %s: %s\n", __LINE__, #call, cudaGetErrorName(check_result));                               \
            exit(1);                                                                                               \
        }                                                                                                          \
    } while (0)

static const int BLOCKS = 100, WORDS = (1 << 20) / 4;

__device__ unsigned *blocks[BLOCKS];

__global__ void allocate()
{
    unsigned *block = (unsigned *)malloc(WORDS * sizeof(unsigned));
    blocks[blockIdx.x] = block;
    for (int i = 0; block && i < WORDS; i += 64)
        block[i] = blockIdx.x + i;
}

/* Runs after all blocks were written, so it would see one that shares memory with another. */
__global__ void check(int *made, int *wrong)
{
    unsigned *block = blocks[blockIdx.x];
    if (!block)
        return;
    atomicAdd(made, 1);
    for (int i = 0; i < WORDS; i += 64)
        if (block[i] != blockIdx.x + i)
            atomicAdd(wrong, 1);
    free(block);
}

int main()
{
    int *counters, found[2];
    CHECK(cudaMalloc(&counters, sizeof found));
    CHECK(cudaMemset(counters, 0, sizeof found));
    allocate<<<BLOCKS, 1>>>();
    check<<<BLOCKS, 1>>>(counters, counters + 1);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(found, counters, sizeof found, cudaMemcpyDeviceToHost));
    printf("%d of %d blocks of 1 MiB, %d wrong words\n", found[0], BLOCKS, found[1]);
    return 0;
}
