/*
 * What the driver answers about handles of cuMemCreate: what each call takes and refuses, what the memory of a released
 * handle is still good for while it is mapped, and whether a handle that comes a second time (by cuMemRetainAllocationHandle,
 * by import) is the same number. A handle that is gone is not asked about: a real driver ends the program for some of that.
 */
#include "vmm.h"

#include <unistd.h>

enum { GRAIN = 2 * MIB, BYTES = 2 * GRAIN };

static CUdeviceptr window;
static CUmemAllocationProp plain, shareable;

static uint64_t made(const CUmemAllocationProp *properties)
{
    uint64_t handle;
    CHECK(cuMemCreate(&handle, BYTES, properties, 0));
    return handle;
}

static CUdeviceptr at(size_t grains)
{
    return window + grains * GRAIN;
}

static void grant(CUdeviceptr address, size_t bytes, int flags)
{
    CUmemAccessDesc access = {{ON_DEVICE, 0}, flags};
    CUresult result = cuMemSetAccess(address, bytes, &access, 1);
    if (result != CUDA_SUCCESS)
        printf("access %d: %d\n", flags, result);
}

/* Writes a word through one mapping and tells what another then reads. */
static void tell_written(const char *where, CUdeviceptr to, CUdeviceptr from, unsigned value)
{
    unsigned word = 0;
    CUresult written = to ? cuMemsetD32_v2(to, value, BYTES / 4) : CUDA_SUCCESS, read = cuMemcpyDtoH_v2(&word, from, 4);
    printf("%s: %d %d, %u\n", where, written, read, word);
}

static void tell_access(const char *where, CUdeviceptr address)
{
    uint64_t flags = 77;
    CUmemLocation location = {ON_DEVICE, 0};
    CUresult result = cuMemGetAccess(&flags, &location, address);
    printf("access %s: %d, %d\n", where, result, result ? -1 : (int)flags);
}

static void tell_properties(const char *when, uint64_t handle)
{
    CUmemAllocationProp properties = {0};
    CUresult result = cuMemGetAllocationPropertiesFromHandle(&properties, handle);
    printf("properties %s: %d, kind %d, shared as %d, at %d %d\n", when, result, properties.kind, properties.handle_types,
           properties.location.kind, properties.location.id);
}

static void tell_export(const char *when, uint64_t handle, int kind, uint64_t flags)
{
    int descriptor = -1;
    CUresult result = cuMemExportToShareableHandle(&descriptor, handle, kind, flags);
    printf("export %s: %d\n", when, result);
    if (result == CUDA_SUCCESS)
        close(descriptor);
}

static void creations(void)
{
    uint64_t handle;
    CUmemAllocationProp nowhere = plain, no_kind = plain, nobody = plain;
    nowhere.location.id = 99;
    no_kind.kind = 0;
    nobody.location.kind = 0;
    puts("== create");
    SHOW(cuMemCreate(NULL, BYTES, &plain, 0));
    SHOW(cuMemCreate(&handle, 0, &plain, 0));
    SHOW(cuMemCreate(&handle, BYTES + 1, &plain, 0));
    SHOW(cuMemCreate(&handle, 64 * KIB, &plain, 0));
    SHOW(cuMemCreate(&handle, BYTES, NULL, 0));
    SHOW(cuMemCreate(&handle, BYTES, &plain, 1));
    SHOW(cuMemCreate(&handle, BYTES, &nowhere, 0));
    SHOW(cuMemCreate(&handle, BYTES, &no_kind, 0));
    SHOW(cuMemCreate(&handle, BYTES, &nobody, 0));
    SHOW(cuMemCreate(&handle, (size_t)1 << 50, &plain, 0));
}

