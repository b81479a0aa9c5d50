/*
 * A program of the CUDA runtime: its ways to allocate, copy and capture, and what it says of pointers. Prints nothing
 * that differs between GPUs or runs. Nothing here knows of gpupool.
 */
#include <vector>

#include "check.cuh"

static uint64_t sum(const std::vector<uint32_t> &values)
{
    uint64_t total = 0;
    for (uint32_t value : values)
        total += value;
    return total;
}

static void describe(const char *name, const void *pointer)
{
    cudaPointerAttributes of;
    CHECK(cudaPointerGetAttributes(&of, pointer));
    printf("%s: type %d, device %d, device pointer %s, host pointer %s\n", name, (int)of.type, of.device,
           of.devicePointer == pointer ? "same" : of.devicePointer ? "other" : "none", of.hostPointer ? "set" : "none");
}

/* Arrays of several sizes, with the driver's small one among them. */
static void plain()
{
    const size_t sizes[] = {1000, (size_t)3 << 20, (size_t)150 << 20};
    uint32_t *arrays[3];
    for (int i = 0; i < 3; i++) {
        CHECK(cudaMalloc(&arrays[i], 4 * sizes[i]));
        ramp<<<256, 256>>>(arrays[i], sizes[i], 17 * (uint32_t)i);
    }
    for (int i = 0; i < 3; i++) {
        std::vector<uint32_t> host(sizes[i]);
        CHECK(cudaMemcpy(host.data(), arrays[i], 4 * sizes[i], cudaMemcpyDeviceToHost));
        printf("array of %zu: sum %llu\n", sizes[i], (unsigned long long)sum(host));
        describe("  its middle", arrays[i] + sizes[i] / 2);
    }
    add<<<256, 256>>>(arrays[2], arrays[2], arrays[1], sizes[1]);
    CHECK(cudaMemset(arrays[2] + sizes[1], 0x5a, 4096));
    std::vector<uint32_t> host(sizes[1] + 1024);
    CHECK(cudaMemcpy(host.data(), arrays[2], 4 * host.size(), cudaMemcpyDefault));
    printf("after an addition: sum %llu\n", (unsigned long long)sum(host));
    for (uint32_t *array : arrays)
        CHECK(cudaFree(array));
    printf("freed twice: %s\n", cudaGetErrorName(cudaFree(arrays[2])));
    (void)cudaGetLastError();
}

static void pitched()
{
    const size_t width = 5000, height = 3000;
    char *rows;
    size_t pitch, pitch3;
    CHECK(cudaMallocPitch((void **)&rows, &pitch, width, height));
    printf("pitch of %zu: %zu\n", width, pitch);
    std::vector<char> in(width * height), out(width * height, 0);
    for (size_t i = 0; i < in.size(); i++)
        in[i] = (char)(i * 7 + i / width);
    CHECK(cudaMemset2D(rows, pitch, 1, width, height));
    CHECK(cudaMemcpy2D(rows, pitch, in.data(), width, width, height, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy2D(out.data(), width, rows, pitch, width, height, cudaMemcpyDeviceToHost));
    printf("2D copy: %s\n", in == out ? "right" : "wrong");

    cudaPitchedPtr volume;
    CHECK(cudaMalloc3D(&volume, make_cudaExtent(1000, 200, 30)));
    pitch3 = volume.pitch;
    CHECK(cudaMemset3D(volume, 3, make_cudaExtent(1000, 200, 30)));
    std::vector<char> row(1000);
    CHECK(cudaMemcpy(row.data(), (char *)volume.ptr + pitch3 * (200 * 30 - 1), 1000, cudaMemcpyDeviceToHost));
    printf("3D: pitch %zu, last row starts %d, ends %d\n", pitch3, row[0], row[999]);
    CHECK(cudaFree(volume.ptr));
    CHECK(cudaFree(rows));
}

static void streams()
{
    const size_t n = (size_t)24 << 20;
    cudaStream_t one, two;
    cudaEvent_t ready;
    uint32_t *a, *b, *pinned;
    CHECK(cudaStreamCreate(&one));
    CHECK(cudaStreamCreateWithFlags(&two, cudaStreamNonBlocking));
    CHECK(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming));
    CHECK(cudaMalloc(&a, 4 * n));
    CHECK(cudaMallocAsync(&b, 4 * n, two));
    CHECK(cudaMallocHost(&pinned, 4 * n));
    describe("stream-ordered", b);
    describe("pinned", pinned);
    ramp<<<128, 256, 0, one>>>(a, n, 1);
    CHECK(cudaEventRecord(ready, one));
    CHECK(cudaStreamWaitEvent(two, ready, 0));
    CHECK(cudaMemcpyAsync(b, a, 4 * n, cudaMemcpyDeviceToDevice, two));
    add<<<128, 256, 0, two>>>(b, b, a, n);
    CHECK(cudaMemcpyAsync(pinned, b, 4 * n, cudaMemcpyDeviceToHost, two));
    CHECK(cudaFreeAsync(b, two));
    CHECK(cudaStreamSynchronize(two));
    printf("streams: sum %llu\n", (unsigned long long)sum(std::vector<uint32_t>(pinned, pinned + n)));

    /* A captured graph over memory that was allocated before, replayed. */
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    size_t nodes = 0;
    CHECK(cudaMalloc(&b, 4 * n));
    CHECK(cudaStreamBeginCapture(one, cudaStreamCaptureModeGlobal));
    CHECK(cudaMemsetAsync(b, 0, 4 * n, one));
    for (int i = 0; i < 3; i++)
        add<<<128, 256, 0, one>>>(b, b, a, n);
    CHECK(cudaMemcpyAsync(pinned, b, 4 * n, cudaMemcpyDeviceToHost, one));
    CHECK(cudaStreamEndCapture(one, &graph));
    CHECK(cudaGraphGetNodes(graph, NULL, &nodes));
    CHECK(cudaGraphInstantiate(&replay, graph, 0));
    for (int i = 0; i < 2; i++)
        CHECK(cudaGraphLaunch(replay, one));
    CHECK(cudaStreamSynchronize(one));
    printf("graph of %zu nodes: sum %llu\n", nodes, (unsigned long long)sum(std::vector<uint32_t>(pinned, pinned + n)));
    CHECK(cudaGraphExecDestroy(replay));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaStreamDestroy(one));
    CHECK(cudaStreamDestroy(two));
    CHECK(cudaEventDestroy(ready));
}

/* Codes for what cannot be served, and that the context lives on. */
static void refusals()
{
    void *pointer = NULL;
    cudaError_t huge = cudaMalloc(&pointer, (size_t)1 << 60), null = cudaFree(NULL);
    cudaError_t zero = cudaMalloc(&pointer, 0);
    printf("1 EiB: %s, zero bytes: %s, free of NULL: %s\n", cudaGetErrorName(huge), cudaGetErrorName(zero),
           cudaGetErrorName(null));
    (void)cudaGetLastError();
    size_t available = 0, total = 0;
    CHECK(cudaMemGetInfo(&available, &total));
    printf("free is at most total: %d\n", available <= total);
    describe("a host variable", &pointer);
}

int main()
{
    CHECK(cudaSetDevice(0));
    plain();
    pitched();
    streams();
    refusals();
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaDeviceReset());
    plain();
    printf("done\n");
    return 0;
}
