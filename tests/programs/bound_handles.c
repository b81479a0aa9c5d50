/*
 * Handles of memory in the calls that bind memory to a multicast object or to a logical endpoint, of which there is none: the driver refuses, but looks at
 * the handle. For the simulated driver, which tells what it was given: a real one follows the object, too.
 */
#include "vmm.h"

CUresult cuMulticastBindMem(uint64_t multicast, size_t offset, uint64_t handle, size_t from, size_t bytes, uint64_t flags);
CUresult cuMulticastBindMem_v2(uint64_t multicast, CUdevice device, size_t offset, uint64_t handle, size_t from, size_t bytes,
                               uint64_t flags);
CUresult cuLogicalEndpointBindMem(unsigned endpoint, CUdevice device, uint64_t offset, uint64_t handle, uint64_t from,
                                  uint64_t bytes, uint64_t flags);

int main(void)
{
    enum { BYTES = 2 * MIB };
    uint64_t handle;
    start_on(0);
    CUmemAllocationProp properties = on_device(0);
    CHECK(cuMemCreate(&handle, BYTES, &properties, 0));
    SHOW(cuMulticastBindMem(1, 0, handle, 0, BYTES, 0));
    SHOW(cuMulticastBindMem_v2(1, 0, 0, handle, 0, BYTES, 0));
    SHOW(cuLogicalEndpointBindMem(1, 0, 0, handle, 0, BYTES, 0));
    CHECK(cuMemRelease(handle));
    return 0;
}
