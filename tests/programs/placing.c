/*
 * placing WHAT: memory of the pool that the program places by hand (gpupool_prefetch), where it lies then, what is in it and what
 * every place holds. Two GPUs of 256 MiB; the first one's context is current.
 *   round     a block of one chunk and one of several, to the other GPU, the host and back
 *   parts     a range that covers chunks in part, the end of an odd block, ranges that are too small
 *   shared    chunks that other blocks stand on, too; free memory beside a block
 *   stays     anchored, exported and retained memory
 *   there     what cannot move and lies where it should already
 *   refused   places and ranges that are none, a full place, a capture
 *   both      a second context, and a kernel at work on a neighbour
 *   faults CODE  every driver call of a move failing once, and two in a row
 *   labels    names of blocks, and budgets for names
 *   scopes    names and places for what a thread allocates
 *   ends      a context that ends with blocks that were moved; threads that free while others move
 */
#include "control.h"
#include "kernels.h"
#include "simulator.h"
#include "streams.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

enum { ONE = 40 * MIB, LARGE = 34 * MIB, MANY = 8 * MIB };

static Control c;
static Simulator simulator;
static Kernels kernels;

static void say_where(const char *what, CUdeviceptr block, size_t bytes)
{
    gpupool_piece pieces[64];
    size_t count = 64;
    int result = c.pieces(as_pointer(block), bytes, pieces, &count);
    printf("%s:", what);
    for (size_t i = 0; result == 0 && i < count; i++)
        printf(" %llu at %d%s", (unsigned long long)(pieces[i].bytes / MIB), pieces[i].place, pieces[i].anchors ? " anchored" : "");
    printf(result ? " answer %d\n" : "\n", result);
}

/* What the pool holds and uses, beside what the driver has given: contexts take the same all the time. */
static void say_held(void)
{
    static uint64_t before[3];
    static int known;
    gpupool_place places[8];
    size_t count = c.places(places, 8);
    uint64_t now[3] = {simulator.used ? simulator.used(0) : 0, simulator.used ? simulator.used(1) : 0,
                       simulator.host_used ? simulator.host_used() : 0};
    for (size_t i = 0; i < count && i < 3; i++) {
        if (!known)
            before[i] = now[i] - places[i].held;
        printf("%s%d holds %llu, uses %llu", i ? "; " : "  ", places[i].place, (unsigned long long)(places[i].held / MIB),
               (unsigned long long)(places[i].used / MIB));
        if (now[i] - before[i] != places[i].held)
            printf(" BUT THE DRIVER GAVE %llu", (unsigned long long)((now[i] - before[i]) / MIB));
    }
    known = 1;
    printf("\n");
}

static int go(CUdeviceptr from, size_t bytes, int place) { return c.prefetch(as_pointer(from), bytes, place, NULL); }

static CUdeviceptr filled(size_t bytes, uint32_t start)
{
    CUdeviceptr block;
    CHECK(cuMemAlloc_v2(&block, bytes));
    iota(&kernels, NULL, block, bytes / 4, start);
    return block;
}

static unsigned long long wrong(CUdeviceptr block, size_t bytes, uint32_t start)
{
    return count_wrong(&kernels, block, bytes / 4, start);
}

static void in_a_round(void)
{
    static const int way[] = {1, -1, 1, 0, 0};
    CUdeviceptr one = filled(LARGE, 7), pieces[MANY / (2 * MIB)], many;
    for (size_t i = 0; i < MANY / (2 * MIB); i++)
        CHECK(cuMemAlloc_v2(&pieces[i], 2 * MIB));
    for (size_t i = 0; i < MANY / (2 * MIB); i++)
        CHECK(cuMemFree_v2(pieces[i]));
    /* Stands on the chunks of those. */
    many = filled(MANY, 9);
    say_held();
    for (size_t i = 0; i < sizeof way / sizeof *way; i++) {
        int first = go(one, LARGE, way[i]), second = go(many, MANY, way[i]);
        printf("to %d: %d, %d\n", way[i], first, second);
        say_where("one chunk", one, LARGE);
        say_where("many", many, MANY);
        printf("  wrong words: %llu, %llu\n", wrong(one, LARGE, 7), wrong(many, MANY, 9));
        say_held();
    }
    /* What is written there is there. */
    REQUIRE(go(one, LARGE, 1) == 0);
    iota(&kernels, NULL, one, LARGE / 4, 77);
    REQUIRE(go(one, LARGE, 0) == 0);
    printf("written on the other GPU: %llu wrong\n", wrong(one, LARGE, 77));
    CHECK(cuMemFree_v2(one));
    CHECK(cuMemFree_v2(many));
    c.trim();
    say_held();
    printf("left: %llu handles, %llu mapped\n", (unsigned long long)simulator.handles(), (unsigned long long)simulator.mapped());
}

