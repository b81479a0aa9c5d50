/*
 * handle_sequences SEED STEPS THREADS FULL [measured]: random calls about memory of cuMemCreate, by threads that have numbers, addresses and data
 * of their own: made, retained, released, mapped at several addresses, given access, unmapped, exported and imported, asked
 * about, written and read, and used in ways that the driver refuses. Every answer is printed; which handle one is, is told by which
 * of the thread's own it equals. FULL first takes so many MiB of the GPU, so that what follows may have to go elsewhere. `measured` leaves out
 * the one call that no real driver was asked for, and which may end the process there: to release what mappings alone keep.
 */
#define _GNU_SOURCE
#include "vmm.h"

#include <pthread.h>
#include <unistd.h>

enum { GRAIN = 2 * MIB, SLOTS = 24, WINDOW = 64, MOST = 16 };

typedef struct {
    uint64_t handle;
    size_t grains;
    int references, mappings;
    /* Which data it has: an imported handle has that of the one it was exported from. */
    int data;
    int shared, imported;
} Memory;

typedef struct {
    int memory, grains, flags;
} Mapped;

typedef struct {
    uint64_t random;
    int steps, number;
    CUcontext context;
    CUdeviceptr window;
    Memory memory[SLOTS];
    Mapped mapped[WINDOW];
    uint32_t data[SLOTS * 64];
    int datas;
    FILE *out;
    char *text;
    size_t length;
} Thread;

static int is_measured;

static uint64_t below(Thread *it, uint64_t end)
{
    it->random = it->random * 6364136223846793005u + 1442695040888963407u;
    return (it->random >> 33) % end;
}

static CUdeviceptr at(Thread *it, int grain) { return it->window + (CUdeviceptr)grain * GRAIN; }

/* Any that is referenced, or with `mapped` is only mapped; -1 where there is none. */
static int any(Thread *it, int referenced, int mapped)
{
    int start = (int)below(it, SLOTS);
    for (int i = 0; i < SLOTS; i++) {
        int slot = (start + i) % SLOTS;
        Memory *memory = &it->memory[slot];
        if ((referenced && memory->references) || (mapped && !memory->references && memory->mappings))
            return slot;
    }
    return -1;
}

static int empty_slot(Thread *it)
{
    for (int i = 0; i < SLOTS; i++)
        if (!it->memory[i].references && !it->memory[i].mappings)
            return i;
    return -1;
}

/* The mapping that starts at or covers a grain; -1 where nothing is. */
static int covering(Thread *it, int grain)
{
    for (int start = grain; start >= 0; start--)
        if (it->mapped[start].grains)
            return start + it->mapped[start].grains > grain ? start : -1;
    return -1;
}

static int any_mapping(Thread *it)
{
    int start = (int)below(it, WINDOW);
    for (int i = 0; i < WINDOW; i++)
        if (it->mapped[(start + i) % WINDOW].grains)
            return (start + i) % WINDOW;
    return -1;
}

static void create(Thread *it)
{
    int slot = empty_slot(it), shared = (int)below(it, 2);
    size_t grains = 1 + below(it, 3);
    if (slot < 0 || it->datas >= SLOTS * 64)
        return;
    CUmemAllocationProp properties = on_device(0);
    properties.handle_types = shared ? POSIX_FD : 0;
    Memory *memory = &it->memory[slot];
    CUresult result = cuMemCreate(&memory->handle, grains * GRAIN, &properties, below(it, 20) == 0);
    fprintf(it->out, "%d: create %zu: %d\n", slot, grains, result);
    if (result != CUDA_SUCCESS)
        return;
    *memory = (Memory){.handle = memory->handle, .grains = grains, .references = 1, .data = it->datas++, .shared = shared};
}

static void release(Thread *it)
{
    int slot = any(it, 1, below(it, 5) == 0 && !is_measured);
    if (slot < 0)
        return;
    Memory *memory = &it->memory[slot];
    CUresult result = cuMemRelease(memory->handle);
    fprintf(it->out, "%d: release of %d references, %d mappings: %d\n", slot, memory->references, memory->mappings, result);
    if (result == CUDA_SUCCESS && memory->references)
        memory->references--;
}

