/*
 * Graphs over memory that moved: replayed, updated and instantiated anew after what is behind their operands' addresses was
 * exchanged for other memory, of the same GPU, of another one and of the host.
 */
#include "probe.h"

typedef struct CUgraphNode_st *CUgraphNode;
typedef struct {
    CUfunction function;
    unsigned grid[3], block[3], shared;
    void **parameters, **extra;
    void *kernel;
    CUcontext context;
} KernelNode;
typedef struct {
    CUdeviceptr to;
    size_t pitch;
    unsigned value, element;
    size_t width, height;
} FillNode;
typedef struct {
    size_t x, y, z, level;
    int type;
    void *host;
    CUdeviceptr device;
    void *array, *reserved;
    size_t pitch, height;
} Side;
typedef struct {
    Side from, to;
    size_t width, height, depth;
} CopyNode;
typedef struct {
    int result;
    CUgraphNode node, from;
} Update;

CUresult cuGraphCreate(CUgraph *graph, unsigned flags);
CUresult cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count, const KernelNode *what);
CUresult cuGraphAddMemcpyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count, const CopyNode *what,
                              CUcontext context);
CUresult cuGraphAddMemsetNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count, const FillNode *what,
                              CUcontext context);
CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, Update *result);

enum { CHUNK = 2 * MIB, HALF = MIB, WORDS = HALF / 4, ON_THE_DEVICE = 2, MOVES = 4 };

typedef struct {
    CUgraph graph;
    CUgraphNode kernel, copy, fill;
} Made;

static Probed *gpu = &on_gpu[0];
static CUdeviceptr first, second;
static uint64_t handles[2];
static uint64_t word_count = WORDS;
static uint32_t from_number = 5;
static int shared_by;

static KernelNode kernel_node(void)
{
    static void *parameters[] = {&first, &word_count, &from_number};
    return (KernelNode){.function = gpu->kernels.iota, .grid = {16, 1, 1}, .block = {256, 1, 1}, .parameters = parameters,
                        .context = gpu->context};
}

static CopyNode copy_node(void)
{
    CopyNode node = {.width = HALF, .height = 1, .depth = 1};
    node.from = (Side){.type = ON_THE_DEVICE, .device = first, .pitch = HALF, .height = 1};
    node.to = (Side){.type = ON_THE_DEVICE, .device = second, .pitch = HALF, .height = 1};
    return node;
}

static FillNode fill_node(void)
{
    return (FillNode){.to = second + HALF, .pitch = 0, .value = 7, .element = 4, .width = WORDS, .height = 1};
}

/* A kernel writes the first chunk, a copy brings it to the second, and a fill writes the second's other half. */
static CUresult make_graph(Made *out)
{
    Made made;
    KernelNode kernel = kernel_node();
    CopyNode copy = copy_node();
    FillNode fill = fill_node();
    CUresult result = cuGraphCreate(&made.graph, 0);
    if (!result)
        result = cuGraphAddKernelNode_v2(&made.kernel, made.graph, NULL, 0, &kernel);
    if (!result)
        result = cuGraphAddMemcpyNode(&made.copy, made.graph, &made.kernel, 1, &copy, gpu->context);
    if (!result)
        result = cuGraphAddMemsetNode(&made.fill, made.graph, &made.copy, 1, &fill, gpu->context);
    *out = made;
    return result;
}

static void move_to(int place)
{
    CUdeviceptr at[] = {first, second};
    CHECK(cuCtxSynchronize());
    for (int i = 0; i < 2; i++) {
        uint64_t fresh = physical(place, CHUNK);
        CHECK(cuMemUnmap(at[i], CHUNK));
        CHECK(cuMemRelease(handles[i]));
        map_here(at[i], fresh, CHUNK, shared_by);
        handles[i] = fresh;
    }
}

