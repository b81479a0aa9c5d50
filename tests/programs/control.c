/*
 * control
 * What the control interface says of a pool, from before the driver is called to a forked child. Two blocks: 32 MiB, and
 * 160 MiB, which on two GPUs of 128 MiB lies on both.
 */
#include "control.h"
#include "streams.h"

#include <sys/wait.h>
#include <unistd.h>

#define SMALL (32 * MIB)
#define LARGE (160 * MIB)

static void say_state(const Control *c, const char *when)
{
    printf("%s: %s, mode %s%s%s\n", when, state_name(c->state()), c->mode(), *c->why() ? ", " : "", c->why());
}

static void say_pieces(const Control *c, const char *what, CUdeviceptr address, size_t bytes)
{
    gpupool_piece pieces[8];
    size_t count = 8;
    int result = c->pieces(as_pointer(address), bytes, pieces, &count);
    printf("%s: %d", what, result);
    for (size_t i = 0; result == 0 && i < count; i++)
        printf(", %llu MiB on %d anchors %u", (unsigned long long)(pieces[i].bytes / MIB), pieces[i].place,
               pieces[i].anchors);
    printf("\n");
}

static void say_statistics(const Control *c, const char *when)
{
    gpupool_statistics s;
    memset(&s, 0x5a, sizeof s);
    s.size = sizeof s;
    int result = c->statistics(&s);
    printf("%s: %d, %llu blocks, %llu MiB live, %llu MiB at most, %llu allocations, %llu reused, spilled %s\n", when,
           result, (unsigned long long)s.live_blocks, (unsigned long long)(s.live_bytes / MIB),
           (unsigned long long)(s.peak_live_bytes / MIB), (unsigned long long)s.allocations,
           (unsigned long long)s.reuses, s.spilled_bytes ? "yes" : "no");
}

/* An older program knows fewer fields; what lies behind them in its memory is not ours to write. */
static void ask_for_less(const Control *c)
{
    union {
        gpupool_statistics all;
        unsigned char bytes[sizeof(gpupool_statistics)];
    } s;
    size_t known = offsetof(gpupool_statistics, peak_live_bytes), touched = 0;
    memset(&s, 0xa5, sizeof s);
    s.all.size = known;
    REQUIRE(c->statistics(&s.all) == 0);
    for (size_t i = known; i < sizeof s; i++)
        touched += s.bytes[i] != 0xa5;
    printf("older program: size %s, %llu blocks, %zu bytes beyond\n", s.all.size == known ? "as asked" : "other",
           (unsigned long long)s.all.live_blocks, touched);
    s.all.size = 3;
    printf("a size of 3: %d, no statistics: %d\n", c->statistics(&s.all), c->statistics(NULL));
}

