/*
 * agent: does what the lines of its standard input say, and answers each with one line. Sizes are in MiB.
 *   init             CUDA and the first GPU's context
 *   allocate SIZE    a block, which stays; free: the last one
 *   make SIZE        physical memory of its own (cuMemCreate), mapped nowhere; drop: releases the last
 *   label NAME       names the last block
 *   pin SIZE         pinned memory; twice: registers the same memory twice, which is a finding
 *   statistics       of the C interface: blocks, bytes, held on GPUs, held on the host, allocations
 *   numbers          all that the C interface tells, as JSON: statistics, places, labels, and where the pieces of the blocks lie
 *   threads          the names of this process's threads other than the main one
 *   signals          which signals the other thread takes: /proc's mask of it
 *   fork             a child that waits for `release`; fork-cuda: one that allocates 4 MiB first; their numbers
 *   release          the child ends by exit(3)
 *   close N          closes every descriptor from 3 on, and opens N files of its own; kept: whether these are whole
 *   switches         how often the other thread was given a processor of its own will
 *   become NAME      another program by exec
 *   nvml             NVML; clock GPU: what it says of a GPU's SM clock; on GPU: how many processes have a context there
 *   watch            counts children's ends from here on; children: how many ended, and whether `wait` finds any
 *   adopt            orphans become children of this process from here on
 *   orphan           a child that does nothing until somebody kills it, also when this process has ended
 */
#define _GNU_SOURCE
#include "control.h"
#include "numbers.h"
#include "nvml.h"
#include "vmm.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST 1024

static CUdeviceptr blocks[64];
static int count, files[MOST], opened, to_child = -1;
static pid_t child;
static uint64_t made;

/* Of the one other thread, a line of its file in /proc that begins so; empty without such a thread. */
static void other_thread(const char *file, const char *begin, char *out, size_t room)
{
    char path[600], line[256];
    struct dirent *entry;
    DIR *tasks = opendir("/proc/self/task");
    REQUIRE(tasks);
    *out = 0;
    while ((entry = readdir(tasks))) {
        if (entry->d_name[0] == '.' || atoi(entry->d_name) == getpid())
            continue;
        snprintf(path, sizeof path, "/proc/self/task/%s/%s", entry->d_name, file);
        FILE *opened_file = fopen(path, "r");
        while (opened_file && fgets(line, sizeof line, opened_file)) {
            line[strcspn(line, "\n")] = 0;
            if (strncmp(line, begin, strlen(begin)) == 0)
                snprintf(out + strlen(out), room - strlen(out), "%s%s", *out ? " " : "", line + strlen(begin));
        }
        if (opened_file)
            fclose(opened_file);
    }
    closedir(tasks);
}

static volatile sig_atomic_t ended;

static void count_end(int signal)
{
    (void)signal;
    ended++;
}

static void orphan(void)
{
    pid_t left = fork();
    REQUIRE(left >= 0);
    if (!left) {
        close(0);
        close(1);
        /* For a test that ends before it does so. */
        alarm(120);
        for (;;)
            pause();
    }
    printf("%d\n", left);
}

static void allocate(size_t mib)
{
    CHECK(cuMemAlloc_v2(&blocks[count++], mib * MIB));
}

static void fork_off(int with_cuda)
{
    int ends[2], ready[2];
    char byte;
    REQUIRE(pipe(ends) == 0 && pipe(ready) == 0);
    child = fork();
    REQUIRE(child >= 0);
    if (!child) {
        close(ends[1]);
        if (with_cuda) {
            start_on(0);
            allocate(4);
        }
        REQUIRE(write(ready[1], "r", 1) == 1);
        while (read(ends[0], &byte, 1) > 0) {
        }
        exit(0);
    }
    close(ends[0]);
    to_child = ends[1];
    REQUIRE(read(ready[0], &byte, 1) == 1);
    close(ready[0]);
    close(ready[1]);
    printf("child %d\n", child);
}

