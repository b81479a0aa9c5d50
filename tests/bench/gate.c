/*
 * What the gate costs a call that passes it, before anything of a GPU lies elsewhere and after that; and what noting what a launch uses costs the launch,
 * with GPUPOOL_MOVE=off and auto, while all is near and while a fifth of what launches use lies elsewhere. Goals: 2 and 5 ns for the gate; nothing a launch while
 * all is near, and 100 ns while something is not.
 *
 *   gpupool sim -- env LD_PRELOAD=libgpupool.so gate [TURNS]
 *
 * The gate: two calls that the shim passes on and traces, one through the gate and one past it; both name nothing, so the driver refuses them at once. What the
 * first takes more hooked than bare, less what the second does, is the gate. A launch is timed three times: one that the driver refuses at once, for its blocks have
 * no threads, so that little but the hook is timed; one that it makes, which leaves less of the hook's memory in the processor's caches; and one that it makes behind
 * work that is not over. The goal is judged by the last. The simulated driver has a thread that makes what is launched, and that has to be woken where it has nothing
 * left to do: who launches a little more slowly wakes it more often, so that between launches that are made at once 40 ns of doing nothing cost 80 to 140
 * (figures in RESULTS.md). Behind work that is not over nobody is woken.
 *
 * Each way is measured in processes of its own, TURNS of them (7 at most, and if nothing is said) in turn: the median of all, and the least and the most. On a GPU a
 * process takes some 14 s.
 */
#include "paired.h"
#include <semaphore.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TURNS = 7, GATE_ROUNDS = 301, GATE_BATCH = 2000, ROUNDS = 1001, BATCH = 200, ARRAYS = 1000, CYCLES = 20 };

