/*
 * ipc_stress SEED ROUNDS GENERATIONS: a process with three threads makes, exports and ends blocks in every way there is, while
 * others, one after the other and with three threads each, open them, look at every word, and close them or are killed with
 * them open. All the while sockets are closed, children forked and streams captured, at random. A block's words are the same
 * from its export on, so whoever reads another one there has frames that were given to somebody else.
 * Prints what is wrong, and at the end what is left; with VERBOSE set, also how much was done.
 */
#include "simulator.h"

#include "streams.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define SLOTS 12
#define THREADS 3
#define HELD 6
#define MOST (24 * MIB)

/* Written by the exporter alone; odd while it writes. */
typedef struct {
    atomic_uint sequence;
    uint32_t live, word;
    size_t bytes;
    CUipcMemHandle handle;
} Published;

typedef struct {
    atomic_int over, wrong, opened, refused;
    Published slots[SLOTS];
} Shared;

/* The exporter's side of a slot. */
typedef struct {
    pthread_mutex_t lock;
    CUdeviceptr address;
    /* Index of the thread whose own context it is of; -1 for the primary. */
    int context;
} Block;

static Shared *shared;
static Block blocks[SLOTS];
static uint64_t seed;
static int rounds;
static CUcontext primary;
static atomic_uint next_word = 1;

static uint64_t roll(uint64_t *dice, uint64_t sides)
{
    *dice ^= *dice << 13;
    *dice ^= *dice >> 7;
    *dice ^= *dice << 17;
    return *dice % sides;
}

static void wrong(const char *what, uint64_t number)
{
    printf("%s (%llu)\n", what, (unsigned long long)number);
    fflush(stdout);
    atomic_fetch_add(&shared->wrong, 1);
}

static uint64_t words_wrong(CUdeviceptr address, size_t bytes, uint32_t word, uint32_t *buffer)
{
    uint64_t count = 0;
    CHECK(cuMemcpyDtoH_v2(buffer, address, bytes));
    for (size_t i = 0; i < bytes / sizeof *buffer; i++)
        count += buffer[i] != word;
    return count;
}

static void close_sockets(void)
{
    struct stat found;
    for (int fd = 5; fd < 1024; fd++)
        if (fstat(fd, &found) == 0 && S_ISSOCK(found.st_mode))
            close(fd);
}

static void fork_once(void)
{
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (!child)
        _exit(0);
    REQUIRE(waitpid(child, NULL, 0) == child);
}

/* Nobody finds the slot's block any more. */
static void withdraw(Published *slot)
{
    atomic_fetch_add(&slot->sequence, 1);
    slot->live = 0;
    atomic_fetch_add(&slot->sequence, 1);
}