static void in_parts(void)
{
    const size_t odd = 5 * MIB + 12;
    CUdeviceptr block = filled(ONE, 3), end;
    printf("8 MiB from 3 MiB on: %d\n", go(block + 3 * MIB, 8 * MIB, 1));
    say_where("block", block, ONE);
    say_held();
    printf("its last 5 MiB: %d\n", go(block + ONE - 5 * MIB, 5 * MIB, -1));
    say_where("block", block, ONE);
    say_held();
    printf("wrong words: %llu\n", wrong(block, ONE, 3));
    printf("a byte at the start: %d, ", go(block, 1, 1));
    printf("2 MiB with no whole page: %d, all but a byte: ", go(block + MIB, 2 * MIB, 1));
    printf("%d\n", go(block, ONE - 1, 1));
    say_where("block", block, ONE);
    printf("where it lies already: %d", go(block + 4 * MIB, 4 * MIB, 1));
    printf(", and all of it: %d\n", go(block, ONE, 0));
    say_where("block", block, ONE);
    printf("wrong words: %llu\n", wrong(block, ONE, 3));
    CHECK(cuMemFree_v2(block));
    end = filled(odd, 5);
    printf("odd block: %d, its last byte: ", go(end, odd, 1));
    printf("%d\n", go(end + odd - 1, 1, 0));
    say_where("odd block", end, odd);
    printf("its last 2 MiB and more: %d\n", go(end + 3 * MIB, odd - 3 * MIB, 0));
    say_where("odd block", end, odd);
    printf("wrong words: %llu\n", wrong(end, odd - 12, 5));
    CHECK(cuMemFree_v2(end));
}

static void beside_others(void)
{
    CUdeviceptr whole, left, right;
    CHECK(cuMemAlloc_v2(&whole, ONE));
    CHECK(cuMemFree_v2(whole));
    left = filled(16 * MIB, 1);
    right = filled(16 * MIB, 2);
    printf("on one chunk: %s\n", left == whole && right == whole + 16 * MIB ? "yes" : "no");
    printf("one of two: %d\n", go(left, 16 * MIB, 1));
    say_where("left", left, 16 * MIB);
    say_held();
    CHECK(cuMemFree_v2(right));
    printf("alone: %d\n", go(left, 16 * MIB, 1));
    say_where("left", left, 16 * MIB);
    printf("  wrong words: %llu\n", wrong(left, 16 * MIB, 1));
    say_held();
    /* What was free there is gone, and its addresses can be used again. */
    right = filled(16 * MIB, 3);
    printf("next block: %llu wrong; first: %llu\n", wrong(right, 16 * MIB, 3), wrong(left, 16 * MIB, 1));
    say_held();
    CHECK(cuMemFree_v2(left));
    CHECK(cuMemFree_v2(right));
}

static void what_stays(void)
{
    CUipcMemHandle ipc;
    CUresult cuMemRetainAllocationHandle(uint64_t *handle, void *address);
    CUresult cuMemRelease(uint64_t handle);
    uint64_t handle;
    CUdeviceptr asked = filled(ONE, 1), exported = filled(ONE, 2), retained = filled(ONE, 3);
    REQUIRE(c.anchor(as_pointer(asked), MIB) == 0);
    printf("asked: %d", go(asked, ONE, 1));
    REQUIRE(c.release_anchor(as_pointer(asked), MIB) == 0);
    printf(", then: %d\n", go(asked, ONE, 1));
    CHECK(cuIpcGetMemHandle(&ipc, exported));
    printf("exported: %d\n", go(exported, ONE, 1));
    CHECK(cuMemRetainAllocationHandle(&handle, as_pointer(retained)));
    printf("retained: %d\n", go(retained, ONE, 1));
    CHECK(cuMemRelease(handle));
    say_where("asked", asked, ONE);
    say_where("exported", exported, ONE);
    say_where("retained", retained, ONE);
    printf("wrong words: %llu, %llu, %llu\n", wrong(asked, ONE, 1), wrong(exported, ONE, 2), wrong(retained, ONE, 3));
}

