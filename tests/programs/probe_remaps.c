/*
 * remaps SECONDS [MOST]: an address is given one of two chunks and the other in turn, at points where nothing runs. What was vacated is
 * poisoned through its second mapping; every multiprocessor of every GPU then reads through the address, and a kernel writes
 * through it. A stale translation or a stale line would show as the poison, or as words in the vacated chunk.
 */
#include "probe.h"

enum { POISON = 0xdbdbdbdb, PAGE_WORDS = 1024 };

static size_t bytes = 2 * MIB;
static CUdeviceptr address, second[2];
static uint64_t chunks[2];

static void check_everywhere(int gpu, CUdeviceptr at, uint32_t value)
{
    Probed *p = &on_gpu[gpu];
    uint64_t n = bytes / 4, stride = PAGE_WORDS;
    CHECK(cuCtxSetCurrent(p->context));
    /* Two blocks and more for each multiprocessor. */
    CHECK(cuLaunchKernel(p->check_all, 1024, 1, 1, 256, 1, 1, 0, p->stream, (void *[]){&at, &n, &stride, &value, &p->wrong}, NULL));
}

static uint64_t found(int gpu)
{
    uint64_t wrong = 0;
    CHECK(cuCtxSetCurrent(on_gpu[gpu].context));
    CHECK(cuStreamSynchronize(on_gpu[gpu].stream));
    CHECK(cuMemcpyDtoH_v2(&wrong, on_gpu[gpu].wrong, 8));
    return wrong;
}

static void remaps(int place, const char *what, double seconds, long most)
{
    CUstream stream = on_gpu[0].stream;
    uint64_t n = bytes / 4;
    double since = now_us(), remap = 0;
    long round;
    uint64_t stale[2] = {0, 0}, stray = 0;
    now_asking = what;
    for (int gpu = gpus - 1; gpu >= 0; gpu--) {
        CHECK(cuCtxSetCurrent(on_gpu[gpu].context));
        CHECK(cuMemsetD8_v2(on_gpu[gpu].wrong, 0, 8));
    }
    address = reserve(bytes);
    for (int i = 0; i < 2; i++) {
        chunks[i] = physical(i ? place : 0, bytes);
        second[i] = reserve(bytes);
        map_here(second[i], chunks[i], bytes, gpus);
        CHECK(cuMemsetD32_v2(second[i], POISON, bytes / 4));
    }
    CHECK(cuCtxSynchronize());
    map_here(address, chunks[0], bytes, gpus);
    for (round = 0; round < most && now_us() - since < seconds * 1e6; round++) {
        int old = (int)(round % 2), fresh = !old;
        uint32_t value = (uint32_t)round * 2 + 2, by_kernel = value + 1;
        /* What the copy of a move would have brought. */
        CHECK(cuMemsetD32Async(second[fresh], value, bytes / 4, stream));
        CHECK(cuStreamSynchronize(stream));
        double begun = now_us();
        CHECK(cuMemUnmap(address, bytes));
        map_here(address, chunks[fresh], bytes, gpus);
        remap += now_us() - begun;
        CHECK(cuMemsetD32Async(second[old], POISON, bytes / 4, stream));
        CHECK(cuStreamSynchronize(stream));
        for (int gpu = 0; gpu < gpus; gpu++)
            check_everywhere(gpu, address, value);
        for (int gpu = 1; gpu < gpus; gpu++)
            CHECK(cuStreamSynchronize(on_gpu[gpu].stream));
        CHECK(cuCtxSetCurrent(on_gpu[0].context));
        /* Behind the reads in the same stream; what it writes has to be in the new chunk and not in the old one. */
        CHECK(cuLaunchKernel(on_gpu[0].kernels.fill, 1024, 1, 1, 256, 1, 1, 0, stream, (void *[]){&address, &n, &by_kernel}, NULL));
        check_everywhere(0, second[fresh], by_kernel);
        check_everywhere(0, second[old], POISON);
        if (round % 4096 == 4095)
            stray += found(0);
        else
            CHECK(cuStreamSynchronize(stream));
        if (stray)
            break;
    }
    for (int gpu = 0; gpu < gpus; gpu++)
        stale[gpu] = found(gpu);
    CHECK(cuCtxSetCurrent(on_gpu[0].context));
    answer("B4, P9: unmap forgets every translation, and nothing stale is read or written after it", stale[0] + stale[1] == 0,
           "%s: stale or stray words: %llu and %llu", what, (unsigned long long)stale[0], (unsigned long long)stale[1]);
    printf("measured: {\"%s, remaps\": %ld, \"us each\": %.1f, \"us with all that looks\": %.1f}\n", what, round,
           remap / (double)(round ? round : 1), (now_us() - since) / (double)(round ? round : 1));
    CHECK(cuMemUnmap(address, bytes));
    CHECK(cuMemAddressFree(address, bytes));
    for (int i = 0; i < 2; i++) {
        CHECK(cuMemUnmap(second[i], bytes));
        CHECK(cuMemRelease(chunks[i]));
        CHECK(cuMemAddressFree(second[i], bytes));
    }
}

int main(int argc, char **argv)
{
    double seconds = argc > 1 ? atof(argv[1]) : 60;
    long most = argc > 2 ? atol(argv[2]) : 1000000;
    begin_probe((int)seconds + 60);
    begin_second();
    for (int gpu = gpus - 1; gpu >= 0; gpu--) {
        CHECK(cuCtxSetCurrent(on_gpu[gpu].context));
        warm_up(&on_gpu[gpu], on_gpu[gpu].stream);
    }
    int parts = gpus > 1 ? 4 : 3;
    remaps(0, "2 MiB between two chunks of GPU 0", seconds / parts, most);
    if (gpus > 1)
        remaps(1, "2 MiB between GPU 0 and GPU 1", seconds / parts, most);
    else
        not_asked("between GPU 0 and GPU 1, both reading", "there is one GPU");
    remaps(HOST, "2 MiB between GPU 0 and the host", seconds / parts, most);
    bytes = 32 * MIB;
    remaps(gpus - 1, gpus > 1 ? "32 MiB between GPU 0 and GPU 1" : "32 MiB between two chunks of GPU 0", seconds / parts, most);
    return end_probe();
}