static void mappings(void)
{
    uint64_t handle = made(&plain), other = made(&plain);
    puts("== map");
    SHOW(cuMemMap(at(0), BYTES, 0, handle, 1));
    SHOW(cuMemMap(at(0), 0, 0, handle, 0));
    SHOW(cuMemMap(at(0), GRAIN, 0, handle, 0));
    SHOW(cuMemUnmap(at(0), GRAIN));
    SHOW(cuMemMap(at(0), GRAIN, GRAIN, handle, 0));
    SHOW(cuMemMap(at(0), BYTES, GRAIN, handle, 0));
    SHOW(cuMemMap(at(0), BYTES + GRAIN, 0, handle, 0));
    SHOW(cuMemMap(at(0), BYTES - 1, 0, handle, 0));
    SHOW(cuMemMap(at(0) + 4096, BYTES, 0, handle, 0));
    SHOW(cuMemMap(at(0), BYTES, 0, handle, 0));
    SHOW(cuMemMap(at(0), BYTES, 0, handle, 0));
    SHOW(cuMemMap(at(1), BYTES, 0, other, 0));
    SHOW(cuMemMap(at(2), BYTES, 0, other, 0));
    SHOW(cuMemMap(at(8), BYTES, 0, handle, 0));
    puts("== access");
    tell_access("before any", at(0));
    CUmemAccessDesc all = {{ON_DEVICE, 0}, READ_WRITE}, odd = {{ON_DEVICE, 0}, 2}, nowhere = {{ON_DEVICE, 99}, READ_WRITE},
                    host = {{ON_HOST_NODE, 0}, READ_WRITE}, twice[] = {all, {{ON_DEVICE, 0}, 1}};
    SHOW(cuMemSetAccess(at(0), BYTES, NULL, 1));
    SHOW(cuMemSetAccess(at(0), BYTES, &all, 0));
    SHOW(cuMemSetAccess(at(0), BYTES, &odd, 1));
    SHOW(cuMemSetAccess(at(0), BYTES, &nowhere, 1));
    SHOW(cuMemSetAccess(at(0), BYTES, &host, 1));
    SHOW(cuMemSetAccess(at(0), 0, &all, 1));
    SHOW(cuMemSetAccess(at(0), GRAIN, &all, 1));
    tell_access("of the first half, after that", at(0));
    tell_access("of the second half", at(1));
    SHOW(cuMemSetAccess(at(1), BYTES, &all, 1));
    SHOW(cuMemSetAccess(at(2), BYTES + GRAIN, &all, 1));
    SHOW(cuMemSetAccess(at(0), 2 * BYTES, &all, 1));
    tell_access("of the first", at(0));
    tell_access("inside the second", at(3) + 12345);
    tell_access("of the first once more", at(8));
    tell_access("where nothing is mapped", at(5));
    SHOW(cuMemSetAccess(at(5), GRAIN, &all, 1));
    SHOW(cuMemSetAccess(at(8), BYTES, twice, 2));
    tell_access("after two in one call", at(8));
    grant(at(8), BYTES, 1);
    tell_access("that is read-only", at(8));
    tell_access("through the other mapping", at(0));
    tell_written("written through one mapping, read through the other", at(0), at(9), 5);
    grant(at(8), BYTES, 0);
    tell_access("that was taken away", at(8));
    puts("== unmap");
    SHOW(cuMemUnmap(at(0), GRAIN));
    SHOW(cuMemUnmap(at(1), GRAIN));
    SHOW(cuMemUnmap(at(1), BYTES));
    SHOW(cuMemUnmap(at(0), 0));
    SHOW(cuMemUnmap(at(5), GRAIN));
    SHOW(cuMemUnmap(at(2), BYTES + GRAIN));
    tell_access("of the second, after that", at(2));
    SHOW(cuMemUnmap(at(0), 2 * BYTES));
    SHOW(cuMemUnmap(at(0), BYTES));
    SHOW(cuMemUnmap(at(8), BYTES));
    SHOW(cuMemRelease(handle));
    SHOW(cuMemRelease(other));
}

