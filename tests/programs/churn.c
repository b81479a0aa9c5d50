/*
 * Eight threads allocate and free 10 000 blocks of 1 B to 64 MiB in a random but repeatable order. Each block carries
 * its own pattern at its head, its tail and every 2 MiB, checked when it is freed: two blocks that overlap, or memory
 * handed out while still in use, show as a wrong word.
 */
#include "program.h"

#include <pthread.h>

enum { THREADS = 8, BLOCKS = 1250, LIVE = 24 };
#define LARGEST (64 * MIB)
#define STEP (2 * MIB)

typedef struct {
    CUdeviceptr address;
    size_t bytes;
    uint64_t pattern;
} Block;

typedef struct {
    CUcontext context;
    uint64_t random;
    uint64_t freed, wrong;
} Worker;

static uint64_t next(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Log-uniform: as many blocks between 1 and 2 KiB as between 32 and 64 MiB. */
static size_t random_size(uint64_t *state)
{
    size_t top = (size_t)1 << next(state) % 27;
    size_t bytes = top + next(state) % top;
    return bytes > LARGEST ? LARGEST : bytes;
}

/* The marked places of a block: every 2 MiB, and the last bytes, which a block that is cut short would lack. */
static size_t mark(size_t bytes, size_t index, size_t *length)
{
    size_t offset = index * STEP < bytes ? index * STEP : bytes > 8 ? bytes - 8 : 0;
    *length = bytes - offset < 8 ? bytes - offset : 8;
    return offset;
}

static void write_block(const Block *block)
{
    for (size_t i = 0; i <= block->bytes / STEP + 1; i++) {
        size_t length, offset = mark(block->bytes, i, &length);
        uint64_t word = block->pattern + offset;
        CHECK(cuMemcpyHtoD_v2(block->address + offset, &word, length));
    }
}

static void release(Worker *worker, Block *block)
{
    /* A tail mark may lie over the mark before it, so only the last one written at each place is expected. */
    for (size_t i = block->bytes / STEP + 2; i-- > 0;) {
        size_t length, offset = mark(block->bytes, i, &length), tail = block->bytes > 8 ? block->bytes - 8 : 0;
        uint64_t word = 0, expected = block->pattern + offset;
        if (offset > tail)
            continue;
        if (offset < tail && offset + length > tail)
            length = tail - offset;
        CHECK(cuMemcpyDtoH_v2(&word, block->address + offset, length));
        worker->wrong += memcmp(&word, &expected, length) != 0;
    }
    CHECK(cuMemFree_v2(block->address));
    worker->freed++;
    block->address = 0;
}

static void *work(void *argument)
{
    Worker *worker = argument;
    Block live[LIVE] = {{0, 0, 0}};
    CHECK(cuCtxSetCurrent(worker->context));
    for (int i = 0; i < BLOCKS; i++) {
        Block *block = &live[next(&worker->random) % LIVE];
        if (block->address)
            release(worker, block);
        block->bytes = random_size(&worker->random);
        block->pattern = next(&worker->random);
        CHECK(cuMemAlloc_v2(&block->address, block->bytes));
        REQUIRE(block->address % 256 == 0);
        write_block(block);
    }
    for (int i = 0; i < LIVE; i++)
        if (live[i].address)
            release(worker, &live[i]);
    return NULL;
}

int main(void)
{
    pthread_t threads[THREADS];
    Worker workers[THREADS];
    uint64_t freed = 0, wrong = 0;
    CUcontext context = start_on(0);
    for (int i = 0; i < THREADS; i++) {
        workers[i] = (Worker){context, 1000 + (uint64_t)i, 0, 0};
        REQUIRE(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    for (int i = 0; i < THREADS; i++) {
        REQUIRE(pthread_join(threads[i], NULL) == 0);
        freed += workers[i].freed;
        wrong += workers[i].wrong;
    }
    printf("%llu blocks, %llu wrong words\n", (unsigned long long)freed, (unsigned long long)wrong);
    return wrong != 0;
}
