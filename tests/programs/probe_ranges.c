/*
 * What cuMemGetAddressRange and the pointer attributes say of memory that is mapped in two places, or was mapped elsewhere before: as where
 * something was copied through a window of one's own before it came to where the program knows it. Then what it says of the ways in which
 * memory can be shared, and of the numbers that it has.
 *
 *   probe_ranges [GPU | -1]     where the memory is, -1: the host
 */
#include "probe.h"

enum {
    PART = 2 * MIB,
    ADDRESS_OF_DEVICE = CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
    MAPPING_SIZE = CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
    MAPPING_BASE = CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
};

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

/* Numbers of a mapping, an allocation or an address: how two addresses differ in them. */
static const char *compared(int attribute, CUdeviceptr one, CUdeviceptr other)
{
    uint64_t first = 0, second = 0;
    CHECK(cuPointerGetAttribute(&first, attribute, one));
    CHECK(cuPointerGetAttribute(&second, attribute, other));
    return first != second ? "differ" : first == 0 ? "are 0" : "are the same";
}

static void tell_ids(const char *what, CUdeviceptr one, CUdeviceptr other)
{
    now_asking = what;
    tell("%s: buffer ids %s, memory block ids %s", what, compared(CU_POINTER_ATTRIBUTE_BUFFER_ID, one, other),
         compared(CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID, one, other));
}

static void tell_sharing(const char *what, CUdeviceptr at)
{
    uint64_t types = 0, legacy = 0, rdma = 0, decompress = 0, start = 0, bytes = 0;
    now_asking = what;
    CHECK(cuPointerGetAttribute(&types, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, at));
    CHECK(cuPointerGetAttribute(&legacy, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, at));
    CHECK(cuPointerGetAttribute(&rdma, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, at));
    /* Drivers before 12.8 do not know it. */
    CUresult knows = cuPointerGetAttribute(&decompress, CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE, at);
    CHECK(cuPointerGetAttribute(&start, MAPPING_BASE, at));
    CHECK(cuPointerGetAttribute(&bytes, MAPPING_SIZE, at));
    tell("%s: allowed handle types %d, legacy IPC %d, RDMA capable %d, for decompression engines %d (answer %d), %zu bytes are mapped from %zu bytes before", what,
         (int)types, (int)legacy, (int)rdma, (int)decompress, knows, (size_t)bytes, (size_t)(at - start));
}

/* What a program is told of memory that it made to be shared in some ways: no rule of the library's is behind these, which passes most of the
   driver's answers on and would have to say, of a handle that lies on the host or is made of parts, what the driver says of one that is not. */
static void tell_of_handles(void)
{
    for (int types = 0; types <= POSIX_FD; types++) {
        for (unsigned char rdma = 0; rdma <= 1; rdma++) {
            CUmemAllocationProp properties = {.kind = 1, .handle_types = types, .rdma = rdma}, told = {0};
            properties.location = (CUmemLocation){place == HOST ? ON_HOST_NODE : ON_DEVICE, place == HOST ? 0 : place};
            char what[120];
            uint64_t handle;
            snprintf(what, sizeof what, "%s, made with handle types %d and RDMA %d", place_name(place), types, rdma);
            now_asking = what;
            CUresult result = cuMemCreate(&handle, 2 * PART, &properties, 0);
            if (result != CUDA_SUCCESS) {
                tell("%s: cuMemCreate answers %d", what, result);
                continue;
            }
            CHECK(cuMemGetAllocationPropertiesFromHandle(&told, handle));
            tell("%s: its properties say %d and %d", what, told.handle_types, told.rdma);
            CUdeviceptr at = reserve(2 * PART), again = reserve(2 * PART);
            map_here(at, handle, 2 * PART, 1);
            map_here(again, handle, 2 * PART, 1);
            tell_sharing(what, at + PART + 7);
            tell_ids("  its first byte and its last", at, at + 2 * PART - 1);
            tell_ids("  its first byte in two mappings", at, again);
            CHECK(cuMemUnmap(at, 2 * PART));
            CHECK(cuMemUnmap(again, 2 * PART));
            CHECK(cuMemAddressFree(at, 2 * PART));
            CHECK(cuMemAddressFree(again, 2 * PART));
            CHECK(cuMemRelease(handle));
        }
    }
    uint64_t one = physical(place, PART), other = physical(place, PART);
    CUdeviceptr at = reserve(2 * PART);
    for (int i = 0; i < 2; i++)
        map_here(at + (size_t)i * PART, i ? other : one, PART, 1);
    tell_ids("two handles side by side", at, at + PART);
    CHECK(cuMemUnmap(at, PART));
    CHECK(cuMemUnmap(at + PART, PART));
    CHECK(cuMemAddressFree(at, 2 * PART));
    CHECK(cuMemRelease(one));
    CHECK(cuMemRelease(other));
}

/* The same of plain memory of the current GPU, as what the pool has is to answer like it. */
static void tell_of_blocks(void)
{
    static const size_t SIZES[] = {1000, 1000, 3 * MIB, 3 * MIB, 64 * MIB};
    static const char *const NAMES[] = {"cuMemAlloc of 1000 bytes", "another", "of 3 MiB", "another", "of 64 MiB"};
    CUdeviceptr blocks[5];
    for (int i = 0; i < 5; i++) {
        CHECK(cuMemAlloc_v2(&blocks[i], SIZES[i]));
        tell_sharing(NAMES[i], blocks[i] + SIZES[i] / 2);
        tell_ids("  its first byte and its last", blocks[i], blocks[i] + SIZES[i] - 1);
    }
    tell_ids("two of 1000 bytes", blocks[0], blocks[1]);
    tell_ids("two of 3 MiB", blocks[2], blocks[3]);
    for (int i = 0; i < 5; i++)
        CHECK(cuMemFree_v2(blocks[i]));
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
    tell_of_handles();
    if (place == 0)
        tell_of_blocks();
    return end_probe();
}
