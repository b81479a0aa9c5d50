/*
 * suspended: does what the lines of its standard input say, and answers each with one line. Its main thread never calls the driver between
 * them, so that it answers while the others wait.
 *   begin N          N threads, each with memory of every kind of its own on a GPU (in turn) that it fills and checks, again and again;
 *                    answered as soon as each has all of that
 *   rounds           how often all of them have done so
 *   wrong            words that were not what they were
 *   signal           a signal for the first of them, which has a handler; handled: how often that ran
 *   reading          from here on the handler copies from a GPU as well
 *   jumping          from here on the handler jumps to the beginning of a round of the thread's work
 *   allocating       from here on the threads do nothing but allocate and free; working: they work again
 *   quit             the process ends by _exit(4) as soon as a call comes back to one of them
 *   thread           the number that the first of them has with the system
 *   spin             a kernel that waits for the host, submitted by another thread; release: it ends
 *   fork             a child that answers the driver's version, and ends
 *   allocate MIB     by another thread; allocated: whether it has
 *   hold CALL        the next call of the driver of this name stands at its end; stands: whether one does; let: it goes on
 *   late CALL        the next call of the driver of this name lets the one go on that stands, and ends once that has had its memory (allocate)
 *   create MIB       by another thread, memory of the program's own, mapped and filled; allocated: whether it has; filled: whether that is over;
 *                  created: how many words of the last one are wrong
 *   keep MIB         by another thread, memory in a context of its own that it fills; kept: whether it has
 *   clear MIB        the same with zeros
 *   make MIB [GPU]   the same in memory of the program's own (of a GPU on which it may have no context), of handles of 4 MiB that are mapped one after the other; every second one has no reference any
 *                    more, and the first is mapped a second time, for GPU 0 to read
 *   unmapped MIB     memory of the program's own that is mapped nowhere; released: it is given back
 *   compress         what is made from here on is to be compressed
 *   visit GPU        the GPU's primary context lives from here on
 *   shut             the third of these is mapped for nobody; open up: for its GPU again
 *   apart MIB GPU    memory of the program's own of a GPU that is mapped for nobody
 *   lend             the handle of the first of these is given out, so that it has to stay
 *   handle           what the driver answers about the handle of the first, and about who may write to it where it is mapped the second time
 *   ask              by another thread, all that can be asked about what is kept and about the GPU's memory; asked: the answers, or that it waits still
 *   give             the handle by which another process opens what is kept; open HANDLE: that is opened, in a context of its own; look: by another thread,
 *                    what was opened, as check does
 *   check            by another thread, what is kept; checked: how many words were wrong, or that it waits still
 *   drop             what is kept is freed; destroy: its context ends, by another thread; destroyed: whether it has
 *   atexit           the process's end counts in a handler what of that is wrong, and ends with 12 for nothing
 *   join             the same by another thread, for which the handler waits
 *   variable         the same, as a variable of the main thread is destroyed
 *   quick            the process ends by quick_exit, with the same in a handler of that
 *   error            the process ends by err(3)
 *   stream MIB       by another thread, so much of the driver's stream-ordered memory of GPU 0, of which 2 MiB stay in use and the pool keeps the rest;
 *                    reserved: bytes that this pool has
 *   pin MIB          so much of the host's memory is pinned and freed again; pinned: bytes that the driver has pinned
 *   become USER      files are opened as that user from here on; root DIR: the root folder is that one
 *   leave            the main thread leaves; the others end, and the last of them ends the process by exit(6)
 *   end              they end, and free all they have
 *   exit             the process ends by exit(3), with all of them at work
 */
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

static atomic_int leaves;

/* While the process ends, a thread at work is told by the driver that it is gone. That is no failure, and not this thread's to end the process for. */
static inline void fail_with(int code)
{
    while (atomic_load(&leaves))
        pause();
    exit(code);
}
#define exit(code) fail_with(code)
#include "held.h"
#include "simulator.h"
#include "standing.h"
#include "streams.h"
#include "vmm.h"

#include <err.h>
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 16, KINDS = 5 };

static const size_t sizes[KINDS] = {24 * MIB, 6 * MIB, 2 * MIB, 40 << 10, 8 * MIB};
static pthread_t workers[MOST];
/* Each posts it once it has its memory. */
static sem_t has_memory;
static int working;
static atomic_int ends, handled, first, is_allocated, is_filled, running, has_left;
static atomic_long rounds, wrong;

