/*
 * The kernel that the library looks at memory with (src/cuda/digest.ptx, whose path is the first word): whether having the driver
 * translate it waits for work that is under way, what loading it takes while nothing runs, whether every change of a word shows, and how long it takes
 * beside a copy of as much.
 */
#include "probe.h"

CUresult cuLinkAddData_v2(void *link, int kind, const void *data, size_t bytes, const char *name, unsigned count, int *options,
                          void **values);
CUresult cuLinkComplete(void *link, void **image, size_t *bytes);
CUresult cuLinkCreate_v2(unsigned count, int *options, void **values, void **link);
CUresult cuLinkDestroy(void *link);

enum { LINK_PTX = 1, ROUNDS = 9, HELD_MS = 3000, BLOCKS = 256, THREADS = 512 };

typedef struct {
    uint64_t one, other;
} Digest;

static CUfunction kernel;
static uint64_t *sums;
/* As the library's: any, the second and the last odd. */
static uint64_t keys[4] = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1};

static void *translate(const char *path)
{
    static char text[1 << 16];
    FILE *file = fopen(path, "r");
    REQUIRE(file);
    size_t length = fread(text, 1, sizeof text - 1, file), bytes;
    fclose(file);
    void *link, *made;
    double since = now_us();
    CHECK(cuLinkCreate_v2(0, NULL, NULL, &link));
    CHECK(cuLinkAddData_v2(link, LINK_PTX, text, length + 1, "digest", 0, NULL, NULL));
    CHECK(cuLinkComplete(link, &made, &bytes));
    void *image = malloc(bytes);
    REQUIRE(image);
    memcpy(image, made, bytes);
    CHECK(cuLinkDestroy(link));
    measured("translating the kernel", "ms", (now_us() - since) / 1e3);
    return image;
}

static Digest digest(CUstream stream, CUdeviceptr from, size_t bytes, double *took)
{
    uint64_t words = bytes / 4, slots = BLOCKS;
    double since = now_us();
    Digest all = {0, 0};
    CHECK(cuLaunchKernel(kernel, BLOCKS, 1, 1, THREADS, 1, 1, 0, stream,
                         (void *[]){&from, &words, &sums, &slots, &keys[0], &keys[1], &keys[2], &keys[3]}, NULL));
    CHECK(cuStreamSynchronize(stream));
    for (int i = 0; i < BLOCKS; i++) {
        all.one += sums[2 * i];
        all.other += sums[2 * i + 1];
    }
    if (took)
        *took = now_us() - since;
    return all;
}

static uint64_t mix(uint64_t word, uint64_t first, uint64_t second)
{
    word = (word ^ word >> 29) * first;
    word = (word ^ word >> 32) * second;
    return word ^ word >> 32;
}

/* Of words that count up from a first one, by the processor. */
static Digest reckoned(uint64_t words, uint32_t first)
{
    Digest all = {0, 0};
    for (uint64_t at = 0; at < words / 4; at++) {
        uint32_t word = first + (uint32_t)(4 * at);
        uint64_t a = word | (uint64_t)(uint32_t)(word + 1) << 32, b = (uint32_t)(word + 2) | (uint64_t)(uint32_t)(word + 3) << 32;
        uint64_t x = mix(a ^ (keys[0] + at * keys[1]), 0xBF58476D1CE4E5B9, 0x94D049BB133111EB);
        uint64_t y = mix(b ^ (x + keys[2] + at * keys[3]), 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53);
        uint64_t z = mix(x + (y << 23 | y >> 41), 0xD6E8FEB86659FD93, 0x9E3779B97F4A7C15);
        all.one += z;
        all.other += mix(y + (z << 37 | z >> 27), 0x9FB21C651E98DF25, 0xD1342543DE82EF95);
    }
    return all;
}

static int same(Digest a, Digest b) { return a.one == b.one && a.other == b.other; }

