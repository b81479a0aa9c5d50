/*
 * Eight threads allocate pinned memory of 1 B to 4 MiB in a random but repeatable order, fill it, and copy it to the GPU
 * and back into other pinned memory on streams of their own. Half of it is freed while the copy out of it may still be
 * running, and the next allocation is overwritten at once: memory that is handed out too early shows as a wrong byte.
 */
#include "program.h"

#include <pthread.h>

enum { THREADS = 8, ROUNDS = 250, LIVE = 8 };
#define LARGEST (4 * MIB)

typedef struct {
    CUcontext context;
    uint64_t random, blocks, wrong;
} Worker;

typedef struct {
    unsigned char *memory;
    size_t bytes;
    uint64_t pattern;
} Block;

static uint64_t next(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static size_t random_size(uint64_t *state)
{
    size_t top = (size_t)1 << next(state) % 23;
    size_t bytes = top + next(state) % top;
    return bytes > LARGEST ? LARGEST : bytes;
}

/* A byte every 509: cheap, and in every page. */
static void fill(unsigned char *memory, size_t bytes, uint64_t pattern)
{
    for (size_t at = 0; at < bytes; at += 509)
        memory[at] = (unsigned char)(pattern + at);
    memory[bytes - 1] = (unsigned char)pattern;
}

static uint64_t wrong_bytes(const unsigned char *memory, size_t bytes, uint64_t pattern)
{
    uint64_t wrong = memory[bytes - 1] != (unsigned char)pattern;
    for (size_t at = 0; at + 1 < bytes; at += 509)
        wrong += memory[at] != (unsigned char)(pattern + at);
    return wrong;
}

static Block allocate(Worker *worker, size_t bytes)
{
    static const unsigned kinds[] = {0, 0, 1, 2, 4};
    Block block = {NULL, bytes, next(&worker->random)};
    CHECK(cuMemHostAlloc((void **)&block.memory, bytes, kinds[next(&worker->random) % 5]));
    REQUIRE((uintptr_t)block.memory % (bytes < 4096 ? 512 : 4096) == 0 || bytes < MIB);
    REQUIRE((uintptr_t)block.memory % 512 == 0);
    fill(block.memory, bytes, block.pattern);
    worker->blocks++;
    return block;
}

static void release(Worker *worker, Block *block)
{
    worker->wrong += wrong_bytes(block->memory, block->bytes, block->pattern);
    CHECK(cuMemFreeHost(block->memory));
    block->memory = NULL;
}

/* To the GPU, and freed or not before the copy is done; then back, and compared. */
static void round_trip(Worker *worker, CUdeviceptr target, CUstream stream)
{
    Block out = allocate(worker, random_size(&worker->random));
    uint64_t pattern = out.pattern;
    size_t bytes = out.bytes;
    int early = (int)(next(&worker->random) % 2);
    CHECK(cuMemcpyHtoDAsync_v2(target, out.memory, bytes, stream));
    if (early)
        release(worker, &out);
    Block back = allocate(worker, bytes);
    CHECK(cuMemcpyDtoHAsync_v2(back.memory, target, bytes, stream));
    CHECK(cuStreamSynchronize(stream));
    back.pattern = pattern;
    release(worker, &back);
    if (!early)
        release(worker, &out);
}

static void *work(void *argument)
{
    Worker *worker = argument;
    Block live[LIVE] = {{NULL, 0, 0}};
    CUdeviceptr target;
    CUstream stream;
    CHECK(cuCtxSetCurrent(worker->context));
    CHECK(cuMemAlloc_v2(&target, LARGEST));
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < ROUNDS; i++) {
        Block *block = &live[next(&worker->random) % LIVE];
        if (block->memory)
            release(worker, block);
        *block = allocate(worker, random_size(&worker->random));
        round_trip(worker, target, stream);
    }
    for (int i = 0; i < LIVE; i++)
        if (live[i].memory)
            release(worker, &live[i]);
    CHECK(cuStreamDestroy_v2(stream));
    CHECK(cuMemFree_v2(target));
    return NULL;
}

int main(void)
{
    pthread_t threads[THREADS];
    Worker workers[THREADS];
    uint64_t blocks = 0, wrong = 0;
    CUcontext context = start_on(0);
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (Worker){context, 4000 + (uint64_t)i, 0, 0};
        REQUIRE(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++) {
        REQUIRE(pthread_join(threads[i], NULL) == 0);
        blocks += workers[i].blocks;
        wrong += workers[i].wrong;
    }
    printf("%llu blocks, %llu wrong bytes\n", (unsigned long long)blocks, (unsigned long long)wrong);
    return wrong != 0;
}
