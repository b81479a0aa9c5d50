/*
 * Access that several threads give at once, as when GPUs get their contexts at the same moment: what each cuMemSetAccess answers, and whether every GPU that was
 * named reads the range afterwards. A GPU that does not ends the process with an error that stays, so each question has a process of its own.
 *
 *   probe_grants QUESTION ROUNDS [lock] [again | anew]
 *
 * lock: one thread at a time maps, unmaps and gives access. again: access is given once more when all are through; anew: it is taken away first.
 */
#include "probe.h"

enum { CHUNK = 4 * MIB, CHUNKS = 6, MOST_GPUS = 4, GRANTERS = 4, MOST_ANSWERS = 1000 };

typedef enum { SAME, GROWING, NEIGHBOURS, COMING, ENDING, FIRST } Question;
static const char *const NAMES[] = {"same", "growing", "neighbours", "coming", "ending", "first"};
static const char *const QUESTIONS[] = {
    "several threads give the same GPUs access to the same range", "each thread names one GPU more than the one before",
    "threads give access to neighbours in one reservation", "a context is made on a GPU that is being named",
    "a context ends on a GPU that is being named",
    "the first context is made on a GPU that is being named",
};

static Question question;
static int all_gpus, rounds;
static CUcontext contexts[MOST_GPUS];
static CUdeviceptr range;
static pthread_barrier_t begins, ends;
static _Atomic int answers[MOST_ANSWERS], asked_again, again_in_vain;
static _Atomic int over;
static int is_locked;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static CUresult set_access(CUdeviceptr at, size_t bytes, const CUmemAccessDesc *list, int count)
{
    if (is_locked)
        pthread_mutex_lock(&lock);
    CUresult result = cuMemSetAccess(at, bytes, list, (size_t)count);
    if (is_locked)
        pthread_mutex_unlock(&lock);
    return result;
}

static int list_of(CUmemAccessDesc *list, int count, int flags)
{
    for (int gpu = 0; gpu < count; gpu++)
        list[gpu] = (CUmemAccessDesc){{ON_DEVICE, gpu}, flags};
    return count;
}

static void named(CUdeviceptr at, size_t bytes, int count)
{
    CUmemAccessDesc list[MOST_GPUS];
    list_of(list, count, READ_WRITE);
    CUresult result = set_access(at, bytes, list, count);
    answers[result < MOST_ANSWERS ? result : MOST_ANSWERS - 1]++;
    for (int again = 0; result && again < 100; again++) {
        asked_again++;
        result = set_access(at, bytes, list, count);
    }
    again_in_vain += result != 0;
}

/* Words of the range that a GPU reads wrongly; what it answers where it does not read it. */
static CUresult reads(const Kernels *kernels, uint32_t start, uint64_t *wrong)
{
    CUdeviceptr counter, array = range;
    uint64_t zero = 0, n = CHUNKS * CHUNK / 4;
    CHECK(cuMemAlloc_v2(&counter, sizeof zero));
    CHECK(cuMemcpyHtoD_v2(counter, &zero, sizeof zero));
    launch(kernels->check_iota, NULL, (void *[]){&array, &n, &start, &counter});
    CUresult result = cuMemcpyDtoH_v2(wrong, counter, sizeof zero);
    if (!result)
        CHECK(cuMemFree_v2(counter));
    return result;
}

static void *granter(void *argument)
{
    int self = (int)(intptr_t)argument, last = all_gpus - 1;
    CHECK(cuCtxSetCurrent(contexts[0]));
    for (;;) {
        pthread_barrier_wait(&begins);
        if (over)
            return NULL;
        if (question == NEIGHBOURS) {
            for (int chunk = self; chunk < CHUNKS; chunk += GRANTERS)
                named(range + (CUdeviceptr)chunk * CHUNK, CHUNK, all_gpus);
        } else if (question == GROWING) {
            named(range, CHUNKS * CHUNK, self < last ? self + 1 : all_gpus);
        } else if (question == FIRST && self == 0) {
            contexts[last] = start_on(last);
            CHECK(cuCtxSetCurrent(contexts[0]));
        } else if ((question == COMING || question == ENDING) && self == 0) {
            CUcontext made;
            CHECK(cuCtxCreate_v2(&made, 0, last));
            if (question == COMING)
                pthread_barrier_wait(&ends);
            CHECK(cuCtxDestroy_v2(made));
            CHECK(cuCtxSetCurrent(contexts[0]));
            if (question == COMING)
                continue;
        } else {
            named(range, CHUNKS * CHUNK, all_gpus);
        }
        pthread_barrier_wait(&ends);
    }
}

