/*
 * How many instructions a hooked call takes, exactly: the calls of passed_on.c and launches.c, and pairs of pooled memory, each carried out
 * step by step once it is warm (ptrace), the least of a few times. The same on a busy machine as on an idle one, where times are not; what
 * an instruction takes, as an atomic one does, it does not tell. One line a call: all of it bare and hooked, and what of it lies in the shim,
 * and in the loader beyond what the driver itself asks that for (`__tls_get_addr`, for variables of the thread).
 *
 *   gpupool sim -- env LD_PRELOAD=libgpupool.so instructions
 */
#include "paired.h"
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WARM = 300, TIMES = 5, MOST = 256, TITLE = 64 };

static const char KERNEL[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry fill_u32(.param .u64 fill_u32_0, .param .u64 fill_u32_1, .param .u32 fill_u32_2)\n{\n ret;\n}\n";

static void *context, *stream, *function, *release;
static unsigned long long asked, pooled;
static size_t bytes;
static int (*synchronize)(void);
static char *label; /* what is counted next, for the process that counts */

static void set_current(void *f) { ((int (*)(void *))f)(context); }
static void free_null(void *f) { ((int (*)(unsigned long long))f)(0); }
static void wait_for_stream(void *f) { ((int (*)(void *))f)(stream); }
static void attribute(void *f)
{
    int ordinal;
    ((int (*)(void *, int, unsigned long long))f)(&ordinal, 9, asked);
}
static void attributes(void *f)
{
    void *owner, *device, *host;
    unsigned type;
    int ordinal, kinds[] = {1, 2, 3, 4, 9};
    void *data[] = {&owner, &type, &device, &host, &ordinal};
    ((int (*)(unsigned, int *, void **, unsigned long long))f)(5, kinds, data, asked);
}
static void range(void *f)
{
    unsigned long long base;
    size_t size;
    ((int (*)(unsigned long long *, size_t *, unsigned long long))f)(&base, &size, asked);
}
static void launch(void *f)
{
    unsigned long long address = pooled, words = 0;
    unsigned value = 1;
    void *arguments[] = {&address, &words, &value};
    ((int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))f)(
        function, 1, 1, 1, 1, 1, 1, 0, NULL, arguments, NULL);
}
static void copy(void *f)
{
    unsigned value = 1;
    ((int (*)(unsigned long long, const void *, size_t))f)(pooled, &value, sizeof value);
}
static void allocate_and_free(void *f)
{
    unsigned long long address;
    require(((int (*)(unsigned long long *, size_t))f)(&address, bytes), "cuMemAlloc_v2");
    ((int (*)(unsigned long long))release)(address);
}
/* In the order of a stream, from the driver's own pool. */
static void allocate_and_free_in_order(void *f)
{
    unsigned long long address;
    void **pair = f;
    require(((int (*)(unsigned long long *, size_t, void *))pair[0])(&address, 4096, stream), "cuMemAllocAsync");
    ((int (*)(unsigned long long, void *))pair[1])(address, stream);
}

static void mark(void) { __asm__ volatile("int3" ::: "memory"); }

static void count(const char *title, const char *way, void (*call)(void *), void *f)
{
    for (int i = 0; i < WARM; i++) {
        call(f);
        if (i % 100 == 0) synchronize();
    }
    synchronize();
    snprintf(label, MOST, "%s %s", way, title);
    for (int i = 0; i < TIMES; i++) {
        mark();
        call(f);
        mark();
    }
    synchronize();
}

static void compare(const char *title, const char *name, void (*call)(void *))
{
    count(title, "bare", call, bare(name));
    count(title, "hooked", call, hooked(name));
}

