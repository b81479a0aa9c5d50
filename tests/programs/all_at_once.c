/*
 * all_at_once [GPUS]: everything that uses memory in ways which no argument of a call tells, at once and from a thread each: tables of
 * pointers and lists on the device, graphs made before, created and green contexts, blocks that come and go, and on two GPUs each
 * one's tables read by the other. Every thread checks what it finds after each round; the sums are the same wherever the memory lies.
 */
#define _GNU_SOURCE
#include "green.h"
#include "pointer_kernels.h"
#include "streams.h"

#include <pthread.h>

enum { BLOCKS = 5, BYTES = 2 * MIB, DATA = MIB, WORDS = DATA / 4, ROUNDS = 3, ROLES = 4 };
/* What a worker works in, and how. */
enum { TABLES, GRAPHS, CREATED, GREEN };

typedef struct {
    int gpu, role;
    CUcontext context;
    CUstream stream;
    Kernels kernels;
    PointerKernels pointers;
    CUdeviceptr blocks[BLOCKS], table, out;
    CUgraphExec exec;
    uint64_t sums[ROUNDS][4];
    pthread_t thread;
} Worker;

static Worker workers[2][ROLES];
static int gpus;
static pthread_barrier_t together;

/* A node lies at the end of each block; the last one points nowhere. */
static CUdeviceptr node(const Worker *w, int i) { return i < BLOCKS ? w->blocks[i] + BYTES - 64 : 0; }

static uint64_t total(Worker *w, CUfunction function, void **parameters)
{
    uint64_t sum;
    CHECK(cuMemsetD32Async(w->out, 0, 2, w->stream));
    launch(function, w->stream, parameters);
    CHECK(cuMemcpyDtoHAsync_v2(&sum, w->out, sizeof sum, w->stream));
    CHECK(cuStreamSynchronize(w->stream));
    return sum;
}

static uint64_t of_table(Worker *w, CUdeviceptr table)
{
    uint64_t count = BLOCKS, n = WORDS;
    return total(w, w->pointers.sum_table, (void *[]){&table, &count, &n, &w->out});
}

static uint64_t of_list(Worker *w)
{
    CUdeviceptr head = node(w, 0), no_flag = 0;
    return total(w, w->pointers.sum_list, (void *[]){&head, &w->out, &no_flag});
}

/* Writes every block: the first by a kernel, the others from it in three ways. */
static void write_all(Worker *w, uint32_t start)
{
    iota(&w->kernels, w->stream, w->blocks[0], WORDS, start);
    copy(&w->kernels, w->stream, w->blocks[1], w->blocks[0], WORDS);
    CHECK(cuMemcpyDtoDAsync_v2(w->blocks[2], w->blocks[1], DATA, w->stream));
    CHECK(cuMemsetD32Async(w->blocks[3], start, WORDS, w->stream));
    copy(&w->kernels, w->stream, w->blocks[4], w->blocks[2], WORDS);
}

