/*
 * Small blocks, bare and from the pool, in one process: a pair of one size, and RMM's random mix of sizes up to 1 MiB.
 *
 *   LD_PRELOAD=libgpupool.so GPUPOOL_FREE=lazy small pairs          a pair of 512 B to 1 MiB - 1, both ways, ns
 *   LD_PRELOAD=libgpupool.so GPUPOOL_FREE=lazy small mix LIVE N     N threads with LIVE blocks together, both ways, ns a pair,
 *                                                                   and what the pool holds for each byte in use
 */
#include "paired.h"
#include <pthread.h>
#include <string.h>

typedef int (*alloc_fn)(unsigned long long *, size_t);
typedef int (*free_fn)(unsigned long long);

/* The two ways to the driver. */
typedef struct {
    alloc_fn allocate;
    free_fn release;
} Way;

static Way ours, theirs;
static void *context;
static int (*set_current)(void *);
static int (*wait_all)(void);
static int (*memory_info)(size_t *, size_t *);

enum { ROUNDS = 9, ROW = 2000, OPERATIONS = 20000, THREADS = 64 };

static void start(void) {
    context = open_first_gpu();
    set_current = (int (*)(void *))hooked("cuCtxSetCurrent");
    ours = (Way){(alloc_fn)hooked("cuMemAlloc_v2"), (free_fn)hooked("cuMemFree_v2")};
    theirs = (Way){(alloc_fn)bare("cuMemAlloc_v2"), (free_fn)bare("cuMemFree_v2")};
    wait_all = (int (*)(void))bare("cuCtxSynchronize");
    memory_info = (int (*)(size_t *, size_t *))bare("cuMemGetInfo_v2");
}

static double row(Way way, size_t bytes) {
    double begin = seconds();
    for (int i = 0; i < ROW; i++) {
        unsigned long long p = 0;
        require(way.allocate(&p, bytes), "allocation");
        require(way.release(p), "free");
    }
    return (seconds() - begin) * 1e9 / ROW;
}

static void pairs(void) {
    static const size_t SIZES[] = {512, 4 << 10, 64 << 10, 300 << 10, (1 << 20) - 1};
    double begin = seconds();
    for (int i = 0; i < ROW; i++) require(wait_all(), "cuCtxSynchronize");
    double wait = (seconds() - begin) * 1e9 / ROW;
    for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++) {
        double pool[ROUNDS], driver[ROUNDS];
        row(ours, SIZES[i]), row(theirs, SIZES[i]);
        for (int k = 0; k < ROUNDS; k++) driver[k] = row(theirs, SIZES[i]), pool[k] = row(ours, SIZES[i]);
        double p = quantile(pool, ROUNDS, 0.5), d = quantile(driver, ROUNDS, 0.5);
        printf("pair of %7zu bytes: driver %7.0f ns, pool %6.0f ns, driver/pool %.2f, the driver's wait alone %.0f ns\n",
               SIZES[i], d, p, d / p, wait);
    }
}

typedef struct {
    Way way;
    unsigned long long *blocks;
    size_t *sizes;
    size_t live;
    uint64_t random;
    double began, ended;
} Worker;

static pthread_barrier_t barrier;

static uint64_t roll(Worker *worker, uint64_t sides) {
    uint64_t random = worker->random;
    random ^= random << 13, random ^= random >> 7, random ^= random << 17;
    worker->random = random;
    return (random >> 16) % sides;
}

static void replace(Worker *worker, size_t at) {
    if (worker->blocks[at]) require(worker->way.release(worker->blocks[at]), "free");
    worker->sizes[at] = 1 + roll(worker, (1 << 20) - 1);
    require(worker->way.allocate(&worker->blocks[at], worker->sizes[at]), "allocation");
}

static void *work(void *argument) {
    Worker *worker = argument;
    require(set_current(context), "cuCtxSetCurrent");
    for (size_t i = 0; i < worker->live; i++) replace(worker, i);
    for (size_t i = 0; i < worker->live; i++) replace(worker, roll(worker, worker->live));
    pthread_barrier_wait(&barrier);
    worker->began = seconds();
    for (int i = 0; i < OPERATIONS; i++) replace(worker, roll(worker, worker->live));
    worker->ended = seconds();
    pthread_barrier_wait(&barrier);
    /* What is held is asked between the two. */
    pthread_barrier_wait(&barrier);
    for (size_t i = 0; i < worker->live; i++) require(worker->way.release(worker->blocks[i]), "free");
    free(worker->blocks);
    free(worker->sizes);
    return NULL;
}

/* ns a pair of one thread's time over the number of threads, and bytes held for each in use. */
static double mix(Way way, size_t live, size_t threads, double *held) {
    pthread_t handles[THREADS];
    Worker workers[THREADS];
    size_t before, after, total, used = 0;
    require(memory_info(&before, &total), "cuMemGetInfo");
    pthread_barrier_init(&barrier, NULL, (unsigned)threads + 1);
    for (size_t i = 0; i < threads; i++) {
        size_t share = live / threads;
        workers[i] = (Worker){way, calloc(share, sizeof(unsigned long long)), calloc(share, sizeof(size_t)), share,
                              88172645463325252ull * (i + 1), 0, 0};
        pthread_create(&handles[i], NULL, work, &workers[i]);
    }
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier);
    require(memory_info(&after, &total), "cuMemGetInfo");
    double first = workers[0].began, last = workers[0].ended;
    for (size_t i = 0; i < threads; i++) {
        for (size_t k = 0; k < workers[i].live; k++) used += workers[i].sizes[k];
        if (workers[i].began < first) first = workers[i].began;
        if (workers[i].ended > last) last = workers[i].ended;
    }
    *held = (double)(before - after) / (double)used;
    pthread_barrier_wait(&barrier);
    for (size_t i = 0; i < threads; i++) pthread_join(handles[i], NULL);
    return (last - first) * 1e9 / OPERATIONS / (double)threads;
}

int main(int count, char **arguments) {
    if (count == 2 && !strcmp(arguments[1], "pairs")) {
        start();
        pairs();
        return 0;
    }
    size_t live = count == 4 ? strtoull(arguments[2], NULL, 10) : 0, threads = count == 4 ? strtoull(arguments[3], NULL, 10) : 0;
    if (!live || !threads || threads > THREADS || threads > live || strcmp(arguments[1], "mix")) {
        fprintf(stderr, "usage: small pairs | mix LIVE THREADS\n");
        return 2;
    }
    start();
    /* What the pool holds is its own from the first round on, so that is the one whose growth says how much. */
    double held[2], more, pool[3], driver[3];
    pool[0] = mix(ours, live, threads, &held[0]);
    driver[0] = mix(theirs, live, threads, &held[1]);
    for (int i = 1; i < 3; i++) driver[i] = mix(theirs, live, threads, &more), pool[i] = mix(ours, live, threads, &more);
    double p = quantile(pool, 3, 0.5), d = quantile(driver, 3, 0.5);
    printf("mix to 1 MiB, %zu live, %zu threads: driver %.0f ns a pair, pool %.0f ns, driver/pool %.2f; held for each byte in use: "
           "driver %.3f, pool %.3f\n", live, threads, d, p, d / p, held[1], held[0]);
    return 0;
}