/* Managed memory and the pool's can be moved; a freed block is nobody's. */
static void say_advice(const Control *c, CUdeviceptr pooled, CUdeviceptr freed)
{
    enum { PREFERRED = 2, LAST_PREFETCH = 4 };
    int place[2] = {-9, -9};
    CUdeviceptr managed;
    CHECK(cuMemAllocManaged(&managed, SMALL, 1));
    printf("advice on managed memory: %d, ", c->advise(as_pointer(managed), SMALL, GPUPOOL_PREFERRED_LOCATION, 1));
    printf("%d, ", c->prefetch(as_pointer(managed), SMALL, -1, NULL));
    CHECK(cuCtxSynchronize());
    CHECK(cuMemRangeGetAttribute(&place[0], sizeof place[0], PREFERRED, managed, SMALL));
    CHECK(cuMemRangeGetAttribute(&place[1], sizeof place[1], LAST_PREFETCH, managed, SMALL));
    printf("prefers GPU %d, was sent to %s\n", place[0], place[1] < 0 ? "the host" : "a GPU");
    printf("advice on the pool's: mostly read %d, ", c->advise(as_pointer(pooled), SMALL, GPUPOOL_READ_MOSTLY, 0));
    printf("accessed by GPU 1 %d, ", c->advise(as_pointer(pooled), SMALL, GPUPOOL_ACCESSED_BY, 1));
    printf("by the host %d, not any more %d, ", c->advise(as_pointer(pooled), SMALL, GPUPOOL_ACCESSED_BY, -1),
           c->advise(as_pointer(pooled), SMALL, GPUPOOL_NOT_ACCESSED_BY, 1));
    printf("by no GPU %d, not by none %d, ", c->advise(as_pointer(pooled), SMALL, GPUPOOL_ACCESSED_BY, 99),
           c->advise(as_pointer(pooled), SMALL, GPUPOOL_NOT_ACCESSED_BY, 99));
    printf("preferred on GPU 1 %d, ", c->advise(as_pointer(pooled), SMALL, GPUPOOL_PREFERRED_LOCATION, 1));
    printf("nowhere %d\n", c->advise(as_pointer(pooled), SMALL, GPUPOOL_NO_PREFERRED_LOCATION, 0));
    say_pieces(c, "the pool's", pooled, SMALL);
    printf("on a freed block: ");
    printf("%d %d; unknown advice: ", c->prefetch(as_pointer(freed), SMALL, 0, NULL),
           c->advise(as_pointer(freed), SMALL, GPUPOOL_ACCESSED_BY, 0));
    printf("%d\n", c->advise(as_pointer(pooled), SMALL, 7, 0));
    /* What is in no block, and what goes on behind one. */
    const void *const nowhere[] = {&managed, NULL, as_pointer(4096), as_pointer(~(CUdeviceptr)0 - 8191)};
    printf("no memory:");
    for (int i = 0; i < 4; i++)
        printf(" %d %d %d", c->prefetch(nowhere[i], 4096, 1, NULL), c->advise(nowhere[i], 4096, GPUPOOL_PREFERRED_LOCATION, 1),
               c->advise(nowhere[i], 4096, GPUPOOL_READ_MOSTLY, 0));
    printf("; beyond the block: %d", c->prefetch(as_pointer(pooled), SMALL + 1, 1, NULL));
    for (int advice = GPUPOOL_READ_MOSTLY; advice <= GPUPOOL_NOT_ACCESSED_BY; advice++)
        printf(" %d", c->advise(as_pointer(pooled), SMALL + 1, advice, 1));
    printf("\n");
    /* Whosever the memory is. */
    const void *const whose[] = {as_pointer(pooled), as_pointer(managed), &managed, NULL};
    printf("no bytes:");
    for (int i = 0; i < 4; i++)
        printf(" %d %d %d", c->prefetch(whose[i], 0, 1, NULL), c->advise(whose[i], 0, GPUPOOL_PREFERRED_LOCATION, 1),
               c->anchor(whose[i], 0));
    printf("\n");
    CHECK(cuMemFree_v2(managed));
}

/* What is neither the pool's nor managed lies where the driver has put it. */
static void say_drivers_own(const Control *c)
{
    CUdeviceptr own;
    void *pinned;
    CHECK(cuMemAllocAsync(&own, 4096, NULL));
    CHECK(cuMemHostAlloc(&pinned, 4096, 0));
    printf("the driver's: sent %d, advised %d; ", c->prefetch(as_pointer(own), 4096, 1, NULL),
           c->advise(as_pointer(own), 4096, GPUPOOL_PREFERRED_LOCATION, 1));
    printf("pinned: %d, %d\n", c->prefetch(pinned, 4096, 0, NULL), c->advise(pinned, 4096, GPUPOOL_READ_MOSTLY, 0));
    CHECK(cuMemFreeHost(pinned));
    CHECK(cuMemFreeAsync(own, NULL));
}

static void in_a_child(const Control *c, CUdeviceptr block)
{
    void *pointer;
    int status;
    fflush(stdout);
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        say_state(c, "child");
        say_statistics(c, "child");
        say_pieces(c, "child", block, SMALL);
        /* To give back what it inherited is no use of CUDA. */
        printf("child: free %d\n", c->free(as_pointer(block), 0, NULL));
        printf("child: malloc %d, trim %llu\n", c->malloc(&pointer, SMALL, 0, NULL), (unsigned long long)c->trim());
        say_state(c, "child later");
        fflush(stdout);
        _exit(0);
    }
    REQUIRE(waitpid(child, &status, 0) == child);
    printf("child ended with %d\n", status);
}

