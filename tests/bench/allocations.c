/*
 * Allocation and free, bare and from the pool, in one process.
 *
 *   LD_PRELOAD=libgpupool.so GPUPOOL_FREE=lazy allocations warm 2MiB..  each size: median and p99 of a pair, both ways
 *   LD_PRELOAD=libgpupool.so GPUPOOL_FREE=strict allocations launched 2MiB..  a pair with one launch between, and what the launch
 *                                                                 and a wait take alone
 *   LD_PRELOAD=libgpupool.so GPUPOOL_FREE=lazy allocations live N       the same at 2 MiB while N blocks live
 *   LD_PRELOAD=libgpupool.so GPUPOOL_FREE=lazy allocations threads N    pairs a second of 1 thread and of N
 */
#include "paired.h"
#include <pthread.h>
#include <string.h>

typedef int (*alloc_fn)(unsigned long long *, size_t);
typedef int (*free_fn)(unsigned long long);

static void *context;
static int (*synchronize)(void);
static alloc_fn pool_alloc, driver_alloc;
static free_fn pool_free, driver_free;

static void start(void) {
    context = open_first_gpu();
    pool_alloc = (alloc_fn)hooked("cuMemAlloc_v2");
    pool_free = (free_fn)hooked("cuMemFree_v2");
    synchronize = (int (*)(void))bare("cuCtxSynchronize");
    driver_alloc = (alloc_fn)bare("cuMemAlloc_v2");
    driver_free = (free_fn)bare("cuMemFree_v2");
}

static double pair(alloc_fn allocate, free_fn release, size_t bytes) {
    unsigned long long p = 0;
    double begin = seconds();
    int a = allocate(&p, bytes), b = release(p);
    double end = seconds();
    require(a, "allocation");
    require(b, "free");
    return (end - begin) * 1e6;
}

/* Every round: one pair of the driver's, and a row of the pool's. The first pool pair of a row finds the caches full of the
 * driver's work and is told apart ("cold"); the others are what a program sees that allocates in a loop. */
enum { ROW = 20 };

static void compare(const char *label, size_t bytes, int rounds) {
    size_t n = (size_t)rounds;
    double *wait = malloc(sizeof(double) * n);
    double *without = malloc(sizeof(double) * n), *cold = malloc(sizeof(double) * n), *warm = malloc(sizeof(double) * n * ROW);
    for (int i = 0; i < 10; i++) pair(pool_alloc, pool_free, bytes); /* the memory is there */
    for (size_t i = 0; i < n; i++) {
        without[i] = pair(driver_alloc, driver_free, bytes);
        cold[i] = pair(pool_alloc, pool_free, bytes);
        for (size_t k = 0; k < ROW; k++) warm[i * ROW + k] = pair(pool_alloc, pool_free, bytes);
        double begin = seconds();
        require(synchronize(), "cuCtxSynchronize");
        wait[i] = (seconds() - begin) * 1e6;
    }
    double d = quantile(without, n, 0.5), w = quantile(warm, n * ROW, 0.5);
    printf("%-24s driver %9.2f us (p99 %9.2f)   pool %7.2f us (p99 %7.2f)   driver/pool %.1f   cold %.2f us   the "
           "driver's wait alone %.2f us\n", label, d,
           quantile(without, n, 0.99), w, quantile(warm, n * ROW, 0.99), d / w, quantile(cold, n, 0.5), quantile(wait, n, 0.5));
    free(wait);
    free(without);
    free(cold);
    free(warm);
}

