/*
 * Records the device allocations of a program at the driver interface, without gpupool:
 *
 *   cc -O2 -shared -fPIC -o recorder.so recorder.c -ldl
 *   RECORD_TO=trace.txt LD_PRELOAD=./recorder.so python3 train.py
 *
 * Lines are `+ID BYTES`, `-ID` and `@MILLISECONDS`, as ../replay.c reads them. Recorded are cuMemAlloc and cuMemFree, the
 * stream-ordered ones, and cuMemCreate with cuMemRelease; an ID is given again after it was freed. Only the process named by the
 * first call records; RECORD_MOST calls at most.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef unsigned long long address;
enum { BUCKETS = 1 << 16 };
typedef struct Live {
    address key;
    unsigned id;
    struct Live *next;
} Live;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Live *buckets[BUCKETS];
static unsigned free_ids[1 << 20], free_count, next_id;
static size_t lines, most;
static FILE *out;
static double began, marked;

static double milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

static Live **slot(address key) {
    Live **place = &buckets[(key * 0x9e3779b97f4a7c15ull) >> 48];
    while (*place && (*place)->key != key) place = &(*place)->next;
    return place;
}

/* Whether something is recorded; a time at most every millisecond. */
static int begin(void) {
    if (!out) {
        const char *path = getenv("RECORD_TO"), *limit = getenv("RECORD_MOST");
        if (!path || !(out = fopen(path, "wx"))) return 0;
        most = limit ? strtoull(limit, NULL, 10) : 60000;
        began = milliseconds();
    }
    double at = milliseconds() - began;
    if (lines <= most && at >= marked + 1) fprintf(out, "@%.0f\n", marked = at);
    return 1;
}

static void taken(address key, size_t bytes) {
    pthread_mutex_lock(&lock);
    if (begin() && lines < most) {
        Live **place = slot(key);
        if (!*place && (*place = calloc(1, sizeof(Live)))) {
            (*place)->key = key;
            (*place)->id = free_count ? free_ids[--free_count] : next_id++;
            fprintf(out, "+%u %zu\n", (*place)->id, bytes);
            lines++;
        }
        fflush(out);
    }
    pthread_mutex_unlock(&lock);
}

static void gone(address key) {
    pthread_mutex_lock(&lock);
    Live **place = slot(key), *found = *place;
    if (found && begin()) {
        if (lines < most) fprintf(out, "-%u\n", found->id), lines++, fflush(out);
        *place = found->next;
        if (free_count < sizeof free_ids / sizeof *free_ids) free_ids[free_count++] = found->id;
        free(found);
    }
    pthread_mutex_unlock(&lock);
}

/* The driver's functions, by the names of the table below. */
static int (*real_alloc)(address *, size_t);
static int (*real_free)(address);
static int (*real_pitch)(address *, size_t *, size_t, size_t, unsigned);
static int (*real_create)(address *, size_t, const void *, address);
static int (*real_release)(address);
static int (*real_async[2])(address *, size_t, void *);
static int (*real_pool[2])(address *, size_t, void *, void *);
static int (*real_free_async[2])(address, void *);

static int my_alloc(address *p, size_t n) { int e = real_alloc(p, n); if (!e) taken(*p, n); return e; }
static int my_free(address p) { gone(p); return real_free(p); }
static int my_pitch(address *p, size_t *pitch, size_t w, size_t h, unsigned b) {
    int e = real_pitch(p, pitch, w, h, b);
    if (!e) taken(*p, *pitch * h);
    return e;
}
static int my_create(address *p, size_t n, const void *properties, address flags) {
    int e = real_create(p, n, properties, flags);
    if (!e) taken(*p, n);
    return e;
}
static int my_release(address p) { gone(p); return real_release(p); }
#define EACH(N) \
    static int my_async##N(address *p, size_t n, void *s) { int e = real_async[N](p, n, s); if (!e) taken(*p, n); return e; } \
    static int my_pool##N(address *p, size_t n, void *pool, void *s) { int e = real_pool[N](p, n, pool, s); if (!e) taken(*p, n); return e; } \
    static int my_free_async##N(address p, void *s) { gone(p); return real_free_async[N](p, s); }
