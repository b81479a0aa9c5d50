/* small_stack KIB: the first calls of the driver, on a thread that has only so much stack. */
#define _GNU_SOURCE
#include "program.h"

#include <pthread.h>
#include <sys/mman.h>

static void *first_calls(void *unused)
{
    CUdeviceptr small, large, managed;
    void *pinned;
    (void)unused;
    start_on(0);
    CHECK(cuMemAlloc_v2(&small, 8 * MIB));
    CHECK(cuMemAlloc_v2(&large, 200 * MIB));
    CHECK(cuMemHostAlloc(&pinned, 2 * MIB, 0));
    CHECK(cuMemAllocManaged(&managed, 4 * MIB, 1));
    CHECK(cuMemFree_v2(managed));
    CHECK(cuMemFreeHost(pinned));
    CHECK(cuMemFree_v2(small));
    CHECK(cuMemFree_v2(large));
    return NULL;
}

int main(int argc, char **argv)
{
    size_t bytes = (argc > 1 ? strtoull(argv[1], NULL, 0) : 64) * KIB, page = 4096;
    pthread_attr_t attributes;
    pthread_t thread;
    /* A stack of exactly this size, with nothing below it. */
    char *stack = mmap(NULL, page + bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(stack != MAP_FAILED && mprotect(stack, page, PROT_NONE) == 0);
    REQUIRE(pthread_attr_init(&attributes) == 0 && pthread_attr_setstack(&attributes, stack + page, bytes) == 0);
    REQUIRE(pthread_create(&thread, &attributes, first_calls, NULL) == 0);
    REQUIRE(pthread_join(thread, NULL) == 0);
    printf("served on %zu KiB\n", bytes / KIB);
    return 0;
}
