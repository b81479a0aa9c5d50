/*
 * The functions of include/gpupool.h, looked up in what `handle` leads to: RTLD_DEFAULT where the library is preloaded.
 */
#ifndef CONTROL_H
#define CONTROL_H

#define _GNU_SOURCE
#include "../../include/gpupool.h"
#include "program.h"

#include <dlfcn.h>

typedef struct {
    const char *(*version)(void);
    gpupool_state (*state)(void);
    const char *(*mode)(void), *(*why)(void);
    int (*statistics)(gpupool_statistics *);
    size_t (*places)(gpupool_place *, size_t);
    int (*pieces)(const void *, size_t, gpupool_piece *, size_t *);
    int (*anchor)(const void *, size_t), (*release_anchor)(const void *, size_t);
    int (*advise)(const void *, size_t, int, int);
    int (*prefetch)(const void *, size_t, int, void *);
    int (*malloc)(void **, size_t, int, void *);
    int (*free)(void *, int, void *);
    void *(*torch_malloc)(ptrdiff_t, int, void *);
    void (*torch_free)(void *, ptrdiff_t, int, void *);
    uint64_t (*trim)(void);
    int (*label)(const void *, const char *), (*label_budget)(const char *, uint64_t);
    size_t (*labels)(gpupool_label_usage *, size_t);
    int (*name)(const void *, size_t, const char *);
    int (*restore)(size_t *);
    int (*label_scope)(const char *, char *), (*far_scope)(int);
} Control;

static inline Control find_control(void *handle)
{
    Control c;
    *(void **)&c.version = dlsym(handle, "gpupool_version");
    *(void **)&c.state = dlsym(handle, "gpupool_get_state");
    *(void **)&c.mode = dlsym(handle, "gpupool_mode");
    *(void **)&c.why = dlsym(handle, "gpupool_why");
    *(void **)&c.statistics = dlsym(handle, "gpupool_get_statistics");
    *(void **)&c.places = dlsym(handle, "gpupool_places");
    *(void **)&c.pieces = dlsym(handle, "gpupool_pieces");
    *(void **)&c.anchor = dlsym(handle, "gpupool_anchor");
    *(void **)&c.release_anchor = dlsym(handle, "gpupool_release_anchor");
    *(void **)&c.advise = dlsym(handle, "gpupool_advise");
    *(void **)&c.prefetch = dlsym(handle, "gpupool_prefetch");
    *(void **)&c.malloc = dlsym(handle, "gpupool_malloc");
    *(void **)&c.free = dlsym(handle, "gpupool_free");
    *(void **)&c.torch_malloc = dlsym(handle, "gpupool_torch_malloc");
    *(void **)&c.torch_free = dlsym(handle, "gpupool_torch_free");
    *(void **)&c.trim = dlsym(handle, "gpupool_trim");
    *(void **)&c.label = dlsym(handle, "gpupool_label");
    *(void **)&c.label_budget = dlsym(handle, "gpupool_label_budget");
    *(void **)&c.labels = dlsym(handle, "gpupool_labels");
    *(void **)&c.name = dlsym(handle, "gpupool_name");
    *(void **)&c.restore = dlsym(handle, "gpupool_restore");
    *(void **)&c.label_scope = dlsym(handle, "gpupool_label_scope");
    *(void **)&c.far_scope = dlsym(handle, "gpupool_far_scope");
    return c;
}

static inline const char *state_name(gpupool_state state)
{
    static const char *const names[] = {"idle", "active", "closed", "passing"};
    return names[state];
}

static inline void *as_pointer(CUdeviceptr address)
{
    return (void *)(uintptr_t)address;
}

static inline CUdeviceptr as_address(const void *pointer)
{
    return (CUdeviceptr)(uintptr_t)pointer;
}

#endif
