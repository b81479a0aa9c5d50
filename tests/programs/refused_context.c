/*
 * refused_context: the memory of GPU 0 cannot be granted to GPU 1 (every cuMemSetAccess fails), where a context is to be made:
 * in each way the program is told so, there is no context afterwards, and what it had works on. Once it can be granted, the same
 * calls succeed. Runs on the simulated driver only.
 */
#include "simulator.h"

#include "green.h"

static CUcontext first;
static CUdeviceptr block;
static CUdevResourceDesc desc;

static void say(const char *what, CUresult result, const void *made)
{
    unsigned flags;
    int active;
    CUcontext current;
    uint32_t word = 7, back = 0;
    CHECK(cuDevicePrimaryCtxGetState(1, &flags, &active));
    CHECK(cuCtxGetCurrent(&current));
    CHECK(cuMemcpyHtoD_v2(block, &word, sizeof word));
    CHECK(cuMemcpyDtoH_v2(&back, block, sizeof back));
    printf("%s: %d, %s; primary context of GPU 1 %s, current %s, memory %s\n", what, result, made ? "made" : "nothing",
           active ? "active" : "inactive", current == first ? "as before" : "another", back == word ? "right" : "wrong");
}

static void make_all(int lasts)
{
    CUcontext context = NULL;
    CUgreenCtx green = NULL;
    CUresult result = cuDevicePrimaryCtxRetain(&context, 1);
    say("retain", result, context);
    if (lasts)
        CHECK(cuDevicePrimaryCtxRelease_v2(1));
    result = cuGreenCtxCreate(&green, desc, 1, CU_GREEN_CTX_DEFAULT_STREAM);
    say("green", result, green);
    if (lasts)
        CHECK(cuGreenCtxDestroy(green));
    context = NULL;
    result = cuCtxCreate_v2(&context, 0, 1);
    if (lasts) {
        CHECK(cuCtxDestroy_v2(context));
        CHECK(cuCtxSetCurrent(first));
    }
    say("create", result, context);
}

int main(void)
{
    Simulator simulator = find_simulator();
    CUdevResource all, part;
    unsigned groups = 1;
    first = start_on(0);
    CHECK(cuMemAlloc_v2(&block, 64 * MIB));
    CHECK(cuDeviceGetDevResource(1, &all, CU_DEV_RESOURCE_TYPE_SM));
    CHECK(cuDevSmResourceSplitByCount(&part, &groups, &all, NULL, 0, 16));
    CHECK(cuDevResourceGenerateDesc(&desc, &part, 1));
    char faults[60 * 24] = "";
    for (int i = 1, at = 0; i <= 50; i++)
        at += snprintf(faults + at, sizeof faults - at, "%scuMemSetAccess:%d=2", i > 1 ? "," : "", i);
    CHECK((CUresult)simulator.arm(faults));
    make_all(0);
    CHECK((CUresult)simulator.arm(""));
    make_all(1);
    CHECK(cuMemFree_v2(block));
    return 0;
}
