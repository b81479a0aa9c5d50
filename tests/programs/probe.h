/*
 * What all probes share. A probe asks a driver what moving memory under a running program relies on: a question and its answer
 * a line, and below an answer that the library does not rely on the rule that falls with it. Lines of measurements are for people.
 * A probe ends with 0 if every rule stands, with 1 if one falls, and with 3 if it had to end itself.
 *
 * Nothing here can hang a GPU: every kernel that waits also looks at the GPU's clock, and behind that a thread lets all of them go.
 */
#ifndef PROBE_H
#define PROBE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "kernels.h"
#include "streams.h"
#include "vmm.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

enum { NOT_READY = 600, NOT_SUPPORTED = 801, HOST = -1 };

CUresult cuCtxRecordEvent(CUcontext context, CUevent event);
CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer);
CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device);
CUresult cuEventDestroy_v2(CUevent event);
CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end);
CUresult cuEventQuery(CUevent event);
CUresult cuStreamQuery(CUstream stream);
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags);

/* Goes back to `again` while less than `limit` ns have passed since %rd15. */
#define PTX_SINCE(limit, again)                                                                                    \
    "mov.u64 %rd14, %globaltimer;\n sub.s64 %rd14, %rd14, %rd15;\n setp.lt.u64 %p1, %rd14, " limit ";\n"           \
    "@%p1 bra " again ";\n"

