/*
 * Who owns each name for a program that links libcuda. The names are compiled in from the file names.inc, a line
 * NAME(cuX) each; a name that the driver lacks stays a null weak reference.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define NAME(symbol) extern int symbol(void) __attribute__((weak));
#include "names.inc"
#undef NAME

static void show(const char *name, void *pointer)
{
    Dl_info info;
    if (!pointer || !dladdr(pointer, &info) || !info.dli_fname) {
        printf("linked %s: %s\n", name, pointer ? "nobody" : "null");
        return;
    }
    const char *slash = strrchr(info.dli_fname, '/');
    printf("linked %s: %s:%s\n", name, slash ? slash + 1 : info.dli_fname, info.dli_sname ? info.dli_sname : "?");
}

int main(void)
{
#define NAME(symbol) show(#symbol, (void *)symbol);
#include "names.inc"
    return 0;
}
