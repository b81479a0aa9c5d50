/* Two GPUs that use each other's memory: kernels on one with blocks of the other, and every copy between them. */
#include "check.cuh"

static const size_t N = (size_t)12 << 20; /* words */

static void show(const char *what, const uint32_t *block, int on, uint32_t start)
{
    cudaPointerAttributes of;
    CHECK(cudaSetDevice(on));
    unsigned long long wrong = wrong_words(block, N, start);
    CHECK(cudaPointerGetAttributes(&of, block + N / 2));
    printf("%s: %llu wrong words seen from GPU %d, memory of GPU %d\n", what, wrong, on, of.device);
}

int main()
{
    uint32_t *block[2], *scratch;
    int can;
    cudaStream_t stream;
    for (int gpu = 0; gpu < 2; gpu++) {
        CHECK(cudaDeviceCanAccessPeer(&can, gpu, 1 - gpu));
        printf("GPU %d can access GPU %d: %d\n", gpu, 1 - gpu, can);
        CHECK(cudaSetDevice(gpu));
        CHECK(cudaDeviceEnablePeerAccess(1 - gpu, 0));
        printf("once more: %s\n", cudaGetErrorName(cudaDeviceEnablePeerAccess(1 - gpu, 0)));
        (void)cudaGetLastError();
        CHECK(cudaMalloc((void **)&block[gpu], 4 * N));
        ramp<<<256, 256>>>(block[gpu], N, 100 * (gpu + 1));
        CHECK(cudaDeviceSynchronize());
    }
    show("its own", block[0], 0, 100);
    show("the other's", block[0], 1, 100);
    show("the other's", block[1], 0, 200);

    CHECK(cudaSetDevice(0));
    ramp<<<256, 256>>>(block[1], N, 7);
    CHECK(cudaDeviceSynchronize());
    show("written by the other", block[1], 1, 7);
    CHECK(cudaSetDevice(1));
    CHECK(cudaMalloc((void **)&scratch, 4 * N));
    CHECK(cudaMemset(scratch, 0, 4 * N));
    add<<<256, 256>>>(block[0], block[1], scratch, N);
    CHECK(cudaDeviceSynchronize());
    show("sum written to the other", block[0], 0, 7);

    CHECK(cudaSetDevice(1));
    ramp<<<256, 256>>>(block[1], N, 11);
    CHECK(cudaMemcpyPeer(block[0], 0, block[1], 1, 4 * N));
    show("cudaMemcpyPeer", block[0], 0, 11);
    CHECK(cudaSetDevice(0));
    CHECK(cudaStreamCreate(&stream));
    ramp<<<256, 256, 0, stream>>>(block[0], N, 13);
    CHECK(cudaMemcpyPeerAsync(block[1], 1, block[0], 0, 4 * N, stream));
    CHECK(cudaStreamSynchronize(stream));
    show("cudaMemcpyPeerAsync", block[1], 1, 13);
    ramp<<<256, 256>>>(block[1], N, 17);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaSetDevice(0));
    CHECK(cudaMemcpy(block[0], block[1], 4 * N, cudaMemcpyDefault));
    show("cudaMemcpyDefault", block[0], 0, 17);

    CHECK(cudaSetDevice(0));
    CHECK(cudaDeviceDisablePeerAccess(1));
    printf("disabled once more: %s\n", cudaGetErrorName(cudaDeviceDisablePeerAccess(1)));
    (void)cudaGetLastError();
    CHECK(cudaMemcpyPeer(block[1], 1, block[0], 0, 4 * N));
    show("cudaMemcpyPeer, access disabled", block[1], 1, 17);
    CHECK(cudaFree(block[0]));
    CHECK(cudaFree(block[1]));
    CHECK(cudaFree(scratch));
    CHECK(cudaSetDevice(0));
    CHECK(cudaStreamDestroy(stream));
    printf("done\n");
    return 0;
}
