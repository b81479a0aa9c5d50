/* Exports the names of a CPython that it is not, as a build that is not understood would look. What is wrong with it is
 * chosen by the macros; its thread state must never be asked for. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/types.h>

#ifndef VERSION
#define VERSION 0x030c01f0
#endif
#ifndef CODE_SIZE
#define CODE_SIZE 192
#endif

void *PyGILState_GetThisThreadState(void) { abort(); }
#ifndef NO_INITIALIZED
int Py_IsInitialized(void) { return 1; }
#endif
int Py_IsFinalizing(void) { return 0; }

/* Reference count, type, length, name, size of an instance, and enough behind it. */
struct type { uint64_t count; struct type *type; uint64_t length; const char *name; uint64_t size, rest[64]; };
struct type PyType_Type = {1, &PyType_Type, 0, "type", 920};
struct type PyCode_Type = {1, &PyType_Type, 0, "code", CODE_SIZE};
struct type PyUnicode_Type = {1, &PyType_Type, 0, "str", 64};
struct type PyBytes_Type = {1, &PyType_Type, 0, "bytes", 33};

#ifdef VERSION_TEXT
const char *Py_GetVersion(void) { return VERSION_TEXT; }
#else
const unsigned long Py_Version = VERSION;
#endif

#ifdef RUNTIME
uint64_t _PyRuntime[512] = {RUNTIME};
#endif

int main(int argc, char **argv)
{
    void *probe = dlopen(argv[1], RTLD_NOW);
    if (!probe) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    ssize_t (*count)(void) = (ssize_t(*)(void))dlsym(probe, "frames_count");
    ssize_t (*state)(char *, size_t) = (ssize_t(*)(char *, size_t))dlsym(probe, "frames_state");
    char text[512];
    ssize_t first = count(), second = count();
    state(text, sizeof text);
    printf("%zd %zd %s\n", first, second, text);
    return 0;
}
