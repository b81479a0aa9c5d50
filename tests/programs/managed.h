/* The part of the driver interface that is about managed memory, and what the simulated driver tells of it. */
#ifndef MANAGED_H
#define MANAGED_H

#include "simulator.h"

#include "program.h"

enum { CU_MEM_ATTACH_GLOBAL = 1, CU_MEM_ATTACH_HOST = 2 };
enum { CU_DEVICE_CPU = -1, CU_DEVICE_INVALID = -2 };
/* CUmem_range_attribute */
enum {
    CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION = 2,
    CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY = 3,
    CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION = 4,
};

CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned flags);
CUresult cuMemPrefetchAsync(CUdeviceptr pointer, size_t bytes, CUdevice to, CUstream stream);
CUresult cuMemRangeGetAttribute(void *data, size_t size, int attribute, CUdeviceptr pointer, size_t bytes);

/* Where most of these bytes are: a GPU's ordinal, CU_DEVICE_CPU, or CU_DEVICE_INVALID (nowhere yet, or nobody can tell). */
static inline int residence(CUdeviceptr pointer, size_t bytes, int devices)
{
    uint64_t (*at)(uint64_t, uint64_t, int);
    *(void **)&at = dlsym(RTLD_DEFAULT, "simcuda_managed_at");
    for (int place = CU_DEVICE_CPU; at && place < devices; place++)
        if (at(pointer, bytes, place) > bytes / 2)
            return place;
    return CU_DEVICE_INVALID;
}

static inline int range_attribute(int attribute, CUdeviceptr pointer, size_t bytes)
{
    int value = CU_DEVICE_INVALID;
    CHECK(cuMemRangeGetAttribute(&value, sizeof value, attribute, pointer, bytes));
    return value;
}

static inline void print_place(int place, size_t mib)
{
    if (place >= 0)
        printf(" gpu%d %zu", place, mib);
    else
        printf(" %s %zu", place == CU_DEVICE_CPU ? "host" : "nowhere", mib);
}

#endif
