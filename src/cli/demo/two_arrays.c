/* Arrays on the first GPU, through the plain driver interface.
 *
 *   two_arrays list           names every GPU's free and total bytes
 *   two_arrays SIZE [SIZE]... allocates one array a size, writes them all, then reads them all back
 *
 * A size is bytes, or a whole number with MiB or GiB. Every 2 MiB of every array, and its last 4 KiB, hold a 4 KiB pattern
 * that occurs nowhere else, so memory that is there twice shows. Exit: 0 right, 1 no memory, 2 no driver, 3 wrong data. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long device_pointer;
enum { PAGE = 4096, STEP = 2 << 20, MOST = 64, OUT_OF_MEMORY = 2 };
static const uint64_t MANY = 1 << 17;

static int (*init)(unsigned), (*device_count)(int *), (*device_get)(int *, int), (*context_set)(void *);
static int (*context_retain)(void **, int), (*context_release)(int), (*memory_info)(size_t *, size_t *);
static int (*allocate)(device_pointer *, size_t), (*release)(device_pointer);
static int (*copy_in)(device_pointer, const void *, size_t), (*copy_out)(void *, device_pointer, size_t);

static void check(const char *call, int result) {
    if (result == 0) return;
    fprintf(stderr, "%s answered %d\n", call, result);
    exit(2);
}

static int load(void) {
    struct { void *function; const char *name; } table[] = {
        {&init, "cuInit"}, {&device_count, "cuDeviceGetCount"}, {&device_get, "cuDeviceGet"},
        {&context_set, "cuCtxSetCurrent"}, {&context_retain, "cuDevicePrimaryCtxRetain"},
        {&context_release, "cuDevicePrimaryCtxRelease_v2"}, {&memory_info, "cuMemGetInfo_v2"},
        {&allocate, "cuMemAlloc_v2"}, {&release, "cuMemFree_v2"},
        {&copy_in, "cuMemcpyHtoD_v2"}, {&copy_out, "cuMemcpyDtoH_v2"},
    };
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) return fprintf(stderr, "%s\n", dlerror()), 0;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        void *found = dlsym(driver, table[i].name);
        if (!found) return fprintf(stderr, "%s\n", dlerror()), 0;
        memcpy(table[i].function, &found, sizeof found);
    }
    return 1;
}

static void use(int gpu) {
    int device;
    void *context;
    check("cuDeviceGet", device_get(&device, gpu));
    check("cuDevicePrimaryCtxRetain", context_retain(&context, device));
    check("cuCtxSetCurrent", context_set(context));
}

static int list(void) {
    int count;
    check("cuDeviceGetCount", device_count(&count));
    for (int gpu = 0; gpu < count; gpu++) {
        size_t free_bytes, total;
        use(gpu);
        check("cuMemGetInfo", memory_info(&free_bytes, &total));
        check("cuDevicePrimaryCtxRelease", context_release(gpu));
        printf("%zu %zu\n", free_bytes, total);
    }
    return 0;
}

/* Splitmix64 of (array, offset, word): no two words of the whole run are likely to agree. */
static void pattern(uint64_t *page, uint64_t array, uint64_t offset) {
    for (uint64_t word = 0; word < PAGE / 8; word++) {
        uint64_t x = (array << 56) + offset + word * 8 + 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        page[word] = x ^ (x >> 31);
    }
}

/* The offset of the next page to look at; past the end when there is none. Of arrays beyond MANY steps the pages lie further
 * apart, so that no size takes longer. */
static uint64_t next(uint64_t offset, uint64_t bytes) {
    uint64_t last = bytes - PAGE, step = STEP * (bytes / (STEP * MANY) + 1);
    if (offset == last) return bytes;
    return offset + step < last ? offset + step : last;
}

static uint64_t size(const char *text) {
    char *unit;
    uint64_t number = strtoull(text, &unit, 10);
    if (strcmp(unit, "GiB") == 0) number <<= 30;
    else if (strcmp(unit, "MiB") == 0) number <<= 20;
    else if (*unit) number = 0;
    if (number >= PAGE && number % 8 == 0) return number;
    fprintf(stderr, "%s: not a size of 4 KiB or more; write for example 30GiB\n", text);
    exit(2);
}

int main(int argc, char **argv) {
    static device_pointer arrays[MOST];
    static uint64_t sizes[MOST], wanted[PAGE / 8], found[PAGE / 8];
    int count = argc - 1;
    if (count < 1 || count > MOST) return fprintf(stderr, "usage: two_arrays list | SIZE [SIZE]...\n"), 2;
    if (!load()) return 2;
    check("cuInit", init(0));
    if (strcmp(argv[1], "list") == 0) return list();
    use(0);

    for (int i = 0; i < count; i++) {
        sizes[i] = size(argv[i + 1]);
        int result = allocate(&arrays[i], sizes[i]);
        if (result == OUT_OF_MEMORY) return printf("array %d, %s: out of memory\n", i + 1, argv[i + 1]), 1;
        check("cuMemAlloc", result);
        printf("array %d, %s: allocated\n", i + 1, argv[i + 1]);
        fflush(stdout);
    }
    for (int i = 0; i < count; i++)
        for (uint64_t at = 0; at < sizes[i]; at = next(at, sizes[i])) {
            pattern(wanted, i, at);
            check("cuMemcpyHtoD", copy_in(arrays[i] + at, wanted, PAGE));
        }
    for (int i = 0; i < count; i++) {
        uint64_t pages = 0;
        for (uint64_t at = 0; at < sizes[i]; at = next(at, sizes[i]), pages++) {
            pattern(wanted, i, at);
            check("cuMemcpyDtoH", copy_out(found, arrays[i] + at, PAGE));
            if (memcmp(wanted, found, PAGE) != 0)
                return printf("array %d, %s: WRONG at byte %llu\n", i + 1, argv[i + 1], (unsigned long long)at), 3;
        }
        printf("array %d, %s: %llu pages written and read back, all right\n", i + 1, argv[i + 1], (unsigned long long)pages);
    }
    for (int i = 0; i < count; i++) check("cuMemFree", release(arrays[i]));
    return 0;
}
