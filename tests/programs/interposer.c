/*
 * A preload library that looks names up as interposers do. Built twice, with IDENTITY 1 and 2, and put before and after
 * libgpupool.so: each must find exactly what it finds without us, because glibc resolves RTLD_NEXT and RTLD_DEFAULT
 * relative to the library that calls dlsym, and its error text names that library.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef void Report(void);

static void show(const char *question, void *found)
{
    Dl_info info;
    const char *error = dlerror();
    const char *file = found && dladdr(found, &info) ? strrchr(info.dli_fname, '/') : NULL;
    if (found)
        printf("interposer %d: %s is in %s\n", IDENTITY, question, file ? file + 1 : "no library");
    else
        printf("interposer %d: %s is not found: %s\n", IDENTITY, question, error ? error : "no error text");
}

/* Both copies define this name; the second one is what the first must find with RTLD_NEXT. */
void interposer_report(void)
{
    show("RTLD_NEXT getpid", dlsym(RTLD_NEXT, "getpid"));
    show("RTLD_NEXT malloc", dlsym(RTLD_NEXT, "malloc"));
    show("RTLD_NEXT printf again", dlsym(RTLD_NEXT, "printf"));
    show("RTLD_DEFAULT interposer_report", dlsym(RTLD_DEFAULT, "interposer_report"));
    show("RTLD_DEFAULT only_in_interposer_2", dlsym(RTLD_DEFAULT, "only_in_interposer_2"));
    show("RTLD_NEXT no_such_function", dlsym(RTLD_NEXT, "no_such_function"));
    show("RTLD_DEFAULT cuNoSuchFunction", dlsym(RTLD_DEFAULT, "cuNoSuchFunction"));
    show("RTLD_NEXT getpid@GLIBC_2.2.5", dlvsym(RTLD_NEXT, "getpid", "GLIBC_2.2.5"));
    void *next = dlsym(RTLD_NEXT, "interposer_report");
    show("RTLD_NEXT interposer_report", next);
    if (next)
        ((Report *)next)();
}

#if IDENTITY == 2
void only_in_interposer_2(void) {}
#endif

/* Interposers do this before main, when other libraries may not have run their constructors yet. */
__attribute__((constructor)) static void on_load(void)
{
    show("RTLD_NEXT getpid, at load", dlsym(RTLD_NEXT, "getpid"));
}
