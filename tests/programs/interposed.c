/* Calls the preload library's report, and asks a few names itself: none of them is the driver's. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

int own_function(void) { return 42; }

int main(void)
{
    void (*report)(void);
    *(void **)&report = dlsym(RTLD_DEFAULT, "interposer_report");
    if (report)
        report();
    printf("program: RTLD_NEXT own_function: %s\n", dlsym(RTLD_NEXT, "own_function") ? "found" : dlerror());
    printf("program: RTLD_DEFAULT no_such_function: %s\n", dlsym(RTLD_DEFAULT, "no_such_function") ? "found" : dlerror());
    void *maths = dlopen("libm.so.6", RTLD_NOW);
    printf("program: cos in libm: %s\n", maths && dlsym(maths, "cos") ? "found" : dlerror());
    printf("program: culture in libm: %s\n", maths && dlsym(maths, "culture") ? "found" : dlerror());
    printf("program: cuMemAlloc_v2 in libm: %s\n", maths && dlsym(maths, "cuMemAlloc_v2") ? "found" : dlerror());
    return own_function() != 42;
}
