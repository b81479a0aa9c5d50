/*
 * resolve ROUTE NAMES: how each name in the file NAMES (one a line) is answered on one route to the driver.
 *   dlsym          dlopen("libcuda.so.1") and dlsym on its handle
 *   default        dlsym(RTLD_DEFAULT)
 *   gpa1 FLAGS     cuGetProcAddress, for several driver versions
 *   gpa2 FLAGS     cuGetProcAddress_v2, likewise
 * A line a question: what was asked, the return code and symbol status where the route has them, and the library and
 * symbol that own the pointer. Nothing here needs a GPU or calls cuInit, so real drivers can be asked anywhere.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int (*GetProcAddress)(const char *, void **, int, uint64_t);
typedef int (*GetProcAddressV2)(const char *, void **, int, uint64_t, int *);

/* Every version at which an export that the shim hooks changed, and the newest ones. */
static const int VERSIONS[] = {2000,  3010,  3020,  4000,  4010,  5050,  6050,  7000,  8000, 10000,
                               11000, 11040, 12000, 12020, 12050, 12080, 13000, 13020, 13030};

static const char *owner(void *pointer)
{
    static char text[512];
    Dl_info info;
    if (!pointer)
        return "null";
    if (!dladdr(pointer, &info) || !info.dli_fname)
        return "nobody";
    const char *slash = strrchr(info.dli_fname, '/');
    snprintf(text, sizeof text, "%s:%s", slash ? slash + 1 : info.dli_fname, info.dli_sname ? info.dli_sname : "?");
    return text;
}

/* The name as cuGetProcAddress knows it: without the version and the stream suffix. */
static void base_name(char *name)
{
    static const char *const STREAM[] = {"_ptsz", "_ptds"};
    for (size_t i = 0; i < 2; i++) {
        size_t length = strlen(name);
        if (length > 5 && strcmp(name + length - 5, STREAM[i]) == 0)
            name[length - 5] = 0;
    }
    size_t length = strlen(name);
    if (length > 3 && name[length - 3] == '_' && name[length - 2] == 'v')
        name[length - 3] = 0;
}

static void ask(void *library, const char *route, uint64_t flags, const char *name)
{
    /* A pointer nobody handed out: shows whether an output was written at all. */
    void *const untouched = (void *)(uintptr_t)0x5a5a;
    char base[256];
    snprintf(base, sizeof base, "%s", name);
    base_name(base);
    for (size_t i = 0; i < sizeof VERSIONS / sizeof *VERSIONS; i++) {
        void *pointer = untouched;
        int status = -1, code;
        if (strcmp(route, "gpa1") == 0) {
            GetProcAddress get = (GetProcAddress)dlsym(library, "cuGetProcAddress");
            code = get ? get(base, &pointer, VERSIONS[i], flags) : -1;
        } else {
            GetProcAddressV2 get = (GetProcAddressV2)dlsym(library, "cuGetProcAddress_v2");
            code = get ? get(base, &pointer, VERSIONS[i], flags, &status) : -1;
        }
        printf("%s %s at %d flags %d: %d status %d %s\n", route, base, VERSIONS[i], (int)flags, code, status,
               pointer == untouched ? "untouched" : owner(pointer));
    }
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: resolve dlsym|default|gpa1|gpa2 NAMES [FLAGS]\n");
        return 2;
    }
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        printf("no driver: %s\n", dlerror());
        return 1;
    }
    FILE *names = fopen(argv[2], "r");
    if (!names) {
        perror(argv[2]);
        return 2;
    }
    char name[256];
    while (fgets(name, sizeof name, names)) {
        name[strcspn(name, "\n")] = 0;
        if (strcmp(argv[1], "dlsym") == 0)
            printf("dlsym %s: %s\n", name, owner(dlsym(library, name)));
        else if (strcmp(argv[1], "default") == 0)
            printf("default %s: %s\n", name, owner(dlsym(RTLD_DEFAULT, name)));
        else
            ask(library, argv[1], argc > 3 ? strtoull(argv[3], NULL, 0) : 0, name);
    }
    fclose(names);
    return 0;
}
