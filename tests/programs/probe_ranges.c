/*
 * What cuMemGetAddressRange and the pointer attributes say of memory that is mapped in two places, or was mapped elsewhere before: as where
 * something was copied through a window of one's own before it came to where the program knows it.
 *
 *   probe_ranges [GPU | -1]     where the memory is, -1: the host
 */
#include "probe.h"

enum { PART = 2 * MIB, ADDRESS_OF_DEVICE = 3, MAPPING_SIZE = 18, MAPPING_BASE = 19 };

static const char RULE[] = "ranges are those of the mapping that was asked about, and only of memory on the host the start is not said";

static int place;

/* Asked in the middle of the part that is mapped at `here`. */
static void ask(const char *when, CUdeviceptr here)
{
    CUdeviceptr start = 0, asked = here + PART / 2, device = 0, mapping = 0;
    size_t bytes = 0, mapped = 0;
    int is_told = place != HOST;
    now_asking = when;
    CHECK(cuMemGetAddressRange_v2(&start, &bytes, asked));
    CHECK(cuPointerGetAttribute(&device, ADDRESS_OF_DEVICE, asked));
    CHECK(cuPointerGetAttribute(&mapping, MAPPING_BASE, asked));
    CHECK(cuPointerGetAttribute(&mapped, MAPPING_SIZE, asked));
    answer(RULE, start == (is_told ? here : 0) && bytes == PART, "%s, %s: the range of %zu MiB starts %s", place_name(place), when, bytes / MIB,
           start == here ? "where it is mapped" : start == 0 ? "at 0" : "elsewhere");
    answer(RULE, device == asked && mapping == here && mapped == PART, "%s, %s: the attributes name %s", place_name(place), when,
           device == asked && mapping == here ? "what is mapped there" : "something else");
}

int main(int argc, char **argv)
{
    begin_probe(60);
    place = argc > 1 ? atoi(argv[1]) : 0;
    CUdeviceptr one = reserve(4 * PART), other = reserve(4 * PART), third = reserve(4 * PART);

    uint64_t chunk = physical(place, PART);
    map_here(one, chunk, PART, 1);
    ask("mapped once", one);
    CHECK(cuMemUnmap(one, PART));
    map_here(other, chunk, PART, 1);
    ask("unmapped and mapped elsewhere", other);
    CHECK(cuMemUnmap(other, PART));
    CHECK(cuMemAddressFree(one, 4 * PART));
    map_here(other, chunk, PART, 1);
    ask("the first address is given back", other);
    CHECK(cuMemRelease(chunk));
    CHECK(cuMemUnmap(other, PART));
    one = reserve(4 * PART);

    chunk = physical(place, PART);
    map_here(one, chunk, PART, 1);
    map_here(other, chunk, PART, 1);
    ask("mapped twice, the first", one);
    ask("mapped twice, the second", other);
    CHECK(cuMemUnmap(one, PART));
    ask("the first of two is unmapped, the second", other);
    map_here(one, chunk, PART, 1);
    ask("and mapped again, the one mapped later", one);
    ask("and mapped again, the one mapped earlier", other);
    CHECK(cuMemUnmap(one, PART));
    CHECK(cuMemUnmap(other, PART));
    CHECK(cuMemRelease(chunk));

    /* Two parts side by side, of which the second was elsewhere before: alone there, and at another place behind a first one. */
    uint64_t parts[2] = {physical(place, PART), physical(place, PART)};
    for (int i = 0; i < 2; i++)
        map_here(third + (size_t)i * PART, parts[i], PART, 1);
    ask("two parts in a window, the second", third + PART);
    for (int i = 0; i < 2; i++)
        CHECK(cuMemUnmap(third + (size_t)i * PART, PART));
    for (int i = 0; i < 2; i++)
        map_here(one + (size_t)i * PART, parts[i], PART, 1);
    ask("both mapped elsewhere, the first", one);
    ask("both mapped elsewhere, the second", one + PART);
    CHECK(cuMemAddressFree(third, 4 * PART));
    ask("the window is given back, the first", one);
    ask("the window is given back, the second", one + PART);
    for (int i = 0; i < 2; i++) {
        CHECK(cuMemUnmap(one + (size_t)i * PART, PART));
        CHECK(cuMemRelease(parts[i]));
    }

    /* In the place of another part, which goes. */
    parts[0] = physical(place, PART), parts[1] = physical(place, PART);
    for (int i = 0; i < 2; i++)
        map_here(one + (size_t)i * PART, parts[i], PART, 1);
    uint64_t next = physical(place, PART);
    third = reserve(4 * PART);
    map_here(third, next, PART, 1);
    map_here(third + PART, parts[1], PART, 1);
    ask("what is to go, mapped beside what comes", one + PART);
    CHECK(cuMemUnmap(third + PART, PART));
    CHECK(cuMemUnmap(third, PART));
    CHECK(cuMemUnmap(one + PART, PART));
    map_here(one + PART, next, PART, 1);
    CHECK(cuMemRelease(parts[1]));
    ask("what came in the place of another", one + PART);
    CHECK(cuMemAddressFree(third, 4 * PART));
    ask("and where it was filled is given back", one + PART);
    CUdeviceptr plain;
    CHECK(cuMemAlloc_v2(&plain, 64 * MIB));
    ask("and memory was allocated since", one + PART);
    CHECK(cuMemFree_v2(plain));
    CHECK(cuMemUnmap(one, PART));
    CHECK(cuMemUnmap(one + PART, PART));
    CHECK(cuMemRelease(parts[0]));
    CHECK(cuMemRelease(next));
    return end_probe();
}
