/*
 * moved_faults FIRST [CALL]: two arrays, of which the first GPU has room for one, are read in turn while launches move them. In front of a
 * reading a fault is armed for the driver call number n from there on, for every n from FIRST on; of calls with that name, where one is named. After each
 * that struck, every frame has to lie where the library says, as the driver itself tells, with all its bytes. "next: N": nothing has struck
 * any more, as there were no such calls or nothing moves any more. Then the program writes, reads and frees as before. Simulated driver only.
 */
#include "simulator.h"

#include "control.h"
#include "kernels.h"
#include "vmm.h"

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

int main(int count, char **arguments)
{
    REQUIRE(count == 2 || count == 3);
    int nth = atoi(arguments[1]);
    const char *call = count == 3 ? arguments[2] : "*";
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
    for (CUresult code; fails(&simulator, call, nth, code = codes[nth % 4]); nth++) {
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
