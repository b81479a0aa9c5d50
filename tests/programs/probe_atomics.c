/*
 * Atomics by the place of their memory: of 32, 64 and 128 bits, of halves and vectors, and reductions by the bulk copy engine, by one GPU,
 * by two at once, and with the processor at the same time. Every word has to hold as many as were added.
 *   probe_atomics                    each place in a process of its own, because an atomic that is refused ends its context
 *   probe_atomics PLACE WHO FIRST    one of them, from the FIRST operation on; ends with 10 + the operation that was refused
 */
#include "probe.h"

#include <sys/wait.h>

enum { NATIVE_ON_HOST = 86, NATIVE_ON_PEER = 3, BLOCKS = 64, THREADS = 128, BYTES = 2 * MIB, REFUSED = 10 };

CUresult cuDeviceGetP2PAttribute(int *value, int attribute, CUdevice device, CUdevice peer);

/* One kernel an operation and scope: every thread does it `times` times, to word (index + turn) & mask. */
#define PTX_OPERATION(name, shift, body)                                                                           \
    ".visible .entry " name "(.param .u64 " name "_0, .param .u64 " name "_1, .param .u32 " name "_2)\n{\n"        \
    ".reg .pred %p<4>;\n .reg .b32 %r<12>;\n .reg .b64 %rd<20>;\n .reg .f32 %f<4>;\n .reg .f64 %fd<4>;\n"          \
    ".reg .b128 %q<4>;\n"                                                                                          \
    PTX_GLOBAL(name, "0", "%rd1") PTX_LOAD(name, "1", "u64", "%rd2") PTX_LOAD(name, "2", "u32", "%r5") PTX_INDEX   \
    "again:\n setp.eq.u32 %p1, %r5, 0;\n @%p1 bra done;\n and.b64 %rd11, %rd8, %rd2;\n"                            \
    "shl.b64 %rd11, %rd11, " shift ";\n add.s64 %rd11, %rd11, %rd1;\n" body                                        \
    "add.s64 %rd8, %rd8, 1;\n sub.u32 %r5, %r5, 1;\n bra again;\n done:\n ret;\n}\n"

#define PTX_SCOPED(s)                                                                                              \
    PTX_OPERATION("red32_" s, "2", "red.relaxed." s ".global.add.u32 [%rd11], 1;\n")                               \
    PTX_OPERATION("add32_" s, "2",                                                                                 \
                  "atom.relaxed." s ".global.add.u32 %r6, [%rd11], 1;\n setp.eq.u32 %p2, %r6, -1;\n @%p2 trap;\n") \
    PTX_OPERATION("add64_" s, "3",                                                                                 \
                  "atom.relaxed." s ".global.add.u64 %rd3, [%rd11], 1;\n setp.eq.u64 %p2, %rd3, -1;\n @%p2 trap;\n") \
    PTX_OPERATION("cas32_" s, "2",                                                                                 \
                  "ld.relaxed." s ".global.u32 %r6, [%rd11];\n try:\n mov.u32 %r7, %r6;\n add.u32 %r8, %r7, 1;\n"  \
                  "atom.relaxed." s ".global.cas.b32 %r6, [%rd11], %r7, %r8;\n setp.ne.u32 %p2, %r6, %r7;\n"       \
                  "@%p2 bra try;\n")                                                                               \
    PTX_OPERATION("cas64_" s, "3",                                                                                 \
                  "ld.relaxed." s ".global.u64 %rd3, [%rd11];\n try:\n mov.u64 %rd4, %rd3;\n add.u64 %rd5, %rd4, 1;\n" \
                  "atom.relaxed." s ".global.cas.b64 %rd3, [%rd11], %rd4, %rd5;\n setp.ne.u64 %p2, %rd3, %rd4;\n"  \
                  "@%p2 bra try;\n")                                                                               \
    PTX_OPERATION("cas128_" s, "4",                                                                                \
                  "ld.relaxed." s ".global.b128 %q1, [%rd11];\n try:\n mov.b128 {%rd3, %rd4}, %q1;\n"              \
                  "add.u64 %rd5, %rd3, 1;\n add.u64 %rd6, %rd4, 1;\n mov.b128 %q2, {%rd3, %rd4};\n"                \
                  "mov.b128 %q3, {%rd5, %rd6};\n atom.relaxed." s ".global.cas.b128 %q1, [%rd11], %q2, %q3;\n"     \
                  "mov.b128 {%rd12, %rd13}, %q1;\n setp.ne.u64 %p2, %rd12, %rd3;\n setp.ne.u64 %p3, %rd13, %rd4;\n" \
                  "or.pred %p2, %p2, %p3;\n @%p2 bra try;\n")                                                      \
    PTX_OPERATION("f32_" s, "2", "red.relaxed." s ".global.add.f32 [%rd11], 0f3F800000;\n")                        \
    PTX_OPERATION("f64_" s, "3", "red.relaxed." s ".global.add.f64 [%rd11], 0d3FF0000000000000;\n")                \
    PTX_OPERATION("f16x2_" s, "2", "mov.b32 %r6, 0x3C003C00;\n red.relaxed." s ".global.add.noftz.f16x2 [%rd11], %r6;\n") \
    PTX_OPERATION("bf16x2_" s, "2", "mov.b32 %r6, 0x3F803F80;\n red.relaxed." s ".global.add.noftz.bf16x2 [%rd11], %r6;\n") \
    PTX_OPERATION("f32v4_" s, "4",                                                                                 \
                  "mov.f32 %f1, 0f3F800000;\n red.relaxed." s ".global.add.v4.f32 [%rd11], {%f1, %f1, %f1, %f1};\n")

