/*
 * How early it shows that a program comes to a GPU.
 *   comers watch GPU COMMAND…   starts it and prints each sign, in ms behind the start: the driver's files opened (inotify), their users counted by the kernel's modules
 *                               (refcnt), the process in NVML's list of that GPU, the GPU's memory in use, and what the command itself says in lines "mark NAME SECONDS"
 *                               (of the monotonic clock). Then by how much the memory in use of each GPU of the machine had grown when, so that it shows whether a sign is of that GPU alone. First what looking costs, and which files NVML itself opens meanwhile.
 *   comers come GPU COUNT       such a command: a context, and COUNT blocks of 1 GiB at once
 * A sign that does not show is "never".
 */
#define _GNU_SOURCE
#include "../programs/nvml.h"

#include <errno.h>
#include <glob.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { FILES = 40, LOOKS = 40, PROCESSES = 64, GPUS = 16, STEPS = 24 };
static const char *const MODULES[] = {"nvidia_uvm", "nvidia"};

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static double begun;
static atomic_int is_over;

static void sign(const char *what, double at)
{
    if (at > 0)
        printf("sign %s: %.1f ms\n", what, (at - begun) * 1e3);
    else
        printf("sign %s: never\n", what);
}

/* Files of the driver: when each was opened first, and how often. */
static struct {
    char path[64];
    int watch;
    double first;
    int count;
} files[FILES];
static int file_count, notifier = -1;

static void watch_files(void)
{
    glob_t found;
    notifier = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (notifier < 0 || glob("/dev/nvidia*", 0, NULL, &found))
        return;
    for (size_t i = 0; i < found.gl_pathc && file_count < FILES; i++) {
        int watch = inotify_add_watch(notifier, found.gl_pathv[i], IN_OPEN);
        if (watch < 0) {
            printf("%s cannot be watched: %s\n", found.gl_pathv[i], strerror(errno));
            continue;
        }
        snprintf(files[file_count].path, sizeof files[file_count].path, "%s", found.gl_pathv[i]);
        files[file_count++].watch = watch;
    }
    globfree(&found);
}

static void read_opened(int milliseconds)
{
    _Alignas(struct inotify_event) char buffer[8192];
    struct pollfd ready = {.fd = notifier, .events = POLLIN};
    if (notifier < 0 || poll(&ready, 1, milliseconds) <= 0)
        return;
    double now = seconds();
    ssize_t bytes = read(notifier, buffer, sizeof buffer);
    for (ssize_t at = 0; at < bytes;) {
        const struct inotify_event *event = (const void *)(buffer + at);
        for (int i = 0; i < file_count; i++)
            if (files[i].watch == event->wd) {
                files[i].first = files[i].count++ ? files[i].first : now;
            }
        at += (ssize_t)(sizeof *event + event->len);
    }
}

static void *look_at_files(void *unused)
{
    while (!atomic_load(&is_over))
        read_opened(20);
    return unused;
}

static long users(const char *module)
{
    char path[96], text[32] = "";
    snprintf(path, sizeof path, "/sys/module/%s/refcnt", module);
    FILE *file = fopen(path, "re");
    if (!file)
        return -1;
    char *line = fgets(text, sizeof text, file);
    fclose(file);
    return line ? atol(line) : -1;
}

static double more_users[2];
static long users_before[2];

static void *look_at_modules(void *unused)
{
    while (!atomic_load(&is_over)) {
        for (int i = 0; i < 2; i++)
            if (more_users[i] == 0 && users(MODULES[i]) > users_before[i])
                more_users[i] = seconds();
        usleep(200);
    }
    return unused;
}

static NvmlDevice device;
static double is_listed, memory_grows, memory_has_context, longest_list;
static unsigned listed_before;
static unsigned long long used_before;

