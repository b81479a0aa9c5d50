/*
 * opened LIBRARY [leave]
 * A program that opens the library and calls gpupool_malloc, as a pluggable allocator does. It prints the same whether the
 * library was preloaded as well: contexts, captures and waiting work for programs whose calls are not seen. `leave`: ends
 * with blocks that nobody freed. Needs two GPUs of 256 MiB.
 */
#include "control.h"
#include "kernels.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

CUresult cuStreamQuery(CUstream stream);

#define BLOCK (48 * MIB)
#define WORDS (BLOCK / 4)

static Control control;

static CUdeviceptr take(size_t bytes, int device, CUstream stream)
{
    void *pointer = NULL;
    CHECK(control.malloc(&pointer, bytes, device, stream));
    return as_address(pointer);
}

static void give(CUdeviceptr block, int device, CUstream stream)
{
    CHECK(control.free(as_pointer(block), device, stream));
}

static uint64_t live(void)
{
    gpupool_statistics s = {.size = sizeof s};
    REQUIRE(control.statistics(&s) == 0);
    return s.live_blocks;
}

static void without_a_context(void)
{
    void *pointer;
    CUcontext current;
    unsigned flags;
    int active;
    printf("before cuInit: %d\n", control.malloc(&pointer, BLOCK, 0, NULL));
    CHECK(cuInit(0));
    printf("no context, no device: %d\n", control.malloc(&pointer, BLOCK, -1, NULL));
    CUdeviceptr block = take(BLOCK, 0, NULL);
    CHECK(cuDevicePrimaryCtxGetState(0, &flags, &active));
    CHECK(cuCtxGetCurrent(&current));
    printf("the primary context was made: %d, and is current: %d\n", active, current != NULL);
    give(block, 0, NULL);
    CHECK(cuDevicePrimaryCtxGetState(0, &flags, &active));
    printf("it stays: %d\n", active);
}

static void data(const Kernels *k)
{
    CUdeviceptr near = take(BLOCK, 0, NULL), far = take(400 * MIB, -1, NULL), small = take(1000, 0, NULL);
    iota(k, NULL, near, WORDS, 7);
    iota(k, NULL, far, 100 * MIB, 9);
    CHECK(cuMemsetD8_v2(small, 1, 1000));
    printf("wrong words: %d, %d in a block larger than a GPU\n", (int)count_wrong(k, near, WORDS, 7),
           (int)count_wrong(k, far, 100 * MIB, 9));
    printf("pooled: %llu of 3\n", (unsigned long long)live());
    printf("freed twice: %d", control.free(as_pointer(near), 0, NULL));
    printf(", %d; inside a block: %d; nothing: %d\n", control.free(as_pointer(near), 0, NULL),
           control.free(as_pointer(far + 4 * MIB), 0, NULL), control.free(NULL, 0, NULL));
    give(far, 0, NULL);
    give(small, 0, NULL);

    void *tensor = control.torch_malloc(BLOCK, 1, NULL);
    CHECK(cuMemsetD8_v2(as_address(tensor), 2, BLOCK));
    printf("as PyTorch asks: %s, nothing: %s\n", tensor ? "allocated" : "refused",
           control.torch_malloc(0, 0, NULL) ? "allocated" : "refused");
    control.torch_free(tensor, BLOCK, 1, NULL);
    printf("live: %llu\n", (unsigned long long)live());
}

typedef struct {
    volatile uint32_t *flag;
    atomic_int freeing;
} Release;

static void *let_go(void *argument)
{
    Release *release = argument;
    while (!atomic_load(&release->freeing))
        sched_yield();
    *release->flag = 1;
    return NULL;
}

/* The kernel runs until the other thread lets it, which happens when the free has begun. */
static void a_free_waits(const Kernels *k)
{
    Release release = {NULL, 0};
    pthread_t thread;
    CUstream stream;
    CUdeviceptr flag, block = take(BLOCK, 0, NULL);
    CHECK(cuMemHostAlloc((void **)&release.flag, 4, CU_MEMHOSTALLOC_DEVICEMAP));
    *release.flag = 0;
    flag = as_address((void *)release.flag);
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuLaunchKernel(k->wait_flag, 1, 1, 1, 1, 1, 1, 0, stream, (void *[]){&flag}, NULL));
    iota(k, stream, block, WORDS, 3);
    REQUIRE(pthread_create(&thread, NULL, let_go, &release) == 0);
    atomic_store(&release.freeing, 1);
    give(block, 0, NULL);
    printf("work on the block after its free: %d\n", cuStreamQuery(stream));
    REQUIRE(pthread_join(thread, NULL) == 0);
    CHECK(cuStreamDestroy_v2(stream));
    CHECK(cuMemFreeHost((void *)release.flag));
}

