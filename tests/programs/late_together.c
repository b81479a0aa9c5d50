/*
 * Contexts of four GPUs come at the same moment, each in a way of its own, while GPU 0's thread goes on to allocate and free: every one reads all of
 * GPU 0's memory at once, what was given a moment before among it, and writes to its own part of it. In several lives, in each of which every GPU comes
 * in another way. Needs as many GPUs as it is told, and one more.
 *
 *   late_together GPUS LIVES
 */
#include "late.h"

#include <pthread.h>

enum { MOST = 8, BLOCKS = 6 };
static const size_t SIZES[BLOCKS] = {2 * MIB, 10 * MIB, 3 * MIB, 34 * MIB, 66 * MIB, 40 << 10};
static const char *const WAYS[] = {"retain", "create", "green", "unseen", "unseen_work"};
enum { ALL_WAYS = sizeof WAYS / sizeof *WAYS };

static CUcontext first;
static pthread_barrier_t begins, given;
static int gpus, life;
static CUdeviceptr blocks[BLOCKS], fresh, parts[MOST];
static uint64_t wrong[MOST];

static void *comes(void *argument)
{
    int gpu = (int)(uintptr_t)argument;
    const char *way = WAYS[(gpu + life) % ALL_WAYS];
    CUgreenCtx green = NULL;
    pthread_barrier_wait(&begins);
    CUcontext own = come(way, gpu, &green);
    CHECK(cuCtxEnablePeerAccess(first, 0));
    Kernels here = load_kernels();
    uint64_t sum = 0;
    for (int i = 0; i < BLOCKS; i++)
        sum += count_wrong(&here, blocks[i], SIZES[i] / 4, (uint32_t)(life * 100 + i));
    iota(&here, NULL, parts[gpu - 1], MIB, (uint32_t)(life * 1000 + gpu));
    CHECK(cuCtxSynchronize());
    /* What GPU 0's thread was given while all of them came. */
    pthread_barrier_wait(&given);
    sum += count_wrong(&here, fresh, MIB, (uint32_t)life);
    CHECK(cuCtxSynchronize());
    wrong[gpu - 1] = sum;
    go(way, gpu, own, green);
    return NULL;
}

int main(int argc, char **argv)
{
    gpus = argc > 1 ? atoi(argv[1]) : 4;
    int lives = argc > 2 ? atoi(argv[2]) : 3;
    first = start_on(0);
    REQUIRE(gpus <= MOST);
    Kernels here = load_kernels();
    for (int i = 0; i < BLOCKS; i++)
        CHECK(cuMemAlloc_v2(&blocks[i], SIZES[i]));
    for (int i = 0; i < gpus; i++)
        CHECK(cuMemAlloc_v2(&parts[i], 4 * MIB));
    for (life = 1; life <= lives; life++) {
        for (int i = 0; i < BLOCKS; i++)
            iota(&here, NULL, blocks[i], SIZES[i] / 4, (uint32_t)(life * 100 + i));
        CHECK(cuCtxSynchronize());
        REQUIRE(pthread_barrier_init(&begins, NULL, (unsigned)gpus + 1) == 0);
        REQUIRE(pthread_barrier_init(&given, NULL, (unsigned)gpus + 1) == 0);
        pthread_t threads[MOST];
        for (int i = 0; i < gpus; i++)
            REQUIRE(pthread_create(&threads[i], NULL, comes, (void *)(uintptr_t)(i + 1)) == 0);
        pthread_barrier_wait(&begins);
        for (int round = 0; round < 200; round++) {
            CHECK(cuMemAlloc_v2(&fresh, (size_t)(4 + round % 40 * 2) * MIB));
            if (round < 199)
                CHECK(cuMemFree_v2(fresh));
        }
        iota(&here, NULL, fresh, MIB, (uint32_t)life);
        CHECK(cuCtxSynchronize());
        pthread_barrier_wait(&given);
        uint64_t sum = 0;
        for (int i = 0; i < gpus; i++) {
            REQUIRE(pthread_join(threads[i], NULL) == 0);
            sum += wrong[i];
        }
        printf("life %d: %llu wrong by those who came;", life, (unsigned long long)sum);
        sum = 0;
        for (int i = 0; i < gpus; i++)
            sum += count_wrong(&here, parts[i], MIB, (uint32_t)(life * 1000 + i + 1));
        printf(" %llu wrong of what they wrote\n", (unsigned long long)sum);
        CHECK(cuMemFree_v2(fresh));
    }
    for (int i = 0; i < gpus; i++)
        CHECK(cuMemFree_v2(parts[i]));
    for (int i = 0; i < BLOCKS; i++)
        CHECK(cuMemFree_v2(blocks[i]));
    return 0;
}