static unsigned listed(void)
{
    NvmlProcess list[PROCESSES];
    unsigned count = PROCESSES;
    int code = NVML("nvmlDeviceGetComputeRunningProcesses_v3", NvmlDevice, unsigned *, NvmlProcess *)(device, &count, list);
    return code ? 0 : count;
}

static unsigned long long used_of(NvmlDevice gpu)
{
    NvmlMemory memory = {0, 0, 0};
    NVML("nvmlDeviceGetMemoryInfo", NvmlDevice, NvmlMemory *)(gpu, &memory);
    return memory.used;
}

static unsigned long long used(void) { return used_of(device); }

/* The memory in use of each GPU, before, at the last look, and the first changes of it. */
static struct {
    NvmlDevice device;
    unsigned long long before, last;
    struct {
        double at;
        long long more;
    } steps[STEPS];
    int count;
} all_gpus[GPUS];
static unsigned gpu_count;

static void find_all_gpus(void)
{
    NVML("nvmlDeviceGetCount_v2", unsigned *)(&gpu_count);
    gpu_count = gpu_count < GPUS ? gpu_count : GPUS;
    for (unsigned i = 0; i < gpu_count; i++) {
        all_gpus[i].device = nvml_device(i);
        all_gpus[i].before = all_gpus[i].last = used_of(all_gpus[i].device);
    }
}

static void *look_at_all_gpus(void *unused)
{
    while (!atomic_load(&is_over)) {
        for (unsigned i = 0; i < gpu_count; i++) {
            unsigned long long now = used_of(all_gpus[i].device);
            if (now != all_gpus[i].last && all_gpus[i].count < STEPS) {
                all_gpus[i].steps[all_gpus[i].count].at = seconds();
                all_gpus[i].steps[all_gpus[i].count++].more = (long long)(now - all_gpus[i].before);
            }
            all_gpus[i].last = now;
        }
        usleep(500);
    }
    return unused;
}

static void tell_all_gpus(void)
{
    for (unsigned i = 0; i < gpu_count; i++) {
        printf("memory in use of GPU %u, %llu KiB before, more at ms:", i, all_gpus[i].before >> 10);
        for (int step = 0; step < all_gpus[i].count; step++)
            printf(" %.1f: %lld KiB%s", (all_gpus[i].steps[step].at - begun) * 1e3, all_gpus[i].steps[step].more / 1024,
                   step + 1 < all_gpus[i].count ? "," : "");
        puts(all_gpus[i].count ? "" : " never");
    }
}

static void *look_at_list(void *unused)
{
    while (!atomic_load(&is_over)) {
        double before = seconds();
        unsigned count = listed();
        double took = seconds() - before;
        longest_list = took > longest_list ? took : longest_list;
        if (is_listed == 0 && count > listed_before)
            is_listed = seconds();
        usleep(200);
    }
    return unused;
}

static void *look_at_memory(void *unused)
{
    while (!atomic_load(&is_over)) {
        unsigned long long now = used();
        if (memory_grows == 0 && now > used_before)
            memory_grows = seconds();
        if (memory_has_context == 0 && now > used_before + (256ull << 20))
            memory_has_context = seconds();
        usleep(200);
    }
    return unused;
}

static double cost_of(void (*look)(void))
{
    double before = seconds();
    for (int i = 0; i < LOOKS; i++)
        look();
    return (seconds() - before) * 1e6 / LOOKS;
}

static void one_list(void) { (void)listed(); }
static void one_memory(void) { (void)used(); }
static void one_count(void) { (void)users(MODULES[0]); }

