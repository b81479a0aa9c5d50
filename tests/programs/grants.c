/*
 * Who may reach memory that is mapped (cuMemSetAccess), and when that may change: for a GPU that gets its context after the
 * memory was mapped, and while a kernel of another GPU works on it. Needs two GPUs; GPU 1 has no context at the start.
 */
#include "waiting.h"

enum { BYTES = 64 * MIB, WORDS = BYTES / 4 };

static CUdeviceptr mapped;
static CUmemAccessDesc second = {{ON_DEVICE, 1}, READ_WRITE};

static void grant_second(size_t bytes)
{
    CHECK(cuMemSetAccess(mapped, bytes, &second, 1));
}

static void revoke_second(size_t bytes)
{
    CUmemAccessDesc none = {{ON_DEVICE, 1}, 0};
    CHECK(cuMemSetAccess(mapped, bytes, &none, 1));
}

static void nothing_to_make(size_t bytes, unsigned flags)
{
    (void)bytes;
    (void)flags;
}

static void tell_access(const char *when)
{
    uint64_t flags[2];
    for (int gpu = 0; gpu < 2; gpu++) {
        CUmemLocation location = {ON_DEVICE, gpu};
        CHECK(cuMemGetAccess(&flags[gpu], &location, mapped));
    }
    printf("%s: GPU 0 %d, GPU 1 %d\n", when, (int)flags[0], (int)flags[1]);
}

/* How many words a kernel of the current context finds wrong. */
static unsigned long long wrong_here(Kernels *kernels, uint32_t start)
{
    CUdeviceptr wrong;
    unsigned long long found;
    uint64_t count = WORDS;
    CHECK(cuMemAlloc_v2(&wrong, sizeof found));
    CHECK(cuMemsetD32_v2(wrong, 0, sizeof found / 4));
    CHECK(cuLaunchKernel(kernels->check_iota, 64, 1, 1, 256, 1, 1, 0, NULL, (void *[]){&mapped, &count, &start, &wrong}, NULL));
    CHECK(cuMemcpyDtoH_v2(&found, wrong, sizeof found));
    CHECK(cuMemFree_v2(wrong));
    return found;
}

static void write_here(Kernels *kernels, uint32_t start)
{
    uint64_t count = WORDS;
    CHECK(cuLaunchKernel(kernels->iota, 64, 1, 1, 256, 1, 1, 0, NULL, (void *[]){&mapped, &count, &start}, NULL));
    CHECK(cuCtxSynchronize());
}

int main(void)
{
    static const Case grant = {"cuMemSetAccess that adds GPU 1", nothing_to_make, grant_second, BYTES, 0};
    static const Case revoke = {"cuMemSetAccess that takes GPU 1 away", nothing_to_make, revoke_second, BYTES, 0};
    CUcontext created;
    uint64_t memory;
    void *word;

    start_on(0);
    Place first = place_here("GPU 0");
    CHECK(cuMemHostAlloc(&word, 4096, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    flag = word;
    CUmemAllocationProp properties = on_device(0);
    CHECK(cuMemCreate(&memory, BYTES, &properties, 0));
    mapped = map_for(0, memory, BYTES);
    tell_access("mapped for GPU 0, before GPU 1 had a context");
    write_here(&first.kernels, 1);

    start_on(1);
    Place other = place_here("GPU 1");
    CHECK(cuMemSetAccess(mapped, BYTES, &second, 1));
    tell_access("granted to GPU 1 after its context was made");
    printf("GPU 1 finds %llu words wrong\n", wrong_here(&other.kernels, 1));
    write_here(&other.kernels, 2);
    CHECK(cuCtxCreate_v2(&created, 0, 1));
    Kernels in_created = load_kernels();
    printf("a context of GPU 1 that was made after the grant finds %llu words wrong\n", wrong_here(&in_created, 2));
    CHECK(cuCtxDestroy_v2(created));
    CHECK(cuCtxSetCurrent(first.context));
    printf("GPU 0 finds %llu words wrong\n", wrong_here(&first.kernels, 2));

    const Case *changes[] = {&revoke, &grant, &revoke, &grant};
    for (int i = 0; i < 4; i++) {
        Place *busy = i < 2 ? &first : &other;
        Call call = {.context = first.context, .of = changes[i]};
        make_and_hold(changes[i], &first, busy);
        begin_call(&call);
        int returned = has_returned(&call, 1);
        end_call(&call, busy);
        printf("%s, while a kernel is held on %s: waits: %s\n", changes[i]->what, busy->name, returned ? "no" : "yes");
        tell_access("now");
    }
    CHECK(cuCtxSetCurrent(other.context));
    printf("GPU 1 finds %llu words wrong\n", wrong_here(&other.kernels, 2));
    CHECK(cuCtxSetCurrent(first.context));
    block = mapped;
    handle = memory;
    unmap(BYTES);
    CHECK(cuMemFreeHost(word));
    return 0;
}