static void release(void)
{
    int status;
    close(to_child);
    REQUIRE(waitpid(child, &status, 0) == child);
    printf("child ended with %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
}

static void close_all(int wanted)
{
    long most = sysconf(_SC_OPEN_MAX);
    for (int file = 3; file < (most < 4096 ? most : 4096); file++)
        close(file);
    for (opened = 0; opened < wanted && opened < MOST; opened++) {
        char name[32];
        snprintf(name, sizeof name, "file%d", opened);
        files[opened] = open(name, O_CREAT | O_RDWR | O_TRUNC, 0600);
        REQUIRE(files[opened] >= 0 && write(files[opened], name, strlen(name)) == (ssize_t)strlen(name));
    }
    printf("opened %d\n", opened);
}

static void kept(void)
{
    int whole = 0;
    for (int i = 0; i < opened; i++) {
        char name[32], text[64] = "";
        struct stat status;
        snprintf(name, sizeof name, "file%d", i);
        whole += fstat(files[i], &status) == 0 && status.st_size == (off_t)strlen(name) &&
                 pread(files[i], text, sizeof text - 1, 0) == (ssize_t)strlen(name) && strcmp(text, name) == 0;
    }
    printf("kept %d\n", whole);
}

int main(void)
{
    char line[256], text[512];
    setvbuf(stdout, NULL, _IOLBF, 0);
    /* A line that is meant for the program that this one becomes must not be read by this one. */
    setvbuf(stdin, NULL, _IONBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        char *word = strtok(line, " \n"), *value = strtok(NULL, " \n");
        size_t number = value ? strtoull(value, NULL, 0) : 0;
        if (!word)
            continue;
        if (strcmp(word, "init") == 0) {
            start_on(0);
            printf("ready\n");
        } else if (strcmp(word, "allocate") == 0) {
            allocate(number);
            printf("allocated\n");
        } else if (strcmp(word, "free") == 0) {
            CHECK(cuMemFree_v2(blocks[--count]));
            printf("freed\n");
        } else if (strcmp(word, "make") == 0) {
            CUmemAllocationProp properties = on_device(0);
            CHECK(cuMemCreate(&made, number * MIB, &properties, 0));
            printf("made\n");
        } else if (strcmp(word, "drop") == 0) {
            CHECK(cuMemRelease(made));
            printf("dropped\n");
        } else if (strcmp(word, "label") == 0) {
            Control control = find_control(RTLD_DEFAULT);
            printf("label: %d\n", control.label((const void *)blocks[count - 1], value));
        } else if (strcmp(word, "pin") == 0) {
            void *pinned;
            CHECK(cuMemHostAlloc(&pinned, number * MIB, 0));
            printf("pinned\n");
        } else if (strcmp(word, "twice") == 0) {
            void *memory = aligned_alloc(4096, MIB);
            CHECK(cuMemHostRegister_v2(memory, MIB, 0));
            printf("registered twice: %d\n", cuMemHostRegister_v2(memory, MIB, 0));
        } else if (strcmp(word, "statistics") == 0) {
            Control control = find_control(RTLD_DEFAULT);
            gpupool_statistics s = {.size = sizeof s};
            REQUIRE(control.statistics(&s) == 0);
            printf("%llu %llu %llu %llu %llu\n", (unsigned long long)s.live_blocks, (unsigned long long)s.live_bytes,
                   (unsigned long long)s.held_on_gpus, (unsigned long long)s.held_on_host,
                   (unsigned long long)s.allocations);
        } else if (strcmp(word, "numbers") == 0) {
            print_numbers(blocks, count);
        } else if (strcmp(word, "threads") == 0) {
            other_thread("comm", "", text, sizeof text);
            printf("threads: %s\n", text);
        } else if (strcmp(word, "signals") == 0) {
            other_thread("status", "SigBlk:\t", text, sizeof text);
            printf("%s\n", text);
        } else if (strcmp(word, "switches") == 0) {
            other_thread("status", "voluntary_ctxt_switches:\t", text, sizeof text);
            printf("%s\n", text);
        } else if (strcmp(word, "fork") == 0 || strcmp(word, "fork-cuda") == 0) {
            fork_off(strcmp(word, "fork-cuda") == 0);
        } else if (strcmp(word, "release") == 0) {
            release();
        } else if (strcmp(word, "close") == 0) {
            close_all((int)number);
        } else if (strcmp(word, "kept") == 0) {
            kept();
        } else if (strcmp(word, "nvml") == 0) {
            REQUIRE(NVML("nvmlInit_v2", void)() == 0);
            printf("ready\n");
        } else if (strcmp(word, "clock") == 0) {
            printf("%u\n", nvml_sm_clock((unsigned)number));
        } else if (strcmp(word, "on") == 0) {
            uint64_t own;
            printf("%d\n", nvml_processes((unsigned)number, 0, &own));
        } else if (strcmp(word, "watch") == 0) {
            struct sigaction action = {.sa_handler = count_end, .sa_flags = SA_RESTART};
            REQUIRE(sigaction(SIGCHLD, &action, NULL) == 0);
            printf("watching\n");
        } else if (strcmp(word, "adopt") == 0) {
            REQUIRE(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
            printf("adopts\n");
        } else if (strcmp(word, "children") == 0) {
            pid_t found = waitpid(-1, NULL, WNOHANG);
            printf("%d ended, %s\n", (int)ended, found < 0 && errno == ECHILD ? "none to wait for" : "some to wait for");
        } else if (strcmp(word, "orphan") == 0) {
            orphan();
        } else if (strcmp(word, "become") == 0) {
            execlp(value, value, (char *)NULL);
            printf("not %s\n", value);
        }
    }
    return 0;
}