/* Known to the simulated driver by its name; told to fill nothing. */
static const char FILL[] = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry fill_u32(.param .u64 fill_u32_0, "
                           ".param .u64 fill_u32_1, .param .u32 fill_u32_2)\n{\nret;\n}\n";
typedef int (*launch_fn)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
static void *fill;

static void launch_by(launch_fn launch, unsigned long long at) {
    uint64_t count = 0;
    uint32_t value = 0;
    require(launch(fill, 1, 1, 1, 32, 1, 1, 0, NULL, (void *[]){&at, &count, &value}, NULL), "launch");
}

static double launched_pair(alloc_fn allocate, launch_fn launch, free_fn release, size_t bytes) {
    unsigned long long p = 0;
    double begin = seconds();
    require(allocate(&p, bytes), "allocation");
    launch_by(launch, p);
    require(release(p), "free");
    return (seconds() - begin) * 1e6;
}

static void launched(const char *label, size_t bytes) {
    enum { ROUNDS = 2000 };
    launch_fn by_pool = (launch_fn)hooked("cuLaunchKernel"), by_driver = (launch_fn)bare("cuLaunchKernel");
    static double pool[ROUNDS], driver[ROUNDS / ROW], alone[ROUNDS], none[ROUNDS];
    void *module;
    unsigned long long block;
    require(((int (*)(void **, const void *))hooked("cuModuleLoadData"))(&module, FILL), "cuModuleLoadData");
    require(((int (*)(void **, void *, const char *))hooked("cuModuleGetFunction"))(&fill, module, "fill_u32"), "cuModuleGetFunction");
    require(pool_alloc(&block, bytes), "allocation");
    for (int i = 0; i < ROUNDS; i++) {
        if (i % ROW == 0) driver[i / ROW] = launched_pair(driver_alloc, by_driver, driver_free, bytes);
        pool[i] = launched_pair(pool_alloc, by_pool, pool_free, bytes);
        none[i] = pair(pool_alloc, pool_free, bytes);
        double begin = seconds();
        launch_by(by_driver, block);
        require(synchronize(), "cuCtxSynchronize");
        alone[i] = (seconds() - begin) * 1e6;
    }
    require(pool_free(block), "free");
    printf("%-24s with a launch: driver %9.2f us   pool %7.2f us   launch and wait alone %.2f us   without: pool %.2f us\n", label,
           quantile(driver, ROUNDS / ROW, 0.5), quantile(pool, ROUNDS, 0.5), quantile(alone, ROUNDS, 0.5), quantile(none, ROUNDS, 0.5));
}

static size_t size_of(const char *text) {
    char *end;
    size_t n = strtoull(text, &end, 10);
    return !strcmp(end, "KiB") ? n << 10 : !strcmp(end, "MiB") ? n << 20 : !strcmp(end, "GiB") ? n << 30 : n;
}

static void live(size_t count) {
    /* Half as many again are made and freed, every third, so that the pool has many runs to choose from. */
    size_t made = count + count / 2;
    unsigned long long *blocks = malloc(made * sizeof *blocks);
    for (size_t i = 0; i < made; i++) require(pool_alloc(&blocks[i], 1 << 20), "filling the pool");
    for (size_t i = 0; i < made; i += 3) require(pool_free(blocks[i]), "free");
    char label[64];
    snprintf(label, sizeof label, "2 MiB, %zu live", made - (made + 2) / 3);
    compare(label, 2 << 20, 1000);
    free(blocks);
}

enum { OPERATIONS = 200000 };
static pthread_barrier_t barrier;
static double began[64], ended[64];

static void *work(void *argument) {
    uint64_t random = 88172645463325252ull + (uint64_t)(uintptr_t)argument;
    unsigned long long held[16] = {0};
    require(((int (*)(void *))hooked("cuCtxSetCurrent"))(context), "cuCtxSetCurrent");
    size_t self = (size_t)(uintptr_t)argument - 1;
    pthread_barrier_wait(&barrier);
    began[self] = seconds();
    for (int i = 0; i < OPERATIONS; i++) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        size_t slot = random % 16;
        if (held[slot]) require(pool_free(held[slot]), "free"), held[slot] = 0;
        else require(pool_alloc(&held[slot], (size_t)(1 + (random >> 8) % 8) << 20), "allocation");
    }
    ended[self] = seconds();
    for (size_t slot = 0; slot < 16; slot++)
        if (held[slot]) require(pool_free(held[slot]), "free");
    return NULL;
}

/* From the first start to the last end, by the workers' own clocks: a thread that only watches may wake late. */
static double throughput(int threads) {
    pthread_t handles[64];
    pthread_barrier_init(&barrier, NULL, (unsigned)threads);
    for (int i = 0; i < threads; i++) pthread_create(&handles[i], NULL, work, (void *)(uintptr_t)(i + 1));
    for (int i = 0; i < threads; i++) pthread_join(handles[i], NULL);
    double first = began[0], last = ended[0];
    for (int i = 1; i < threads; i++) {
        if (began[i] < first) first = began[i];
        if (ended[i] > last) last = ended[i];
    }
    return (double)threads * OPERATIONS / (last - first);
}

int main(int count, char **arguments) {
    start();
    if (count > 2 && !strcmp(arguments[1], "warm")) {
        for (int i = 2; i < count; i++) compare(arguments[i], size_of(arguments[i]), 300);
    } else if (count > 2 && !strcmp(arguments[1], "launched")) {
        for (int i = 2; i < count; i++) launched(arguments[i], size_of(arguments[i]));
    } else if (count == 3 && !strcmp(arguments[1], "live")) {
        live(strtoull(arguments[2], NULL, 10));
    } else if (count == 3 && !strcmp(arguments[1], "threads")) {
        int threads = atoi(arguments[2]);
        throughput(threads); /* warm */
        double ratio[9], one[9], many[9];
        for (int i = 0; i < 9; i++) one[i] = throughput(1), many[i] = throughput(threads), ratio[i] = many[i] / one[i];
        printf("1 thread %.0f operations/s, %d threads %.0f operations/s, median ratio %.2f\n", quantile(one, 9, 0.5),
               threads, quantile(many, 9, 0.5), quantile(ratio, 9, 0.5));
    } else {
        fprintf(stderr, "usage: allocations warm SIZE... | launched SIZE... | live COUNT | threads COUNT\n");
        return 2;
    }
    return 0;
}