EACH(0)
EACH(1)

static const struct {
    const char *name;
    void *real, *mine;
} hooks[] = {
    {"cuMemAlloc", &real_alloc, my_alloc}, {"cuMemFree", &real_free, my_free}, {"cuMemAllocPitch", &real_pitch, my_pitch},
    {"cuMemCreate", &real_create, my_create}, {"cuMemRelease", &real_release, my_release},
    {"cuMemAllocAsync", &real_async[0], my_async0}, {"cuMemAllocAsync", &real_async[1], my_async1},
    {"cuMemAllocFromPoolAsync", &real_pool[0], my_pool0}, {"cuMemAllocFromPoolAsync", &real_pool[1], my_pool1},
    {"cuMemFreeAsync", &real_free_async[0], my_free_async0}, {"cuMemFreeAsync", &real_free_async[1], my_free_async1},
};

static void *hooked(const char *name, void *real, int per_thread) {
    size_t length = strlen(name);
    if (length > 5 && !strcmp(name + length - 5, "_ptsz")) length -= 5, per_thread = 1;
    if (length > 3 && !strncmp(name + length - 3, "_v2", 3)) length -= 3;
    for (size_t i = 0; i < sizeof hooks / sizeof *hooks; i++)
        if (strlen(hooks[i].name) == length && !strncmp(hooks[i].name, name, length)) {
            int twin = i + 1 < sizeof hooks / sizeof *hooks && !strcmp(hooks[i].name, hooks[i + 1].name);
            size_t which = i + (size_t)(twin && per_thread);
            memcpy(hooks[which].real, &real, sizeof real);
            return hooks[which].mine;
        }
    return real;
}

typedef int (*get_1)(const char *, void **, int, uint64_t);
typedef int (*get_2)(const char *, void **, int, uint64_t, int *);
static get_1 real_get_1;
static get_2 real_get_2;
static int my_get_1(const char *name, void **result, int version, uint64_t flags);
static int my_get_2(const char *name, void **result, int version, uint64_t flags, int *status);

static void *routed(const char *name, void *real, uint64_t flags, int version) {
    if (!real) return real;
    if (!strcmp(name, "cuGetProcAddress_v2") || (!strcmp(name, "cuGetProcAddress") && version >= 12000))
        return real_get_2 = (get_2)real, (void *)my_get_2;
    if (!strcmp(name, "cuGetProcAddress")) return real_get_1 = (get_1)real, (void *)my_get_1;
    return strncmp(name, "cuMem", 5) ? real : hooked(name, real, (flags & 2) != 0);
}

static int my_get_1(const char *name, void **result, int version, uint64_t flags) {
    int e = real_get_1(name, result, version, flags);
    if (!e && result) *result = routed(name, *result, flags, version);
    return e;
}

static int my_get_2(const char *name, void **result, int version, uint64_t flags, int *status) {
    int e = real_get_2(name, result, version, flags, status);
    if (!e && result) *result = routed(name, *result, flags, version);
    return e;
}

typedef void *(*lookup)(void *, const char *);
static lookup real_dlsym;

__attribute__((constructor)) static void start(void) {
    real_dlsym = (lookup)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!real_dlsym) real_dlsym = (lookup)dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
}

__attribute__((visibility("default"))) void *dlsym(void *restrict handle, const char *restrict name) {
    if (!real_dlsym) start();
    /* RTLD_NEXT goes by the return address: this must stay a jump. */
    if (name[0] != 'c' || name[1] != 'u') return real_dlsym(handle, name);
    return routed(name, real_dlsym(handle, name), 0, 0);
}