/* Nothing of these moves; each is asked to go to its own place and to another. */
static void what_is_there(void)
{
    CUipcMemHandle ipc;
    CUdeviceptr whole, left, right, small, block = filled(ONE, 1);
    printf("a byte: %d, %d; no whole page: %d, %d\n", go(block + 5, 1, 0), go(block + 5, 1, 1), go(block + MIB, 2 * MIB, 0),
           go(block + MIB, 2 * MIB, 1));
    REQUIRE(go(block, 4 * MIB, 1) == 0);
    printf("on two places: %d, %d\n", go(block + 3 * MIB, 2 * MIB, 0), go(block + 3 * MIB, 2 * MIB, 1));
    CHECK(cuMemAlloc_v2(&small, 1000));
    printf("a small block: %d, %d, advised %d; beyond it: %d\n", go(small, 1000, 0), go(small, 1000, 1),
           c.advise(as_pointer(small), 1000, GPUPOOL_PREFERRED_LOCATION, 0), go(small, 2000, 0));
    CHECK(cuMemAlloc_v2(&whole, ONE));
    CHECK(cuMemFree_v2(whole));
    left = filled(16 * MIB, 1), right = filled(16 * MIB, 2);
    printf("on one chunk: %d, %d\n", go(left, 16 * MIB, 0), go(right, 16 * MIB, 1));
    CHECK(cuIpcGetMemHandle(&ipc, block));
    printf("exported: %d, %d\n", go(block + 4 * MIB, ONE - 4 * MIB, 0), go(block + 4 * MIB, ONE - 4 * MIB, 1));
    printf("no such place: %d, %d\n", go(small, 1000, 7), go(block + 5, 1, -6));
}

static void what_is_refused(void)
{
    CUdeviceptr block = filled(ONE, 1), other, freed = filled(4 * MIB, 0);
    CUstream stream;
    CUgraph graph;
    int status;
    CHECK(cuMemFree_v2(freed));
    printf("GPU 7: %d, host node 5: %d, beyond the block: %d, nothing: %d\n", go(block, ONE, 7), go(block, ONE, -6),
           go(block, ONE + 1, 1), go(block, 0, 1));
    printf("freed: %d, managed memory still moves: ", go(freed, 4 * MIB, 1));
    CHECK(cuMemAllocManaged(&other, 4 * MIB, 1));
    printf("%d\n", go(other, 4 * MIB, -1));
    CHECK(cuMemFree_v2(other));
    /* All but 16 MiB of the other GPU: 224 MiB can be had of each. */
    other = filled(208 * MIB, 2);
    printf("a large one: %d, ", go(other, 208 * MIB, 1));
    printf("one more: %d\n", go(block, ONE, 1));
    say_where("block", block, ONE);
    say_held();
    /* Room that only freed memory takes is room. */
    CHECK(cuMemFree_v2(other));
    printf("after the free: %d\n", go(block, ONE, 1));
    say_held();
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuStreamBeginCapture_v2(stream, CAPTURE_GLOBAL));
    printf("while a stream is captured: %d", go(block, ONE, 0));
    CHECK(cuStreamIsCapturing(stream, &status));
    printf(", capture %s", status == 1 ? "goes on" : "broken");
    printf(", ends with %d\n", cuStreamEndCapture(stream, &graph));
    printf("after it: %d\n", go(block, ONE, 0));
    printf("wrong words: %llu\n", wrong(block, ONE, 1));
}

