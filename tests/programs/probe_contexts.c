/*
 * Contexts that are made after memory was mapped: a second one on a GPU, the first on another, a green one. What they see by a grant
 * that is older than they are, and after memory was exchanged under them.
 */
#include "probe.h"

#include "green.h"

enum { CHUNK = 8 * MIB };

static CUdeviceptr mapped;
static uint64_t now_there;

/* Puts another chunk behind the address, of the same GPU or another, that begins with `start`. */
static void exchange(int place, uint32_t start, int count)
{
    uint64_t n = CHUNK / 4;
    CHECK(cuCtxSetCurrent(on_gpu[0].context));
    CHECK(cuCtxSynchronize());
    if (now_there) {
        CHECK(cuMemUnmap(mapped, CHUNK));
        CHECK(cuMemRelease(now_there));
    }
    now_there = physical(place, CHUNK);
    map_here(mapped, now_there, CHUNK, count);
    iota(&on_gpu[0].kernels, on_gpu[0].stream, mapped, n, start);
    CHECK(cuStreamSynchronize(on_gpu[0].stream));
}

/* A kernel and a copy of the context both read, and one of its kernels writes. */
static void sees(const char *who, Probed *p, uint32_t start)
{
    uint32_t *words = malloc(CHUNK);
    uint64_t wrong = 0, n = CHUNK / 4;
    CUresult copied;
    now_asking = who;
    REQUIRE(words != NULL);
    uint64_t by_kernel = wrong_at(p, mapped, CHUNK, start);
    CHECK(cuCtxSetCurrent(p->context));
    copied = cuMemcpyDtoH_v2(words, mapped, CHUNK);
    for (size_t i = 0; i < CHUNK / 4; i++)
        wrong += words[i] != start + (uint32_t)i;
    free(words);
    iota(&p->kernels, p->stream, mapped, n, start + 1);
    CHECK(cuStreamSynchronize(p->stream));
    CHECK(cuCtxSetCurrent(on_gpu[0].context));
    uint64_t written = wrong_at(&on_gpu[0], mapped, CHUNK, start + 1);
    iota(&on_gpu[0].kernels, on_gpu[0].stream, mapped, n, start);
    CHECK(cuStreamSynchronize(on_gpu[0].stream));
    answer("B5: a grant is a GPU's, whichever of its contexts is made when", !by_kernel && !copied && !wrong && !written,
           "%s: its kernel finds %llu words wrong, its copy %llu (%d), what it wrote %llu", who, (unsigned long long)by_kernel,
           (unsigned long long)wrong, copied, (unsigned long long)written);
}

int main(void)
{
    Probed made;
    CUcontext context;
    begin_probe(60);
    mapped = reserve(CHUNK);
    exchange(0, 1, gpus);
    sees("the context that the memory was mapped in", &on_gpu[0], 1);
    CHECK(cuCtxCreate_v2(&context, 0, 0));
    load_probe(&made);
    sees("a second context of GPU 0, made afterwards", &made, 1);
    exchange(0, 100, gpus);
    sees("it, after the memory was exchanged", &made, 100);
    CHECK(cuCtxSetCurrent(on_gpu[0].context));
    CUgreenCtx green = green_on(0);
    CUcontext of_green;
    Probed in_green = on_gpu[0];
    CHECK(cuCtxFromGreenCtx(&of_green, green));
    CHECK(cuCtxSetCurrent(of_green));
    load_probe(&in_green);
    sees("a green context of GPU 0, made afterwards", &in_green, 100);
    exchange(0, 200, gpus);
    sees("it, after the memory was exchanged", &in_green, 200);
    if (gpus > 1) {
        unsigned flags;
        int active;
        CHECK(cuDevicePrimaryCtxGetState(1, &flags, &active));
        REQUIRE(!active);
        begin_second();
        sees("the first context of GPU 1, made after the grant", &on_gpu[1], 200);
        exchange(1, 300, gpus);
        sees("it, after the memory was exchanged for its own", &on_gpu[1], 300);
        sees("the second context of GPU 0", &made, 300);
        exchange(HOST, 400, gpus);
        sees("it, after the memory was exchanged for the host's", &on_gpu[1], 400);
        sees("the second context of GPU 0", &made, 400);
        exchange(0, 500, 1);
        CHECK(cuCtxSetCurrent(on_gpu[1].context));
        CHECK(cuCtxSynchronize());
        grant(mapped, CHUNK, 2);
        sees("GPU 1, granted to after the exchange", &on_gpu[1], 500);
    } else {
        not_asked("the first context of another GPU", "there is one GPU");
    }
    exchange(HOST, 600, gpus);
    sees("the first context, on the host's memory", &on_gpu[0], 600);
    sees("the second context of GPU 0, on the host's memory", &made, 600);
    return end_probe();
}
