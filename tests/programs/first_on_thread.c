/*
 * The process's first memory of each kind is another thread's, which has called nothing before.
 *
 *   first_on_thread [CALL]
 *
 * CALL: as this call of the simulated driver begins, which it makes for the first of that memory, the thread is cancelled: the first of the process that is.
 */
#include "simulator.h"

#include "kernels.h"

#include <pthread.h>

static CUcontext context;

static void cancel(void)
{
    REQUIRE(pthread_cancel(pthread_self()) == 0);
}

static void *work(void *argument)
{
    CUdeviceptr large, small;
    void *pinned;
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuMemAlloc_v2(&large, 3 * MIB));
    CHECK(cuMemAlloc_v2(&small, 700));
    CHECK(cuMemAllocHost_v2(&pinned, 4096));
    Kernels kernels = load_kernels();
    iota(&kernels, NULL, large, 1000, 7);
    *(int *)argument = count_wrong(&kernels, large, 1000, 7) == 0;
    CHECK(cuMemFreeHost(pinned));
    CHECK(cuMemFree_v2(small));
    CHECK(cuMemFree_v2(large));
    pthread_testcancel();
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t thread;
    void *answer;
    int right = 0;
    context = start_on(0);
    if (argc > 1)
        find_simulator().before(argv[1], cancel);
    REQUIRE(pthread_create(&thread, NULL, work, &right) == 0);
    REQUIRE(pthread_join(thread, &answer) == 0);
    puts(answer == PTHREAD_CANCELED ? "cancelled" : right ? "right" : "wrong");
    return 0;
}
