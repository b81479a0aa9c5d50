/*
 * An allocator of PyTorch's kind (torch.cuda.memory.CUDAPluggableAllocator) that takes each block from the driver, by the name that a program would
 * call. Compiled by the check, before anything is timed.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <sys/types.h>

static void *driver(const char *name)
{
    static void *library;
    if (!library)
        library = dlopen("libcuda.so.1", RTLD_NOW);
    return library ? dlsym(library, name) : NULL;
}

void *take(ssize_t bytes, int device, void *stream)
{
    int (*allocate)(unsigned long long *, size_t) = (int (*)(unsigned long long *, size_t))driver("cuMemAlloc_v2");
    unsigned long long address = 0;
    (void)device, (void)stream;
    return allocate && allocate(&address, (size_t)bytes) == 0 ? (void *)address : NULL;
}

void give(void *pointer, ssize_t bytes, int device, void *stream)
{
    int (*release)(unsigned long long) = (int (*)(unsigned long long))driver("cuMemFree_v2");
    (void)bytes, (void)device, (void)stream;
    if (release)
        release((unsigned long long)pointer);
}
