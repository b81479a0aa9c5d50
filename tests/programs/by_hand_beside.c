/*
 * by_hand_beside: one thread places its block on one GPU and the other in turn, by hand, while another launches kernels on blocks of its own.
 * Between two of those moves there is a launch at least, so that whatever is moved for launches has its turn as well. Answers the lines of its
 * standard input:
 *   moves            how often the block was placed by hand
 *   end              both end; how many words of the other blocks are wrong
 */
#include "control.h"
#include "kernels.h"
#include "streams.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>

enum { BLOCKS = 6, BYTES = 4 * MIB };

static CUcontext context;
static CUdeviceptr placed;
static atomic_int is_over;
static atomic_long launched, moves;
static uint64_t wrong;

static void *launches(void *kernels)
{
    const Kernels *k = kernels;
    CUdeviceptr blocks[BLOCKS], bad;
    CUstream stream;
    uint64_t words = BYTES / 4;
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuStreamCreate(&stream, 1));
    CHECK(cuMemAlloc_v2(&bad, 8));
    CHECK(cuMemcpyHtoD_v2(bad, &wrong, 8));
    for (uint32_t i = 0; i < BLOCKS; i++) {
        CHECK(cuMemAlloc_v2(&blocks[i], BYTES));
        iota(k, stream, blocks[i], words, i);
    }
    while (!atomic_load(&is_over)) {
        for (uint32_t i = 0; i < BLOCKS; i++) {
            launch(k->check_iota, stream, (void *[]){&blocks[i], &words, &i, &bad});
            atomic_fetch_add(&launched, 1);
        }
        CHECK(cuStreamSynchronize(stream));
    }
    CHECK(cuMemcpyDtoH_v2(&wrong, bad, 8));
    return NULL;
}

static void *places(void *control)
{
    const Control *c = control;
    while (!atomic_load(&is_over)) {
        long before = atomic_load(&launched);
        c->prefetch((void *)placed, 2 * BYTES, (int)(atomic_load(&moves) % 2), NULL);
        atomic_fetch_add(&moves, 1);
        while (!atomic_load(&is_over) && atomic_load(&launched) == before)
            sched_yield();
    }
    return NULL;
}

int main(void)
{
    pthread_t launcher, placer;
    char line[64];
    context = start_on(0);
    Kernels k = load_kernels();
    Control c = find_control(RTLD_DEFAULT);
    CHECK(cuMemAlloc_v2(&placed, 2 * BYTES));
    REQUIRE(pthread_create(&launcher, NULL, launches, &k) == 0);
    REQUIRE(pthread_create(&placer, NULL, places, &c) == 0);
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        if (strcmp(line, "moves") == 0) {
            printf("%ld\n", atomic_load(&moves));
        } else {
            REQUIRE(strcmp(line, "end") == 0 && !atomic_load(&is_over));
            atomic_store(&is_over, 1);
            REQUIRE(pthread_join(launcher, NULL) == 0 && pthread_join(placer, NULL) == 0);
            printf("%llu wrong\n", (unsigned long long)wrong);
        }
        fflush(stdout);
    }
    return 0;
}