static atomic_int is_reading, is_jumping, is_allocating, quits;
static sigjmp_buf beginning;
static CUdeviceptr any_block;

static void on_signal(int number)
{
    (void)number;
    if (atomic_load(&is_reading)) {
        uint32_t word = 0;
        if (cuMemcpyDtoH_v2(&word, any_block, sizeof word) != CUDA_SUCCESS)
            abort();
    }
    atomic_fetch_add(&handled, 1);
    if (atomic_load(&is_jumping))
        siglongjmp(beginning, 1);
}

static void quit_if_asked(void)
{
    if (atomic_load(&quits))
        _exit(4);
}

/* Memory of one kind; the last one is the program's own. */
static CUdeviceptr memory_of(int kind, int device, uint64_t *handle)
{
    CUdeviceptr block = 0;
    if (kind < KINDS - 1) {
        CHECK(cuMemAlloc_v2(&block, sizes[kind]));
        return block;
    }
    CUmemAllocationProp properties = on_device(device);
    CHECK(cuMemCreate(handle, sizes[kind], &properties, 0));
    return map_for(device, *handle, sizes[kind]);
}

static void *work(void *argument)
{
    int number = (int)(uintptr_t)argument, gpus = 0;
    if (number == 0)
        atomic_store(&first, (int)syscall(SYS_gettid));
    CUdeviceptr blocks[KINDS];
    uint64_t handle = 0;
    CHECK(cuDeviceGetCount(&gpus));
    int device = number % gpus;
    CUcontext context;
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));
    Kernels kernels = load_kernels();
    CUstream stream;
    CHECK(cuStreamCreate(&stream, 1));
    for (int kind = 0; kind < KINDS; kind++)
        blocks[kind] = memory_of(kind, device, &handle);
    if (number == 0)
        any_block = blocks[0];
    REQUIRE(sem_post(&has_memory) == 0);
    for (volatile uint32_t round = 0; !atomic_load(&ends); round++) {
        if (number == 0)
            (void)sigsetjmp(beginning, 1);
        while (atomic_load(&is_allocating)) {
            CUdeviceptr passing;
            CHECK(cuMemAlloc_v2(&passing, 3 * MIB));
            CHECK(cuMemFree_v2(passing));
            atomic_fetch_add(&rounds, 1);
        }
        for (int kind = 0; kind < KINDS; kind++) {
            iota(&kernels, stream, blocks[kind], sizes[kind] / 4, round * 7 + (uint32_t)kind);
            quit_if_asked();
        }
        CHECK(cuStreamSynchronize(stream));
        quit_if_asked();
        for (int kind = 0; kind < KINDS; kind++)
            atomic_fetch_add(&wrong, (long)count_wrong(&kernels, blocks[kind], sizes[kind] / 4, round * 7 + (uint32_t)kind));
        quit_if_asked();
        CUdeviceptr passing;
        CHECK(cuMemAlloc_v2(&passing, 3 * MIB));
        CHECK(cuMemsetD32_v2(passing, round, 3 * MIB / 4));
        uint32_t last = 0;
        CHECK(cuMemcpyDtoH_v2(&last, passing + 3 * MIB - 4, 4));
        atomic_fetch_add(&wrong, last != round);
        CHECK(cuMemFree_v2(passing));
        atomic_fetch_add(&rounds, 1);
    }
    for (int kind = 0; kind < KINDS - 1; kind++)
        CHECK(cuMemFree_v2(blocks[kind]));
    CHECK(cuMemUnmap(blocks[KINDS - 1], sizes[KINDS - 1]));
    CHECK(cuMemRelease(handle));
    CHECK(cuMemAddressFree(blocks[KINDS - 1], sizes[KINDS - 1]));
    CHECK(cuStreamDestroy_v2(stream));
    if (atomic_fetch_sub(&running, 1) == 1 && atomic_load(&has_left))
        (exit)(6);
    return NULL;
}

static void *allocate(void *argument)
{
    CUdeviceptr block;
    CUcontext context;
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuMemAlloc_v2(&block, (size_t)(uintptr_t)argument * MIB));
    atomic_store(&is_allocated, 1);
    return NULL;
}

static char late_call[64];