static const char PROBE_KERNELS[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"

    /* says in the word behind the flag that it runs, and waits for the flag, so many ns at most */
    ".visible .entry spin_flag(.param .u64 spin_flag_0, .param .u64 spin_flag_1)\n{\n" PTX_REGISTERS
    "mov.u64 %rd15, %globaltimer;\n" PTX_GLOBAL("spin_flag", "0", "%rd1") PTX_LOAD("spin_flag", "1", "u64", "%rd2")
    "mov.u32 %r6, 1;\n st.volatile.global.u32 [%rd1+4], %r6;\n"
    "again:\n ld.volatile.global.u32 %r5, [%rd1];\n setp.ne.u32 %p1, %r5, 0;\n @%p1 bra done;\n"
    PTX_SINCE("%rd2", "again") "done:\n ret;\n}\n"

    /* check_iota_u32 again and again until the flag is set, so many ns at most; says that it runs, too */
    ".visible .entry check_until_u32(.param .u64 check_until_u32_0, .param .u64 check_until_u32_1,"
    " .param .u32 check_until_u32_2, .param .u64 check_until_u32_3, .param .u64 check_until_u32_4,"
    " .param .u64 check_until_u32_5)\n{\n" PTX_REGISTERS
    "mov.u64 %rd15, %globaltimer;\n" PTX_GLOBAL("check_until_u32", "0", "%rd1")
    PTX_LOAD("check_until_u32", "1", "u64", "%rd2") PTX_LOAD("check_until_u32", "2", "u32", "%r5")
    PTX_GLOBAL("check_until_u32", "3", "%rd3") PTX_LOAD("check_until_u32", "4", "u64", "%rd4")
    PTX_GLOBAL("check_until_u32", "5", "%rd5") "mov.u32 %r8, 1;\n st.volatile.global.u32 [%rd3+4], %r8;\n round:\n" PTX_INDEX
    PTX_LOOP("%rd2", PTX_ELEMENT("%rd11", "%rd1")
             "ld.volatile.global.u32 %r7, [%rd11];\n cvt.u32.u64 %r6, %rd8;\n add.s32 %r6, %r6, %r5;\n"
             "setp.ne.u32 %p2, %r6, %r7;\n @%p2 red.global.add.u64 [%rd5], 1;\n")
    "ld.volatile.global.u32 %r7, [%rd3];\n setp.ne.u32 %p1, %r7, 0;\n @%p1 bra over;\n"
    PTX_SINCE("%rd4", "round") "over:\n ret;\n}\n"

    /* every block reads every `stride`-th word, so that every multiprocessor does; *bad += how many are not v */
    ".visible .entry check_all_u32(.param .u64 check_all_u32_0, .param .u64 check_all_u32_1,"
    " .param .u64 check_all_u32_2, .param .u32 check_all_u32_3, .param .u64 check_all_u32_4)\n{\n" PTX_REGISTERS
    PTX_GLOBAL("check_all_u32", "0", "%rd1") PTX_LOAD("check_all_u32", "1", "u64", "%rd2")
    PTX_LOAD("check_all_u32", "2", "u64", "%rd3") PTX_LOAD("check_all_u32", "3", "u32", "%r5")
    PTX_GLOBAL("check_all_u32", "4", "%rd4")
    "mov.u32 %r1, %tid.x;\n mov.u32 %r2, %ntid.x;\n cvt.u64.u32 %rd8, %r1;\n mul.lo.u64 %rd8, %rd8, %rd3;\n"
    "cvt.u64.u32 %rd9, %r2;\n mul.lo.u64 %rd9, %rd9, %rd3;\n"
    PTX_LOOP("%rd2", PTX_ELEMENT("%rd11", "%rd1")
             "ld.volatile.global.u32 %r7, [%rd11];\n setp.ne.u32 %p2, %r5, %r7;\n @%p2 red.global.add.u64 [%rd4], 1;\n")
    "ret;\n}\n";

typedef struct {
    CUcontext context;
    Kernels kernels;
    CUmodule module;
    CUfunction spin, check_until, check_all;
    CUstream stream;
    CUdeviceptr wrong;
} Probed;

static Probed on_gpu[2];
static int gpus;
/* What held kernels wait for; the word behind it says that one runs. */
static volatile uint32_t *flag;
static int fallen;
static const char *volatile now_asking = "the start";

static inline double now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static inline CUdeviceptr flag_at(void) { return (CUdeviceptr)(uintptr_t)flag; }

static void *end_late(void *seconds)
{
    struct timespec time = {(time_t)(intptr_t)seconds, 0}, more = {5, 0};
    nanosleep(&time, NULL);
    printf("ended after %d s: %s\n", (int)(intptr_t)seconds, now_asking);
    fflush(stdout);
    if (flag)
        *flag = 1;
    nanosleep(&more, NULL);
    _exit(3);
}

static inline void load_probe(Probed *p)
{
    CHECK(cuCtxGetCurrent(&p->context));
    p->kernels = load_kernels();
    CHECK(cuModuleLoadData(&p->module, PROBE_KERNELS));
    CHECK(cuModuleGetFunction(&p->spin, p->module, "spin_flag"));
    CHECK(cuModuleGetFunction(&p->check_until, p->module, "check_until_u32"));
    CHECK(cuModuleGetFunction(&p->check_all, p->module, "check_all_u32"));
    CHECK(cuStreamCreate(&p->stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemAlloc_v2(&p->wrong, 8));
    CHECK(cuMemsetD8_v2(p->wrong, 0, 8));
}

/* Counts the GPUs, two at most; the second one only if the first reaches it. The probe is over after so many seconds. */
static inline void count_gpus(int seconds)
{
    pthread_t thread;
    int can = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    REQUIRE(pthread_create(&thread, NULL, end_late, (void *)(intptr_t)seconds) == 0);
    CHECK(cuInit(0));
    CHECK(cuDeviceGetCount(&gpus));
    if (gpus > 1) {
        CHECK(cuDeviceCanAccessPeer(&can, 0, 1));
        gpus = can ? 2 : 1;
    }
}

/* On the first GPU, which is current from then on. */
static inline void begin_probe(int seconds)
{
    void *word;
    count_gpus(seconds);
    start_on(0);
    load_probe(&on_gpu[0]);
    CHECK(cuMemHostAlloc(&word, 4096, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    memset(word, 0, 4096);
    flag = word;
}

static inline void begin_second(void)
{
    if (gpus < 2)
        return;
    start_on(1);
    load_probe(&on_gpu[1]);
    CHECK(cuCtxSetCurrent(on_gpu[0].context));
}

__attribute__((format(printf, 1, 2))) static inline void tell(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vprintf(format, list);
    va_end(list);
    printf("\n");
}

/* An answer; `rule` falls unless it `holds`. */
__attribute__((format(printf, 3, 4))) static inline void answer(const char *rule, int holds, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vprintf(format, list);
    va_end(list);
    printf("\n");
    if (!holds) {
        printf("  FALLS: %s\n", rule);
        fallen++;
    }
}

static inline void not_asked(const char *question, const char *why) { printf("%s: not asked: %s\n", question, why); }

static inline void measured(const char *what, const char *unit, double value)
{
    printf("measured: {\"%s, %s\": %.3f}\n", what, unit, value);
}

static inline int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Median and worst; sorts them. */
static inline void measured_all(const char *what, const char *unit, double *values, size_t count)
{
    qsort(values, count, sizeof *values, by_value);
    printf("measured: {\"%s, %s, median and worst of %zu\": [%.3f, %.3f]}\n", what, unit, count, values[count / 2],
           values[count - 1]);
}

/* An export that older drivers lack; null where this one has none. */
static inline void *optional(const char *name)
{
    static void *library;
    if (!library)
        library = dlopen("libcuda.so.1", RTLD_NOW);
    return library ? dlsym(library, name) : NULL;
}

/* The first launch of a function may load it, which waits for the device: nothing may be held then. */
static inline void warm_up(Probed *p, CUstream stream)
{
    uint64_t none = 0;
    CUdeviceptr at = p->wrong;
    uint32_t value = 0;
    uint64_t stride = 1;
    CUdeviceptr held = flag_at();
    *flag = 1;
    launch(p->kernels.fill, stream, (void *[]){&at, &none, &value});
    launch(p->kernels.iota, stream, (void *[]){&at, &none, &value});
    launch(p->kernels.check_iota, stream, (void *[]){&at, &none, &value, &p->wrong});
    launch(p->kernels.copy, stream, (void *[]){&at, &at, &none});
    launch(p->check_all, stream, (void *[]){&at, &none, &stride, &value, &p->wrong});
    launch(p->spin, stream, (void *[]){&held, &none});
    launch(p->check_until, stream, (void *[]){&at, &none, &value, &held, &none, &p->wrong});
    CHECK(cuCtxSynchronize());
}

/* A kernel of one thread that runs until let_go, so many ms at most; returns when it runs. */
static inline void spin_in(Probed *p, CUstream stream, double milliseconds)
{
    CUdeviceptr at = flag_at();
    uint64_t limit = (uint64_t)(milliseconds * 1e6);
    double since = now_us();
    flag[0] = flag[1] = 0;
    CHECK(cuLaunchKernel(p->spin, 1, 1, 1, 1, 1, 1, 0, stream, (void *[]){&at, &limit}, NULL));
    while (!flag[1]) {
        sched_yield();
        REQUIRE(now_us() - since < 10e6);
    }
}

static inline void let_go(void) { *flag = 1; }

/* Words of an array that are not start + index, as kernels of this GPU find them. */
static inline uint64_t wrong_at(Probed *p, CUdeviceptr array, size_t bytes, uint32_t start)
{
    uint64_t n = bytes / 4, wrong;
    CHECK(cuCtxSetCurrent(p->context));
    CHECK(cuMemsetD32_v2(p->wrong, 0, 2));
    launch(p->kernels.check_iota, NULL, (void *[]){&array, &n, &start, &p->wrong});
    CHECK(cuMemcpyDtoH_v2(&wrong, p->wrong, sizeof wrong));
    CHECK(cuCtxSetCurrent(on_gpu[0].context));
    return wrong;
}

/* Physical memory of a GPU or of the host. */
static inline uint64_t physical(int place, size_t bytes)
{
    uint64_t handle;
    CUmemAllocationProp properties = {.kind = 1, .location = {place == HOST ? ON_HOST_NODE : ON_DEVICE, place == HOST ? 0 : place}};
    CHECK(cuMemCreate(&handle, bytes, &properties, 0));
    return handle;
}

static inline CUdeviceptr reserve(size_t bytes)
{
    CUdeviceptr address;
    CHECK(cuMemAddressReserve(&address, bytes, 0, 0, 0));
    return address;
}

/* For the first `count` GPUs. */
static inline void grant(CUdeviceptr at, size_t bytes, int count)
{
    CUmemAccessDesc access[] = {{{ON_DEVICE, 0}, READ_WRITE}, {{ON_DEVICE, 1}, READ_WRITE}};
    CHECK(cuMemSetAccess(at, bytes, access, (size_t)count));
}

static inline void map_here(CUdeviceptr at, uint64_t handle, size_t bytes, int count)
{
    CHECK(cuMemMap(at, bytes, 0, handle, 0));
    grant(at, bytes, count);
}

static inline const char *place_name(int place)
{
    static const char *const names[] = {"the host", "GPU 0", "GPU 1"};
    return names[place + 1];
}

/* Two GiB of each GPU stay free. */
static inline int has_room(size_t bytes)
{
    size_t free_bytes, total;
    CHECK(cuMemGetInfo_v2(&free_bytes, &total));
    return free_bytes >= bytes + ((size_t)2 << 30);
}

static inline int end_probe(void)
{
    if (fallen)
        printf("%d rules fall\n", fallen);
    else
        printf("every rule stands\n");
    return fallen > 0;
}

#endif