static const char ATOMICS[] =
    ".version 8.4\n.target sm_90\n.address_size 64\n"
    PTX_SCOPED("gpu") PTX_SCOPED("sys")

    /* One thread a block adds 64 words of 1 at once, by the bulk copy engine. */
    ".visible .entry bulk32_gpu(.param .u64 bulk32_gpu_0, .param .u64 bulk32_gpu_1, .param .u32 bulk32_gpu_2)\n{\n"
    ".reg .pred %p<4>;\n .reg .b32 %r<12>;\n .reg .b64 %rd<20>;\n .shared .align 128 .b8 ones[256];\n"
    PTX_GLOBAL("bulk32_gpu", "0", "%rd1") PTX_LOAD("bulk32_gpu", "2", "u32", "%r5")
    "mov.u32 %r1, %tid.x;\n mov.u32 %r2, ones;\n setp.ge.u32 %p1, %r1, 64;\n @%p1 bra filled;\n"
    "shl.b32 %r3, %r1, 2;\n add.u32 %r3, %r3, %r2;\n mov.u32 %r4, 1;\n st.shared.u32 [%r3], %r4;\n"
    "filled:\n fence.proxy.async.shared::cta;\n bar.sync 0;\n setp.ne.u32 %p1, %r1, 0;\n @%p1 bra done;\n"
    "again:\n setp.eq.u32 %p1, %r5, 0;\n @%p1 bra sent;\n"
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd1], [%r2], 256;\n"
    "sub.u32 %r5, %r5, 1;\n bra again;\n"
    "sent:\n cp.async.bulk.commit_group;\n cp.async.bulk.wait_group 0;\n done:\n ret;\n}\n";

/* How many 32-bit parts of the memory hold one count each, and how it is written. */
typedef enum { U32, U64, F32, F64, F16, BF16 } Form;

typedef struct {
    const char *name;
    Form form;
    /* Bytes of one word, and how many words; halves are whole numbers to 256 at least. */
    unsigned bytes, words;
    int bulk;
} Operation;

static const Operation OPERATIONS[] = {
    {"red32", U32, 4, 64, 0},    {"add32", U32, 4, 64, 0},      {"add64", U64, 8, 64, 0},   {"cas32", U32, 4, 1024, 0},
    {"cas64", U64, 8, 1024, 0},  {"cas128", U64, 16, 1024, 0},  {"f32", F32, 4, 64, 0},     {"f64", F64, 8, 64, 0},
    {"f16x2", F16, 4, 1024, 0},  {"bf16x2", BF16, 4, 1024, 0},  {"f32v4", F32, 16, 64, 0},  {"bulk32", U32, 4, 64, 1},
};
enum { OPERATION_COUNT = sizeof OPERATIONS / sizeof *OPERATIONS, TIMES = 16 };

typedef enum { LOCAL, PEER, MAPPED_HOST, PINNED_HOST, PLACES } Where;
typedef enum { ONE_GPU, ONE_SYSTEM, BOTH, WITH_PROCESSOR, WAYS } Who;
static const char *const WHERE[] = {"GPU 0's memory", "GPU 1's memory", "mapped host memory", "pinned host memory"};
static const char *const WHO[] = {"GPU 0, scope gpu", "GPU 0, scope sys", "both GPUs, scope sys", "GPU 0 and the processor"};

static CUmodule modules[2];
static CUdeviceptr memory;

