/* What a stream-ordered free answers on a stream whose capture is broken: for memory of every kind, in every mode. */
#include "streams.h"

enum { LEAST = 4, MODES = 3 };

int main(void)
{
    start_on(0);
    for (int mode = 0; mode < MODES; mode++) {
        CUdeviceptr small, block;
        CUstream stream;
        CUgraph graph = NULL;
        void *pinned;
        int status = -1;
        printf("mode %d\n", mode);
        CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        CHECK(cuMemAlloc_v2(&small, 4 * KIB));
        CHECK(cuMemAlloc_v2(&block, LEAST * MIB));
        CHECK(cuMemHostAlloc(&pinned, LEAST * MIB, 0));
        CHECK(cuStreamBeginCapture_v2(stream, mode));
        SHOW(cuMemFreeAsync(block, stream));
        CHECK(cuStreamIsCapturing(stream, &status));
        printf("status %d\n", status);
        SHOW(cuStreamSynchronize(stream));
        CHECK(cuStreamIsCapturing(stream, &status));
        printf("status %d\n", status);
        SHOW(cuMemFreeAsync(small, stream));
        SHOW(cuMemFreeAsync(block, stream));
        SHOW(cuMemFreeAsync((CUdeviceptr)(uintptr_t)pinned, stream));
        SHOW(cuStreamEndCapture(stream, &graph));
        SHOW(cuMemFreeAsync(small, stream));
        SHOW(cuMemFree_v2(block));
        SHOW(cuMemFreeHost(pinned));
        SHOW(cuStreamSynchronize(stream));
    }
    return 0;
}