/* As an image takes them: many small ones, and one wait for them. */
static void many(Probed *p, size_t part, size_t bytes)
{
    CUdeviceptr near = reserve(bytes);
    uint64_t handle = physical(0, bytes), words = part / 4, slots = BLOCKS;
    double took[ROUNDS];
    char what[128];
    map_here(near, handle, bytes, 1);
    for (int round = 0; round < ROUNDS; round++) {
        double since = now_us();
        for (size_t at = 0; at < bytes; at += part) {
            CUdeviceptr from = near + at;
            CHECK(cuLaunchKernel(kernel, BLOCKS, 1, 1, THREADS, 1, 1, 0, p->stream,
                                 (void *[]){&from, &words, &sums, &slots, &keys[0], &keys[1], &keys[2], &keys[3]}, NULL));
        }
        CHECK(cuStreamSynchronize(p->stream));
        took[round] = now_us() - since;
    }
    snprintf(what, sizeof what, "%zu MiB, looking at it in parts of %zu MiB", bytes / MIB, part / MIB);
    measured_all(what, "us", took, ROUNDS);
    CHECK(cuMemUnmap(near, bytes));
    CHECK(cuMemRelease(handle));
}

static void of(Probed *p, size_t bytes)
{
    CUdeviceptr near = reserve(bytes), to = reserve(bytes);
    int other = gpus > 1 ? 1 : HOST;
    uint64_t handles[2] = {physical(0, bytes), physical(other, bytes)};
    uint64_t words = bytes / 4;
    double took[ROUNDS], copying[ROUNDS];
    char what[128];
    map_here(near, handles[0], bytes, 1);
    map_here(to, handles[1], bytes, 1);
    iota(&p->kernels, p->stream, near, words, 7);
    CHECK(cuStreamSynchronize(p->stream));
    Digest before = digest(p->stream, near, bytes, NULL);
    for (int round = 0; round < ROUNDS; round++) {
        REQUIRE(same(digest(p->stream, near, bytes, &took[round]), before));
        double since = now_us();
        CHECK(cuMemcpyDtoDAsync_v2(to, near, bytes, p->stream));
        CHECK(cuStreamSynchronize(p->stream));
        copying[round] = now_us() - since;
    }
    snprintf(what, sizeof what, "%zu MiB, looking at it", bytes / MIB);
    measured_all(what, "us", took, ROUNDS);
    snprintf(what, sizeof what, "%zu MiB, copying it to %s", bytes / MIB, place_name(other));
    measured_all(what, "us", copying, ROUNDS);
    answer("two digests of the same contents are the same", same(digest(p->stream, to, bytes, NULL), before),
           "%zu MiB: the copy has the same digest", bytes / MIB);
    /* One word at a time, by one bit, and then two that change places. */
    int seen = 0, changes = 0;
    for (uint64_t at = 0; at < words; at = at * 3 + 1) {
        CHECK(cuMemsetD32_v2(near + 4 * at, (unsigned)(at + 7) ^ 1u << (at % 32), 1));
        CHECK(cuStreamSynchronize(NULL));
        seen += !same(digest(p->stream, near, bytes, NULL), before);
        CHECK(cuMemsetD32_v2(near + 4 * at, (unsigned)(at + 7), 1));
        changes++;
    }
    for (uint64_t at = 1; at < words; at = at * 5 + 2) {
        CHECK(cuMemsetD32_v2(near, (unsigned)(at + 7), 1));
        CHECK(cuMemsetD32_v2(near + 4 * at, 7, 1));
        CHECK(cuStreamSynchronize(NULL));
        seen += !same(digest(p->stream, near, bytes, NULL), before);
        CHECK(cuMemsetD32_v2(near, 7, 1));
        CHECK(cuMemsetD32_v2(near + 4 * at, (unsigned)(at + 7), 1));
        changes++;
    }
    CHECK(cuStreamSynchronize(NULL));
    /* Four words that are looked at together, and four others. */
    for (uint64_t at = 4; at + 4 <= words; at = at * 7) {
        for (uint64_t word = 0; word < 4; word++) {
            CHECK(cuMemsetD32_v2(near + 4 * word, (unsigned)(at + word + 7), 1));
            CHECK(cuMemsetD32_v2(near + 4 * (at + word), (unsigned)(word + 7), 1));
        }
        CHECK(cuStreamSynchronize(NULL));
        seen += !same(digest(p->stream, near, bytes, NULL), before);
        for (uint64_t word = 0; word < 4; word++) {
            CHECK(cuMemsetD32_v2(near + 4 * word, (unsigned)(word + 7), 1));
            CHECK(cuMemsetD32_v2(near + 4 * (at + word), (unsigned)(at + word + 7), 1));
        }
        changes++;
    }
    /* The highest bit of two numbers that are far from each other, which a weaker way of mixing would have cancel out. */
    for (uint64_t at = 7; at < words; at = at * 3 + 2) {
        CHECK(cuMemsetD32_v2(near + 4 * 3, (unsigned)(3 + 7) ^ 1u << 31, 1));
        CHECK(cuMemsetD32_v2(near + 4 * at, (unsigned)(at + 7) ^ 1u << 31, 1));
        CHECK(cuStreamSynchronize(NULL));
        seen += !same(digest(p->stream, near, bytes, NULL), before);
        CHECK(cuMemsetD32_v2(near + 4 * 3, 3 + 7, 1));
        CHECK(cuMemsetD32_v2(near + 4 * at, (unsigned)(at + 7), 1));
        changes++;
    }
    CHECK(cuStreamSynchronize(NULL));
    answer("every change shows", seen == changes, "%zu MiB: %d of %d changes show", bytes / MIB, seen, changes);
    answer("what is as it was has the digest that it had", same(digest(p->stream, near, bytes, NULL), before),
           "%zu MiB: what was put back has the digest that it had", bytes / MIB);
    answer("a GPU and a processor reckon the same", same(before, reckoned(words, 7)), "%zu MiB: the processor's digest is the same", bytes / MIB);
    for (int key = 0; key < 4; key++) {
        keys[key] ^= 2ull << (key * 7);
        int other_key = !same(digest(p->stream, near, bytes, NULL), before);
        keys[key] ^= 2ull << (key * 7);
        answer("a digest is of its keys", other_key, "%zu MiB: with another key %d the digest is another one", bytes / MIB, key);
    }
    CHECK(cuMemUnmap(near, bytes));
    CHECK(cuMemUnmap(to, bytes));
    CHECK(cuMemRelease(handles[0]));
    CHECK(cuMemRelease(handles[1]));
}

