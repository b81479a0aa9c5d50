/*
 * moved_faults FIRST [CALL]: two arrays, of which the first GPU has room for one, are read in turn while launches move them. In front of a
 * reading a fault is armed for the driver call number n from there on, for every n from FIRST on; of calls with that name, where one is named. After each
 * that struck, every frame has to lie where the library says, as the driver itself tells, with all its bytes. "next: N": nothing has struck
 * any more, as there were no such calls or nothing moves any more. Then the program writes, reads and frees as before. Simulated driver only.
 * moved_faults FIRST fork: nothing fails, and at that call another thread forks; the child asks the driver and ends, by `exit` and by `_exit` in turn.
 * moved_faults N exit: at the call number N of some readings another thread ends the process with status 5, while the move goes on as soon as that has
 * begun; exit_here: the thread that moves does. N = 0: nobody ends it, "calls: ..." are there.
 */
#include "simulator.h"

#include "control.h"
#include "kernels.h"
#include "vmm.h"

#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

/* A reading moves nothing where chance has it so. */
enum { ARRAYS = 2, ARRAY = 16 * MIB, FRAME = 2 * MIB, TRIES = 16, READS_LATER = 4, MOST = 64 };

static Kernels kernels;
static CUdeviceptr arrays[ARRAYS];
/* What each begins with. */
static uint32_t starts[ARRAYS];
/* Of the host, so that a reading names nothing else that could move. */
static uint64_t *out;
/* OUT_OF_MEMORY, UNKNOWN, NOT_READY, INVALID_VALUE take turns. */
static const CUresult codes[] = {2, 999, 600, 1};

/* The driver's own functions, past all hooks, which would say what the program asked for. */
static struct {
    CUresult (*retain)(uint64_t *, void *);
    CUresult (*properties)(CUmemAllocationProp *, uint64_t);
    CUresult (*release)(uint64_t);
} driver;

static void find_driver(void)
{
    void *(*look_up)(void *, const char *) = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!look_up)
        look_up = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    REQUIRE(look_up);
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    *(void **)&driver.retain = look_up(library, "cuMemRetainAllocationHandle");
    *(void **)&driver.properties = look_up(library, "cuMemGetAllocationPropertiesFromHandle");
    *(void **)&driver.release = look_up(library, "cuMemRelease");
    REQUIRE(driver.retain && driver.properties && driver.release);
}

static int lies_at(CUdeviceptr at)
{
    CUmemAllocationProp properties;
    uint64_t handle;
    CHECK(driver.retain(&handle, (void *)at));
    CHECK(driver.properties(&properties, handle));
    CHECK(driver.release(handle));
    return properties.location.kind == ON_DEVICE ? properties.location.id : -1;
}

/* Frames of all arrays that are not where the library says. */
static int misplaced(const Control *control)
{
    int wrong = 0;
    for (int i = 0; i < ARRAYS; i++) {
        gpupool_piece pieces[MOST];
        size_t count = MOST, bytes = 0;
        REQUIRE(control->pieces((void *)arrays[i], ARRAY, pieces, &count) == 0 && count <= MOST);
        for (size_t piece = 0; piece < count; piece++)
            for (size_t at = 0; at < pieces[piece].bytes; at += FRAME, bytes += FRAME)
                wrong += lies_at(arrays[i] + bytes) != pieces[piece].place;
        REQUIRE(bytes == ARRAY);
    }
    return wrong;
}

/* By copies, before which nothing moves. */
static unsigned long long wrong_words(void)
{
    unsigned long long wrong = 0;
    for (int i = 0; i < ARRAYS; i++)
        wrong += wrong_on_host(arrays[i], ARRAY, starts[i]);
    return wrong;
}

