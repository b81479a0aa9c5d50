/*
 * The driver's virtual memory management, declared as in cuda_driver.h, and what every program about it needs.
 */
#ifndef VMM_H
#define VMM_H

#include "program.h"

typedef struct {
    int kind, id;
} CUmemLocation;

typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

typedef struct {
    int kind, handle_types;
    CUmemLocation location;
    void *win32;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
} CUmemAllocationProp;

enum { ON_DEVICE = 1, ON_HOST_NODE = 3, POSIX_FD = 1, READ_WRITE = 3 };

CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr address, uint64_t flags);
CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes);
CUresult cuMemCreate(uint64_t *handle, size_t bytes, const CUmemAllocationProp *properties, uint64_t flags);
CUresult cuMemRelease(uint64_t handle);
CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, uint64_t handle, uint64_t flags);
CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes);
CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *list, size_t count);
CUresult cuMemGetAccess(uint64_t *flags, const CUmemLocation *location, CUdeviceptr pointer);
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties, uint64_t handle);
CUresult cuMemRetainAllocationHandle(uint64_t *handle, void *address);
CUresult cuMemExportToShareableHandle(void *shared, uint64_t handle, int kind, uint64_t flags);
CUresult cuMemImportFromShareableHandle(uint64_t *handle, void *shared, int kind);

static inline CUmemAllocationProp on_device(int device)
{
    return (CUmemAllocationProp){.kind = 1, .handle_types = POSIX_FD, .location = {ON_DEVICE, device}};
}

/* Maps a handle at an address of its own, for one device alone, as a program does that works on one. */
static inline CUdeviceptr map_for(int device, uint64_t handle, size_t bytes)
{
    CUdeviceptr address;
    CHECK(cuMemAddressReserve(&address, bytes, 0, 0, 0));
    CHECK(cuMemMap(address, bytes, 0, handle, 0));
    CUmemAccessDesc access = {{ON_DEVICE, device}, READ_WRITE};
    CHECK(cuMemSetAccess(address, bytes, &access, 1));
    return address;
}

/* How many of the words at an address are not start + index, by a copy to the host. */
static inline uint64_t wrong_on_host(CUdeviceptr from, size_t bytes, uint32_t start)
{
    uint32_t *words = malloc(bytes);
    uint64_t wrong = 0;
    REQUIRE(words != NULL);
    CHECK(cuMemcpyDtoH_v2(words, from, bytes));
    for (size_t i = 0; i < bytes / sizeof *words; i++)
        wrong += words[i] != start + (uint32_t)i;
    free(words);
    return wrong;
}

#endif
