/*
 * A thread has a default stream of its own in each context. It captures those of two contexts at once, and after the end of the
 * one gives memory back in the other's, where a capture goes on. That is relaxed: bare, the other modes forbid the free.
 */
#include "streams.h"

enum { LEAST = 4 };

CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, int mode);
CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph);

int main(void)
{
    CUcontext primary = start_on(0), created;
    CUdeviceptr small, block;
    void *pinned;
    CUgraph graph;
    CHECK(cuCtxCreate_v2(&created, 0, 0));
    for (int first = 0; first < 2; first++) {
        CUcontext here = first ? created : primary, there = first ? primary : created;
        CHECK(cuCtxSetCurrent(here));
        CHECK(cuMemAlloc_v2(&small, 4 * KIB));
        CHECK(cuMemAlloc_v2(&block, LEAST * MIB));
        CHECK(cuMemHostAlloc(&pinned, LEAST * MIB, 0));
        SHOW(cuStreamBeginCapture_v2_ptsz(NULL, CAPTURE_RELAXED));
        CHECK(cuCtxSetCurrent(there));
        SHOW(cuStreamBeginCapture_v2_ptsz(NULL, CAPTURE_RELAXED));
        SHOW(cuStreamEndCapture_ptsz(NULL, &graph));
        CHECK(cuGraphDestroy(graph));
        CHECK(cuCtxSetCurrent(here));
        SHOW(cuMemFree_v2(small));
        SHOW(cuMemFree_v2(block));
        SHOW(cuMemFreeHost(pinned));
        SHOW(cuStreamEndCapture_ptsz(NULL, &graph));
        CHECK(cuGraphDestroy(graph));
    }
    return 0;
}
