/*
 * What it costs to move a mapped chunk by hand at an address that stays, with the new chunk's second mapping kept or not; whether the
 * data is right; whether kernels on a neighbouring chunk notice; whether graphs that were made before replay on moved memory.
 *
 *   remapping [both]      a context on GPU 0 alone, or contexts on GPU 0 and 1 with access for both
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef unsigned long long u64;
typedef struct { int kind, id, flags; } Access;
typedef struct { int kind, handles, location, device; void *win32; unsigned char more[8]; } Properties;
enum { DEVICE = 1, HOST_NUMA = 3, READ_WRITE = 3 };

static void *library;
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e3 + t.tv_nsec * 1e-6; }
static int try_(int result, const char *what) { if (result) printf("  (%s: %d)\n", what, result); return result; }
static void must(int result, const char *what) { if (result) { printf("%s: %d\n", what, result); fflush(stdout); exit(1); } }
#define FN(name) ((int (*)())dlsym(library, #name))
#define CALL(name, ...) must(FN(name)(__VA_ARGS__), #name)
#define TRY(name, ...) try_(FN(name)(__VA_ARGS__), #name)

#define HEAD ".reg .pred %p<3>;\n .reg .b32 %r<12>;\n .reg .b64 %rd<16>;\n"
#define INDEX "mov.u32 %r1, %ctaid.x;\n mov.u32 %r2, %ntid.x;\n mov.u32 %r3, %tid.x;\n mov.u32 %r4, %nctaid.x;\n" \
    "mul.wide.u32 %rd8, %r1, %r2;\n cvt.u64.u32 %rd10, %r3;\n add.s64 %rd8, %rd8, %rd10;\n mul.wide.u32 %rd9, %r2, %r4;\n"
#define LOOP(body) "again:\n setp.ge.u64 %p1, %rd8, %rd2;\n @%p1 bra done;\n shl.b64 %rd11, %rd8, 2;\n add.s64 %rd11, %rd11, %rd1;\n" body \
    "add.s64 %rd8, %rd8, %rd9;\n bra again;\n done:\n ret;\n}\n"
static const char PTX[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry iota(.param .u64 a, .param .u64 n, .param .u32 s)\n{\n" HEAD
    "ld.param.u64 %rd1, [a];\n ld.param.u64 %rd2, [n];\n ld.param.u32 %r5, [s];\n" INDEX
    LOOP("cvt.u32.u64 %r6, %rd8;\n add.s32 %r6, %r6, %r5;\n st.global.u32 [%rd11], %r6;\n")
    ".visible .entry check(.param .u64 a, .param .u64 n, .param .u32 s, .param .u64 w)\n{\n" HEAD
    "ld.param.u64 %rd1, [a];\n ld.param.u64 %rd2, [n];\n ld.param.u32 %r5, [s];\n ld.param.u64 %rd3, [w];\n" INDEX
    LOOP("ld.global.u32 %r7, [%rd11];\n cvt.u32.u64 %r6, %rd8;\n add.s32 %r6, %r6, %r5;\n setp.ne.u32 %p2, %r6, %r7;\n @%p2 red.global.add.u64 [%rd3], 1;\n")
    /* until the flag is set: every word is what this thread left there (index + rounds so far), and is made one more; counts what is not */
    ".visible .entry churn(.param .u64 a, .param .u64 n, .param .u64 f, .param .u64 w)\n{\n" HEAD
    "ld.param.u64 %rd1, [a];\n ld.param.u64 %rd2, [n];\n ld.param.u64 %rd3, [f];\n ld.param.u64 %rd4, [w];\n mov.u32 %r5, 0;\n round:\n" INDEX
    "again:\n setp.ge.u64 %p1, %rd8, %rd2;\n @%p1 bra done;\n shl.b64 %rd11, %rd8, 2;\n add.s64 %rd11, %rd11, %rd1;\n"
    "ld.volatile.global.u32 %r6, [%rd11];\n cvt.u32.u64 %r7, %rd8;\n add.s32 %r7, %r7, %r5;\n setp.ne.u32 %p2, %r6, %r7;\n @%p2 red.global.add.u64 [%rd4], 1;\n"
    "add.s32 %r6, %r6, 1;\n st.volatile.global.u32 [%rd11], %r6;\n add.s64 %rd8, %rd8, %rd9;\n bra again;\n done:\n"
    "add.s32 %r5, %r5, 1;\n ld.volatile.global.u32 %r7, [%rd3];\n setp.eq.u32 %p2, %r7, 0;\n @%p2 bra round;\n st.volatile.global.u32 [%rd3+8], %r5;\n ret;\n}\n";

