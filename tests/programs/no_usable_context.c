/*
 * What the driver answers about memory to a thread without a context, and with one that was destroyed: sharing it with other
 * processes, and all that is asked of pinned memory.
 */
#include "program.h"

#include <pthread.h>

CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream);

enum { LEAST = 4 };

static CUcontext whole, gone;
static CUdeviceptr block, freed_block;
static char *pinned, *small, *freed;
static CUipcMemHandle handle;

static void ask_pinned(const char *what, char *memory)
{
    CUdeviceptr device;
    unsigned flags;
    printf("%s\n", what);
    SHOW(cuMemHostGetDevicePointer_v2(&device, memory, 0));
    SHOW(cuMemHostGetFlags(&flags, memory));
    SHOW(cuMemFreeAsync((CUdeviceptr)(uintptr_t)memory, NULL));
    SHOW(cuMemFreeAsync((CUdeviceptr)(uintptr_t)memory + 256, NULL));
    SHOW(cuMemHostUnregister(memory));
    SHOW(cuMemHostUnregister(memory + 4096));
}

static void ask(const char *when)
{
    static char plain[8192];
    CUdeviceptr opened;
    printf("-- %s\n", when);
    SHOW(cuIpcGetMemHandle(&handle, block));
    ask_pinned("pinned", pinned);
    ask_pinned("a small piece", small);
    ask_pinned("freed", freed);
    SHOW(cuMemHostUnregister(plain));
    SHOW(cuMemHostUnregister((void *)(uintptr_t)block));
    SHOW(cuMemHostUnregister((void *)(uintptr_t)freed_block));
    SHOW(cuIpcOpenMemHandle_v2(&opened, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
}

static void *destroy(void *unused)
{
    CHECK(cuCtxSetCurrent(gone));
    CHECK(cuCtxDestroy_v2(gone));
    return unused;
}

int main(void)
{
    pthread_t thread;
    whole = start_on(0);
    CHECK(cuMemAlloc_v2(&block, LEAST * MIB));
    CHECK(cuMemAlloc_v2(&freed_block, LEAST * MIB));
    CHECK(cuMemHostAlloc((void **)&pinned, LEAST * MIB, CU_MEMHOSTALLOC_DEVICEMAP));
    CHECK(cuMemHostAlloc((void **)&small, 4 * KIB, CU_MEMHOSTALLOC_DEVICEMAP));
    CHECK(cuMemHostAlloc((void **)&freed, MIB, CU_MEMHOSTALLOC_DEVICEMAP));
    CHECK(cuMemFreeHost(freed));
    CHECK(cuMemFree_v2(freed_block));
    ask("a context that lives");
    CHECK(cuCtxSetCurrent(NULL));
    ask("no context");
    CHECK(cuCtxCreate_v2(&gone, 0, 0));
    REQUIRE(pthread_create(&thread, NULL, destroy, NULL) == 0);
    REQUIRE(pthread_join(thread, NULL) == 0);
    ask("one that was destroyed");
    return 0;
}