static void await_allocation(void)
{
    atomic_store(&goes_on, 1);
    while (!atomic_load(&is_allocated))
        usleep(1000);
}

static CUdeviceptr last_created;
static size_t last_bytes;

static void *create(void *argument)
{
    size_t bytes = (size_t)(uintptr_t)argument * MIB;
    uint64_t handle;
    CUcontext context;
    CUmemAllocationProp properties = on_device(0);
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuMemCreate(&handle, bytes, &properties, 0));
    atomic_store(&is_allocated, 1);
    CUdeviceptr created = map_for(0, handle, bytes);
    CHECK(cuMemsetD32_v2(created, 7, bytes / 4));
    CHECK(cuCtxSynchronize());
    last_created = created;
    last_bytes = bytes;
    atomic_store(&is_filled, 1);
    return NULL;
}

static CUcontext own;
static CUdeviceptr kept;
static size_t kept_bytes;
static int is_clear;
static atomic_int is_kept, is_destroyed;
static atomic_long checked;

static void *keep(void *argument)
{
    kept_bytes = (size_t)(uintptr_t)argument * MIB;
    CHECK(cuCtxCreate_v2(&own, 0, 0));
    CHECK(cuMemAlloc_v2(&kept, kept_bytes));
    uint32_t *words = malloc(kept_bytes);
    REQUIRE(words);
    for (size_t at = 0; at < kept_bytes / 4; at++)
        words[at] = (uint32_t)(at * 2654435761u);
    CHECK(cuMemcpyHtoD_v2(kept, words, kept_bytes));
    free(words);
    atomic_store(&is_kept, 1);
    return NULL;
}

static void *clear(void *argument)
{
    kept_bytes = (size_t)(uintptr_t)argument * MIB;
    is_clear = 1;
    CHECK(cuCtxCreate_v2(&own, 0, 0));
    CHECK(cuMemAlloc_v2(&kept, kept_bytes));
    CHECK(cuMemsetD32_v2(kept, 0, kept_bytes / 4));
    return NULL;
}

enum { PIECE = 4 * MIB };
static uint64_t pieces[1024], unmapped;
static CUdeviceptr beside;

static int made_on;
/* Of a kind that only the driver can place. */
static unsigned char is_compressed;

static void *make(void *argument)
{
    CUmemAllocationProp properties = on_device(made_on);
    properties.compression = is_compressed;
    CUmemAccessDesc access = {{ON_DEVICE, 0}, READ_WRITE}, reads = {{ON_DEVICE, 0}, 1};
    kept_bytes = (size_t)(uintptr_t)argument * MIB;
    REQUIRE(kept_bytes / PIECE <= sizeof pieces / sizeof *pieces);
    CHECK(cuCtxCreate_v2(&own, 0, 0));
    CHECK(cuMemAddressReserve(&kept, kept_bytes, 0, 0, 0));
    for (size_t at = 0; at < kept_bytes / PIECE; at++) {
        CHECK(cuMemCreate(&pieces[at], PIECE, &properties, 0));
        CHECK(cuMemMap(kept + at * PIECE, PIECE, 0, pieces[at], 0));
    }
    CHECK(cuMemSetAccess(kept, kept_bytes, &access, 1));
    CHECK(cuMemAddressReserve(&beside, PIECE, 0, 0, 0));
    CHECK(cuMemMap(beside, PIECE, 0, pieces[0], 0));
    CHECK(cuMemSetAccess(beside, PIECE, &reads, 1));
    for (size_t at = 1; at < kept_bytes / PIECE; at += 2)
        CHECK(cuMemRelease(pieces[at]));
    uint32_t *words = malloc(kept_bytes);
    REQUIRE(words);
    for (size_t at = 0; at < kept_bytes / 4; at++)
        words[at] = (uint32_t)(at * 2654435761u);
    CHECK(cuMemcpyHtoD_v2(kept, words, kept_bytes));
    free(words);
    atomic_store(&is_kept, 1);
    return NULL;
}

/* All of it goes, and the GPU has as much more. */
static void unmake(void)
{
    for (size_t at = 0; at < kept_bytes / PIECE; at += 2)
        CHECK(cuMemRelease(pieces[at]));
    CHECK(cuMemUnmap(kept, kept_bytes));
    CHECK(cuMemAddressFree(kept, kept_bytes));
    CHECK(cuMemUnmap(beside, PIECE));
    CHECK(cuMemAddressFree(beside, PIECE));
    pieces[0] = 0;
}

