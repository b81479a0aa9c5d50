/*
 * A copy from the device to memory that is not pinned waits in its call for the work before it, and holds the context meanwhile: which calls of
 * another thread wait for that. One GPU.
 */
#include "probe.h"
#include "waiting.h"

enum { MANY = 20000 };

static CUcontext context;
static CUevent event;
static CUstream other;
static Kernels kernels;
static CUdeviceptr device, words;
static uint32_t pageable;

static void copy_out(size_t bytes)
{
    CHECK(cuMemcpyDtoHAsync_v2(&pageable, device, bytes, own_stream));
}

/* So often that the copy has begun at some point of it. */
static void make_events(size_t bytes)
{
    (void)bytes;
    for (int i = 0; i < MANY; i++) {
        CUevent made;
        CHECK(cuEventCreate(&made, CU_EVENT_DISABLE_TIMING));
        CHECK(cuEventDestroy_v2(made));
    }
}

static void make_streams(size_t bytes)
{
    (void)bytes;
    for (int i = 0; i < MANY / 20; i++) {
        CUstream made;
        CHECK(cuStreamCreate(&made, CU_STREAM_NON_BLOCKING));
        CHECK(cuStreamDestroy_v2(made));
    }
}

static void launch_others(size_t bytes)
{
    uint64_t n = bytes / 4;
    uint32_t value = 7;
    for (int i = 0; i < MANY / 20; i++)
        launch(kernels.fill, other, (void *[]){&words, &n, &value});
}

static void record(size_t bytes)
{
    (void)bytes;
    for (int i = 0; i < MANY / 20; i++)
        CHECK(cuCtxRecordEvent(context, event));
}

static void ask_event(size_t bytes)
{
    (void)bytes;
    for (int i = 0; i < MANY; i++)
        (void)cuEventQuery(event);
}

static const struct {
    Case of;
    int waits;
} CASES[] = {
    {{"cuEventCreate", NULL, make_events, 0, 0}, 1},
    {{"cuStreamCreate", NULL, make_streams, 0, 0}, 1},
    {{"cuLaunchKernel", NULL, launch_others, 4 * KIB, 0}, 0},
    {{"cuCtxRecordEvent", NULL, record, 0, 0}, 0},
    {{"cuEventQuery", NULL, ask_event, 0, 0}, 0},
};

int main(void)
{
    static const Case copying = {"cuMemcpyDtoHAsync", NULL, copy_out, 4, 0};
    void *word;
    context = start_on(0);
    kernels = load_kernels();
    CHECK(cuStreamCreate(&own_stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CHECK(cuMemAlloc_v2(&device, 4 * KIB));
    CHECK(cuMemAlloc_v2(&words, 4 * KIB));
    CHECK(cuMemHostAlloc(&word, 4096, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    flag = word;
    CUdeviceptr on_device = (CUdeviceptr)(uintptr_t)flag;
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        Call copy = {.context = context, .of = &copying}, call = {.context = context, .of = &CASES[i].of};
        *flag = 0;
        CHECK(cuLaunchKernel(kernels.wait_flag, 1, 1, 1, 1, 1, 1, 0, own_stream, (void *[]){&on_device}, NULL));
        begin_call(&copy);
        begin_call(&call);
        printf("%s: %s\n", CASES[i].of.what, has_returned(&call, !CASES[i].waits) ? "does not wait" : "waits");
        *flag = 1;
        REQUIRE(pthread_join(call.thread, NULL) == 0 && pthread_join(copy.thread, NULL) == 0);
        CHECK(cuCtxSynchronize());
    }
    return 0;
}