static void make(Worker *w)
{
    CUdevice device;
    uint64_t nodes[2];
    CHECK(cuDeviceGet(&device, w->gpu));
    if (w->role == CREATED) {
        CHECK(cuCtxCreate_v2(&w->context, 0, device));
    } else {
        CHECK(cuDevicePrimaryCtxRetain(&w->context, device));
        if (w->role == GREEN) {
            CHECK(cuCtxSetCurrent(w->context));
            CHECK(cuCtxFromGreenCtx(&w->context, green_on(device)));
        }
    }
    CHECK(cuCtxSetCurrent(w->context));
    w->kernels = load_kernels();
    w->pointers = load_pointer_kernels();
    CHECK(cuStreamCreate(&w->stream, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < BLOCKS; i++)
        CHECK(cuMemAlloc_v2(&w->blocks[i], BYTES));
    CHECK(cuMemAlloc_v2(&w->table, BYTES));
    CHECK(cuMemAlloc_v2(&w->out, BYTES));
    CHECK(cuMemcpyHtoD_v2(w->table, w->blocks, sizeof w->blocks));
    for (int i = 0; i < BLOCKS; i++) {
        nodes[0] = node(w, i + 1);
        nodes[1] = (uint64_t)i + 1;
        CHECK(cuMemcpyHtoD_v2(node(w, i), nodes, sizeof nodes));
    }
    if (w->role == GRAPHS) {
        CUgraph graph;
        CHECK(cuStreamBeginCapture_v2(w->stream, CAPTURE_RELAXED));
        write_all(w, 77);
        CHECK(cuStreamEndCapture(w->stream, &graph));
        CHECK(cuGraphInstantiateWithFlags(&w->exec, graph, 0));
    }
    /* What was copied went through the default stream. */
    CHECK(cuCtxSynchronize());
}

static void a_round(Worker *w, int round)
{
    uint32_t start = (uint32_t)(1000 * round + 10 * w->gpu + w->role);
    uint64_t count = BLOCKS, n = WORDS, more = (uint64_t)round + 1, *sums = w->sums[round];
    CUdeviceptr head = node(w, 0), passing;
    if (w->role == GRAPHS)
        CHECK(cuGraphLaunch(w->exec, w->stream));
    else if (w->role == CREATED)
        write_all(w, start);
    else
        launch(w->pointers.fill_table, w->stream, (void *[]){&w->table, &count, &n, &start});
    launch(w->pointers.add_list, w->stream, (void *[]){&head, &more});
    CHECK(cuMemAlloc_v2(&passing, BYTES));
    copy(&w->kernels, w->stream, passing, w->blocks[BLOCKS - 1], WORDS);
    sums[0] = of_table(w, w->table);
    sums[1] = of_list(w);
    sums[2] = total(w, w->kernels.sum, (void *[]){&passing, &n, &w->out});
    CHECK(cuMemFree_v2(passing));
    pthread_barrier_wait(&together);
    /* The other GPU's table, and through it its blocks, while nobody writes them. */
    sums[3] = w->role == TABLES && gpus > 1 ? of_table(w, workers[!w->gpu][TABLES].table) : 0;
    pthread_barrier_wait(&together);
}

static void *work(void *worker)
{
    Worker *w = worker;
    CHECK(cuCtxSetCurrent(w->context));
    for (int round = 0; round < ROUNDS; round++)
        a_round(w, round);
    return NULL;
}

int main(int argc, char **argv)
{
    uint64_t hash = 14695981039346656037ull;
    gpus = argc > 1 ? atoi(argv[1]) : 1;
    CHECK(cuInit(0));
    for (int gpu = 0; gpu < gpus; gpu++)
        for (int role = 0; role < ROLES; role++) {
            workers[gpu][role].gpu = gpu;
            workers[gpu][role].role = role;
            make(&workers[gpu][role]);
        }
    for (int gpu = 0; gpu < gpus && gpus > 1; gpu++) {
        CHECK(cuCtxSetCurrent(workers[gpu][TABLES].context));
        CHECK(cuCtxEnablePeerAccess(workers[!gpu][TABLES].context, 0));
    }
    REQUIRE(pthread_barrier_init(&together, NULL, (unsigned)(gpus * ROLES)) == 0);
    for (int i = 0; i < gpus * ROLES; i++) {
        Worker *w = &workers[i / ROLES][i % ROLES];
        REQUIRE(pthread_create(&w->thread, NULL, work, w) == 0);
    }
    for (int i = 0; i < gpus * ROLES; i++)
        REQUIRE(pthread_join(workers[i / ROLES][i % ROLES].thread, NULL) == 0);
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < gpus * ROLES; i++) {
            const Worker *w = &workers[i / ROLES][i % ROLES];
            const uint64_t *sums = w->sums[round];
            printf("round %d, GPU %d, worker %d: table %llu, list %llu, block %llu, the other's table %llu\n", round, w->gpu, w->role,
                   (unsigned long long)sums[0], (unsigned long long)sums[1], (unsigned long long)sums[2],
                   (unsigned long long)sums[3]);
            for (int j = 0; j < 4; j++)
                hash = (hash ^ sums[j]) * 1099511628211ull;
        }
    printf("checksum %016llx\n", (unsigned long long)hash);
    return 0;
}
