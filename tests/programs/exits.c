#define _GNU_SOURCE
/* exits HOW: ends with live blocks and queued work in the way named, so that the exit status can be compared. */
#include "kernels.h"

#include "streams.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

static void at_exit(void)
{
    /* Programs free at exit, in destructors that run before or after the driver's own: both are answered. */
    CUdeviceptr late = 0;
    CUresult result = cuMemAlloc_v2(&late, 4 * MIB);
    printf("in atexit: allocation %s\n", result == CUDA_SUCCESS ? "works" : "is refused");
    if (result == CUDA_SUCCESS)
        CHECK(cuMemFree_v2(late));
}

static char *page;

static void unmap_page(void)
{
    munmap(page, 4096);
}

static CUdeviceptr left_behind;

static void after_the_driver(void)
{
    CUdeviceptr late = 0;
    CUresult allocated = cuMemAlloc_v2(&late, 4 * MIB), freed = cuMemFree_v2(left_behind);
    printf("after the driver's own handlers: allocation %d, free %d\n", allocated, freed);
}

static CUdeviceptr freed_before;
static void *pinned_before, *pinned;

static void again_after_the_driver(void)
{
    CUresult device = cuMemFree_v2(freed_before), inner = cuMemFree_v2(left_behind + 4096);
    printf("after the driver's own handlers: freed again %d, an inner byte %d", device, inner);
    CUresult ordered = cuMemFreeAsync(freed_before, NULL), host = cuMemFreeHost(pinned_before);
    printf(", in a stream %d, pinned memory again %d, for the first time %d\n", ordered, host, cuMemFreeHost(pinned));
    CUdeviceptr blocks[] = {left_behind + 4096, freed_before, (CUdeviceptr)pinned};
    enum { SYNC_MEMOPS = 6 };
    static const char *const names[] = {"a block", "a freed one", "pinned memory"};
    for (int i = 0; i < 3; i++) {
        CUdeviceptr start = 0;
        size_t bytes = 0;
        unsigned is_set = 1;
        int wanted[] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
        printf("asked of %s:", names[i]);
        printf(" one attribute %d", cuPointerGetAttribute(&bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE, blocks[i]));
        printf(", two %d", cuPointerGetAttributes(2, wanted, (void *[]){&start, &bytes}, blocks[i]));
        printf(", its range %d", cuMemGetAddressRange_v2(&start, &bytes, blocks[i]));
        printf(", to set one %d\n", cuPointerSetAttribute(&is_set, SYNC_MEMOPS, blocks[i]));
    }
}

static void *leave(void *how)
{
    if (strcmp(how, "thread") == 0)
        exit(7);
    return NULL;
}

int main(int argc, char **argv)
{
    const char *how = argc > 1 ? argv[1] : "return";
    CUdeviceptr block;
    /* Registered before the driver is initialised, so it runs after the driver's handler. */
    if (strcmp(how, "late") == 0)
        atexit(after_the_driver);
    if (strcmp(how, "again") == 0)
        atexit(again_after_the_driver);
    if (strcmp(how, "cleared") == 0)
        clearenv();
    /* An entry of the environment that nobody may read any more. */
    if (strcmp(how, "dangling") == 0) {
        page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        REQUIRE(page != MAP_FAILED && putenv(strcpy(page, "NOBODY=reads")) == 0);
        atexit(unmap_page);
    }
    start_on(0);
    Kernels k = load_kernels();
    CHECK(cuMemAlloc_v2(&block, 8 * MIB));
    iota(&k, NULL, block, 2 * MIB, 0);
    left_behind = block;
    CHECK(cuMemAlloc_v2(&freed_before, 8 * MIB));
    CHECK(cuMemFree_v2(freed_before));
    CHECK(cuMemHostAlloc(&pinned_before, MIB, 0));
    CHECK(cuMemHostAlloc(&pinned, MIB, 0));
    CHECK(cuMemFreeHost(pinned_before));
    printf("leaving by %s\n", how);
    fflush(stdout);
    if (strcmp(how, "_exit") == 0)
        _exit(5);
    if (strcmp(how, "quick_exit") == 0)
        quick_exit(8);
    if (strcmp(how, "abort") == 0)
        abort();
    if (strcmp(how, "signal") == 0)
        raise(SIGTERM);
    if (strcmp(how, "kill") == 0)
        raise(SIGKILL);
    if (strcmp(how, "segv") == 0)
        raise(SIGSEGV);
    if (strcmp(how, "atexit") == 0)
        atexit(at_exit);
    pthread_t thread;
    REQUIRE(pthread_create(&thread, NULL, leave, (void *)how) == 0);
    pthread_join(thread, NULL);
    if (strcmp(how, "exit") == 0)
        exit(6);
    return 4;
}