/* A block that is taken and one that is freed inside a capture, which must not be hurt; then the freed one's memory is
 * used again, with the right data. `told`: the stream that the functions are told of. */
static void in_a_capture(const Kernels *k, const char *what, unsigned flags, int mode, int is_told)
{
    CUstream stream;
    CUgraph graph = NULL;
    CHECK(cuStreamCreate(&stream, flags));
    CUstream told = is_told ? stream : NULL;
    CUdeviceptr before = take(BLOCK, 0, told), inside;
    CHECK(cuStreamBeginCapture_v2(stream, mode));
    inside = take(BLOCK, 0, told);
    give(before, 0, told);
    iota(k, stream, inside, WORDS, 5);
    CUresult ended = cuStreamEndCapture(stream, &graph);
    CUdeviceptr after = take(BLOCK, 0, told);
    iota(k, NULL, after, WORDS, 11);
    iota(k, NULL, inside, WORDS, 13);
    printf("%s: capture ended with %d, %d wrong words\n", what, ended,
           (int)(count_wrong(k, after, WORDS, 11) + count_wrong(k, inside, WORDS, 13)));
    give(after, 0, told);
    give(inside, 0, told);
    CHECK(cuStreamDestroy_v2(stream));
}

/* A block that is freed inside a capture, and freed memory that is asked back there, of which no stream is told. */
static void trimmed_in_a_capture(const Kernels *k)
{
    CUstream stream;
    CUgraph graph = NULL;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUdeviceptr block = take(BLOCK, 0, stream), out = take(BLOCK, 0, stream);
    iota(k, stream, block, WORDS, 3);
    CHECK(cuStreamBeginCapture_v2(stream, 0));
    give(block, 0, stream);
    iota(k, stream, out, WORDS, 5);
    control.trim();
    printf("trimmed: capture ended with %d\n", cuStreamEndCapture(stream, &graph));
    CHECK(cuStreamSynchronize(stream));
    give(out, 0, stream);
    CHECK(cuStreamDestroy_v2(stream));
}

/* Contexts that end without the library's knowledge: their handles must not be used again. */
static void contexts_end(void)
{
    CUcontext created, primary;
    CHECK(cuCtxGetCurrent(&primary));
    CHECK(cuCtxCreate_v2(&created, 0, 1));
    CUdeviceptr in_created = take(BLOCK, -1, NULL);
    CHECK(cuMemsetD8_v2(in_created, 1, BLOCK));
    give(in_created, -1, NULL);
    CHECK(cuCtxDestroy_v2(created));
    CHECK(cuCtxSetCurrent(primary));
    CUdeviceptr block = take(BLOCK, -1, NULL);
    CHECK(cuMemsetD8_v2(block, 1, BLOCK));
    give(block, -1, NULL);
    printf("after a context ended: served\n");
}

static void in_a_child(void)
{
    void *pointer;
    fflush(stdout);
    pid_t child = fork();
    int status;
    REQUIRE(child >= 0);
    if (child == 0) {
        printf("child: %d\n", control.malloc(&pointer, BLOCK, 0, NULL));
        fflush(stdout);
        _exit(0);
    }
    REQUIRE(waitpid(child, &status, 0) == child);
}

int main(int count, char **arguments)
{
    REQUIRE(count > 1);
    void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        printf("%s\n", dlerror());
        return 1;
    }
    control = find_control(library);
    without_a_context();
    start_on(0);
    if (count > 2) {
        take(BLOCK, 0, NULL);
        take(400 * MIB, 0, NULL);
        return 0;
    }
    Kernels k = load_kernels();
    data(&k);
    a_free_waits(&k);
    in_a_capture(&k, "captured stream", CU_STREAM_NON_BLOCKING, 0, 1);
    in_a_capture(&k, "thread's own capture", CU_STREAM_NON_BLOCKING, 1, 1);
    in_a_capture(&k, "another stream", CU_STREAM_DEFAULT, 0, 0);
    trimmed_in_a_capture(&k);
    contexts_end();
    /* Closing it is legal, and memory that it gave stays. */
    CUdeviceptr kept = take(BLOCK, 0, NULL);
    iota(&k, NULL, kept, WORDS, 17);
    REQUIRE(dlclose(library) == 0);
    printf("after closing it: %d wrong words\n", (int)count_wrong(&k, kept, WORDS, 17));
    give(kept, 0, NULL);
    in_a_child();
    return 0;
}