/* A kernel of its own context holds the processor as long as the host says, on its own word and nothing else. */
static void with_both(void)
{
    CUcontext first, second;
    Kernels there;
    CHECK(cuCtxGetCurrent(&first));
    CUdeviceptr block = filled(ONE, 4), neighbour = filled(ONE, 5);
    REQUIRE(go(block, ONE, 1) == 0);
    second = start_on(1);
    there = load_kernels();
    printf("GPU 1, which came later: %llu wrong", (unsigned long long)count_wrong(&there, block, ONE / 4, 4));
    CHECK(cuCtxSetCurrent(first));
    REQUIRE(go(block, ONE, -1) == 0);
    CHECK(cuCtxSetCurrent(second));
    printf(", on the host %llu", (unsigned long long)count_wrong(&there, block, ONE / 4, 4));
    /* By the thread of another GPU, after work of that GPU on it. */
    iota(&there, NULL, block, ONE / 4, 6);
    REQUIRE(go(block, ONE, 0) == 0);
    printf(", back %llu\n", (unsigned long long)count_wrong(&there, block, ONE / 4, 6));
    CHECK(cuCtxSetCurrent(first));
    printf("GPU 0: %llu wrong, neighbour %llu\n", wrong(block, ONE, 6), wrong(neighbour, ONE, 5));
    say_held();
}

typedef struct {
    CUcontext context;
    CUdeviceptr block;
    int number;
    unsigned long long wrong;
} Mover;

enum { MOVERS = 4, TURNS = 6, SMALL = 6 * MIB };

static void *move_to_and_fro(void *argument)
{
    Mover *mover = argument;
    CHECK(cuCtxSetCurrent(mover->context));
    for (int i = 0; i < TURNS; i++) {
        CUdeviceptr more;
        CHECK(cuMemAlloc_v2(&more, SMALL));
        iota(&kernels, NULL, more, SMALL / 4, (uint32_t)i);
        int answer = go(mover->block, SMALL, i % 2 == 0);
        REQUIRE(answer == 0 || answer == GPUPOOL_STAYED);
        mover->wrong += wrong(mover->block, SMALL, (uint32_t)mover->number) + wrong(more, SMALL, (uint32_t)i);
        CHECK(cuMemFree_v2(more));
    }
    return NULL;
}

static void to_the_end(void)
{
    CUcontext first, created;
    CUdeviceptr block;
    pthread_t threads[MOVERS];
    Mover movers[MOVERS];
    unsigned long long sum = 0;
    CHECK(cuCtxGetCurrent(&first));
    for (int i = 0; i < MOVERS; i++) {
        movers[i] = (Mover){first, filled(SMALL, (uint32_t)i), i, 0};
        REQUIRE(pthread_create(&threads[i], NULL, move_to_and_fro, &movers[i]) == 0);
    }
    for (int i = 0; i < MOVERS; i++) {
        REQUIRE(pthread_join(threads[i], NULL) == 0);
        CHECK(cuMemFree_v2(movers[i].block));
        sum += movers[i].wrong;
    }
    printf("threads that move, allocate and free: %llu wrong\n", sum);
    c.trim();
    say_held();
    CHECK(cuCtxCreate_v2(&created, 0, 0));
    CHECK(cuMemAlloc_v2(&block, ONE));
    REQUIRE(go(block, 16 * MIB, 1) == 0);
    CHECK(cuCtxDestroy_v2(created));
    CHECK(cuCtxSetCurrent(first));
    printf("of a context that ended: %d\n", go(block, ONE, 0));
    c.trim();
    say_held();
    printf("left: %llu handles, %llu mapped\n", (unsigned long long)simulator.handles(), (unsigned long long)simulator.mapped());
}

static void say_labels(void)
{
    gpupool_label_usage labels[4];
    size_t count = c.labels(labels, 4);
    for (size_t i = 0; i < count && i < 4; i++) {
        gpupool_label_usage *l = &labels[i];
        printf("  %s: %llu blocks, %llu MiB; %llu at home, %llu on peers, %llu on the host", l->label, (unsigned long long)l->blocks,
               (unsigned long long)(l->bytes / MIB), (unsigned long long)(l->at_home / MIB),
               (unsigned long long)(l->on_peers / MIB), (unsigned long long)(l->on_host / MIB));
        if (l->budget == UINT64_MAX)
            printf("\n");
        else
            printf(" of %llu\n", (unsigned long long)(l->budget / MIB));
    }
}