static void *contexts[2], *modules[2], *iota[2], *check[2], *churn[2], *stream;
static int both;
static u64 wrong_at[2];

static void grant(u64 at, size_t bytes) {
    Access access[2] = {{DEVICE, 0, READ_WRITE}, {DEVICE, 1, READ_WRITE}};
    CALL(cuMemSetAccess, at, bytes, access, both ? (size_t)2 : (size_t)1);
}
static u64 make(int place, size_t bytes) {
    Properties p = {.kind = 1, .location = place < 0 ? HOST_NUMA : DEVICE, .device = place < 0 ? 0 : place};
    u64 handle = 0;
    CALL(cuMemCreate, &handle, bytes, &p, 0ull);
    return handle;
}
static void run(void *kernel, unsigned blocks, void *on, void **parameters) {
    CALL(cuLaunchKernel, kernel, blocks, 1u, 1u, 256u, 1u, 1u, 0u, on, parameters, NULL);
}
static u64 wrong(int gpu, u64 at, size_t bytes, unsigned start) {
    u64 count = 0, n = bytes / 4;
    CALL(cuCtxSetCurrent, contexts[gpu]);
    CALL(cuMemcpyHtoD_v2, wrong_at[gpu], &count, sizeof count);
    run(check[gpu], 512, NULL, (void *[]){&at, &n, &start, &wrong_at[gpu]});
    CALL(cuMemcpyDtoH_v2, &count, wrong_at[gpu], sizeof count);
    CALL(cuCtxSetCurrent, contexts[0]);
    return count;
}
static void fill(u64 at, size_t bytes, unsigned start) {
    u64 n = bytes / 4;
    run(iota[0], 512, NULL, (void *[]){&at, &n, &start});
    CALL(cuCtxSynchronize);
}

static u64 mapped_main, window[2];   /* the address that stays, and two second windows that are used in turn */
static const char *name(int place) { static char text[4][8]; static int i; i = (i + 1) % 4; snprintf(text[i], 8, place < 0 ? "host" : "%d", place); return text[i]; }

/* Moves; `keep`: the new chunk's second mapping stays, and the old one's ends with it. */
static u64 move(u64 old, int had_alias, int turn, int place, size_t bytes, int keep, int tell, const char *what) {
    double t0 = now();
    u64 fresh = make(place, bytes);
    double t1 = now();
    CALL(cuMemMap, window[turn], bytes, (size_t)0, fresh, 0ull);
    grant(window[turn], bytes);
    double t2 = now();
    CALL(cuMemcpyDtoDAsync_v2, window[turn], mapped_main, bytes, stream);
    CALL(cuStreamSynchronize, stream);
    double t3 = now();
    if (!keep) CALL(cuMemUnmap, window[turn], bytes);
    double t4 = now();
    CALL(cuMemUnmap, mapped_main, bytes);
    double t5 = now();
    CALL(cuMemMap, mapped_main, bytes, (size_t)0, fresh, 0ull);
    grant(mapped_main, bytes);
    double t6 = now();
    if (had_alias) CALL(cuMemUnmap, window[!turn], bytes);
    double t7 = now();
    CALL(cuMemRelease, old);
    double t8 = now();
    if (tell)
        printf("  %s: create %.3f, second mapping %.3f, copy %.3f (%.0f GB/s), drop it %.3f | unmap %.3f, map+access %.3f | old's second mapping %.3f, release %.3f ms | all %.3f ms = %.0f GB/s\n",
               what, t1 - t0, t2 - t1, t3 - t2, bytes / (t3 - t2) / 1e6, t4 - t3, t5 - t4, t6 - t5, t7 - t6, t8 - t7, t8 - t0, bytes / (t8 - t0) / 1e6);
    fflush(stdout);
    return fresh;
}