static void tell_of_handle(void)
{
    CUmemAllocationProp properties;
    CUmemLocation here = {ON_DEVICE, 0};
    uint64_t flags = 0, again = 0, first = 0;
    CHECK(cuMemGetAllocationPropertiesFromHandle(&properties, pieces[0]));
    CHECK(cuMemGetAccess(&flags, &here, beside));
    CHECK(cuMemRetainAllocationHandle(&again, (void *)kept));
    CHECK(cuMemRelease(again));
    CHECK(cuMemcpyDtoH_v2(&first, beside + 4, 4));
    printf("on %d of kind %d, access %llu, %s, %s\n", properties.location.id, properties.location.kind, (unsigned long long)flags,
           again == pieces[0] ? "the same" : "another", first == 2654435761u ? "right" : "wrong");
}

/* Words of a block that are not what was written to it, or not 0 where it is clear. */
static long wrong_of(CUcontext context, CUdeviceptr block, size_t bytes, int clear)
{
    long found = 0;
    uint32_t *words = calloc(1, bytes);
    REQUIRE(words);
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuMemcpyDtoH_v2(words, block, bytes));
    for (size_t at = 0; at < bytes / 4; at++)
        found += words[at] != (clear ? 0 : (uint32_t)(at * 2654435761u));
    free(words);
    return found;
}

static long wrong_of_kept(void)
{
    return wrong_of(own, kept, kept_bytes, is_clear);
}

static void *check(void *unused)
{
    atomic_store(&checked, wrong_of_kept());
    return unused;
}

static char answers[4096];
static atomic_int is_answered;
static CUcontext visiting;
static CUdeviceptr opened;
static size_t opened_bytes;

/* Every attribute that the runtime and frameworks ask for, one by one and together, of a byte in the middle; the block's range; and the GPU's memory. */
static void *ask(void *unused)
{
    static const int kinds[] = {1, 2, 3, 4, 6, 7, 8, 9, 11, 12, 13, 16, 18, 19};
    enum { COUNT = sizeof kinds / sizeof *kinds };
    CUdeviceptr middle = kept + kept_bytes / 2, base = 0;
    size_t bytes = 0, free_bytes = 0, total = 0;
    int wanted[COUNT];
    uint64_t together[COUNT] = {0};
    void *outputs[COUNT];
    char text[4096];
    int end = 0;
    CHECK(cuCtxSetCurrent(own));
    for (int i = 0; i < COUNT; i++) {
        uint64_t alone = 0;
        CUresult result = cuPointerGetAttribute(&alone, kinds[i], middle);
        end += snprintf(text + end, sizeof text - (size_t)end, "%d:%d:%llx ", kinds[i], result, (unsigned long long)alone);
        wanted[i] = kinds[i];
        outputs[i] = &together[i];
    }
    CHECK(cuPointerGetAttributes(COUNT, wanted, outputs, middle));
    for (int i = 0; i < COUNT; i++)
        end += snprintf(text + end, sizeof text - (size_t)end, "%llx ", (unsigned long long)together[i]);
    CHECK(cuMemGetAddressRange_v2(&base, &bytes, middle));
    CHECK(cuMemGetInfo_v2(&free_bytes, &total));
    REQUIRE(free_bytes <= total);
    snprintf(text + end, sizeof text - (size_t)end, "%llx %zu of %zu", (unsigned long long)base, bytes, total);
    strcpy(answers, text);
    atomic_store(&is_answered, 1);
    return unused;
}

static void give(void)
{
    CUipcMemHandle handle;
    CHECK(cuCtxSetCurrent(own));
    CHECK(cuIpcGetMemHandle(&handle, kept));
    for (size_t at = 0; at < sizeof handle; at++)
        printf("%02x", ((unsigned char *)&handle)[at]);
    putchar('\n');
}

static void open_given(const char *text)
{
    CUipcMemHandle handle;
    for (size_t at = 0; at < sizeof handle; at++)
        REQUIRE(sscanf(text + 2 * at, "%2hhx", (unsigned char *)&handle + at) == 1);
    CHECK(cuCtxCreate_v2(&visiting, 0, 0));
    CHECK(cuIpcOpenMemHandle_v2(&opened, handle, 1));
    CHECK(cuMemGetAddressRange_v2(NULL, &opened_bytes, opened));
    puts("opened");
}