static void with_labels(void)
{
    enum { CACHE = 8 * MIB };
    CUdeviceptr caches[4], other = filled(CACHE, 9);
    char longest[65];
    memset(longest, 'a', 64);
    longest[64] = 0;
    for (int i = 0; i < 4; i++)
        caches[i] = filled(CACHE, (uint32_t)i);
    printf("label: %d, inside: %d, ", c.label(as_pointer(caches[0]), "kv"), c.label(as_pointer(caches[1] + MIB), "kv"));
    printf("weights: %d, again: ", c.label(as_pointer(other), "w"));
    printf("%d\n", c.label(as_pointer(other), "weights"));
    say_labels();
    printf("nobody's: %d, empty: %d, too long: %d, no name for a budget: %d\n", c.label(longest, "kv"), c.label(as_pointer(other), ""),
           c.label(as_pointer(other), longest), c.label_budget(NULL, 1));
    printf("budget: %d\n", c.label_budget("kv", 2 * CACHE));
    say_labels();
    /* The third is one too many. */
    printf("third: %d\n", c.label(as_pointer(caches[2]), "kv"));
    say_where("third", caches[2], CACHE);
    say_labels();
    printf("home again: %d", go(caches[2], CACHE, 0));
    printf(", half of it: %d", go(caches[2], CACHE / 2, 0));
    CHECK(cuMemFree_v2(caches[0]));
    printf(", after a free: %d\n", go(caches[2], CACHE, 0));
    say_where("third", caches[2], CACHE);
    /* What may not move stays, and is told. */
    REQUIRE(c.anchor(as_pointer(caches[3]), CACHE) == 0);
    printf("anchored: %d\n", c.label(as_pointer(caches[3]), "kv"));
    say_labels();
    printf("no budget: %d, ", c.label_budget("kv", UINT64_MAX));
    printf("no label: %d, ", c.label(as_pointer(caches[3]), NULL));
    printf("%llu, %llu, %llu wrong\n", wrong(caches[1], CACHE, 1), wrong(caches[2], CACHE, 2), wrong(caches[3], CACHE, 3));
    say_labels();
    for (int i = 1; i < 4; i++)
        CHECK(cuMemFree_v2(caches[i]));
    CHECK(cuMemFree_v2(other));
    say_labels();
}

static CUdeviceptr allocated(size_t bytes)
{
    CUdeviceptr block;
    CHECK(cuMemAlloc_v2(&block, bytes));
    return block;
}

static void *elsewhere(void *unused)
{
    CHECK(cuCtxSetCurrent(*(CUcontext *)unused));
    CUdeviceptr block = allocated(8 * MIB);
    say_where("another thread's", block, 8 * MIB);
    CHECK(cuMemFree_v2(block));
    return NULL;
}

static void in_scopes(void)
{
    enum { CACHE = 8 * MIB };
    char outer[64], most[64], longest[65];
    CUdeviceptr blocks[8], small;
    CUcontext context;
    pthread_t thread;
    memset(longest, 'a', 64);
    longest[64] = 0;
    printf("far: %d, ", c.far_scope(1));
    printf("again: %d\n", c.far_scope(1));
    blocks[0] = filled(CACHE, 4);
    say_where("far", blocks[0], CACHE);
    CHECK(cuCtxGetCurrent(&context));
    REQUIRE(pthread_create(&thread, NULL, elsewhere, &context) == 0 && pthread_join(thread, NULL) == 0);
    printf("near: %d\n", c.far_scope(0));
    blocks[1] = allocated(CACHE);
    say_where("near", blocks[1], CACHE);
    for (int i = 0; i < 4; i++)
        REQUIRE(wrong(blocks[0], CACHE, 4) == 0);
    say_where("used", blocks[0], CACHE);

    printf("kv: %d, before '%s'; ", c.label_scope("kv", outer), outer);
    blocks[2] = allocated(CACHE);
    CHECK(cuMemAlloc_v2(&small, 1000));
    printf("inner: %d, before '%s'; too long: %d; ", c.label_scope("inner", most), most, c.label_scope(longest, NULL));
    blocks[3] = allocated(CACHE);
    printf("back: %d; ", c.label_scope(most, NULL));
    REQUIRE(c.label_budget("kv", 2 * CACHE) == 0);
    blocks[4] = allocated(CACHE);
    blocks[5] = allocated(CACHE);
    printf("none: %d\n", c.label_scope(outer, outer));
    blocks[6] = allocated(CACHE);
    say_where("beyond the budget", blocks[5], CACHE);
    say_labels();

    /* The other GPU has 216 MiB left and the host 256, so that this one fills the GPU, the rest of it is on the host, and the next has room
       at home only. */
    c.far_scope(1);
    blocks[7] = allocated(400 * MIB);
    say_where("larger than the other GPU", blocks[7], 400 * MIB);
    CUdeviceptr last = allocated(100 * MIB);
    say_where("no room elsewhere", last, 100 * MIB);
    c.far_scope(0);
    CHECK(cuMemFree_v2(last));
    CHECK(cuMemFree_v2(small));
    for (int i = 0; i < 8; i++)
        CHECK(cuMemFree_v2(blocks[i]));
    c.trim();
    say_held();
}

