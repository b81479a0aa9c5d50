/* Prints the name of every function the preloaded shim hooks, a line each, from its own list. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
    const char *(*names)(void);
    *(void **)&names = dlsym(RTLD_DEFAULT, "gpupool_hook_names");
    if (!names) {
        printf("gpupool_hook_names: %s\n", dlerror());
        return 1;
    }
    for (const char *name = names(); *name; name += strlen(name) + 1)
        puts(name);
    return 0;
}
