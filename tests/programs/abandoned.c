/*
 * abandoned CASE
 * A capture that ends otherwise than by cuStreamEndCapture: afterwards, freed memory is used again as before. Three quarters
 * of the GPU are allocated, freed and allocated again; and pinned memory, of which more than before each time.
 */
#include "streams.h"
#include "green.h"

#include <pthread.h>

enum { MODES = 3 };

CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, int mode);

static CUcontext primary;
static int mode;

static void use_memory(void)
{
    size_t free_bytes, total;
    CHECK(cuMemGetInfo_v2(&free_bytes, &total));
    size_t large = free_bytes / 4 * 3 / MIB * MIB;
    for (int i = 0; i < 3; i++) {
        CUdeviceptr block;
        SHOW(cuMemAlloc_v2(&block, large));
        SHOW(cuMemsetD8_v2(block, (unsigned char)i, large));
        SHOW(cuMemFree_v2(block));
    }
    static size_t pinned = 1 * MIB;
    void *host;
    SHOW(cuMemHostAlloc(&host, pinned += MIB, 0));
    SHOW(cuMemFreeHost(host));
}

static CUstream capturing(void)
{
    CUstream stream;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuStreamBeginCapture_v2(stream, mode));
    return stream;
}

static void *capture_and_leave(void *unused)
{
    CHECK(cuCtxSetCurrent(primary));
    CHECK(cuStreamBeginCapture_v2_ptsz(NULL, mode));
    return unused;
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "";
    primary = start_on(0);
    for (mode = 0; mode < MODES; mode++) {
        printf("mode %d\n", mode);
        if (strcmp(name, "stream") == 0) {
            CHECK(cuStreamDestroy_v2(capturing()));
        } else if (strcmp(name, "context") == 0) {
            CUcontext own;
            CHECK(cuCtxCreate_v2(&own, 0, 0));
            capturing();
            CHECK(cuCtxDestroy_v2(own));
        } else if (strcmp(name, "reset") == 0) {
            capturing();
            CHECK(cuDevicePrimaryCtxReset_v2(0));
            CHECK(cuDevicePrimaryCtxRetain(&primary, 0));
            CHECK(cuCtxSetCurrent(primary));
        } else if (strcmp(name, "thread") == 0) {
            pthread_t thread;
            REQUIRE(pthread_create(&thread, NULL, capture_and_leave, NULL) == 0);
            REQUIRE(pthread_join(thread, NULL) == 0);
        } else if (strcmp(name, "green") == 0) {
            /* On a stream of its own, and on the thread's default one there. */
            for (int own = 0; own < 2; own++) {
                CUgreenCtx green = green_on(0);
                CUcontext context;
                CUstream stream = NULL;
                CHECK(cuCtxFromGreenCtx(&context, green));
                CHECK(cuCtxSetCurrent(context));
                if (own)
                    CHECK(cuGreenCtxStreamCreate(&stream, green, CU_STREAM_NON_BLOCKING, 0));
                CHECK(cuStreamBeginCapture_v2_ptsz(stream, mode));
                CHECK(cuGreenCtxDestroy(green));
                CHECK(cuCtxSetCurrent(primary));
            }
        } else if (strcmp(name, "twice") == 0) {
            CUgraph graph;
            CUstream stream = capturing();
            SHOW(cuStreamBeginCapture_v2(stream, mode));
            SHOW(cuStreamEndCapture(stream, &graph));
            CHECK(cuGraphDestroy(graph));
        } else if (strcmp(name, "free_meanwhile") == 0) {
            /* Bare, the free breaks the capture in two of the modes. */
            CUgraph graph;
            CUdeviceptr block;
            CHECK(cuMemAlloc_v2(&block, 4 * MIB));
            CUstream stream = capturing();
            SHOW(cuStreamBeginCapture_v2(stream, mode));
            SHOW(cuMemFree_v2(block));
            SHOW(cuStreamEndCapture(stream, &graph));
            CHECK(cuGraphDestroy(graph));
        } else {
            printf("abandoned: no case %s\n", name);
            return 2;
        }
        use_memory();
    }
    return 0;
}
