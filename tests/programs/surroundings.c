/*
 * surroundings WHAT [VALUE]: a program that uses CUDA where the system gives it little: limits, and descriptors that are
 * closed, used again, or few. It tells what it got of the system and of CUDA, which must be what it gets bare.
 *   fsize BYTES    no file of it may grow beyond that; its own file does, and says so by a signal
 *   fsize-kill BYTES  the same, and nobody handles the signal
 *   fsize-later BYTES  as that, and the limit is taken back halfway
 *   nofile N, as MIB, nproc N, core 0   the limit of that name, MIB above what is mapped
 *   stderr         2 is closed and its number taken by a file of the program's
 *   low N          0 to 2 are closed, and there are N descriptors
 *   closed N       all descriptors are closed after CUDA was used, and N opened again on files of the program's
 */
#define _GNU_SOURCE
#include "program.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile sig_atomic_t too_large;

static void on_too_large(int signal)
{
    (void)signal;
    too_large++;
}

/* Enough calls that a log at level debug has some kilobytes to say. */
static int work(int rounds)
{
    int failed = 0;
    for (int i = 0; i < rounds; i++) {
        CUdeviceptr block;
        uint32_t word = 0;
        if (cuMemAlloc_v2(&block, (size_t)(i % 7 + 2) * MIB) != CUDA_SUCCESS) {
            failed++;
            continue;
        }
        failed += cuMemsetD32_v2(block, 7 + (uint32_t)i, 1024) != CUDA_SUCCESS;
        failed += cuMemcpyDtoH_v2(&word, block + 4092, 4) != CUDA_SUCCESS || word != 7 + (uint32_t)i;
        failed += cuMemFree_v2(block) != CUDA_SUCCESS;
    }
    return failed;
}

static void limit(int which, rlim_t value)
{
    struct rlimit both = {value, value};
    REQUIRE(setrlimit(which, &both) == 0);
}

static size_t mapped_bytes(void)
{
    size_t pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    REQUIRE(file && fscanf(file, "%zu", &pages) == 1);
    fclose(file);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static void with_limit(const char *what, size_t value)
{
    if (strcmp(what, "nofile") == 0) {
        limit(RLIMIT_NOFILE, value);
    } else if (strcmp(what, "nproc") == 0) {
        limit(RLIMIT_NPROC, value);
    } else if (strcmp(what, "core") == 0) {
        limit(RLIMIT_CORE, value);
    }
    CUcontext context;
    CUdevice device;
    SHOW(cuInit(0));
    SHOW(cuDeviceGet(&device, 0));
    SHOW(cuDevicePrimaryCtxRetain(&context, device));
    SHOW(cuCtxSetCurrent(context));
    /* The driver maps and makes what it needs at its start, so these come after it. */
    if (strcmp(what, "as") == 0)
        limit(RLIMIT_AS, mapped_bytes() + value * MIB);
    if (strcmp(what, "fsize") == 0)
        signal(SIGXFSZ, on_too_large);
    if (strcmp(what, "fsize-later") == 0) {
        struct rlimit before, low;
        REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
        low = before;
        low.rlim_cur = value;
        REQUIRE(setrlimit(RLIMIT_FSIZE, &low) == 0);
        printf("failed: %d\n", work(200));
        REQUIRE(setrlimit(RLIMIT_FSIZE, &before) == 0);
    } else if (strncmp(what, "fsize", 5) == 0) {
        limit(RLIMIT_FSIZE, value);
    }
    printf("failed: %d\n", work(200));
    if (strcmp(what, "fsize") == 0) {
        int file = open("own", O_CREAT | O_WRONLY | O_TRUNC, 0600);
        REQUIRE(file >= 0 && lseek(file, (off_t)value, SEEK_SET) == (off_t)value);
        int before = too_large;
        ssize_t written = write(file, "x", 1);
        int error = errno;
        printf("signals before: %d, its own write: %zd, %s, signals: %d\n", before, written, strerror(error), too_large);
        close(file);
        unlink("own");
    }
}

static void take(const char *name, int file)
{
    char line[64];
    int length = snprintf(line, sizeof line, "%s is %d\n", name, file);
    REQUIRE(write(file, line, (size_t)length) == length);
}

/* The child's descriptors are the subject; the parent looks at the files when it is gone. */
static void in_child(const char *what, long value)
{
    if (strcmp(what, "stderr") == 0) {
        close(2);
        int data = open("data", O_CREAT | O_WRONLY | O_APPEND, 0600);
        take("data", data);
        start_on(0);
        exit(work(20));
    }
    if (strcmp(what, "low") == 0) {
        for (int i = 0; i < 3; i++)
            close(i);
        limit(RLIMIT_NOFILE, (rlim_t)value);
        start_on(0);
        int failed = work(20);
        for (int i = 0; i < 3; i++) {
            char name[8] = {'f', (char)('0' + i), 0};
            int file = open(name, O_CREAT | O_WRONLY | O_APPEND, 0600);
            if (file >= 0)
                take(name, file);
        }
        failed += work(20);
        exit(failed);
    }
    start_on(0);
    int failed = work(20);
    for (int i = 3; i < 1024; i++)
        close(i);
    int files = 0;
    /* All of one file, so that the parent has one length to look at. */
    for (; files < value; files++) {
        if (open("data", O_CREAT | O_WRONLY | O_APPEND, 0600) < 0)
            _exit(99);
    }
    failed += work(20);
    exit(failed);
}

static void with_descriptors(const char *what, long value)
{
    fflush(stdout);
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0)
        in_child(what, value);
    int status;
    REQUIRE(waitpid(child, &status, 0) == child);
    printf("child ended with %d, signal %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1,
           WIFSIGNALED(status) ? WTERMSIG(status) : 0);
    const char *names[] = {"data", "f0", "f1", "f2"};
    for (int i = 0; i < 4; i++) {
        char text[4096] = {0};
        int file = open(names[i], O_RDONLY);
        if (file < 0)
            continue;
        ssize_t bytes = read(file, text, sizeof text - 1);
        printf("%s holds %zd bytes: %s\n", names[i], bytes, text);
        close(file);
        unlink(names[i]);
    }
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "fsize";
    long value = argc > 2 ? atol(argv[2]) : 0;
    if (strcmp(what, "stderr") == 0 || strcmp(what, "low") == 0 || strcmp(what, "closed") == 0)
        with_descriptors(what, value);
    else
        with_limit(what, (size_t)value);
    return 0;
}
