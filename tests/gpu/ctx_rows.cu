/*
 * One call of the CUDA runtime in a process of its own, and which GPUs have a primary context after it.
 *
 *   ctx_rows CALL        makes the call, prints `CALL: context on 0 1` or `CALL: context on none`
 *   ctx_rows CALL hold   and then waits for the end of stdin
 *
 * What a call returns does not matter: some fail, and make a context all the same. Managed memory and resets are left
 * out, for the sake of machines where other people's programs run on the same GPUs.
 */
#include <cstdio>
#include <cstring>
#include <dlfcn.h>

static const size_t BYTES = 1 << 20;
static char on_host[64];

__global__ void nothing() {}

struct Row {
    const char *name;
    void (*make)();
};

static void *memory;
static int number;

static const Row ROWS[] = {
    {"cudaGetDeviceCount", [] { cudaGetDeviceCount(&number); }},
    {"cudaGetDeviceProperties(1)", [] { cudaDeviceProp of; cudaGetDeviceProperties(&of, 1); }},
    {"cudaDeviceGetAttribute", [] { cudaDeviceGetAttribute(&number, cudaDevAttrMultiProcessorCount, 1); }},
    {"cudaDeviceCanAccessPeer", [] { cudaDeviceCanAccessPeer(&number, 0, 1); }},
    {"cudaPointerGetAttributes(host)", [] { cudaPointerAttributes of; cudaPointerGetAttributes(&of, on_host); }},
    {"cudaGetDriverEntryPoint", [] {
         cudaDriverEntryPointQueryResult found;
         cudaGetDriverEntryPointByVersion("cuMemAlloc", &memory, 12000, cudaEnableDefault, &found);
     }},
    {"cudaDeviceGetDefaultMemPool(1)", [] { cudaMemPool_t pool; cudaDeviceGetDefaultMemPool(&pool, 1); }},
    {"cuInit", [] {
         void *driver = dlopen("libcuda.so.1", RTLD_NOW);
         if (driver) ((int (*)(unsigned))dlsym(driver, "cuInit"))(0);
     }},
    {"cudaRuntimeGetVersion", [] { cudaRuntimeGetVersion(&number); }},

    {"cudaFree(0)", [] { cudaFree(nullptr); }},
    {"cudaMemGetInfo", [] { size_t free, total; cudaMemGetInfo(&free, &total); }},
    {"cudaMalloc", [] { cudaMalloc(&memory, BYTES); }},
    {"cudaMallocHost", [] { cudaMallocHost(&memory, BYTES); }},
    {"cudaHostAlloc", [] { cudaHostAlloc(&memory, BYTES, cudaHostAllocPortable); }},
    {"cudaStreamCreate", [] { cudaStream_t stream; cudaStreamCreate(&stream); }},
    {"cudaEventCreate", [] { cudaEvent_t event; cudaEventCreate(&event); }},
    {"cudaDeviceSetLimit", [] { cudaDeviceSetLimit(cudaLimitMallocHeapSize, 64 << 20); }},
    {"cudaFuncGetAttributes", [] { cudaFuncAttributes of; cudaFuncGetAttributes(&of, nothing); }},
    {"cudaIpcGetMemHandle", [] { cudaIpcMemHandle_t handle; cudaIpcGetMemHandle(&handle, on_host); }},
    {"cudaDeviceSynchronize", [] { cudaDeviceSynchronize(); }},

    {"cudaSetDevice(1)", [] { cudaSetDevice(1); }},
    {"cudaInitDevice(1)", [] { cudaInitDevice(1, 0, 0); }},
    {"cudaDeviceEnablePeerAccess(1)", [] { cudaDeviceEnablePeerAccess(1, 0); }},
    {"cudaMemcpyPeer", [] {
         void *other;
         cudaMalloc(&memory, BYTES);
         cudaSetDevice(1);
         cudaMalloc(&other, BYTES);
         cudaMemcpyPeer(other, 1, memory, 0, BYTES);
     }},
};

/* Asks the driver itself: a question to the runtime could make the context that it asks about. */
static void print_contexts(const char *name)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    auto device_count = driver ? (int (*)(int *))dlsym(driver, "cuDeviceGetCount") : nullptr;
    auto state = driver ? (int (*)(int, unsigned *, int *))dlsym(driver, "cuDevicePrimaryCtxGetState") : nullptr;
    int count = 0;
    if (!device_count || !state || device_count(&count)) {
        printf("%s: driver not initialised\n", name);
        return;
    }
    printf("%s: context on", name);
    bool any = false;
    for (int device = 0; device < count; device++) {
        unsigned flags;
        int active = 0;
        if (state(device, &flags, &active) || !active)
            continue;
        printf(" %d", device);
        any = true;
    }
    printf(any ? "\n" : " none\n");
}

int main(int count, char **arguments)
{
    for (const Row &row : ROWS) {
        if (count < 2 || strcmp(arguments[1], row.name))
            continue;
        row.make();
        print_contexts(row.name);
        fflush(stdout);
        if (count == 3 && !strcmp(arguments[2], "hold"))
            while (getchar() != EOF) {
            }
        return 0;
    }
    fprintf(stderr, "usage: ctx_rows CALL [hold]; the calls are\n");
    for (const Row &row : ROWS)
        fprintf(stderr, "    %s\n", row.name);
    return 2;
}