/* The last byte asked for ends a block, whatever stands behind it. */
static void say_end(const Control *c)
{
    const size_t bytes = 3 * MIB + 5;
    CUdeviceptr block;
    gpupool_piece piece = {0};
    size_t count = 1;
    CHECK(cuMemAlloc_v2(&block, bytes));
    printf("odd block: %d", c->pieces(as_pointer(block), bytes + MIB, &piece, &count));
    printf(", %llu of its bytes", (unsigned long long)(bytes - piece.bytes));
    printf(" left out; at its end: %d\n", c->pieces(as_pointer(block + bytes), 1, &piece, &count));
    printf("its bytes anchored: %d, ", c->anchor(as_pointer(block), bytes));
    printf("one more: %d, ", c->anchor(as_pointer(block), bytes + 1));
    printf("at its end: %d\n", c->anchor(as_pointer(block + bytes), 1));
    CHECK(cuMemFree_v2(block));
}

/* What a network adapter is about to reach stays where it is, to its end and no longer. */
static void say_registered(const Control *c)
{
    enum { SYNC_MEMOPS = 6 };
    unsigned one = 1;
    CUdeviceptr block;
    CHECK(cuMemAlloc_v2(&block, SMALL));
    for (int i = 0; i < 2; i++)
        CHECK(cuPointerSetAttribute(&one, SYNC_MEMOPS, block + MIB));
    say_pieces(c, "with SYNC_MEMOPS", block, SMALL);
    CHECK(cuMemFree_v2(block));
    CHECK(cuMemAlloc_v2(&block, SMALL));
    say_pieces(c, "another block", block, SMALL);
    CHECK(cuMemFree_v2(block));
}

static void say_devices(const Control *c)
{
    static const int none[] = {-2, -77, 99};
    for (size_t i = 0; i < sizeof none / sizeof *none; i++) {
        void *pointer;
        printf("malloc on device %d: %d\n", none[i], c->malloc(&pointer, SMALL, none[i], NULL));
    }
    void *unchanged = &unchanged;
    int answer = c->malloc(&unchanged, 0, 0, NULL);
    printf("malloc of no bytes: %d, to nowhere: %d, the pointer %s\n", answer, c->malloc(NULL, SMALL, 0, NULL),
           unchanged == &unchanged ? "as it was" : "another");
}

int main(void)
{
    CUdeviceptr small, large;
    Control c = find_control(RTLD_DEFAULT);
    REQUIRE(c.version && *c.version());
    say_state(&c, "at first");
    say_statistics(&c, "at first");

    start_on(0);
    CHECK(cuMemAlloc_v2(&small, SMALL));
    CHECK(cuMemAlloc_v2(&large, LARGE));
    say_state(&c, "with two blocks");
    say_statistics(&c, "with two blocks");
    ask_for_less(&c);

    say_pieces(&c, "small block", small, SMALL);
    say_pieces(&c, "large block", large, LARGE);
    say_pieces(&c, "its last 4 MiB", large + LARGE - 4 * MIB, 64 * MIB);
    say_pieces(&c, "a stack address", as_address(&c), 4);
    size_t count = 0;
    printf("no room: %d, ", c.pieces(as_pointer(large), LARGE, NULL, &count));
    printf("%zu pieces; no count: %d\n", count, c.pieces(as_pointer(large), LARGE, NULL, NULL));

    printf("anchor: %d, beyond the block: %d, nothing: %d\n", c.anchor(as_pointer(small), SMALL),
           c.anchor(as_pointer(small), SMALL + 4 * MIB), c.anchor(as_pointer(small), 0));
    say_pieces(&c, "anchored block", small, SMALL);
    printf("released: %d", c.release_anchor(as_pointer(small), SMALL));
    printf(", again: %d\n", c.release_anchor(as_pointer(small), SMALL));
    say_pieces(&c, "released block", small, SMALL);

    in_a_child(&c, small);
    CHECK(cuMemFree_v2(large));
    say_advice(&c, small, large);
    say_drivers_own(&c);
    CHECK(cuMemFree_v2(small));
    say_statistics(&c, "after the frees");
    say_end(&c);
    say_registered(&c);
    say_devices(&c);
    printf("trim: %s\n", c.trim() > 0 ? "some" : "none");
    return 0;
}