/* "right", or what is wrong with a launch of it. */
static const char *launched(CUgraphExec exec)
{
    uint32_t filled[2] = {0, 0};
    CHECK(cuMemsetD32_v2(first, 1, CHUNK / 4));
    CHECK(cuMemsetD32_v2(second, 1, CHUNK / 4));
    CHECK(cuCtxSynchronize());
    if (cuGraphLaunch(exec, gpu->stream) != CUDA_SUCCESS || cuStreamSynchronize(gpu->stream) != CUDA_SUCCESS)
        return "not launched";
    if (wrong_at(gpu, first, HALF, from_number) || wrong_at(gpu, second, HALF, from_number))
        return "wrong";
    CHECK(cuMemcpyDtoH_v2(&filled[0], second + HALF, 4));
    CHECK(cuMemcpyDtoH_v2(&filled[1], second + CHUNK - 4, 4));
    return filled[0] == 7 && filled[1] == 7 ? "right" : "wrong";
}

static void said(const char *place, const char *what, CUresult result, int reason, const char *data)
{
    char why[32] = "";
    if (reason >= 0)
        snprintf(why, sizeof why, ", reason %d", reason);
    answer("A9: what a graph does to memory that moved is what it does to memory that did not",
           result == CUDA_SUCCESS && strcmp(data, "right") == 0, "on %s: %s: %d%s, data %s", place, what, result, why, data);
}

static void update(const char *place, const char *what, CUgraphExec exec, CUgraph graph)
{
    Update update = {0, NULL, NULL};
    CUresult result = cuGraphExecUpdate_v2(exec, graph, &update);
    said(place, what, result, update.result, launched(exec));
}

static void set_parameters(const char *place, CUgraphExec exec, const Made *made)
{
    CUresult (*kernel)(CUgraphExec, CUgraphNode, const KernelNode *);
    CUresult (*copy)(CUgraphExec, CUgraphNode, const CopyNode *, CUcontext);
    CUresult (*fill)(CUgraphExec, CUgraphNode, const FillNode *, CUcontext);
    KernelNode k = kernel_node();
    CopyNode c = copy_node();
    FillNode f = fill_node();
    *(void **)&kernel = optional("cuGraphExecKernelNodeSetParams_v2");
    *(void **)&copy = optional("cuGraphExecMemcpyNodeSetParams");
    *(void **)&fill = optional("cuGraphExecMemsetNodeSetParams");
    if (!kernel || !copy || !fill) {
        not_asked("parameters set anew", "this driver has no such calls");
        return;
    }
    CUresult result = kernel(exec, made->kernel, &k);
    said(place, "the kernel's parameters set to what they were", result, -1, launched(exec));
    result = copy(exec, made->copy, &c, gpu->context);
    said(place, "the copy's", result, -1, launched(exec));
    result = fill(exec, made->fill, &f, gpu->context);
    said(place, "the fill's", result, -1, launched(exec));
}

int main(void)
{
    static const int way[MOVES + 1] = {0, 1, HOST, 0, 0};
    CUgraphExec exec, again;
    begin_probe(60);
    shared_by = gpus;
    first = reserve(CHUNK);
    second = reserve(CHUNK);
    for (int i = 0; i < 2; i++) {
        handles[i] = physical(0, CHUNK);
        map_here(i ? second : first, handles[i], CHUNK, shared_by);
    }
    warm_up(gpu, gpu->stream);
    Made made, fresh;
    CHECK(make_graph(&made));
    CHECK(cuGraphInstantiateWithFlags(&exec, made.graph, 0));
    said("GPU 0", "launched before anything moved", 0, -1, launched(exec));
    for (int i = 0; i <= MOVES; i++) {
        char place[48];
        if (way[i] == 1 && gpus < 2) {
            not_asked("memory on GPU 1", "there is one GPU");
            continue;
        }
        snprintf(place, sizeof place, "%s%s", i == 0 || i == MOVES ? "another chunk of " : "", place_name(way[i]));
        now_asking = place;
        move_to(way[i]);
        said(place, "launched", 0, -1, launched(exec));
        update(place, "updated with the graph that it was made of", exec, made.graph);
        CUresult built = make_graph(&fresh);
        if (built)
            said(place, "a graph made there", built, -1, "none");
        else
            update(place, "updated with a graph that was made there", exec, fresh.graph);
        set_parameters(place, exec, &made);
        CUresult result = cuGraphInstantiateWithFlags(&again, made.graph, 0);
        said(place, "instantiated anew", result, -1, result ? "none" : launched(again));
        if (!result)
            CHECK(cuGraphExecDestroy(again));
    }
    return end_probe();
}