static int watch(unsigned gpu, char **command)
{
    int pipes[2], status;
    char line[256];
    pthread_t threads[5];
    if (NVML("nvmlInit_v2", void)() != 0) {
        puts("NVML: not to be initialised");
        return 1;
    }
    device = nvml_device(gpu);
    watch_files();
    printf("a look at NVML's list: %.0f us, at a GPU's memory: %.0f us, at a module's users: %.0f us\n", cost_of(one_list), cost_of(one_memory),
           cost_of(one_count));
    read_opened(20);
    for (int i = 0; i < file_count; i++)
        if (files[i].count)
            printf("NVML itself opened %s %d times in %d looks\n", files[i].path, files[i].count, 2 * LOOKS);
    for (int i = 0; i < file_count; i++)
        files[i].count = 0, files[i].first = 0;
    for (int i = 0; i < 2; i++) {
        users_before[i] = users(MODULES[i]);
        printf("users of %s before: %ld\n", MODULES[i], users_before[i]);
    }
    find_all_gpus();
    listed_before = listed(), used_before = used();
    fflush(stdout);
    if (pipe(pipes))
        return 1;
    pthread_create(&threads[0], NULL, look_at_files, NULL);
    pthread_create(&threads[1], NULL, look_at_modules, NULL);
    pthread_create(&threads[2], NULL, look_at_list, NULL);
    pthread_create(&threads[3], NULL, look_at_memory, NULL);
    pthread_create(&threads[4], NULL, look_at_all_gpus, NULL);
    begun = seconds();
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(pipes[1], 1);
        close(pipes[0]);
        execvp(command[0], command);
        _exit(127);
    }
    close(pipes[1]);
    FILE *said = fdopen(pipes[0], "r");
    while (said && fgets(line, sizeof line, said)) {
        char name[128];
        double at;
        if (sscanf(line, "mark %127s %lf", name, &at) == 2)
            sign(name, at);
        else
            fputs(line, stdout);
    }
    waitpid(child, &status, 0);
    atomic_store(&is_over, 1);
    for (int i = 0; i < 5; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < file_count; i++)
        if (files[i].count)
            printf("sign opened %s: %.1f ms, %d times in all\n", files[i].path, (files[i].first - begun) * 1e3, files[i].count);
    for (int i = 0; i < 2; i++) {
        snprintf(line, sizeof line, "more users of %s", MODULES[i]);
        sign(line, more_users[i]);
    }
    sign("in NVML's list", is_listed);
    sign("memory in use", memory_grows);
    sign("256 MiB more in use", memory_has_context);
    tell_all_gpus();
    printf("the longest look at NVML's list meanwhile: %.1f ms\n", longest_list * 1e3);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

static void mark(const char *name)
{
    printf("mark %s %.6f\n", name, seconds());
    fflush(stdout);
}

static void *of_driver(const char *name)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    void *function = library ? dlsym(library, name) : NULL;
    if (!function) {
        printf("no %s\n", name);
        exit(1);
    }
    return function;
}

static int come(int gpu, int count)
{
    void *context;
    unsigned long long block;
    int taken = 0;
    mark("starts");
    int (*init)(unsigned) = of_driver("cuInit");
    int (*retain)(void **, int) = of_driver("cuDevicePrimaryCtxRetain");
    int (*use)(void *) = of_driver("cuCtxSetCurrent");
    int (*allocate)(unsigned long long *, size_t) = of_driver("cuMemAlloc_v2");
    mark("library-loaded");
    if (init(0))
        return 1;
    mark("cuInit-is-back");
    if (retain(&context, gpu) || use(context)) {
        puts("no context");
        return 1;
    }
    mark("context-is-made");
    while (taken < count && allocate(&block, (size_t)1 << 30) == 0)
        if (++taken == 1)
            mark("first-block");
    mark(taken < count ? "refused" : "all-blocks");
    printf("%d of %d GiB\n", taken, count);
    /* So that whatever shows late shows at all. */
    usleep(500000);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 3 && strcmp(argv[1], "watch") == 0)
        return watch((unsigned)atoi(argv[2]), argv + 3);
    if (argc == 4 && strcmp(argv[1], "come") == 0)
        return come(atoi(argv[2]), atoi(argv[3]));
    puts("comers watch GPU COMMAND… or comers come GPU COUNT");
    return 2;
}
