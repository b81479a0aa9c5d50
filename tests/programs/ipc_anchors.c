/* What leaves the process by its physical memory, and that such memory is known to stay where it is. */
#define _GNU_SOURCE
#include <dlfcn.h>

#include "kernels.h"
#include "simulator.h"
#include "vmm.h"

#include "../../include/gpupool.h"

#include <pthread.h>
#include <unistd.h>

CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr pointer, size_t bytes, int kind, uint64_t flags);

enum { DMA_BUF = 1 };

static int (*find_pieces)(const void *, size_t, gpupool_piece *, size_t *);

static void say_anchors(const char *when, CUdeviceptr pointer, size_t bytes)
{
    gpupool_piece pieces[8];
    size_t count = 8;
    REQUIRE(find_pieces((const void *)(uintptr_t)pointer, bytes, pieces, &count) == 0);
    printf("%s:", when);
    for (size_t i = 0; i < count; i++)
        printf(" %zu MiB %u", (size_t)(pieces[i].bytes / MIB), pieces[i].anchors);
    printf("\n");
}

CUresult cuMulticastBindAddr(uint64_t multicast, size_t offset, CUdeviceptr pointer, size_t bytes, uint64_t flags);

/* The block that a call is about, and what that is called. */
static CUdeviceptr given_away;
static const char *meanwhile;

static void *say_meanwhile(void *nothing)
{
    say_anchors(meanwhile, given_away, 8 * MIB);
    return nothing;
}

/* In a thread of its own: inside a call of the program's, gpupool answers nothing. */
static void during_the_call(void)
{
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, say_meanwhile, NULL) == 0 && pthread_join(thread, NULL) == 0);
}

/* The driver's part of the next call of that name is over, and nobody has what it gave. */
static void look_during(const Simulator *simulator, const char *call, const char *what, CUdeviceptr block)
{
    given_away = block;
    meanwhile = what;
    REQUIRE(simulator->after);
    simulator->after(call, during_the_call);
}

static void *free_it(void *context)
{
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuMemFree_v2(given_away));
    return context;
}

static void free_during_the_call(void)
{
    pthread_t thread;
    CUcontext context;
    CHECK(cuCtxGetCurrent(&context));
    REQUIRE(pthread_create(&thread, NULL, free_it, context) == 0 && pthread_join(thread, NULL) == 0);
}

int main(void)
{
    CUdeviceptr whole, several, freed, mapped, bound;
    Simulator s = find_simulator();
    CUipcMemHandle shared;
    uint64_t handle, other;
    int descriptor = -1;
    uint64_t (*trim)(void);
    *(void **)&find_pieces = dlsym(RTLD_DEFAULT, "gpupool_pieces");
    *(void **)&trim = dlsym(RTLD_DEFAULT, "gpupool_trim");
    REQUIRE(find_pieces && trim);
    start_on(0);
    Kernels kernels = load_kernels();
    CHECK(cuMemAlloc_v2(&freed, 32 * MIB));
    CHECK(cuMemFree_v2(freed));
    SHOW(cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)freed));
    trim();

    CHECK(cuMemAlloc_v2(&several, 600 * MIB));
    say_anchors("several chunks", several, 600 * MIB);
    SHOW(cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)several));
    CHECK(cuIpcGetMemHandle(&shared, several));
    say_anchors("shared", several, 600 * MIB);

    CHECK(cuMemAlloc_v2(&whole, 8 * MIB));
    iota(&kernels, NULL, whole, 8 * MIB / 4, 5);
    look_during(&s, "cuMemRetainAllocationHandle", "before the handle is given", whole);
    SHOW(cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)whole));
    say_anchors("retained", whole, 8 * MIB);
    look_during(&s, "cuMemGetHandleForAddressRange", "before the descriptor is given", whole);
    SHOW(cuMemGetHandleForAddressRange(&descriptor, whole, 8 * MIB, DMA_BUF, 0));
    close(descriptor);
    say_anchors("and a descriptor given", whole, 8 * MIB);

    /* Whoever has the handle has the memory, when the pool has let go of it. */
    CHECK(cuMemFree_v2(whole));
    trim();
    mapped = map_for(0, handle, 8 * MIB);
    printf("through the handle: %llu wrong\n", (unsigned long long)count_wrong(&kernels, mapped, 8 * MIB / 4, 5));
    CHECK(cuMemUnmap(mapped, 8 * MIB));
    CHECK(cuMemAddressFree(mapped, 8 * MIB));
    CHECK(cuMemRelease(handle));
    SHOW(cuMemRelease(handle));

    CHECK(cuMemAlloc_v2(&whole, 8 * MIB));
    say_anchors("a new one", whole, 8 * MIB);
    CHECK(cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)whole));
    CHECK(cuMemRetainAllocationHandle(&other, (void *)(uintptr_t)whole));
    printf("retained twice: %s handle\n", handle == other ? "the same" : "another");
    CHECK(cuMemExportToShareableHandle(&descriptor, handle, POSIX_FD, 0));
    close(descriptor);
    CHECK(cuMemRelease(handle));
    CHECK(cuMemRelease(other));
    CHECK(cuMemFree_v2(whole));
    CHECK(cuMemFree_v2(several));
    trim();

    /* Simulated GPUs have no multicast, so the call fails, and what it said before is taken back. */
    CHECK(cuMemAlloc_v2(&bound, 8 * MIB));
    look_during(&s, "cuMulticastBindAddr", "while it is bound", bound);
    SHOW(cuMulticastBindAddr(1, 0, bound, 8 * MIB, 0));
    say_anchors("refused", bound, 8 * MIB);
    CHECK(cuMemFree_v2(bound));

    /* Three blocks on one chunk: what a descriptor was given of is not the next block's, as long as its chunk is here. */
    CUdeviceptr given, neighbour, next;
    CHECK(cuMemAlloc_v2(&whole, 32 * MIB));
    CHECK(cuMemFree_v2(whole));
    CHECK(cuMemAlloc_v2(&given, 4 * MIB));
    CHECK(cuMemAlloc_v2(&neighbour, 4 * MIB));
    SHOW(cuMemGetHandleForAddressRange(&descriptor, given, 8 * MIB, DMA_BUF, 1 << 20));
    say_anchors("refused", given, 4 * MIB);
    SHOW(cuMemGetHandleForAddressRange(&descriptor, given, 4 * MIB, DMA_BUF, 0));
    CHECK(cuMemFree_v2(given));
    CHECK(cuMemAlloc_v2(&next, 4 * MIB));
    printf("what is open by its descriptor serves again: %s\n", next == given ? "yes" : "no");
    close(descriptor);
    CHECK(cuMemFree_v2(next));
    CHECK(cuMemFree_v2(neighbour));
    printf("all of it goes: %d\n", trim() >= 32 * MIB);

    /* A block that another thread frees while it is shared. */
    CHECK(cuMemAlloc_v2(&given_away, 8 * MIB));
    s.after("cuMemExportToShareableHandle", free_during_the_call);
    SHOW(cuIpcGetMemHandle(&shared, given_away));
    SHOW(cuIpcGetMemHandle(&shared, given_away));
    return 0;
}