/* Reads an array by a kernel, and waits for it; whether that answered with something else than success and the fault. */
static int read_it(int i, CUresult code)
{
    uint64_t n = ARRAY / 4;
    CUdeviceptr to = (CUdeviceptr)out;
    void *parameters[] = {&arrays[i], &n, &starts[i], &to};
    CUresult launched = cuLaunchKernel(kernels.check_iota, 64, 1, 1, 256, 1, 1, 0, NULL, parameters, NULL);
    CUresult waited = cuCtxSynchronize();
    return (launched != 0 && launched != code) + (waited != 0 && waited != code);
}

/* Has the call with this number fail in a reading; whether there was one. */
static int fails(const Simulator *simulator, const char *call, int nth, CUresult code)
{
    static int reads;
    char fault[96];
    for (int i = 0; i < TRIES; i++) {
        snprintf(fault, sizeof fault, "%s:%d=%d", call, nth, code);
        REQUIRE(simulator->arm(fault) == 0);
        int others = read_it(reads++ % ARRAYS, code);
        int struck = simulator->faults_left() == 0;
        REQUIRE(simulator->arm("") == 0);
        if (others)
            printf("%s:%d=%d: another answer\n", call, nth, code);
        if (struck)
            return 1;
    }
    return 0;
}

/* What another thread does in the middle of a move. */
static sem_t is_due, has_begun;
static int times_done;

/* All that the child of a fork may do with a driver is to be told that it has none. */
static _Noreturn void end_child(int by_exit)
{
    CUdeviceptr more;
    size_t free_now, all;
    int answered = cuMemAlloc_v2(&more, ARRAY) == 0 || cuMemFree_v2(arrays[0]) == 0 || cuCtxSynchronize() == 0 ||
                   cuMemGetInfo_v2(&free_now, &all) == 0;
    void *volatile own = malloc(MIB);
    free(own);
    if (by_exit)
        exit(answered || !own ? 1 : 7);
    _exit(answered || !own ? 1 : 7);
}

static void *fork_when_due(void *unused)
{
    (void)unused;
    for (int i = 0;; i++) {
        int status;
        sem_wait(&is_due);
        pid_t child = fork();
        if (child == 0)
            end_child(i % 2);
        /* The child is over before the move goes on. */
        if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 7)
            printf("fork %d: the child ended with %#x\n", i, status);
        sem_post(&has_begun);
    }
    return NULL;
}

/* The thread that ends the process, once it is about to, and whether handlers of that run. */
static atomic_int leaves, ends;

static void *exit_when_due(void *unused)
{
    (void)unused;
    sem_wait(&is_due);
    atomic_store(&leaves, gettid());
    exit(5);
}

/* Registered last, so that of all handlers this is the first. */
static void tell_of_exit(void)
{
    atomic_store(&ends, 1);
}

static int is_asleep(int thread)
{
    char path[64], text[512] = "";
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
    FILE *file = fopen(path, "r");
    if (!file || !fgets(text, sizeof text, file))
        text[0] = 0;
    if (file)
        fclose(file);
    const char *state = strrchr(text, ')');
    return state && state[2] == 'S';
}

/* The end waits for what moves, or its handlers run where nothing does. */
static void have_it_end(void)
{
    sem_post(&is_due);
    times_done++;
    while (!atomic_load(&leaves))
        sched_yield();
    while (!atomic_load(&ends) && !is_asleep(atomic_load(&leaves)))
        sched_yield();
}

static void have_it_fork(void)
{
    sem_post(&is_due);
    sem_wait(&has_begun);
    times_done++;
}

static void exit_here(void)
{
    exit(5);
}

static void begin_beside(void *(*act)(void *))
{
    pthread_t thread;
    REQUIRE(sem_init(&is_due, 0, 0) == 0 && sem_init(&has_begun, 0, 0) == 0);
    REQUIRE(pthread_create(&thread, NULL, act, NULL) == 0);
}