static void map(Thread *it)
{
    int slot = any(it, 1, below(it, 3) == 0), grain = (int)below(it, WINDOW - 4);
    if (slot < 0)
        return;
    Memory *memory = &it->memory[slot];
    size_t bytes = memory->grains * GRAIN, offset = 0;
    if (below(it, 8) == 0)
        bytes += below(it, 2) ? GRAIN : -(size_t)GRAIN;
    if (below(it, 12) == 0)
        offset = GRAIN;
    uint64_t flags = below(it, 20) == 0;
    CUresult result = cuMemMap(at(it, grain), bytes, offset, memory->handle, flags);
    fprintf(it->out, "%d: map at %d, %zu of %zu from %zu: %d\n", slot, grain, bytes / GRAIN, memory->grains, offset / GRAIN, result);
    if (result != CUDA_SUCCESS)
        return;
    memory->mappings++;
    it->mapped[grain] = (Mapped){slot, (int)memory->grains, 0};
}

static void grant(Thread *it)
{
    int start = below(it, 4) ? any_mapping(it) : (int)below(it, WINDOW - 8);
    if (start < 0)
        return;
    int grains = it->mapped[start].grains && below(it, 4) ? it->mapped[start].grains : 1 + (int)below(it, 6);
    static const int choices[] = {READ_WRITE, READ_WRITE, 1, 0, 2};
    CUmemAccessDesc access = {{ON_DEVICE, below(it, 16) ? 0 : 99}, choices[below(it, 5)]};
    CUresult result = cuMemSetAccess(at(it, start), (size_t)grains * GRAIN, &access, 1);
    fprintf(it->out, "access %d to %d of %d from %d: %d\n", access.flags, grains, access.location.id, start, result);
    for (int grain = start; result == CUDA_SUCCESS && grain < start + grains; grain++)
        it->mapped[grain].flags = access.flags;
}

static void unmap(Thread *it)
{
    int start = below(it, 5) ? any_mapping(it) : (int)below(it, WINDOW - 8);
    if (start < 0)
        return;
    int grains = it->mapped[start].grains && below(it, 4) ? it->mapped[start].grains : 1 + (int)below(it, 6);
    CUresult result = cuMemUnmap(at(it, start), (size_t)grains * GRAIN);
    fprintf(it->out, "unmap %d from %d: %d\n", grains, start, result);
    for (int grain = start; result == CUDA_SUCCESS && grain < start + grains; grain++) {
        if (it->mapped[grain].grains)
            it->memory[it->mapped[grain].memory].mappings--;
        it->mapped[grain] = (Mapped){0};
    }
}

static void retain(Thread *it)
{
    int grain = (int)below(it, WINDOW), start = covering(it, grain);
    uint64_t handle = 0;
    CUresult result = cuMemRetainAllocationHandle(&handle, (void *)(at(it, grain) + below(it, GRAIN)));
    int same = start >= 0 && it->memory[it->mapped[start].memory].handle == handle;
    fprintf(it->out, "retain at %d: %d, the one that is mapped %d\n", grain, result, same);
    if (result == CUDA_SUCCESS && same)
        it->memory[it->mapped[start].memory].references++;
}

static void share(Thread *it)
{
    int slot = any(it, 1, below(it, 4) == 0), target, descriptor = -1;
    if (slot < 0)
        return;
    Memory *memory = &it->memory[slot];
    CUresult result = cuMemExportToShareableHandle(&descriptor, memory->handle, POSIX_FD, below(it, 10) == 0);
    fprintf(it->out, "%d: export: %d\n", slot, result);
    if (result != CUDA_SUCCESS)
        return;
    if ((target = empty_slot(it)) >= 0) {
        Memory *imported = &it->memory[target];
        result = cuMemImportFromShareableHandle(&imported->handle, (void *)(intptr_t)descriptor, POSIX_FD);
        fprintf(it->out, "%d: import of %d: %d, another handle %d\n", target, slot, result, imported->handle != memory->handle);
        if (result == CUDA_SUCCESS)
            *imported = (Memory){.handle = imported->handle, .grains = memory->grains, .references = 1, .data = memory->data, .imported = 1};
    }
    close(descriptor);
}