/* What a count of n looks like, as its first 64 bits. */
static uint64_t pattern(Form form, uint64_t n)
{
    float f = (float)n;
    double d = (double)n;
    uint32_t bits;
    uint64_t wide;
    memcpy(&bits, &f, 4);
    memcpy(&wide, &d, 8);
    switch (form) {
    case U32: return n;
    case U64: return n;
    case F32: return bits;
    case F64: return wide;
    case BF16: return (bits >> 16) * 0x10001u;
    default: break;
    }
    /* Half: whole numbers to 2048 are exact. */
    uint32_t half = n ? ((bits >> 13) & 0x3ff) | (((bits >> 23) - 127 + 15) << 10) : 0;
    return half * 0x10001u;
}

/* How many of the words' parts are not as they should be. */
static unsigned wrong_words(const Operation *o, const unsigned char *at, uint64_t each)
{
    unsigned part = o->form == U64 || o->form == F64 ? 8 : 4, wrong = 0;
    uint64_t want = pattern(o->form, each), found = 0;
    for (unsigned i = 0; i < o->bytes * o->words; i += part) {
        memcpy(&found, at + i, part);
        wrong += found != want;
    }
    return wrong;
}

static atomic_int go;
static const Operation *with_processor;
static unsigned char *seen;

static void *processor(void *unused)
{
    (void)unused;
    while (!atomic_load(&go))
        ;
    for (unsigned i = 0; i < BLOCKS * THREADS * TIMES; i++) {
        unsigned char *word = seen + (size_t)(i % with_processor->words) * with_processor->bytes;
        if (with_processor->bytes == 4)
            __atomic_fetch_add((uint32_t *)word, 1, __ATOMIC_RELAXED);
        else
            __atomic_fetch_add((uint64_t *)word, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

static CUresult start(int gpu, const Operation *o, Who who)
{
    CUfunction function;
    char name[32];
    uint64_t mask = o->words - 1;
    uint32_t times = TIMES;
    const char *scope = who == ONE_GPU || o->bulk ? "gpu" : "sys";
    snprintf(name, sizeof name, "%s_%s", o->name, scope);
    CHECK(cuCtxSetCurrent(on_gpu[gpu].context));
    CUresult result = cuModuleGetFunction(&function, modules[gpu], name);
    if (result)
        return result;
    return cuLaunchKernel(function, BLOCKS, 1, 1, THREADS, 1, 1, 0, on_gpu[gpu].stream, (void *[]){&memory, &mask, &times}, NULL);
}

static int one(Where where, Who who, int first)
{
    char good[256] = "", bad[256] = "";
    int count = who == BOTH ? 2 : 1, lost = 0, asked = 0;
    uint64_t chunk;
    void *page;
    begin_probe(40);
    begin_second();
    for (int gpu = 0; gpu < count; gpu++) {
        CHECK(cuCtxSetCurrent(on_gpu[gpu].context));
        CUresult result = cuModuleLoadData(&modules[gpu], ATOMICS);
        if (result) {
            printf("atomics: not asked: this GPU has not all of them (%d)\n", result);
            return 0;
        }
    }
    CHECK(cuCtxSetCurrent(on_gpu[0].context));
    if (where == PINNED_HOST) {
        CHECK(cuMemHostAlloc(&page, BYTES, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
        seen = page;
        memory = (CUdeviceptr)(uintptr_t)page;
    } else {
        chunk = physical(where == MAPPED_HOST ? HOST : (int)where, BYTES);
        memory = reserve(BYTES);
        map_here(memory, chunk, BYTES, gpus);
        if (where == MAPPED_HOST) {
            CUmemAccessDesc host = {{ON_HOST_NODE, 0}, READ_WRITE};
            CHECK(cuMemSetAccess(memory, BYTES, &host, 1));
            seen = (unsigned char *)(uintptr_t)memory;
        }
    }
    for (int i = first; i < OPERATION_COUNT; i++) {
        const Operation *o = &OPERATIONS[i];
        static unsigned char copy[16 * 1024];
        pthread_t thread;
        int with = who == WITH_PROCESSOR;
        if (with && (o->form > U64 || o->bytes > 8 || o->bulk))
            continue;
        now_asking = o->name;
        CHECK(cuCtxSetCurrent(on_gpu[0].context));
        CHECK(cuMemsetD8_v2(memory, 0, BYTES));
        CHECK(cuCtxSynchronize());
        with_processor = o;
        atomic_store(&go, 0);
        if (with)
            REQUIRE(pthread_create(&thread, NULL, processor, NULL) == 0);
        CUresult result = CUDA_SUCCESS;
        for (int gpu = count - 1; gpu >= 0 && !result; gpu--)
            result = start(gpu, o, who);
        atomic_store(&go, 1);
        if (with)
            REQUIRE(pthread_join(thread, NULL) == 0);
        if (result == NOT_SUPPORTED)
            continue;
        for (int gpu = count - 1; gpu >= 0 && !result; gpu--) {
            CHECK(cuCtxSetCurrent(on_gpu[gpu].context));
            result = cuStreamSynchronize(on_gpu[gpu].stream);
        }
        if (result) {
            printf("%s by %s: %s is refused (%d)%s%s\n", WHERE[where], WHO[who], o->name, result, *good ? "; whole until then: " : "",
                   good);
            if (who <= ONE_SYSTEM)
                printf("  FALLS: A13: one GPU's atomics are whole wherever its memory lies\n");
            fflush(stdout);
            _exit(REFUSED + i);
        }
        CHECK(cuMemcpyDtoH_v2(copy, memory, o->bytes * o->words));
        uint64_t each = o->bulk ? (uint64_t)BLOCKS * TIMES : (uint64_t)BLOCKS * THREADS * TIMES / o->words;
        unsigned wrong = wrong_words(o, copy, each * (unsigned)(count + with));
        char *list = wrong ? bad : good;
        size_t length = strlen(list);
        if (wrong)
            snprintf(list + length, sizeof bad - length, "%s%s (%u words)", length ? ", " : "", o->name, wrong);
        else
            snprintf(list + length, sizeof good - length, "%s%s", length ? ", " : "", o->name);
        lost += wrong > 0;
        asked++;
    }
    if (!asked) {
        printf("%s by %s: not asked: this driver runs no such kernel\n", WHERE[where], WHO[who]);
        return 0;
    }
    int native = 0, peer_native = 0;
    CHECK(cuDeviceGetAttribute(&native, NATIVE_ON_HOST, 0));
    if (gpus > 1)
        CHECK(cuDeviceGetP2PAttribute(&peer_native, NATIVE_ON_PEER, 0, 1));
    int relied = who <= ONE_SYSTEM || (who == BOTH && where <= PEER && peer_native);
    answer(who <= ONE_SYSTEM ? "A13: one GPU's atomics are whole wherever its memory lies"
                             : "A13: two GPUs' atomics on the memory of either are whole where the link has native ones",
           !lost || !relied, "%s by %s: whole: %s; updates lost: %s", WHERE[where], WHO[who], *good ? good : "none", *bad ? bad : "none");
    return fallen > 0;
}

int main(int argc, char **argv)
{
    int falls = 0, native = 0, peer_native = 0;
    if (argc > 3)
        return one((Where)atoi(argv[1]), (Who)atoi(argv[2]), atoi(argv[3]));
    /* Only this process asks how many there are: the others' output follows this. */
    count_gpus(150);
    CHECK(cuDeviceGetAttribute(&native, NATIVE_ON_HOST, 0));
    if (gpus > 1)
        CHECK(cuDeviceGetP2PAttribute(&peer_native, NATIVE_ON_PEER, 0, 1));
    printf("HOST_NATIVE_ATOMIC_SUPPORTED %d", native);
    printf(gpus > 1 ? ", between the GPUs %d\n" : "\n", peer_native);
    for (Where where = LOCAL; where < PLACES; where++)
        for (Who who = ONE_GPU; who < WAYS; who++) {
            if (gpus < 2 && (where == PEER || who == BOTH)) {
                if (who == BOTH || who == ONE_GPU)
                    printf("%s by %s: not asked: there is one GPU\n", WHERE[where], WHO[who]);
                continue;
            }
            if (who == WITH_PROCESSOR && where < MAPPED_HOST)
                continue;
            for (int first = 0; first < OPERATION_COUNT;) {
                char words[3][16];
                int status = 0;
                snprintf(words[0], 16, "%d", where);
                snprintf(words[1], 16, "%d", who);
                snprintf(words[2], 16, "%d", first);
                fflush(stdout);
                pid_t child = fork();
                REQUIRE(child >= 0);
                if (!child) {
                    execl("/proc/self/exe", argv[0], words[0], words[1], words[2], (char *)NULL);
                    _exit(4);
                }
                REQUIRE(waitpid(child, &status, 0) == child);
                int code = WIFEXITED(status) ? WEXITSTATUS(status) : 4;
                falls += code == 1 || code == 3 || code == 4 || (code >= REFUSED && who <= ONE_SYSTEM);
                first = code >= REFUSED ? code - REFUSED + 1 : OPERATION_COUNT;
            }
        }
    fallen = falls;
    return end_probe();
}
