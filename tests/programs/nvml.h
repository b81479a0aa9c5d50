/* The part of NVML that the programs here use, looked up when they run: a machine may have none. */
#ifndef NVML_H
#define NVML_H

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef void *NvmlDevice;
typedef struct {
    unsigned long long total, free, used;
} NvmlMemory;
typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} NvmlMemory2;
typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} NvmlProcess;
typedef struct {
    NvmlDevice device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} NvmlEvent;
typedef struct {
    char legacy[16];
    unsigned domain, bus, device, kind, subsystem;
    char id[32];
} NvmlPci;

/* A function of NVML; the program ends where it is missing. */
static inline void *nvml_function(const char *name)
{
    static void *library;
    if (!library)
        library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    void *function = library ? dlsym(library, name) : NULL;
    if (!function) {
        printf("NVML: no %s\n", name);
        exit(1);
    }
    return function;
}

/* NVML(int, "name", types…)(arguments…) */
#define NVML(name, ...) ((int (*)(__VA_ARGS__))nvml_function(name))

static inline NvmlDevice nvml_device(unsigned index)
{
    NvmlDevice device = NULL;
    if (NVML("nvmlDeviceGetHandleByIndex_v2", unsigned, NvmlDevice *)(index, &device) != 0) {
        printf("NVML: no GPU %u\n", index);
        exit(1);
    }
    return device;
}

static inline NvmlMemory nvml_memory(unsigned index)
{
    NvmlMemory memory = {0, 0, 0};
    NVML("nvmlDeviceGetMemoryInfo", NvmlDevice, NvmlMemory *)(nvml_device(index), &memory);
    return memory;
}

static inline unsigned nvml_sm_clock(unsigned index)
{
    unsigned clock = 0;
    NVML("nvmlDeviceGetClockInfo", NvmlDevice, unsigned, unsigned *)(nvml_device(index), 1, &clock);
    return clock;
}

/* How many processes are on a GPU, and the bytes of this one if it is among them. */
static inline int nvml_processes(unsigned index, unsigned pid, uint64_t *used)
{
    NvmlProcess list[64];
    unsigned count = 64;
    *used = 0;
    if (NVML("nvmlDeviceGetComputeRunningProcesses_v3", NvmlDevice, unsigned *, NvmlProcess *)(nvml_device(index), &count, list))
        return -1;
    for (unsigned i = 0; i < count; i++)
        if (list[i].pid == pid)
            *used = list[i].used;
    return (int)count;
}

#endif