static void make(int index, int context, uint64_t *dice)
{
    Published *slot = &shared->slots[index];
    size_t bytes = roll(dice, 8) == 0 ? MOST : (1 + roll(dice, 10)) * MIB + roll(dice, 512) * 4 * KIB;
    uint32_t word = atomic_fetch_add(&next_word, 1);
    CUdeviceptr address;
    CUipcMemHandle handle;
    CUresult result = cuMemAlloc_v2(&address, bytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        return;
    CHECK(result);
    CHECK(cuMemsetD32_v2(address, word, bytes / 4));
    /* Of the stream alone: another thread may be capturing in this context, which may not be synchronised then. */
    CHECK(cuStreamSynchronize(NULL));
    CHECK(cuIpcGetMemHandle(&handle, address));
    blocks[index].address = address;
    blocks[index].context = context;
    atomic_fetch_add(&slot->sequence, 1);
    slot->live = 1;
    slot->word = word;
    slot->bytes = bytes;
    slot->handle = handle;
    atomic_fetch_add(&slot->sequence, 1);
}

static void end(int index, uint64_t *dice, uint32_t *buffer)
{
    Published *slot = &shared->slots[index];
    uint64_t count = words_wrong(blocks[index].address, slot->bytes, slot->word, buffer);
    if (count)
        wrong("the exporter's own words are wrong", count);
    withdraw(slot);
    if (roll(dice, 4) > 0) {
        CHECK(cuMemFree_v2(blocks[index].address));
    } else {
        CUstream stream;
        CUgraph graph = NULL;
        CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        CHECK(cuStreamBeginCapture_v2(stream, CAPTURE_RELAXED));
        CHECK(cuMemFree_v2(blocks[index].address));
        CHECK(cuStreamEndCapture(stream, &graph));
        CHECK(cuStreamDestroy_v2(stream));
        if (graph)
            CHECK(cuGraphDestroy(graph));
    }
    blocks[index].address = 0;
}

static void *export_and_end(void *argument)
{
    int self = (int)(intptr_t)argument;
    uint64_t dice = seed * 31 + (uint64_t)self * 7919 + 1;
    uint32_t *buffer = malloc(MOST);
    CUcontext own = NULL;
    CUdevice device;
    Simulator simulator = find_simulator();
    CHECK(cuDeviceGet(&device, 0));
    for (int round = 0; !atomic_load(&shared->over); round++) {
        /* Importers set the pace: when they are through, so is this. */
        int index = (int)roll(&dice, SLOTS), kind = (int)roll(&dice, 400);
        CHECK(cuCtxSetCurrent(primary));
        if (kind == 0 && simulator.trim) {
            simulator.trim();
        } else if (kind == 1) {
            close_sockets();
        } else if (kind == 2) {
            fork_once();
        } else if (kind < 12 && own) {
            for (int i = 0; i < SLOTS; i++)
                pthread_mutex_lock(&blocks[i].lock);
            for (int i = 0; i < SLOTS; i++) {
                if (blocks[i].address && blocks[i].context == self) {
                    withdraw(&shared->slots[i]);
                    blocks[i].address = 0;
                }
            }
            CHECK(cuCtxDestroy_v2(own));
            own = NULL;
            for (int i = 0; i < SLOTS; i++)
                pthread_mutex_unlock(&blocks[i].lock);
        } else {
            pthread_mutex_lock(&blocks[index].lock);
            if (blocks[index].address) {
                end(index, &dice, buffer);
            } else if (kind < 120) {
                if (!own)
                    CHECK(cuCtxCreate_v2(&own, 0, device));
                CHECK(cuCtxSetCurrent(own));
                make(index, self, &dice);
            } else {
                make(index, -1, &dice);
            }
            pthread_mutex_unlock(&blocks[index].lock);
        }
        sched_yield();
    }
    free(buffer);
    return NULL;
}

/* A copy of what is published, and its sequence; 0 where nothing is. */
static unsigned published(int index, Published *copy)
{
    Published *slot = &shared->slots[index];
    unsigned before = atomic_load(&slot->sequence);
    copy->live = slot->live;
    copy->word = slot->word;
    copy->bytes = slot->bytes;
    copy->handle = slot->handle;
    atomic_thread_fence(memory_order_seq_cst);
    return before % 2 == 0 && before == atomic_load(&slot->sequence) && copy->live ? before : 0;
}

static void *open_and_look(void *argument)
{
    uint64_t dice = seed * 131 + (uint64_t)(intptr_t)argument * 104729 + 3;
    uint32_t *buffer = malloc(MOST);
    struct {
        CUdeviceptr address;
        uint32_t word;
        size_t bytes;
    } held[HELD] = {0};
    CHECK(cuCtxSetCurrent(primary));
    /* A round counts once it had a block to look at. Which of the two processes is the quicker is not known: all rounds
     * could be over before the first block is there, or one thread lose every race for a block. */
    for (int round = 0; round < rounds; round++) {
        int at = (int)roll(&dice, HELD), index = (int)roll(&dice, SLOTS), kind = (int)roll(&dice, 60);
        unsigned sequence = 0;
        Published slot;
        if (!held[at].address && !(sequence = published(index, &slot))) {
            round--;
            sched_yield();
            continue;
        }
        if (kind == 0) {
            close_sockets();
        } else if (kind == 1) {
            fork_once();
        }
        if (held[at].address) {
            uint64_t count = words_wrong(held[at].address, held[at].bytes, held[at].word, buffer);
            if (count)
                wrong("words of an opened block are wrong", count);
            if (roll(&dice, 2) == 0)
                continue;
            CHECK(cuIpcCloseMemHandle(held[at].address));
            held[at].address = 0;
            continue;
        }
        CUdeviceptr address;
        CUresult result = cuIpcOpenMemHandle_v2(&address, slot.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
        if (result == CUDA_SUCCESS) {
            held[at].address = address;
            held[at].word = slot.word;
            held[at].bytes = slot.bytes;
            atomic_fetch_add(&shared->opened, 1);
            uint64_t count = words_wrong(address, slot.bytes, slot.word, buffer);
            if (count)
                wrong("words of a block just opened are wrong", count);
        } else if (atomic_load(&shared->slots[index].sequence) == sequence) {
            wrong("a block that is there is not opened", (uint64_t)result);
        } else {
            atomic_fetch_add(&shared->refused, 1);
            round--;
        }
    }
    for (int i = 0; i < HELD; i++)
        if (held[i].address && roll(&dice, 2) == 0)
            CHECK(cuIpcCloseMemHandle(held[i].address));
    free(buffer);
    return NULL;
}

static void run(pthread_t *threads, void *(*work)(void *))
{
    for (intptr_t i = 0; i < THREADS; i++)
        REQUIRE(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
}

static void join(pthread_t *threads)
{
    for (int i = 0; i < THREADS; i++)
        REQUIRE(pthread_join(threads[i], NULL) == 0);
}

/* A process of its own, which ends in order or killed. */
static int importer(int generation)
{
    pthread_t threads[THREADS];
    primary = start_on(0);
    seed = seed * 1009 + (uint64_t)generation + 1;
    run(threads, open_and_look);
    join(threads);
    if (generation % 3 == 1)
        raise(SIGKILL);
    return 0;
}

int main(int argc, char **argv)
{
    REQUIRE(argc >= 4);
    seed = strtoull(argv[1], NULL, 0);
    rounds = atoi(argv[2]);
    int generations = atoi(argv[3]), status;
    if (argc == 6) {
        shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, atoi(argv[5]), 0);
        REQUIRE(shared != MAP_FAILED);
        return importer(atoi(argv[4]));
    }
    int file = memfd_create("shared", 0);
    REQUIRE(file >= 0 && ftruncate(file, sizeof *shared) == 0);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    REQUIRE(shared != MAP_FAILED);
    /* Starts the importers: a process with CUDA should not fork. */
    pid_t starter = fork();
    REQUIRE(starter >= 0);
    if (!starter) {
        for (int generation = 0; generation < generations; generation++) {
            pid_t importer = fork();
            REQUIRE(importer >= 0);
            if (!importer) {
                char number[16], descriptor[16];
                snprintf(number, sizeof number, "%d", generation);
                snprintf(descriptor, sizeof descriptor, "%d", file);
                execl("/proc/self/exe", argv[0], argv[1], argv[2], argv[3], number, descriptor, (char *)NULL);
                _exit(127);
            }
            REQUIRE(waitpid(importer, &status, 0) == importer);
            int killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && generation % 3 == 1;
            if (!killed && !(WIFEXITED(status) && WEXITSTATUS(status) == 0)) {
                printf("importer %d ended with %d\n", generation, status);
                fflush(stdout);
                atomic_fetch_add(&shared->wrong, 1);
            }
        }
        atomic_store(&shared->over, 1);
        _exit(0);
    }
    primary = start_on(0);
    pthread_t threads[THREADS];
    for (int i = 0; i < SLOTS; i++)
        pthread_mutex_init(&blocks[i].lock, NULL);
    run(threads, export_and_end);
    join(threads);
    REQUIRE(waitpid(starter, &status, 0) == starter);
    CHECK(cuCtxSetCurrent(primary));
    for (int i = 0; i < SLOTS; i++)
        if (blocks[i].address)
            CHECK(cuMemFree_v2(blocks[i].address));
    Simulator simulator = find_simulator();
    if (simulator.trim)
        simulator.trim();
    printf("%s, %llu handles left, %llu MiB mapped\n", atomic_load(&shared->opened) > 0 ? "some opened" : "none opened",
           (unsigned long long)simulator.handles(), (unsigned long long)(simulator.mapped() / MIB));
    if (getenv("VERBOSE"))
        printf("%d opened, %d refused, %u made\n", shared->opened, shared->refused, next_word - 1);
    return atomic_load(&shared->wrong) != 0;
}