static void *look(void *unused)
{
    atomic_store(&checked, wrong_of(visiting, opened, opened_bytes, 0));
    return unused;
}

static void *destroy(void *unused)
{
    CHECK(cuCtxDestroy_v2(own));
    atomic_store(&is_destroyed, 1);
    return unused;
}

static void at_exit(void)
{
    _exit(wrong_of_kept() ? 9 : 12);
}

static void *end_with_it(void *unused)
{
    at_exit();
    return unused;
}

static void wait_at_exit(void)
{
    pthread_t other;
    REQUIRE(pthread_create(&other, NULL, end_with_it, NULL) == 0);
    pthread_join(other, NULL);
}

static void destroy_variable(void *unused)
{
    (void)unused;
    at_exit();
}

/* What C++ calls for a thread_local object. */
extern int __cxa_thread_atexit_impl(void (*)(void *), void *, void *);
extern void *__dso_handle;

static void *stream(void *argument)
{
    CUdeviceptr freed, used;
    CUstream stream;
    CUmemoryPool pool;
    uint64_t all = UINT64_MAX;
    CUcontext context;
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    CHECK(cuDeviceGetDefaultMemPool(&pool, 0));
    CHECK(cuMemPoolSetAttribute(pool, 4, &all));
    CHECK(cuStreamCreate(&stream, 1));
    CHECK(cuMemAllocAsync(&freed, (size_t)(uintptr_t)argument * MIB, stream));
    CHECK(cuMemAllocAsync(&used, 2 * MIB, stream));
    CHECK(cuMemFreeAsync(freed, stream));
    CHECK(cuStreamSynchronize(stream));
    return NULL;
}

static uint64_t reserved(void)
{
    CUmemoryPool pool;
    uint64_t bytes = 0;
    CHECK(cuDeviceGetDefaultMemPool(&pool, 0));
    CHECK(cuMemPoolGetAttribute(pool, 5, &bytes));
    return bytes;
}

static Gpu spinning;

static void *spin(void *argument)
{
    open_gpu(&spinning, 0);
    hold(&spinning);
    return argument;
}

