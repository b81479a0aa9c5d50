/*
 * A kernel waits for a word in pinned memory while the program takes more pinned memory, of other sizes than it freed
 * before, and only then writes the word. An allocation that waited for the device would wait for ever.
 */
#include "kernels.h"

int main(void)
{
    start_on(0);
    Kernels k = load_kernels();
    volatile uint32_t *word;
    CUstream stream;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemHostAlloc((void **)&word, 4096, 0));
    for (size_t round = 0; round < 3; round++) {
        void *before, *during[3];
        CHECK(cuMemHostAlloc(&before, (64 + round) * MIB, 0));
        CHECK(cuMemFreeHost(before));
        *word = 0;
        CUdeviceptr on_device = (CUdeviceptr)(uintptr_t)word;
        CHECK(cuLaunchKernel(k.wait_flag, 1, 1, 1, 1, 1, 1, 0, stream, (void *[]){&on_device}, NULL));
        for (size_t i = 0; i < 3; i++) {
            CHECK(cuMemHostAlloc(&during[i], (20 + 7 * i + round) * MIB, 0));
            memset(during[i], (int)i, 20 * MIB);
        }
        *word = 1;
        CHECK(cuStreamSynchronize(stream));
        for (size_t i = 0; i < 3; i++)
            CHECK(cuMemFreeHost(during[i]));
        printf("round %zu is over\n", round);
    }
    CHECK(cuMemFreeHost((void *)(uintptr_t)word));
    CHECK(cuStreamDestroy_v2(stream));
    return 0;
}
