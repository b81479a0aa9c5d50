/*
 * What the simulated driver tells tests beyond the driver interface, and the pool's own trim. All are looked up at
 * run time: on a real driver, or without the shim, they are null and callers leave those lines out.
 */
#ifndef SIMULATOR_H
#define SIMULATOR_H

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

typedef struct {
    int (*arm)(const char *specification);
    uint64_t (*faults_left)(void);
    void (*before)(const char *call, void (*act)(void));
    void (*after)(const char *call, void (*act)(void));
    uint64_t (*calls)(void);
    uint64_t (*used)(int device);
    uint64_t (*host_used)(void);
    uint64_t (*pinned)(void);
    uint64_t (*handles)(void);
    uint64_t (*mapped)(void);
    uint64_t (*violations)(void);
    uint64_t (*trim)(void);
} Simulator;

static inline Simulator find_simulator(void)
{
    Simulator s;
    *(void **)&s.arm = dlsym(RTLD_DEFAULT, "simcuda_fault_arm");
    *(void **)&s.faults_left = dlsym(RTLD_DEFAULT, "simcuda_faults_left");
    *(void **)&s.before = dlsym(RTLD_DEFAULT, "simcuda_before");
    *(void **)&s.after = dlsym(RTLD_DEFAULT, "simcuda_after");
    *(void **)&s.calls = dlsym(RTLD_DEFAULT, "simcuda_calls");
    *(void **)&s.used = dlsym(RTLD_DEFAULT, "simcuda_used");
    *(void **)&s.host_used = dlsym(RTLD_DEFAULT, "simcuda_host_used");
    *(void **)&s.pinned = dlsym(RTLD_DEFAULT, "simcuda_pinned");
    *(void **)&s.handles = dlsym(RTLD_DEFAULT, "simcuda_handles");
    *(void **)&s.mapped = dlsym(RTLD_DEFAULT, "simcuda_mapped");
    *(void **)&s.violations = dlsym(RTLD_DEFAULT, "simcuda_violations");
    *(void **)&s.trim = dlsym(RTLD_DEFAULT, "gpupool_trim");
    return s;
}

/* What is used of each GPU and, where `host` says so, of the host, in MiB; only `used:` on a real driver. */
static inline void print_used(const Simulator *s, int devices, int host)
{
    const uint64_t mib = 1 << 20;
    printf("used:");
    for (int gpu = 0; s->used && gpu < devices; gpu++)
        printf(" gpu%d %llu", gpu, (unsigned long long)(s->used(gpu) / mib));
    if (host)
        printf(" host %llu", (unsigned long long)(s->host_used ? s->host_used() / mib : 0));
    printf("\n");
}

/* The physical memory of the whole machine, in bytes, as the simulator counts it; 0 on a real driver. */
static inline uint64_t physical_use(const Simulator *s, int devices)
{
    uint64_t sum = s->host_used ? s->host_used() : 0;
    for (int i = 0; s->used && i < devices; i++)
        sum += s->used(i);
    return sum;
}

#endif
