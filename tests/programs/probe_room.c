/*
 * What mappings cost a GPU in memory of its own (page tables), and whether exchanging what is behind an address needs more of it:
 * a remap on a GPU without a free byte succeeds only if it needs none. How the driver answers with no byte free is not asked, since
 * 2 GiB have to stay free.
 */
#include "probe.h"

enum { ROUNDS = 64 };

static size_t left(void)
{
    size_t free_bytes, total;
    CHECK(cuCtxSynchronize());
    CHECK(cuMemGetInfo_v2(&free_bytes, &total));
    return free_bytes;
}

/* `count` mappings of one chunk side by side, so that they need page tables and no memory. */
static void of_chunks(size_t bytes, int count, int place)
{
    CUdeviceptr at = reserve(bytes * (size_t)count);
    uint64_t handles[2] = {physical(place, bytes), physical(0, bytes)};
    size_t before = left();
    char what[128];
    now_asking = "mappings";
    for (int i = 0; i < count; i++)
        CHECK(cuMemMap(at + bytes * (size_t)i, bytes, 0, handles[0], 0));
    grant(at, bytes * (size_t)count, 1);
    size_t mapped = left();
    size_t least = mapped, refused = 0;
    for (int round = 0; round < ROUNDS; round++) {
        CUdeviceptr one = at + bytes * (size_t)(round % count);
        CUmemAccessDesc access = {{ON_DEVICE, 0}, READ_WRITE};
        size_t now;
        CHECK(cuMemUnmap(one, bytes));
        refused += cuMemMap(one, bytes, 0, handles[(round + 1) % 2], 0) != CUDA_SUCCESS;
        refused += cuMemSetAccess(one, bytes, &access, 1) != CUDA_SUCCESS;
        now = left();
        least = now < least ? now : least;
    }
    CHECK(cuMemUnmap(at, bytes * (size_t)count));
    size_t unmapped = left();
    double gib = (double)bytes * count / (1 << 30);
    snprintf(what, sizeof what, "page tables, chunks of %zu MiB of %s", bytes / MIB, place_name(place));
    measured(what, "KiB a GiB", before > mapped ? (double)(before - mapped) / 1024 / gib : 0);
    answer("A10: a remap at addresses that were mapped needs no more memory", least >= mapped && !refused,
           "chunks of %zu MiB of %s: %d remaps take memory: %s", bytes / MIB, place_name(place), ROUNDS,
           least < mapped ? "yes" : "no");
    tell("chunks of %zu MiB of %s: page tables are given back by the unmap: %s", bytes / MIB, place_name(place),
         unmapped >= before ? "yes" : unmapped > mapped ? "in part" : "no");
    CHECK(cuMemRelease(handles[0]));
    CHECK(cuMemRelease(handles[1]));
    CHECK(cuMemAddressFree(at, bytes * (size_t)count));
}

int main(int argc, char **argv)
{
    /* Addresses, in GiB, that are mapped at a time; no memory. */
    size_t gib = argc > 1 ? (size_t)atoi(argv[1]) : 64;
    static const size_t sizes[] = {2, 32, 512};
    begin_probe(60);
    for (int i = 0; i < 3; i++)
        for (int place = HOST; place < gpus; place++) {
            size_t bytes = sizes[i] * MIB, whole = gib << 30;
            /* Each mapping of 2 MiB costs two driver calls; so many show as well. */
            if (sizes[i] == 2)
                whole /= 8;
            if (!has_room(2 * bytes)) {
                not_asked("chunks", "2 GiB have to stay free");
                continue;
            }
            of_chunks(bytes, (int)(whole / bytes < 2 ? 2 : whole / bytes), place);
        }
    not_asked("map and access with no byte free", "2 GiB have to stay free");
    return end_probe();
}