int main(int argc, char **argv) {
    both = argc > 1 && !strcmp(argv[1], "both");
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) return printf("no driver\n"), 1;
    CALL(cuInit, 0u);
    for (int gpu = both; gpu >= 0; gpu--) {
        CALL(cuDevicePrimaryCtxRetain, &contexts[gpu], gpu);
        CALL(cuCtxSetCurrent, contexts[gpu]);
        CALL(cuModuleLoadData, &modules[gpu], PTX);
        CALL(cuModuleGetFunction, &iota[gpu], modules[gpu], "iota");
        CALL(cuModuleGetFunction, &check[gpu], modules[gpu], "check");
        CALL(cuModuleGetFunction, &churn[gpu], modules[gpu], "churn");
        CALL(cuMemAlloc_v2, &wrong_at[gpu], (size_t)8);
    }
    CALL(cuStreamCreate, &stream, 1u);
    size_t whole = 512ull << 20;
    CALL(cuMemAddressReserve, &mapped_main, whole, (size_t)0, 0ull, 0ull);
    for (int i = 0; i < 2; i++) CALL(cuMemAddressReserve, &window[i], whole, (size_t)0, 0ull, 0ull);
    printf("contexts on %s\n", both ? "GPU 0 and 1" : "GPU 0 only");

    static const int way[] = {0, 1, 0, -1, 0, -1, 1, 0};
    for (int s = 0; s < 3; s++) {
        size_t bytes = (size_t[]){512, 32, 2}[s] << 20;
        for (int keep = 0; keep < 2; keep++) {
            printf("%zu MiB, the new chunk's second mapping is %s\n", bytes >> 20, keep ? "kept" : "dropped before the remap");
            for (int round = 0; round < 2; round++) {
                u64 handle = make(0, bytes), bad = 0;
                int turn = 0, had = 0;
                CALL(cuMemMap, mapped_main, bytes, (size_t)0, handle, 0ull);
                grant(mapped_main, bytes);
                fill(mapped_main, bytes, 77 + round);
                for (int i = 1; i < 8; i++, turn = !turn) {
                    char what[32];
                    snprintf(what, sizeof what, "%s -> %s", name(way[i - 1]), name(way[i]));
                    handle = move(handle, had, turn, way[i], bytes, keep, round == 1, what);
                    had = keep;
                    bad += wrong(0, mapped_main, bytes, 77 + round);
                    if (both) bad += wrong(1, mapped_main, bytes, 77 + round);
                }
                if (keep) CALL(cuMemUnmap, window[!turn], bytes);
                CALL(cuMemUnmap, mapped_main, bytes);
                CALL(cuMemRelease, handle);
                if (round == 1 || bad) printf("  wrong words: %llu\n", bad);
            }
        }
    }

    /* A kernel works on a neighbour (the upper half of the reservation) while the lower half moves to and fro; streams are made meanwhile. */
    size_t half = 256ull << 20;
    u64 lower = make(0, half), upper = make(0, half), words = half / 4;
    CALL(cuMemMap, mapped_main, half, (size_t)0, lower, 0ull);
    CALL(cuMemMap, mapped_main + half, half, (size_t)0, upper, 0ull);
    grant(mapped_main, 2 * half);
    fill(mapped_main, half, 5);
    fill(mapped_main + half, half, 0);
    volatile uint32_t *flag;
    CALL(cuMemHostAlloc, (void **)&flag, (size_t)4096, 3u);
    memset((void *)flag, 0, 4096);
    void *beside, *made;
    CALL(cuStreamCreate, &beside, 1u);
    u64 neighbour = mapped_main + half, flag_at = (u64)(uintptr_t)flag;
    u64 zero = 0, noticed;
    CALL(cuMemcpyHtoD_v2, wrong_at[0], &zero, sizeof zero);
    run(churn[0], 16, beside, (void *[]){&neighbour, &words, &flag_at, &wrong_at[0]});
    double t0 = now();
    CALL(cuStreamCreate, &made, 1u);
    double t1 = now();
    printf("beside a kernel on the neighbouring chunk: cuStreamCreate %.3f ms\n", t1 - t0);
    int turn = 0;
    for (int i = 0; i < 6; i++, turn = !turn) {
        static const int round_trip[] = {1, 0, -1, 0, 1, 0};
        char what[32];
        snprintf(what, sizeof what, "to %s", name(round_trip[i]));
        lower = move(lower, i > 0, turn, round_trip[i], half, 1, 1, what);
    }
    printf("  the kernel still runs: %s\n", FN(cuStreamQuery)(beside) == 600 ? "yes" : "no");
    t0 = now();
    CALL(cuStreamDestroy_v2, made);
    printf("  cuStreamDestroy of an idle stream %.3f ms\n", now() - t0);
    *flag = 1;
    CALL(cuStreamSynchronize, beside);
    CALL(cuMemcpyDtoH_v2, &noticed, wrong_at[0], sizeof noticed);
    printf("  after it: moved half wrong %llu, words that the kernel on the neighbour found wrong %llu (%u rounds)\n", wrong(0, mapped_main, half, 5),
           noticed, flag[2]);
    if (both) printf("  seen from GPU 1: %llu\n", wrong(1, mapped_main, half, 5));

    /* Pointer questions after a move to GPU 1. */
    lower = move(lower, 1, turn, 1, half, 1, 0, "");
    turn = !turn;
    unsigned ordinal = 99, type = 99;
    u64 base = 0, id0 = 0; size_t size = 0;
    TRY(cuPointerGetAttribute, &ordinal, 9, mapped_main);
    TRY(cuPointerGetAttribute, &type, 2, mapped_main);
    TRY(cuPointerGetAttribute, &id0, 7, mapped_main);
    TRY(cuMemGetAddressRange_v2, &base, &size, mapped_main + 4096);
    printf("after a move to GPU 1: DEVICE_ORDINAL %u, MEMORY_TYPE %u, cuMemGetAddressRange %s of %zu MiB\n", ordinal, type, base == mapped_main ? "the start" : "elsewhere", size >> 20);
    lower = move(lower, 1, turn, 0, half, 1, 0, "");
    turn = !turn;

    /* A graph with a memset, a copy and a kernel on the lower half, made before it moves. */
    void *graph = NULL, *exec = NULL, *capturing;
    u64 other, small = 1 << 20, n = small / 4;
    unsigned start = 9;
    CALL(cuMemAlloc_v2, &other, (size_t)small);
    CALL(cuStreamCreate, &capturing, 1u);
    fill(other, small, 1234);
    CALL(cuStreamBeginCapture_v2, capturing, 2);
    u64 at = mapped_main, second = mapped_main + small, third = mapped_main + 2 * small;
    CALL(cuMemsetD32Async, at, 7u, (size_t)n, capturing);
    CALL(cuMemcpyDtoDAsync_v2, second, other, (size_t)small, capturing);
    run(iota[0], 16, capturing, (void *[]){&third, &n, &start});
    CALL(cuStreamEndCapture, capturing, &graph);
    CALL(cuGraphInstantiateWithFlags, &exec, graph, 0ull);
    for (int i = 0; i < 4; i++, turn = !turn) {
        static const int to[] = {1, -1, 0, 1};
        uint32_t word[2] = {0, 0};
        lower = move(lower, 1, turn, to[i], half, 1, 0, "");
        fill(mapped_main, 3 * small, 0);
        int launched = TRY(cuGraphLaunch, exec, capturing), waited = TRY(cuStreamSynchronize, capturing);
        if (launched || waited) break;
        CALL(cuMemcpyDtoH_v2, word, at + small - 4, (size_t)4);
        printf("graph made before, replayed on memory now on %s: memset %s, copy wrong %llu, kernel wrong %llu", name(to[i]), word[0] == 7 ? "right" : "WRONG",
               wrong(0, second, small, 1234), wrong(0, third, small, 9));
        typedef struct { int result; void *a, *b; } Info;
        Info info = {0};
        int updated = FN(cuGraphExecUpdate_v2)(exec, graph, &info);
        printf("; cuGraphExecUpdate with the same graph: %d (reason %d)\n", updated, info.result);
        fflush(stdout);
    }

    /* A capture in another stream (GLOBAL) while this thread, relaxed, moves; the copy goes to a stream of its own. */
    int mode = 2;
    CALL(cuThreadExchangeStreamCaptureMode, &mode);
    CALL(cuStreamBeginCapture_v2, capturing, 0);
    CALL(cuMemsetD32Async, other, 1u, (size_t)n, capturing);
    lower = move(lower, 1, turn, 0, half, 1, 0, "");
    turn = !turn;
    graph = NULL;
    printf("a GLOBAL capture beside a move in a relaxed thread ends with %d\n", FN(cuStreamEndCapture)(capturing, &graph));
    return 0;
}