static void program(void)
{
    unsigned long long others;
    void *module, *pinned;
    char title[TITLE];
    context = open_first_gpu();
    synchronize = (int (*)(void))bare("cuCtxSynchronize");
    release = hooked("cuMemFree_v2");
    require(((int (*)(void **, const void *))hooked("cuModuleLoadData"))(&module, KERNEL), "cuModuleLoadData");
    require(((int (*)(void **, void *, const char *))hooked("cuModuleGetFunction"))(&function, module, "fill_u32"), "cuModuleGetFunction");
    require(((int (*)(unsigned long long *, size_t))bare("cuMemAlloc_v2"))(&others, 4096), "cuMemAlloc_v2");
    require(((int (*)(unsigned long long *, size_t))hooked("cuMemAlloc_v2"))(&pooled, 4096), "cuMemAlloc_v2");
    require(((int (*)(void **, size_t, unsigned))hooked("cuMemHostAlloc"))(&pinned, 4096, 0), "cuMemHostAlloc");
    require(((int (*)(void **, unsigned))hooked("cuStreamCreate"))(&stream, 1), "cuStreamCreate");

    compare("cuCtxSetCurrent", "cuCtxSetCurrent", set_current);
    compare("cuMemFree(NULL)", "cuMemFree_v2", free_null);
    const struct {
        const char *whose;
        unsigned long long address;
    } all[] = {{"driver's", others}, {"pool's", pooled}, {"pinned", (unsigned long long)pinned}};
    for (int i = 0; i < 3; i++) {
        asked = all[i].address;
        snprintf(title, sizeof title, "attribute, %s", all[i].whose);
        compare(title, "cuPointerGetAttribute", attribute);
        snprintf(title, sizeof title, "five attributes, %s", all[i].whose);
        compare(title, "cuPointerGetAttributes", attributes);
        snprintf(title, sizeof title, "range, %s", all[i].whose);
        compare(title, "cuMemGetAddressRange_v2", range);
    }
    compare("cuStreamSynchronize", "cuStreamSynchronize", wait_for_stream);
    compare("cuLaunchKernel", "cuLaunchKernel", launch);
    compare("cuMemcpyHtoD", "cuMemcpyHtoD_v2", copy);
    void *own[] = {bare("cuMemAllocAsync"), bare("cuMemFreeAsync")}, *ours[] = {hooked("cuMemAllocAsync"), hooked("cuMemFreeAsync")};
    count("cuMemAllocAsync, FreeAsync", "bare", allocate_and_free_in_order, own);
    count("cuMemAllocAsync, FreeAsync", "hooked", allocate_and_free_in_order, ours);
    const size_t sizes[] = {4, 1 << 10, 64 << 10, 600 << 10};
    for (int i = 0; i < 4; i++) {
        bytes = sizes[i] << 10;
        snprintf(title, sizeof title, "pair of %zu KiB", sizes[i]);
        count(title, "hooked", allocate_and_free, hooked("cuMemAlloc_v2"));
    }
    exit(0);
}

/* Where code of the shim and of the loader is mapped in the process. */
typedef struct {
    unsigned long long start, end;
    int is_shim, is_loader;
} Mapped;

typedef struct {
    long all, shim, loader;
} Counts;

static int read_maps(pid_t process, Mapped *maps, int most)
{
    char path[64], line[4096];
    int found = 0;
    snprintf(path, sizeof path, "/proc/%d/maps", process);
    FILE *file = fopen(path, "r");
    while (file && found < most && fgets(line, sizeof line, file)) {
        Mapped *it = &maps[found];
        char rights[8];
        if (sscanf(line, "%llx-%llx %7s", &it->start, &it->end, rights) != 3 || rights[2] != 'x') continue;
        it->is_shim = strstr(line, "libgpupool") != NULL;
        it->is_loader = strstr(line, "/ld-linux") != NULL || strstr(line, "/ld-2") != NULL;
        found += it->is_shim || it->is_loader;
    }
    if (file) fclose(file);
    return found;
}

int main(void)
{
    static Mapped maps[16];
    label = mmap(NULL, MOST, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t child = fork();
    if (child == 0) {
        ptrace(PTRACE_TRACEME, 0, 0, 0);
        raise(SIGSTOP);
        program();
    }
    int status, counting = 0, known = 0;
    long pass = 0, times = 0;
    Counts now = {0}, least = {0}, without = {0};
    waitpid(child, &status, 0);
    while (ptrace(counting ? PTRACE_SINGLESTEP : PTRACE_CONT, child, 0, pass) == 0 && waitpid(child, &status, 0) == child && WIFSTOPPED(status)) {
        siginfo_t info;
        struct user_regs_struct registers;
        pass = WSTOPSIG(status) == SIGTRAP || WSTOPSIG(status) == SIGSTOP ? 0 : WSTOPSIG(status);
        if (WSTOPSIG(status) != SIGTRAP || ptrace(PTRACE_GETSIGINFO, child, 0, &info)) continue;
        if (info.si_code == SI_KERNEL) { /* a mark */
            counting = !counting;
            if (counting) {
                known = read_maps(child, maps, 16);
                now = (Counts){0};
                continue;
            }
            if (times == 0 || now.all < least.all) least = now;
            if (++times < TIMES) continue;
            times = 0;
            if (!strncmp(label, "bare ", 5)) {
                without = least;
                continue;
            }
            if (!strncmp(label, "hooked pair", 11)) without = (Counts){0};
            printf("%-26s bare %5ld   hooked %5ld   shim %5ld   loader %+4ld\n", label + 7, without.all, least.all, least.shim,
                   least.loader - without.loader);
            fflush(stdout);
        } else if (counting && ptrace(PTRACE_GETREGS, child, 0, &registers) == 0) {
            now.all++;
            for (int i = 0; i < known; i++) {
                if (registers.rip < maps[i].start || registers.rip >= maps[i].end) continue;
                now.shim += maps[i].is_shim;
                now.loader += maps[i].is_loader;
            }
        }
    }
    return !WIFEXITED(status) || WEXITSTATUS(status);
}
