/*
 * A preload library that shows a program another host: what it opens under /proc/meminfo, /proc/self/cgroup,
 * /proc/self/mountinfo, /sys/fs/cgroup and /sys/module/nvidia_uvm is looked for in the folder MADE_HOST. The system call that tells of memory where
 * /proc is missing says 64 GiB, and 48 of them free.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <unistd.h>

static const char *const MADE[] = {"/proc/meminfo", "/proc/self/cgroup", "/proc/self/mountinfo", "/sys/fs/cgroup",
                                   "/sys/module/nvidia_uvm"};

static int open_made(const char *path, int flags, unsigned mode)
{
    char made[4096];
    const char *root = getenv("MADE_HOST");
    for (unsigned i = 0; root && i < sizeof MADE / sizeof *MADE; i++)
        if (strncmp(path, MADE[i], strlen(MADE[i])) == 0 &&
            (size_t)snprintf(made, sizeof made, "%s%s", root, path) < sizeof made)
            path = made;
    return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

/* The same call by both of its names. A mode is passed where a file may be made, and is of no meaning elsewhere. */
#define OPEN(name)                                     \
    int name(const char *path, int flags, ...)         \
    {                                                  \
        va_list rest;                                  \
        va_start(rest, flags);                         \
        unsigned mode = va_arg(rest, unsigned);        \
        va_end(rest);                                  \
        return open_made(path, flags, mode);           \
    }
OPEN(open)
OPEN(open64)

int sysinfo(struct sysinfo *info)
{
    memset(info, 0, sizeof *info);
    info->mem_unit = 1;
    info->totalram = (unsigned long)64 << 30;
    info->freeram = (unsigned long)48 << 30;
    return 0;
}
