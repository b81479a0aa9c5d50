/*
 * variables HOW [NAME [VALUE]]: changes an environment variable that the driver reads once, after it did (or `early`,
 * before), in the ways that C has. `workers` changes it for two processes that it starts, and takes it back; `launcher`
 * leaves it as the last of them had it, and does nothing on any GPU itself.
 */
#define _GNU_SOURCE
#include "diagnosed.h"

#include <unistd.h>

static const char *chosen = "3";

NAMED void choose_gpu(const char *how, const char *name);
NAMED void choose_gpu(const char *how, const char *name)
{
    /* putenv and environ keep the pointer. */
    static char assignment[64];
    snprintf(assignment, sizeof assignment, "%s=%s", name, chosen);
    if (strcmp(how, "putenv") == 0) {
        REQUIRE(putenv(assignment) == 0);
    } else if (strcmp(how, "unsetenv") == 0) {
        REQUIRE(unsetenv(name) == 0);
    } else if (strcmp(how, "environ") == 0) {
        char **entry = environ;
        while (*entry && strncmp(*entry, assignment, strlen(name) + 1) != 0)
            entry++;
        REQUIRE(*entry);
        *entry = assignment;
    } else {
        REQUIRE(setenv(name, chosen, 1) == 0);
    }
}

NAMED void start_cuda(void);
NAMED void start_cuda(void)
{
    CHECK(cuInit(0));
}

int main(int argc, char **argv)
{
    const char *how = argc > 1 ? argv[1] : "setenv";
    const char *name = argc > 2 ? argv[2] : "CUDA_VISIBLE_DEVICES";
    if (argc > 3) {
        /* A word of a command line has no spaces. */
        chosen = argv[3];
        for (char *space = argv[3]; (space = strchr(space, '_')); space++)
            if (strcmp(name, "CUDA_VISIBLE_DEVICES") == 0)
                *space = ' ';
    }
    if (strcmp(how, "early") == 0)
        choose_gpu(how, name);
    start_cuda();
    if (strcmp(how, "launcher") == 0) {
        int count;
        CHECK(cuDeviceGetCount(&count));
        for (int worker = 0; worker < count; worker++) {
            char gpu[16];
            snprintf(gpu, sizeof gpu, "%d", worker);
            REQUIRE(setenv(name, gpu, 1) == 0);
            REQUIRE(system("test -n \"$CUDA_VISIBLE_DEVICES\"") == 0);
        }
        printf("started workers for %d GPUs\n", count);
        return 0;
    }
    if (strcmp(how, "workers") == 0) {
        const char *before = getenv(name);
        char *kept = before ? strdup(before) : NULL;
        for (int worker = 0; worker < 2; worker++) {
            REQUIRE(setenv(name, worker ? "3" : "0", 1) == 0);
            REQUIRE(system("test -n \"$CUDA_VISIBLE_DEVICES\"") == 0);
        }
        REQUIRE((kept ? setenv(name, kept, 1) : unsetenv(name)) == 0);
        free(kept);
    } else if (strcmp(how, "early") != 0)
        choose_gpu(how, name);
    compute_on(0);
    const char *value = getenv(name);
    printf("%s is %s\n", name, value ? value : "not set");
    return 0;
}