int main(int argc, char **argv)
{
    CUmodule module;
    void *pinned;
    REQUIRE(argc > 1);
    /* The largest, in MiB. */
    size_t largest = argc > 2 ? (size_t)atoi(argv[2]) : 512;
    begin_probe(60);
    Probed *p = &on_gpu[0];
    warm_up(p, p->stream);
    spin_in(p, p->stream, HELD_MS);
    now_asking = "whether a translation waits";
    void *image = translate(argv[1]);
    int waited = cuStreamQuery(p->stream) != (CUresult)NOT_READY;
    let_go();
    CHECK(cuCtxSynchronize());
    answer("a kernel is translated without a wait for work that is under way", !waited,
           "translating a kernel (cuLinkComplete) waits for a kernel that runs: %s", waited ? "yes" : "no");
    now_asking = "loading";
    CHECK(cuMemHostAlloc(&pinned, 16 * BLOCKS, CU_MEMHOSTALLOC_DEVICEMAP));
    sums = pinned;
    double since = now_us();
    CHECK(cuModuleLoadData(&module, image));
    CHECK(cuModuleGetFunction(&kernel, module, "digest_u32"));
    measured("loading what was translated while nothing runs", "us", now_us() - since);
    now_asking = "digests";
    for (size_t mib = 2; mib <= largest; mib *= mib == 2 ? 16 : 4) {
        if (has_room(mib * MIB))
            of(p, mib * MIB);
        else
            not_asked("digests", "2 GiB have to stay free");
    }
    for (size_t part = 2; part <= 32 && largest >= 32; part *= 4)
        if (has_room(largest * MIB))
            many(p, part * MIB, largest * MIB);
    return end_probe();
}
