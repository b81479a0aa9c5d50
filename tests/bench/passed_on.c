/*
 * What a hooked call costs that the shim passes on: the same driver function bare and hooked, in alternating batches of
 * one process. Prints the median nanoseconds of each and the median difference. Goal: at most 25 ns more, and 30 ns for
 * an allocation and its free on a stream, which the driver serves from its own pool.
 *
 *   LD_PRELOAD=libgpupool.so passed_on
 */
#include "paired.h"

enum { ROUNDS = 301, BATCH = 20000 };

typedef int (*set_current_fn)(void *);
typedef int (*free_fn)(unsigned long long);
typedef int (*attribute_fn)(void *, int, unsigned long long);
typedef int (*attributes_fn)(unsigned, int *, void **, unsigned long long);
typedef int (*range_fn)(unsigned long long *, size_t *, unsigned long long);
typedef int (*allocate_async_fn)(unsigned long long *, size_t, void *);
typedef int (*free_async_fn)(unsigned long long, void *);
typedef int (*synchronize_fn)(void *);
typedef struct {
    void *allocate, *free;
} Pair;

static void *context, *stream, *event, *awaited; /* awaited: the stream or the event, which has nothing to do */
static unsigned long long asked; /* what is asked about */

static void set_current(void *f) { ((set_current_fn)f)(context); }
static void free_null(void *f) { ((free_fn)f)(0); }
static void attribute(void *f) {
    int ordinal;
    ((attribute_fn)f)(&ordinal, 9, asked);
}
/* As the runtime asks for cudaPointerGetAttributes. */
static void attributes(void *f) {
    void *context, *device, *host;
    unsigned type;
    int ordinal, kinds[] = {1, 2, 3, 4, 9};
    void *data[] = {&context, &type, &device, &host, &ordinal};
    ((attributes_fn)f)(5, kinds, data, asked);
}
static void range(void *f) {
    unsigned long long base;
    size_t bytes;
    ((range_fn)f)(&base, &bytes, asked);
}

static void synchronize(void *f) { ((synchronize_fn)f)(awaited); }

static void allocate_and_free(void *f) {
    unsigned long long address;
    Pair *pair = f;
    require(((allocate_async_fn)pair->allocate)(&address, 4096, stream), "cuMemAllocAsync");
    ((free_async_fn)pair->free)(address, stream);
}

static double batch(void (*call)(void *), void *f, int calls) {
    double start = seconds();
    for (int i = 0; i < calls; i++) call(f);
    return (seconds() - start) * 1e9 / calls;
}

static void compare(const char *name, void (*call)(void *), void *b, void *h, int calls, int goal, int is_hooked) {
    static double without[ROUNDS], with[ROUNDS], more[ROUNDS];
    for (int round = 0; round < ROUNDS; round++) {
        without[round] = batch(call, b, calls);
        with[round] = batch(call, h, calls);
        more[round] = with[round] - without[round];
    }
    double x = quantile(without, ROUNDS, 0.5), y = quantile(with, ROUNDS, 0.5), d = quantile(more, ROUNDS, 0.5);
    printf("%-26s bare %7.1f ns   hooked %7.1f ns   %+6.1f ns   x%.2f   %s %d ns\n", name, x, y, d, y / x,
           !is_hooked ? "NOT HOOKED" : d <= goal ? "within" : "OVER", goal);
}

static void measure(const char *name, void (*call)(void *), int calls) {
    void *b = bare(name), *h = hooked(name);
    compare(name, call, b, h, calls, 25, b != h);
}

/* What is asked about memory: of the driver's, of the pool's, and of pinned memory. Both ask about the same addresses. */
static void measure_questions(void) {
    unsigned long long driver_memory, pooled; /* the first is asked for past the shim */
    void *pinned;
    require(((int (*)(unsigned long long *, size_t))bare("cuMemAlloc_v2"))(&driver_memory, 4096), "cuMemAlloc_v2");
    require(((int (*)(unsigned long long *, size_t))hooked("cuMemAlloc_v2"))(&pooled, 4096), "cuMemAlloc_v2");
    require(((int (*)(void **, size_t, unsigned))hooked("cuMemHostAlloc"))(&pinned, 4096, 0), "cuMemHostAlloc");
    unsigned long long all[] = {driver_memory, pooled, (unsigned long long)pinned};
    const char *whose[] = {"the driver's", "the pool's", "pinned"};
    for (int i = 0; i < 3; i++) {
        asked = all[i];
        printf("of memory that is %s:\n", whose[i]);
        measure("cuPointerGetAttribute", attribute, BATCH);
        measure("cuPointerGetAttributes", attributes, BATCH);
        measure("cuMemGetAddressRange_v2", range, BATCH);
    }
}

int main(void) {
    context = open_first_gpu();
    measure("cuCtxSetCurrent", set_current, BATCH);
    measure("cuMemFree_v2", free_null, BATCH);
    measure_questions();
    require(((int (*)(void **, unsigned))hooked("cuStreamCreate"))(&stream, 1), "cuStreamCreate");
    require(((int (*)(void **, unsigned))hooked("cuEventCreate"))(&event, 2), "cuEventCreate");
    /* A wait takes a microsecond by itself. */
    awaited = stream;
    measure("cuStreamSynchronize", synchronize, BATCH / 20);
    awaited = event;
    measure("cuEventSynchronize", synchronize, BATCH / 20);
    Pair b = {bare("cuMemAllocAsync"), bare("cuMemFreeAsync")}, h = {hooked("cuMemAllocAsync"), hooked("cuMemFreeAsync")};
    compare("cuMemAllocAsync, FreeAsync", allocate_and_free, &b, &h, BATCH / 20, 30, b.allocate != h.allocate);
    return 0;
}
