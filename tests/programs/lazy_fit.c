/*
 * While a kernel runs, memory that was freed without a wait and fits best is left to it, and freed memory that nobody is at work on is
 * given out instead: the allocation returns before the kernel does. For lazy frees; whoever waits is ended by an alarm.
 */
#include "kernels.h"

#include <unistd.h>

int main(void)
{
    start_on(0);
    Kernels k = load_kernels();
    volatile uint32_t *flag;
    CUdeviceptr on_device, quiet, between, best, instead;
    CUstream stream;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemHostAlloc((void **)&flag, 4096, CU_MEMHOSTALLOC_DEVICEMAP));
    CHECK(cuMemHostGetDevicePointer_v2(&on_device, (void *)flag, 0));
    *flag = 0;
    CHECK(cuMemAlloc_v2(&quiet, 96 * MIB));
    CHECK(cuMemAlloc_v2(&between, 2 * MIB));
    CHECK(cuMemAlloc_v2(&best, 80 * MIB));
    CHECK(cuMemFree_v2(quiet));
    /* The wait of this one is for what was freed before, too. */
    CHECK(cuMemFree_v2(best));
    CHECK(cuMemAlloc_v2(&best, 80 * MIB));

    CHECK(cuLaunchKernel(k.wait_flag, 1, 1, 1, 1, 1, 1, 0, stream, (void *[]){&on_device}, NULL));
    CHECK(cuMemFree_v2(best));
    alarm(20);
    CHECK(cuMemAlloc_v2(&instead, 80 * MIB));
    alarm(0);
    printf("while the kernel runs: %s\n", instead == quiet ? "what nobody works on" : "something else");
    *flag = 1;
    CHECK(cuCtxSynchronize());
    CHECK(cuMemFree_v2(instead));
    CHECK(cuMemFree_v2(between));
    return 0;
}
