/* Handles for other processes: of large and of small memory, of an inner byte, of none, and into nothing. */
#include "program.h"

int main(void)
{
    CUdeviceptr block, small;
    CUipcMemHandle handle;
    start_on(0);
    CHECK(cuMemAlloc_v2(&block, 16 * MIB));
    CHECK(cuMemAlloc_v2(&small, 4096));
    SHOW(cuIpcGetMemHandle(&handle, block));
    SHOW(cuIpcGetMemHandle(&handle, block + 4096));
    SHOW(cuIpcGetMemHandle(&handle, small));
    SHOW(cuIpcGetMemHandle(NULL, block));
    CHECK(cuMemFree_v2(block));
    CHECK(cuMemFree_v2(small));
    return 0;
}
