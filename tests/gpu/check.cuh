/* What the programs of this folder that use the CUDA runtime have in common. */
#ifndef CHECK_CUH
#define CHECK_CUH

#include <cstdint>
#include <cstdio>
#include <cstdlib>

/* Ends the program, since every later line of its output would follow from this failure. */
#define CHECK(call)                                                                                                \
    do {                                                                                                           \
        cudaError_t check_result = (call);                                                                         \
        if (check_result != cudaSuccess) {                                                                         \
            printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorName(check_result));                  \
            exit(1);                                                                                               \
        }                                                                                                          \
    } while (0)

__global__ void ramp(uint32_t *to, size_t n, uint32_t start)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        to[i] = start + (uint32_t)i;
}

__global__ void add(uint32_t *to, const uint32_t *a, const uint32_t *b, size_t n)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        to[i] = a[i] + b[i];
}

/* How many words differ from start + index, counted by a kernel of the current device. */
__global__ void count_wrong(const uint32_t *from, size_t n, uint32_t start, unsigned long long *wrong)
{
    unsigned long long mine = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        mine += from[i] != start + (uint32_t)i;
    if (mine)
        atomicAdd(wrong, mine);
}

static inline unsigned long long wrong_words(const uint32_t *from, size_t n, uint32_t start)
{
    unsigned long long *counter, result;
    CHECK(cudaMalloc((void **)&counter, sizeof *counter));
    CHECK(cudaMemset(counter, 0, sizeof *counter));
    count_wrong<<<256, 256>>>(from, n, start, counter);
    CHECK(cudaMemcpy(&result, counter, sizeof result, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(counter));
    return result;
}

#endif