int main(void)
{
    char line[256];
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    REQUIRE(sigaction(SIGUSR1, &action, NULL) == 0);
    CHECK(cuInit(0));
    while (fgets(line, sizeof line, stdin)) {
        int number = 0, gpu;
        pthread_t other;
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, "begin %d", &number) == 1) {
            REQUIRE(number <= MOST && sem_init(&has_memory, 0, 0) == 0);
            atomic_store(&running, number);
            for (working = 0; working < number; working++)
                REQUIRE(pthread_create(&workers[working], NULL, work, (void *)(uintptr_t)working) == 0);
            while (number > 0)
                number -= sem_wait(&has_memory) == 0;
            puts("begun");
        } else if (strcmp(line, "rounds") == 0) {
            printf("%ld\n", atomic_load(&rounds));
        } else if (strcmp(line, "wrong") == 0) {
            printf("%ld\n", atomic_load(&wrong));
        } else if (strcmp(line, "signal") == 0) {
            REQUIRE(pthread_kill(workers[0], SIGUSR1) == 0);
            puts("sent");
        } else if (strcmp(line, "reading") == 0) {
            atomic_store(&is_reading, 1);
            puts("it will");
        } else if (strcmp(line, "jumping") == 0) {
            atomic_store(&is_jumping, 1);
            puts("it will");
        } else if (strcmp(line, "allocating") == 0 || strcmp(line, "working") == 0) {
            atomic_store(&is_allocating, *line == 'a');
            puts("they will");
        } else if (strcmp(line, "quit") == 0) {
            atomic_store(&quits, 1);
            puts("they will");
        } else if (strcmp(line, "thread") == 0) {
            printf("%d\n", atomic_load(&first));
        } else if (strcmp(line, "handled") == 0) {
            printf("%d\n", atomic_load(&handled));
        } else if (strcmp(line, "spin") == 0) {
            REQUIRE(pthread_create(&other, NULL, spin, NULL) == 0 && pthread_join(other, NULL) == 0);
            puts("it spins");
        } else if (strcmp(line, "release") == 0) {
            *spinning.flag = 1;
            puts("it ends");
        } else if (strcmp(line, "fork") == 0) {
            int status;
            fflush(stdout);
            pid_t child = fork();
            REQUIRE(child >= 0);
            if (child == 0) {
                int version;
                _exit(cuDriverGetVersion(&version) == CUDA_SUCCESS ? 7 : 8);
            }
            REQUIRE(waitpid(child, &status, 0) == child);
            printf("child ended with %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
        } else if (sscanf(line, "allocate %d", &number) == 1) {
            atomic_store(&is_allocated, 0);
            REQUIRE(pthread_create(&other, NULL, allocate, (void *)(uintptr_t)number) == 0);
            REQUIRE(pthread_detach(other) == 0);
            puts("asked");
        } else if (sscanf(line, "create %d", &number) == 1) {
            atomic_store(&is_allocated, 0);
            REQUIRE(pthread_create(&other, NULL, create, (void *)(uintptr_t)number) == 0);
            REQUIRE(pthread_detach(other) == 0);
            puts("asked");
        } else if (sscanf(line, "keep %d", &number) == 1) {
            REQUIRE(pthread_create(&other, NULL, keep, (void *)(uintptr_t)number) == 0 && pthread_join(other, NULL) == 0);
            puts(atomic_load(&is_kept) ? "kept" : "not");
        } else if (sscanf(line, "clear %d", &number) == 1) {
            REQUIRE(pthread_create(&other, NULL, clear, (void *)(uintptr_t)number) == 0 && pthread_join(other, NULL) == 0);
            puts("cleared");
        } else if (strcmp(line, "compress") == 0) {
            is_compressed = 1;
            puts("it will be");
        } else if (sscanf(line, "make %d %d", &number, &made_on) >= 1) {
            REQUIRE(pthread_create(&other, NULL, make, (void *)(uintptr_t)number) == 0 && pthread_join(other, NULL) == 0);
            puts(atomic_load(&is_kept) ? "made" : "not");
        } else if (sscanf(line, "unmapped %d", &number) == 1) {
            CUmemAllocationProp properties = on_device(0);
            CHECK(cuMemCreate(&unmapped, (size_t)number << 20, &properties, 0));
            puts("made");
        } else if (strcmp(line, "released") == 0) {
            CHECK(cuMemRelease(unmapped));
            puts("released");
        } else if (sscanf(line, "visit %d", &number) == 1) {
            start_on(number);
            puts("visited");
        } else if (strcmp(line, "shut") == 0) {
            CHECK(cuMemUnmap(kept + 2 * PIECE, PIECE));
            CHECK(cuMemMap(kept + 2 * PIECE, PIECE, 0, pieces[2], 0));
            puts("shut");
        } else if (strcmp(line, "open up") == 0) {
            CUmemAccessDesc access = {{ON_DEVICE, 0}, READ_WRITE};
            CHECK(cuMemSetAccess(kept + 2 * PIECE, PIECE, &access, 1));
            puts("open");
        } else if (sscanf(line, "apart %d %d", &number, &gpu) == 2) {
            CUmemAllocationProp properties = on_device(gpu);
            CUdeviceptr there;
            uint64_t handle;
            CHECK(cuMemCreate(&handle, (size_t)number * MIB, &properties, 0));
            CHECK(cuMemAddressReserve(&there, (size_t)number * MIB, 0, 0, 0));
            CHECK(cuMemMap(there, (size_t)number * MIB, 0, handle, 0));
            puts("made");
        } else if (strcmp(line, "lend") == 0) {
            int descriptor = -1;
            CHECK(cuMemExportToShareableHandle(&descriptor, pieces[0], POSIX_FD, 0));
            puts("lent");
        } else if (strcmp(line, "handle") == 0) {
            CHECK(cuCtxSetCurrent(own));
            tell_of_handle();
        } else if (strcmp(line, "check") == 0 || strcmp(line, "destroy") == 0) {
            atomic_store(&checked, -1);
            REQUIRE(pthread_create(&other, NULL, *line == 'c' ? check : destroy, NULL) == 0 && pthread_detach(other) == 0);
            puts("asked");
        } else if (strcmp(line, "ask") == 0) {
            atomic_store(&is_answered, 0);
            REQUIRE(pthread_create(&other, NULL, ask, NULL) == 0 && pthread_detach(other) == 0);
            puts("it does");
        } else if (strcmp(line, "asked") == 0) {
            puts(atomic_load(&is_answered) ? answers : "it waits");
        } else if (strcmp(line, "give") == 0) {
            give();
        } else if (strncmp(line, "open ", 5) == 0) {
            open_given(line + 5);
        } else if (strcmp(line, "look") == 0) {
            atomic_store(&checked, -1);
            REQUIRE(pthread_create(&other, NULL, look, NULL) == 0 && pthread_detach(other) == 0);
            puts("asked");
        } else if (strcmp(line, "checked") == 0) {
            printf("%ld\n", atomic_load(&checked));
        } else if (strcmp(line, "destroyed") == 0) {
            puts(atomic_load(&is_destroyed) ? "yes" : "no");
        } else if (strcmp(line, "drop") == 0) {
            CHECK(cuCtxSetCurrent(own));
            if (pieces[0])
                unmake();
            else
                CHECK(cuMemFree_v2(kept));
            puts("freed");
        } else if (strcmp(line, "atexit") == 0) {
            REQUIRE(atexit(at_exit) == 0);
            puts("registered");
        } else if (strcmp(line, "join") == 0) {
            REQUIRE(atexit(wait_at_exit) == 0);
            puts("registered");
        } else if (strcmp(line, "variable") == 0) {
            REQUIRE(__cxa_thread_atexit_impl(destroy_variable, NULL, &__dso_handle) == 0);
            puts("registered");
        } else if (strcmp(line, "quick") == 0) {
            REQUIRE(at_quick_exit(at_exit) == 0);
            quick_exit(5);
        } else if (strcmp(line, "error") == 0) {
            err(5, "%s", "it ends");
        } else if (sscanf(line, "stream %d", &number) == 1) {
            REQUIRE(pthread_create(&other, NULL, stream, (void *)(uintptr_t)number) == 0 && pthread_join(other, NULL) == 0);
            puts("kept");
        } else if (strcmp(line, "reserved") == 0) {
            printf("%llu\n", (unsigned long long)reserved());
        } else if (sscanf(line, "pin %d", &number) == 1) {
            void *memory;
            start_on(0);
            CHECK(cuMemHostAlloc(&memory, (size_t)number * MIB, 0));
            memset(memory, 1, (size_t)number * MIB);
            CHECK(cuMemFreeHost(memory));
            puts("freed");
        } else if (strcmp(line, "pinned") == 0) {
            printf("%llu\n", (unsigned long long)find_simulator().pinned());
        } else if (sscanf(line, "become %d", &number) == 1) {
            REQUIRE(seteuid((uid_t)number) == 0);
            puts("done");
        } else if (strncmp(line, "root ", 5) == 0) {
            REQUIRE(chroot(line + 5) == 0);
            puts("done");
        } else if (strcmp(line, "leave") == 0) {
            atomic_store(&has_left, 1);
            atomic_store(&ends, 1);
            pthread_exit(NULL);
        } else if (orders_a_call(line)) {
            /* It is answered. */
        } else if (sscanf(line, "late %63s", late_call) == 1) {
            find_simulator().after(late_call, await_allocation);
            puts("it will");
        } else if (strcmp(line, "allocated") == 0) {
            puts(atomic_load(&is_allocated) ? "yes" : "no");
        } else if (strcmp(line, "end") == 0) {
            atomic_store(&ends, 1);
            while (working)
                REQUIRE(pthread_join(workers[--working], NULL) == 0);
            atomic_store(&ends, 0);
            printf("%ld wrong\n", atomic_load(&wrong));
        } else if (strcmp(line, "created") == 0) {
            uint32_t *words = malloc(last_bytes);
            long found = 0;
            REQUIRE(words);
            start_on(0);
            CHECK(cuMemcpyDtoH_v2(words, last_created, last_bytes));
            for (size_t at = 0; at < last_bytes / 4; at++)
                found += words[at] != 7;
            free(words);
            printf("%ld\n", found);
        } else if (strcmp(line, "filled") == 0) {
            puts(atomic_load(&is_filled) ? "yes" : "no");
        } else if (strcmp(line, "exit") == 0) {
            atomic_store(&leaves, 1);
            (exit)(5);
        } else {
            printf("what is %s?\n", line);
        }
        fflush(stdout);
    }
    return 0;
}