static void references(void)
{
    uint64_t handle = made(&shareable), again = 0, third = 0;
    puts("== references");
    SHOW(cuMemRetainAllocationHandle(&again, (void *)at(0)));
    CHECK(cuMemMap(at(0), BYTES, 0, handle, 0));
    grant(at(0), BYTES, READ_WRITE);
    SHOW(cuMemRetainAllocationHandle(NULL, (void *)at(0)));
    SHOW(cuMemRetainAllocationHandle(&again, (void *)(at(1) + 99)));
    printf("retained: the same %d\n", again == handle);
    SHOW(cuMemRelease(handle));
    tell_properties("after one release of two", handle);
    SHOW(cuMemRelease(again));
    tell_properties("after the last, while mapped", handle);
    tell_export("after the last, while mapped", handle, POSIX_FD, 0);
    SHOW(cuMemMap(at(4), BYTES, 0, handle, 0));
    SHOW(cuMemUnmap(at(4), BYTES));
    tell_written("written after the last release", at(0), at(0), 6);
    SHOW(cuMemRetainAllocationHandle(&third, (void *)at(0)));
    printf("retained after the last release: the same %d\n", third == handle);
    tell_properties("of that", third);
    tell_export("of that", third, POSIX_FD, 0);
    SHOW(cuMemMap(at(4), BYTES, 0, third, 0));
    SHOW(cuMemUnmap(at(0), BYTES));
    grant(at(4), BYTES, READ_WRITE);
    tell_written("what was written before", 0, at(5), 0);
    SHOW(cuMemUnmap(at(4), BYTES));
    SHOW(cuMemMap(at(6), BYTES, 0, third, 0));
    SHOW(cuMemUnmap(at(6), BYTES));
    SHOW(cuMemRelease(third));
}

static void sharing(void)
{
    int descriptor = -1, unrelated[2];
    uint64_t own = made(&shareable), kept = made(&plain), imported = 0, twice = 0, mapped = 0;
    puts("== export and import");
    tell_export("of what was not made for it", kept, POSIX_FD, 0);
    tell_export("of no kind", own, 0, 0);
    tell_export("as another kind", own, 8, 0);
    tell_export("with flags", own, POSIX_FD, 1);
    SHOW(cuMemExportToShareableHandle(NULL, own, POSIX_FD, 0));
    CHECK(cuMemExportToShareableHandle(&descriptor, own, POSIX_FD, 0));
    SHOW(cuMemImportFromShareableHandle(NULL, (void *)(intptr_t)descriptor, POSIX_FD));
    SHOW(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)descriptor, 0));
    SHOW(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)descriptor, POSIX_FD));
    SHOW(cuMemImportFromShareableHandle(&twice, (void *)(intptr_t)descriptor, POSIX_FD));
    printf("imported: the same as the own %d, as the second import %d\n", imported == own, imported == twice);
    close(descriptor);
    tell_properties("of the import", imported);
    tell_export("of the import", imported, POSIX_FD, 0);
    CHECK(cuMemMap(at(0), BYTES, 0, own, 0));
    SHOW(cuMemMap(at(4), BYTES, 0, imported, 0));
    grant(at(0), BYTES, READ_WRITE);
    grant(at(4), BYTES, READ_WRITE);
    tell_written("written to the own, read from the import", at(0), at(5), 7);
    SHOW(cuMemRetainAllocationHandle(&mapped, (void *)at(4)));
    printf("retained of the import: the same as the own %d, as the import %d\n", mapped == own, mapped == imported);
    SHOW(cuMemRelease(own));
    SHOW(cuMemUnmap(at(0), BYTES));
    tell_properties("of the import, without the own", imported);
    SHOW(cuMemRelease(imported));
    SHOW(cuMemRelease(twice));
    SHOW(cuMemRelease(mapped));
    SHOW(cuMemUnmap(at(4), BYTES));
    SHOW(cuMemRelease(kept));
    REQUIRE(pipe(unrelated) == 0);
    SHOW(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)unrelated[0], POSIX_FD));
    SHOW(cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)-1, POSIX_FD));
}

int main(void)
{
    start_on(0);
    plain = shareable = on_device(0);
    plain.handle_types = 0;
    CHECK(cuMemAddressReserve(&window, 16 * GRAIN, 0, 0, 0));
    creations();
    mappings();
    references();
    sharing();
    uint64_t handle = made(&plain);
    puts("== addresses");
    CHECK(cuMemMap(at(0), BYTES, 0, handle, 0));
    SHOW(cuMemAddressFree(window, GRAIN));
    SHOW(cuMemAddressFree(window, 16 * GRAIN));
    tell_access("after that", at(0));
    SHOW(cuMemUnmap(at(0), BYTES));
    SHOW(cuMemRelease(handle));
    return 0;
}
