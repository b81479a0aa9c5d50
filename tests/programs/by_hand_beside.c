/*
 * by_hand_beside TIMES: one thread places its block on one GPU and the other in turn, by hand, so many times, while another launches kernels on
 * blocks of its own. Prints how many of their words are wrong.
 */
#include "control.h"
#include "kernels.h"
#include "streams.h"

#include <pthread.h>
#include <stdatomic.h>

enum { BLOCKS = 6, BYTES = 4 * MIB };

static CUcontext context;
static atomic_int is_over;

static void *launches(void *kernels)
{
    const Kernels *k = kernels;
    CUdeviceptr blocks[BLOCKS], bad;
    CUstream stream;
    uint64_t words = BYTES / 4, wrong = 0;
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuStreamCreate(&stream, 1));
    CHECK(cuMemAlloc_v2(&bad, 8));
    CHECK(cuMemcpyHtoD_v2(bad, &wrong, 8));
    for (uint32_t i = 0; i < BLOCKS; i++) {
        CHECK(cuMemAlloc_v2(&blocks[i], BYTES));
        iota(k, stream, blocks[i], words, i);
    }
    while (!atomic_load(&is_over)) {
        for (uint32_t i = 0; i < BLOCKS; i++)
            launch(k->check_iota, stream, (void *[]){&blocks[i], &words, &i, &bad});
        CHECK(cuStreamSynchronize(stream));
    }
    CHECK(cuMemcpyDtoH_v2(&wrong, bad, 8));
    printf("%llu wrong\n", (unsigned long long)wrong);
    return NULL;
}

int main(int argc, char **argv)
{
    REQUIRE(argc == 2);
    pthread_t launcher;
    CUdeviceptr block;
    context = start_on(0);
    Kernels k = load_kernels();
    Control c = find_control(RTLD_DEFAULT);
    CHECK(cuMemAlloc_v2(&block, 6 * BYTES));
    REQUIRE(pthread_create(&launcher, NULL, launches, &k) == 0);
    for (int i = 0; i < atoi(argv[1]); i++)
        c.prefetch((void *)block, 6 * BYTES, i % 2, NULL);
    atomic_store(&is_over, 1);
    REQUIRE(pthread_join(launcher, NULL) == 0);
    return 0;
}