static const char KERNEL[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry fill_u32(.param .u64 fill_u32_0, .param .u64 fill_u32_1, .param .u32 fill_u32_2)\n{\n ret;\n}\n";

typedef int (*launch_fn)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

/* What one process measures. */
enum { GATE_BEFORE, GATE_AFTER, REFUSED_BARE, REFUSED_MORE, MADE_BARE, MADE_MORE, QUEUED_BARE, QUEUED_MORE, NUMBERS };

static void *function;
static int (*synchronize)(void);
static int (*run_on_host)(void *, void (*)(void *), void *);
static sem_t goes_on;
static unsigned long long arrays[ARRAYS];
static unsigned next, threads;

static void through_gate(void *f) { ((int (*)(void **, void *))f)(NULL, NULL); }
static void past_gate(void *f) { ((int (*)(void *, size_t))f)(NULL, 0); }
static void launch(void *f) {
    unsigned long long words = 0;
    unsigned value = 0;
    void *parameters[] = {&arrays[next++ % ARRAYS], &words, &value};
    ((launch_fn)f)(function, 1, 1, 1, threads, 1, 1, 0, NULL, parameters, NULL);
}

static double batch(void (*call)(void *), void *f, int calls) {
    double begin = seconds();
    for (int i = 0; i < calls; i++) call(f);
    return (seconds() - begin) * 1e9 / calls;
}

static double gate(void) {
    static double samples[GATE_ROUNDS];
    void *through = hooked("cuGraphClone"), *past = hooked("cuMemPoolTrimTo");
    void *bare_through = bare("cuGraphClone"), *bare_past = bare("cuMemPoolTrimTo");
    if (through == bare_through || past == bare_past) require(1, "finding the hooks (is libgpupool.so preloaded?); the look-up");
    for (int round = 0; round < GATE_ROUNDS; round++) {
        double with = batch(through_gate, through, GATE_BATCH), without = batch(past_gate, past, GATE_BATCH);
        samples[round] = with - batch(through_gate, bare_through, GATE_BATCH) - (without - batch(past_gate, bare_past, GATE_BATCH));
    }
    return quantile(samples, GATE_ROUNDS, 0.5);
}

static void wait_to_go_on(void *unused) {
    (void)unused;
    while (sem_wait(&goes_on)) {}
}

/* A batch of launches by this function, and the end of all of them; behind a function of ours that waits for the last one, if they are to queue. */
static double launched(void *f, int are_queued) {
    if (are_queued) require(run_on_host(NULL, wait_to_go_on, NULL), "cuLaunchHostFunc");
    double took = batch(launch, f, BATCH);
    if (are_queued) sem_post(&goes_on);
    require(synchronize(), "cuCtxSynchronize");
    return took;
}

/* Bare, and how much more hooked. */
static void launches(unsigned of_threads, int are_queued, double *of_bare, double *of_more) {
    static double without[ROUNDS], more[ROUNDS];
    void *b = bare("cuLaunchKernel"), *h = hooked("cuLaunchKernel");
    threads = of_threads;
    for (int i = 0; i < CYCLES * ARRAYS / BATCH; i++) launched(h, 0);
    for (int round = 0; round < ROUNDS; round++) {
        double with;
        if (round % 2) without[round] = launched(b, are_queued);
        with = launched(h, are_queued);
        if (round % 2 == 0) without[round] = launched(b, are_queued);
        more[round] = with - without[round];
    }
    *of_bare = quantile(without, ROUNDS, 0.5);
    *of_more = quantile(more, ROUNDS, 0.5);
}

static int measure(void) {
    double found[NUMBERS];
    void *module;
    open_first_gpu();
    require(((int (*)(void **, const void *))hooked("cuModuleLoadData"))(&module, KERNEL), "cuModuleLoadData");
    require(((int (*)(void **, void *, const char *))hooked("cuModuleGetFunction"))(&function, module, "fill_u32"), "cuModuleGetFunction");
    synchronize = (int (*)(void))bare("cuCtxSynchronize");
    run_on_host = (int (*)(void *, void (*)(void *), void *))bare("cuLaunchHostFunc");
    require(sem_init(&goes_on, 0, 0), "sem_init");
    int (*allocate)(unsigned long long *, size_t) = (int (*)(unsigned long long *, size_t))hooked("cuMemAlloc_v2");
    require(allocate(&arrays[0], 2 << 20), "cuMemAlloc_v2");
    found[GATE_BEFORE] = gate();
    for (int i = 1; i < ARRAYS; i++) require(allocate(&arrays[i], 2 << 20), "cuMemAlloc_v2");
    found[GATE_AFTER] = gate();
    launches(0, 0, &found[REFUSED_BARE], &found[REFUSED_MORE]);
    launches(1, 0, &found[MADE_BARE], &found[MADE_MORE]);
    launches(1, 1, &found[QUEUED_BARE], &found[QUEUED_MORE]);
    for (int i = 0; i < NUMBERS; i++) printf("%.2f ", found[i]);
    printf("\n");
    return 0;
}

static const struct {
    const char *name, *move, *limit;
} WAYS[] = {
    {"MOVE=off, all near", "off", NULL},
    {"MOVE=auto, all near", "auto", NULL},
    {"MOVE=off, a fifth far", "off", "0:1600MiB"},
    {"MOVE=auto, a fifth far", "auto", "0:1600MiB"},
};
enum { COUNT = sizeof WAYS / sizeof *WAYS };

/* This program again, with other settings. */
static void in_a_process(const char *self, int way, double *found) {
    int ends[2], status;
    require(pipe(ends), "pipe");
    pid_t child = fork();
    if (child == 0) {
        setenv("GPUPOOL_MOVE", WAYS[way].move, 1);
        setenv("GPUPOOL_LOG", "off", 1);
        if (WAYS[way].limit) setenv("GPUPOOL_LIMIT", WAYS[way].limit, 1);
        else unsetenv("GPUPOOL_LIMIT");
        dup2(ends[1], 1);
        execl("/proc/self/exe", self, "measure", (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    FILE *answer = fdopen(ends[0], "r");
    int known = 0;
    while (answer && known < NUMBERS && fscanf(answer, "%lf", &found[known]) == 1) known++;
    if (answer) fclose(answer);
    waitpid(child, &status, 0);
    require(known < NUMBERS || status, WAYS[way].name);
}

static double tell(const char *name, double *samples, int count) {
    double median = quantile(samples, count, 0.5);
    printf("%-44s %7.1f ns (%.1f to %.1f)\n", name, median, samples[0], samples[count - 1]);
    return median;
}

int main(int argc, char **argv) {
    static double found[COUNT][NUMBERS][TURNS], gates[COUNT * TURNS + COUNT * TURNS];
    double refused[COUNT], made[COUNT], queued[COUNT];
    char name[64];
    if (argc > 1 && !strcmp(argv[1], "measure")) return measure();
    int turns = argc > 1 ? atoi(argv[1]) : TURNS;
    require(turns < 1 || turns > TURNS, "TURNS is 1 to 7;");
    for (int turn = 0; turn < turns; turn++)
        for (int way = 0; way < COUNT; way++) {
            double one[NUMBERS];
            in_a_process(argv[0], way, one);
            for (int i = 0; i < NUMBERS; i++) found[way][i][turn] = one[i];
        }
    int before = 0, after = 0;
    for (int way = 0; way < COUNT; way++)
        for (int turn = 0; turn < turns; turn++) gates[before++] = found[way][GATE_BEFORE][turn];
    double first = tell("gate, before the first spill", gates, before);
    for (int way = 0; way < COUNT; way++)
        for (int turn = 0; WAYS[way].limit && turn < turns; turn++) gates[after++] = found[way][GATE_AFTER][turn];
    double second = tell("gate, after it", gates, after);
    printf("gate: %s 2 ns before, %s 5 ns after\n", first <= 2 ? "within" : "OVER", second <= 5 ? "within" : "OVER");
    for (int way = 0; way < COUNT; way++) {
        snprintf(name, sizeof name, "refused launch, %s, more", WAYS[way].name);
        refused[way] = tell(name, found[way][REFUSED_MORE], turns);
    }
    for (int way = 0; way < COUNT; way++) {
        snprintf(name, sizeof name, "launch, %s, bare", WAYS[way].name);
        tell(name, found[way][MADE_BARE], turns);
        snprintf(name, sizeof name, "launch, %s, more", WAYS[way].name);
        made[way] = tell(name, found[way][MADE_MORE], turns);
        snprintf(name, sizeof name, "queued launch, %s, bare", WAYS[way].name);
        tell(name, found[way][QUEUED_BARE], turns);
        snprintf(name, sizeof name, "queued launch, %s, more", WAYS[way].name);
        queued[way] = tell(name, found[way][QUEUED_MORE], turns);
    }
    printf("all near, auto less off: %+.1f ns (refused), %+.1f ns (made), %+.1f ns (queued)\n", refused[1] - refused[0], made[1] - made[0], queued[1] - queued[0]);
    for (int way = 2; way < COUNT; way++) {
        double more = queued[way] - queued[way - 2];
        printf("%s, less all near: %+.1f ns (refused), %+.1f ns (made), %+.1f ns (queued): %s 100 ns\n", WAYS[way].name, refused[way] - refused[way - 2],
               made[way] - made[way - 2], more, more <= 100 ? "within" : "OVER");
    }
    return 0;
}