/* One move with a fault; it succeeds or fails, and whatever it did, the block is what it was. Returns the calls made. */
static uint64_t faulty_move(CUdeviceptr block, int *place, const char *faults, uint64_t first)
{
    REQUIRE(simulator.arm(faults) == 0);
    uint64_t calls = simulator.calls();
    int answer = go(block + 2 * MIB, 6 * MIB, *place);
    calls = simulator.calls() - calls;
    REQUIRE(simulator.arm("") == 0);
    if (answer != 0)
        printf("%llu: answer %d\n", (unsigned long long)first, answer);
    /* The host gives nothing any more once its driver has refused all that can be left out. */
    if (answer == 0 || (answer == 2 && *place == -1))
        *place = *place == 1 ? -1 : *place == -1 ? 0 : 1;
    if (wrong(block, 10 * MIB, 8) != 0)
        printf("%llu: WRONG WORDS\n", (unsigned long long)first);
    return calls;
}

static void with_faults(int code)
{
    CUdeviceptr block = filled(10 * MIB, 8);
    char faults[64];
    int place = 1;
    say_held();
    for (int in_a_row = 1; in_a_row <= 2; in_a_row++) {
        uint64_t n = 0, calls;
        /* A move to a place that gives nothing any more makes few calls: until three in a row met no fault. */
        for (int met_none = 0; met_none < 3; met_none = calls < n ? met_none + 1 : 0) {
            n++;
            /* First with memory that is made each time, then with what the move before has left. */
            if (in_a_row == 1)
                c.trim();
            int length = snprintf(faults, sizeof faults, "*:%llu=%d", (unsigned long long)n, code);
            if (in_a_row == 2)
                snprintf(faults + length, sizeof faults - (size_t)length, ",*:%llu=%d", (unsigned long long)n + 1, code);
            calls = faulty_move(block, &place, faults, n);
        }
        REQUIRE(n > (in_a_row == 1 ? 20 : 12));
    }
    CHECK(cuMemFree_v2(block));
    c.trim();
    say_held();
    printf("left: %llu handles, %llu mapped\n", (unsigned long long)simulator.handles(), (unsigned long long)simulator.mapped());
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } parts[] = {{"round", in_a_round}, {"parts", in_parts},     {"shared", beside_others}, {"stays", what_stays}, {"there", what_is_there},
                 {"refused", what_is_refused}, {"both", with_both}, {"labels", with_labels}, {"ends", to_the_end},
                 {"scopes", in_scopes}};
    REQUIRE(argc >= 2);
    c = find_control(RTLD_DEFAULT);
    simulator = find_simulator();
    REQUIRE(c.prefetch != NULL);
    start_on(0);
    kernels = load_kernels();
    if (strcmp(argv[1], "faults") == 0 && argc == 3)
        return with_faults(atoi(argv[2])), 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (strcmp(argv[1], parts[i].name) == 0)
            return parts[i].run(), 0;
    return 2;
}