static void ask(Thread *it)
{
    int slot = any(it, 1, 1), grain = (int)below(it, WINDOW);
    uint64_t flags = 77;
    CUmemLocation location = {ON_DEVICE, 0};
    CUresult result = cuMemGetAccess(&flags, &location, at(it, grain));
    fprintf(it->out, "access at %d: %d %d\n", grain, result, result ? -1 : (int)flags);
    if (slot < 0)
        return;
    CUmemAllocationProp properties = {0};
    result = cuMemGetAllocationPropertiesFromHandle(&properties, it->memory[slot].handle);
    /* Of what was imported, where it lies is told, which may be elsewhere. */
    fprintf(it->out, "%d: properties: %d, %d %d at %d\n", slot, result, properties.kind, properties.handle_types,
            it->memory[slot].imported ? 0 : properties.location.id);
    int start = any_mapping(it);
    if (start < 0 || it->memory[it->mapped[start].memory].imported)
        return;
    int ordinal = -1;
    CUdeviceptr base = 0;
    size_t bytes = 0;
    CUresult attribute = cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at(it, start) + 99);
    result = cuMemGetAddressRange_v2(&base, &bytes, at(it, start) + 99);
    fprintf(it->out, "at %d: GPU %d %d, range %d %d %zu\n", start, attribute, ordinal, result, base == at(it, start), bytes / GRAIN);
}

static void use(Thread *it)
{
    int start = any_mapping(it);
    if (start < 0)
        return;
    Mapped *mapped = &it->mapped[start];
    uint32_t *data = &it->data[it->memory[mapped->memory].data], value = (uint32_t)below(it, 1000000) + 1, found[2];
    CUdeviceptr end = at(it, start) + (CUdeviceptr)mapped->grains * GRAIN;
    if (mapped->flags == READ_WRITE && below(it, 2)) {
        CUresult result = cuMemsetD32_v2(at(it, start), value, (size_t)mapped->grains * GRAIN / 4);
        fprintf(it->out, "write at %d: %d\n", start, result);
        *data = value;
        /* The fill may not be over yet, and the memory may be unmapped next. */
        CHECK(cuStreamSynchronize(NULL));
    }
    if (!mapped->flags || !*data)
        return;
    CUresult first = cuMemcpyDtoH_v2(&found[0], at(it, start), 4), last = cuMemcpyDtoH_v2(&found[1], end - 4, 4);
    fprintf(it->out, "read at %d: %d %d, right %d\n", start, first, last, found[0] == *data && found[1] == *data);
}

static void *play(void *argument)
{
    static void (*const calls[])(Thread *) = {create, create, create, release, release, map, map, map, map, grant, grant, grant,
                                              unmap, unmap, retain, share, ask, use, use, use};
    Thread *it = argument;
    it->out = open_memstream(&it->text, &it->length);
    REQUIRE(it->out != NULL);
    CHECK(cuCtxSetCurrent(it->context));
    for (int step = 0; step < it->steps; step++)
        calls[below(it, sizeof calls / sizeof *calls)](it);
    CHECK(cuMemUnmap(it->window, (size_t)WINDOW * GRAIN));
    for (int i = 0; i < SLOTS; i++)
        for (; it->memory[i].references; it->memory[i].references--)
            CHECK(cuMemRelease(it->memory[i].handle));
    CHECK(cuMemAddressFree(it->window, (size_t)WINDOW * GRAIN));
    fclose(it->out);
    return NULL;
}

int main(int argc, char **argv)
{
    static Thread threads[MOST];
    pthread_t running[MOST];
    REQUIRE(argc == 5 || (argc == 6 && !strcmp(argv[5], "measured")));
    is_measured = argc == 6;
    int count = atoi(argv[3]);
    size_t full = (size_t)atoi(argv[4]) * MIB;
    REQUIRE(count > 0 && count <= MOST);
    CUcontext context = start_on(0);
    uint64_t taken = 0;
    CUmemAllocationProp properties = on_device(0);
    if (full)
        CHECK(cuMemCreate(&taken, full, &properties, 0));
    for (int i = 0; i < count; i++) {
        threads[i] = (Thread){.random = (uint64_t)atoi(argv[1]) * 1000 + i, .steps = atoi(argv[2]), .number = i, .context = context};
        CHECK(cuMemAddressReserve(&threads[i].window, (size_t)WINDOW * GRAIN, 0, 0, 0));
        REQUIRE(pthread_create(&running[i], NULL, play, &threads[i]) == 0);
    }
    for (int i = 0; i < count; i++) {
        REQUIRE(pthread_join(running[i], NULL) == 0);
        printf("thread %d\n%s", i, threads[i].text);
        free(threads[i].text);
    }
    if (full)
        CHECK(cuMemRelease(taken));
    return 0;
}
