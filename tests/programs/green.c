/*
 * A green context: its handle is another than the primary one, kernels run in its stream, and memory made in it outlives
 * it. Twice, so that what was made for the first would be found by the second.
 */
#include "green.h"
#include "kernels.h"

#define BYTES (8 * MIB)
#define ELEMENTS (BYTES / 4)

int main(void)
{
    CUcontext primary = start_on(0);
    for (int round = 1; round <= 2; round++) {
        CUgreenCtx green = green_on(0), of;
        CUcontext context, again, owner;
        CUstream stream;
        CUdeviceptr block, small;
        CHECK(cuCtxFromGreenCtx(&context, green));
        CHECK(cuCtxFromGreenCtx(&again, green));
        printf("round %d: it has one handle: %s\n", round, again == context ? "yes" : "no");
        printf("round %d: its handle is the primary one's: %s\n", round, context == primary ? "yes" : "no");
        CHECK(cuCtxPushCurrent_v2(context));
        CHECK(cuGreenCtxStreamCreate(&stream, green, CU_STREAM_NON_BLOCKING, 0));
        CHECK(cuStreamGetGreenCtx(stream, &of));
        printf("round %d: its stream names it: %s\n", round, of == green ? "yes" : "no");
        CHECK(cuMemAlloc_v2(&block, BYTES));
        CHECK(cuMemAlloc_v2(&small, 4 * KIB));
        CHECK(cuPointerGetAttribute(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, block));
        printf("round %d: its memory is the primary one's: %s\n", round, owner == primary ? "yes" : "no");
        Kernels k = load_kernels();
        iota(&k, stream, block, ELEMENTS, (uint32_t)round);
        iota(&k, stream, small, KIB, 5);
        CHECK(cuStreamSynchronize(stream));
        CHECK(cuStreamDestroy_v2(stream));
        CHECK(cuCtxPopCurrent_v2(&again));
        CHECK(cuGreenCtxDestroy(green));
        Kernels after = load_kernels();
        printf("round %d: %llu and %llu words wrong after its end\n", round,
               (unsigned long long)count_wrong(&after, block, ELEMENTS, (uint32_t)round),
               (unsigned long long)count_wrong(&after, small, KIB, 5));
        SHOW(cuMemFree_v2(block));
        SHOW(cuMemFree_v2(small));
    }
    return 0;
}
