/*
 * What cuMemGetAccess answers about memory that no cuMemSetAccess was called for: a library that is given a pointer asks so
 * whether a GPU may use it.
 */
#include "streams.h"
#include "vmm.h"



static void tell(const char *what, CUdeviceptr address)
{
    static const CUmemLocation places[] = {{ON_DEVICE, 0}, {ON_DEVICE, 99}, {ON_HOST_NODE, 0}, {0, 0}};
    printf("%s:", what);
    for (int i = 0; i < 4; i++) {
        uint64_t flags = 77;
        CUresult result = cuMemGetAccess(&flags, &places[i], address);
        printf(" %d,%d", result, (int)flags);
    }
    puts("");
}

int main(void)
{
    CUcontext context;
    CUdeviceptr small, large, ordered, managed;
    void *pinned;
    static int pageable;
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuMemAlloc_v2(&small, 4096));
    CHECK(cuMemAlloc_v2(&large, 64 << 20));
    CHECK(cuMemAllocAsync(&ordered, 1 << 20, 0));
    CHECK(cuMemAllocManaged(&managed, 2 << 20, 1));
    CHECK(cuMemHostAlloc(&pinned, 4096, 0));
    tell("4 KiB", small);
    tell("inside them", small + 100);
    tell("64 MiB", large);
    tell("inside them", large + (33 << 20));
    tell("stream-ordered", ordered);
    tell("managed", managed);
    tell("pinned", (CUdeviceptr)pinned);
    tell("pageable", (CUdeviceptr)&pageable);
    tell("nothing", 0);
    SHOW(cuMemGetAccess(0, &(CUmemLocation){ON_DEVICE, 0}, large));
    CHECK(cuMemFree_v2(large));
    tell("freed", large);
    CHECK(cuMemFree_v2(small));
    return 0;
}
