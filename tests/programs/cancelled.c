/*
 * cancelled: threads that are cancelled in each kind of call. A request waits when the call begins (as when it came a
 * moment before), or comes in the middle of it, from a system call that something makes there; in threads of deferred and
 * of asynchronous type. The thread does what it does bare: a deferred request lets the call end and is met by
 * pthread_testcancel.
 */
#define _GNU_SOURCE
#include "diagnosed.h"

#include <sys/syscall.h>
#include <unistd.h>

CUresult cuCtxCreate_v2(CUcontext *context, unsigned flags, CUdevice device);
CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags);
CUresult cuMemFreeHost(void *address);

static Kernels kernels;

/* Of this thread: cancel it when something writes. */
static __thread int cancel_at_write;
static volatile int cancelled_in_write;

/* Ours comes before the C library's, for every library of the process. */
ssize_t write(int file, const void *bytes, size_t count)
{
    if (cancel_at_write) {
        cancel_at_write = 0;
        cancelled_in_write++;
        pthread_cancel(pthread_self());
    }
    /* As the C library's, a place at which a thread can be cancelled. */
    pthread_testcancel();
    return (ssize_t)syscall(SYS_write, file, bytes, count);
}

static CUresult allocate(void)
{
    CUdeviceptr block = 0;
    CUresult result = cuMemAlloc_v2(&block, 3 * MIB);
    return result ? result : cuMemFree_v2(block);
}

static CUresult allocate_pinned(void)
{
    void *block = NULL;
    CUresult result = cuMemHostAlloc(&block, 3 * MIB, 0);
    return result ? result : cuMemFreeHost(block);
}

static CUresult launch_kernel(void)
{
    CUdeviceptr block = 0;
    CUresult result = cuMemAlloc_v2(&block, 4096);
    if (result == CUDA_SUCCESS)
        iota(&kernels, NULL, block, 1024, 7);
    return result;
}

static CUresult load(void)
{
    load_kernels();
    return CUDA_SUCCESS;
}

static CUresult make_context(void)
{
    CUcontext context;
    CUresult result = cuCtxCreate_v2(&context, 0, 0);
    return result;
}

static CUresult use_other_gpu(void)
{
    return cuCtxSetCurrent(retain(1));
}

static CUresult ask(void)
{
    size_t free_bytes, total;
    return cuMemGetInfo_v2(&free_bytes, &total);
}

static CUresult change_environment(void)
{
    return setenv("CUDA_VISIBLE_DEVICES", "1", 1);
}

static const struct {
    const char *name;
    CUresult (*act)(void);
} KINDS[] = {{"allocate", allocate}, {"pinned", allocate_pinned}, {"launch", launch_kernel}, {"load", load},
             {"context", make_context}, {"other GPU", use_other_gpu}, {"question", ask},
             {"environment", change_environment}};
enum { COUNT = sizeof KINDS / sizeof KINDS[0] };

typedef struct {
    int kind, at_write, asynchronous;
    CUresult result;
    CUcontext context;
} Case;

static void *run(void *argument)
{
    Case *at = argument;
    int state;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    CHECK(cuCtxSetCurrent(at->context));
    if (at->at_write)
        cancel_at_write = 1;
    else
        pthread_cancel(pthread_self());
    if (at->asynchronous)
        pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, &state);
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state);
    at->result = KINDS[at->kind].act();
    /* Nothing wrote: the request comes now. */
    if (cancel_at_write) {
        cancel_at_write = 0;
        pthread_cancel(pthread_self());
    }
    pthread_testcancel();
    return NULL;
}

int main(int argc, char **argv)
{
    int asynchronous = argc > 1 && strcmp(argv[1], "asynchronous") == 0;
    CUcontext context = start_on(0);
    kernels = load_kernels();
    for (int kind = 0; kind < COUNT; kind++) {
        for (int at_write = asynchronous; at_write < 2; at_write++) {
            Case at = {kind, at_write, asynchronous, -1, context};
            pthread_t thread;
            void *end;
            REQUIRE(pthread_create(&thread, NULL, run, &at) == 0);
            REQUIRE(pthread_join(thread, &end) == 0);
            /* Of an asynchronous thread it depends on where the request came whether the answer arrived. */
            if (asynchronous)
                at.result = 0;
            printf("%s, %s: %d, %s\n", KINDS[kind].name, at_write ? "in the call" : "before the call", at.result,
                   end == PTHREAD_CANCELED ? "cancelled" : "not cancelled");
        }
    }
    /* Nobody left a lock or a mark behind. */
    int again = allocate() + allocate_pinned() + launch_kernel() + ask() + load();
    printf("afterwards: %d\n", again);
    fprintf(stderr, "cancelled in a write: %d\n", cancelled_in_write);
    return 0;
}
