/*
 * The corners of cuGetProcAddress: names and versions it does not have, the empty name that the CUDA runtime probes
 * with, a missing status output, flags that do not exist. Only codes are printed, and whether outputs were written.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

static const char *state(void *pointer)
{
    return pointer == (void *)(uintptr_t)0x5a5a ? "untouched" : pointer ? "a pointer" : "null";
}

int main(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        printf("no driver\n");
        return 1;
    }
    int (*v1)(const char *, void **, int, uint64_t);
    int (*v2)(const char *, void **, int, uint64_t, int *);
    *(void **)&v1 = dlsym(library, "cuGetProcAddress");
    *(void **)&v2 = dlsym(library, "cuGetProcAddress_v2");
    static const struct {
        const char *name;
        int version;
        uint64_t flags;
    } QUESTIONS[] = {
        {"", 0, 0},
        {"", 12000, 0},
        {"cuNoSuchFunction", 12000, 0},
        {"cuMemAlloc_v2", 12000, 0},
        {"cuMemAlloc", 1000, 0},
        {"cuMemAlloc", 3020, 0},
        {"cuMemAlloc", 12000, 1},
        {"cuMemAlloc", 12000, 2},
        {"cuMemAlloc", 12000, 3},
        {"cuMemAlloc", 12000, 4},
        {"cuMemAlloc", 12000, UINT64_MAX},
        {"cuGetProcAddress", 11030, 0},
        {"cuGetProcAddress", 12000, 0},
        {"cumemalloc", 12000, 0},
    };
    for (size_t i = 0; i < sizeof QUESTIONS / sizeof *QUESTIONS; i++) {
        void *one = (void *)(uintptr_t)0x5a5a, *two = one, *three = one;
        int status = -1;
        int a = v1(QUESTIONS[i].name, &one, QUESTIONS[i].version, QUESTIONS[i].flags);
        int b = v2(QUESTIONS[i].name, &two, QUESTIONS[i].version, QUESTIONS[i].flags, &status);
        int c = v2(QUESTIONS[i].name, &three, QUESTIONS[i].version, QUESTIONS[i].flags, NULL);
        printf("\"%s\" at %d flags %llx: v1 %d %s, v2 %d %s status %d, without status %d %s\n", QUESTIONS[i].name,
               QUESTIONS[i].version, (unsigned long long)QUESTIONS[i].flags, a, state(one), b, state(two), status, c,
               state(three));
        if (two != three)
            printf("the status output changes the pointer\n");
    }
    printf("an unknown symbol by dlsym: %s\n", state(dlsym(library, "cuNoSuchFunction")));
    printf("its error is told: %s\n", dlerror() ? "yes" : "no");
    return 0;
}