/* Has another thread fork at the call with this number of a reading; whether there was one. */
static int forks(const Simulator *simulator, int nth)
{
    static int reads;
    static char call[32];
    snprintf(call, sizeof call, "*:%d", nth);
    for (int i = 0; i < TRIES; i++) {
        int before = times_done;
        simulator->before(call, have_it_fork);
        REQUIRE(read_it(reads++ % ARRAYS, 0) == 0);
        simulator->before(NULL, NULL);
        if (times_done != before)
            return 1;
    }
    return 0;
}

/* Something else, by a copy as well. */
static void rewrite(int i)
{
    uint32_t *words = malloc(ARRAY);
    REQUIRE(words);
    starts[i] += 63 + (uint32_t)i;
    for (uint32_t at = 0; at < ARRAY / 4; at++)
        words[at] = starts[i] + at;
    CHECK(cuMemcpyHtoD_v2(arrays[i], words, ARRAY));
    free(words);
}

/* Readings that move something, at the call number `nth` of which the process ends. */
static void read_and_exit(const Simulator *simulator, int nth, int here)
{
    enum { READINGS = 2 };
    static char call[32];
    /* Nothing of it is to be new to the mover. */
    for (int i = 0; i < READINGS; i++)
        REQUIRE(read_it(i % ARRAYS, 0) == 0);
    begin_beside(exit_when_due);
    REQUIRE(atexit(tell_of_exit) == 0);
    snprintf(call, sizeof call, "*:%d", nth);
    if (nth)
        simulator->before(call, here ? exit_here : have_it_end);
    uint64_t before = simulator->calls();
    int refused = 0;
    for (int i = 0; i < READINGS; i++)
        refused += read_it(i % ARRAYS, 0);
    /* The driver may be gone before the process is. */
    while (times_done)
        pause();
    REQUIRE(refused == 0);
    printf("calls: %llu\n", (unsigned long long)(simulator->calls() - before));
}

int main(int count, char **arguments)
{
    REQUIRE(count == 2 || count == 3);
    int nth = atoi(arguments[1]);
    const char *call = count == 3 ? arguments[2] : "*";
    int is_fork = strcmp(call, "fork") == 0;
    setvbuf(stdout, NULL, _IONBF, 0);
    start_on(0);
    kernels = load_kernels();
    Simulator simulator = find_simulator();
    Control control = find_control(RTLD_DEFAULT);
    find_driver();
    CHECK(cuMemHostAlloc((void **)&out, sizeof *out, 0));
    *out = 0;
    for (int i = 0; i < ARRAYS; i++) {
        CHECK(cuMemAlloc_v2(&arrays[i], ARRAY));
        rewrite(i);
    }
    if (strncmp(call, "exit", 4) == 0) {
        read_and_exit(&simulator, nth, strcmp(call, "exit_here") == 0);
        return 0;
    }
    if (is_fork)
        begin_beside(fork_when_due);
    for (CUresult code = 0; is_fork ? forks(&simulator, nth) : fails(&simulator, call, nth, code = codes[nth % 4]); nth++) {
        unsigned long long wrong = wrong_words();
        int places = misplaced(&control);
        if (wrong || places)
            printf("%s:%d=%d: %llu wrong, %d misplaced\n", call, nth, code, wrong, places);
        if (nth % 2)
            rewrite(nth / 2 % ARRAYS);
    }
    printf("next: %d\n", nth);
    for (int i = 0; i < READS_LATER; i++) {
        rewrite(i % ARRAYS);
        REQUIRE(read_it(i % ARRAYS, 0) == 0);
    }
    printf("later: %llu wrong, %d misplaced", wrong_words(), misplaced(&control));
    printf(", kernels found %llu\n", (unsigned long long)*(volatile uint64_t *)out);
    for (int i = 0; i < ARRAYS; i++)
        CHECK(cuMemFree_v2(arrays[i]));
    CHECK(cuMemFreeHost(out));
    simulator.trim();
    printf("left: %llu handles, %llu mapped\n", (unsigned long long)simulator.handles(), (unsigned long long)simulator.mapped());
    return 0;
}