int main(int argc, char **argv)
{
    pthread_t threads[GRANTERS];
    uint64_t handles[CHUNKS], lacking = 0, wrong = 0;
    int again = 0, unread = 0, by = 0, in_round = 0;
    CUresult unread_with = 0;
    REQUIRE(argc > 2);
    while (strcmp(argv[1], NAMES[question]) != 0)
        REQUIRE(++question <= FIRST);
    rounds = atoi(argv[2]);
    for (int i = 3; i < argc; i++) {
        is_locked |= strcmp(argv[i], "lock") == 0;
        again = strcmp(argv[i], "again") == 0 ? 1 : strcmp(argv[i], "anew") == 0 ? 2 : again;
    }
    begin_probe(60);
    now_asking = QUESTIONS[question];
    CHECK(cuDeviceGetCount(&all_gpus));
    for (int gpu = 1; gpu < all_gpus; gpu++) {
        int can = 0;
        CHECK(cuDeviceCanAccessPeer(&can, gpu, 0));
        if (!can)
            all_gpus = gpu;
    }
    all_gpus = all_gpus > MOST_GPUS ? MOST_GPUS : all_gpus;
    if (all_gpus < 2) {
        not_asked("access that several threads give", "there is one GPU");
        return end_probe();
    }
    int last = all_gpus - 1;
    Kernels kernels[MOST_GPUS];
    contexts[0] = on_gpu[0].context;
    kernels[0] = on_gpu[0].kernels;
    for (int gpu = 1; gpu < all_gpus; gpu++) {
        contexts[gpu] = start_on(gpu);
        kernels[gpu] = load_kernels();
    }
    CHECK(cuCtxSetCurrent(contexts[0]));
    range = reserve(CHUNKS * CHUNK);
    for (int i = 0; i < CHUNKS; i++)
        handles[i] = physical(0, CHUNK);
    REQUIRE(pthread_barrier_init(&begins, NULL, GRANTERS + 1) == 0);
    REQUIRE(pthread_barrier_init(&ends, NULL, GRANTERS + 1) == 0);
    for (int i = 0; i < GRANTERS; i++)
        REQUIRE(pthread_create(&threads[i], NULL, granter, (void *)(intptr_t)i) == 0);
    for (int round = 0; round < rounds && !unread; round++) {
        CUmemAccessDesc list[MOST_GPUS];
        if (question == FIRST)
            CHECK(cuDevicePrimaryCtxRelease_v2(last));
        for (int i = 0; i < CHUNKS; i++)
            CHECK(cuMemMap(range + (CUdeviceptr)i * CHUNK, CHUNK, 0, handles[i], 0));
        list_of(list, 1, READ_WRITE);
        CHECK(cuMemSetAccess(range, CHUNKS * CHUNK, list, 1));
        iota(&kernels[0], NULL, range, CHUNKS * CHUNK / 4, (uint32_t)round);
        CHECK(cuCtxSynchronize());
        pthread_barrier_wait(&begins);
        pthread_barrier_wait(&ends);
        if (question == FIRST) {
            CHECK(cuCtxSetCurrent(contexts[last]));
            kernels[last] = load_kernels();
            CHECK(cuCtxSetCurrent(contexts[0]));
        }
        if (again == 2) {
            list_of(list, all_gpus, 0);
            CHECK(cuMemSetAccess(range, CHUNKS * CHUNK, list + 1, (size_t)last));
        }
        if (again) {
            list_of(list, all_gpus, READ_WRITE);
            CHECK(cuMemSetAccess(range, CHUNKS * CHUNK, list, (size_t)all_gpus));
        }
        for (int gpu = 0; gpu < all_gpus && !unread; gpu++) {
            CUmemLocation location = {ON_DEVICE, gpu};
            int reaches = 1;
            for (int i = 0; i < CHUNKS; i++) {
                uint64_t flags = 0;
                CHECK(cuMemGetAccess(&flags, &location, range + (CUdeviceptr)i * CHUNK));
                reaches &= flags == READ_WRITE;
            }
            lacking += !reaches;
            if (!reaches)
                continue;
            uint64_t found = 0;
            CHECK(cuCtxSetCurrent(contexts[gpu]));
            if ((unread_with = reads(&kernels[gpu], (uint32_t)round, &found)))
                unread = 1, by = gpu, in_round = round;
            wrong += found;
        }
        if (unread)
            break;
        CHECK(cuCtxSetCurrent(contexts[0]));
        CHECK(cuMemUnmap(range, CHUNKS * CHUNK));
    }
    for (int i = 1; i < MOST_ANSWERS; i++)
        if (answers[i])
            tell("%s, %d GPUs: answered %d for %d of %d", QUESTIONS[question], all_gpus, i, (int)answers[i], (int)answers[i] + (int)answers[0]);
    answer("a grant that another thread's got in the way of succeeds when it is asked again", again_in_vain == 0,
           "%s: asked again %d times, in vain %d", QUESTIONS[question], (int)asked_again, (int)again_in_vain);
    if (unread)
        tell("in round %d GPU %d, which has access as cuMemGetAccess says, answered %d", in_round, by, unread_with);
    answer("who was named by a grant that succeeded reads the range", lacking == 0 && wrong == 0 && !unread,
           "%s: %llu times access was missing, %llu words were wrong, %d could not read", QUESTIONS[question], (unsigned long long)lacking,
           (unsigned long long)wrong, unread);
    over = 1;
    if (unread) {
        /* Its contexts are of no use any more. */
        fflush(stdout);
        _exit(1);
    }
    pthread_barrier_wait(&begins);
    for (int i = 0; i < GRANTERS; i++)
        REQUIRE(pthread_join(threads[i], NULL) == 0);
    return end_probe();
}
