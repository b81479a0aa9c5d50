/*
 * main_leaves: the main thread allocates and leaves by pthread_exit; another one says that it is done, and is the last to end.
 * With `stays` the other one waits until it is killed.
 */
#define _GNU_SOURCE
#include "program.h"

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

static CUdeviceptr block;

static void at_exit(void)
{
    CUdeviceptr late;
    sigset_t blocked;
    REQUIRE(pthread_sigmask(SIG_SETMASK, NULL, &blocked) == 0);
    printf("at exit: SIGTERM %s, SIGUSR1 %s\n", sigismember(&blocked, SIGTERM) ? "blocked" : "taken",
           sigismember(&blocked, SIGUSR1) ? "blocked" : "taken");
    start_on(0);
    CHECK(cuMemFree_v2(block));
    CHECK(cuMemAlloc_v2(&late, 4 * MIB));
    printf("at exit: freed and allocated\n");
}

/* Until the main thread has left: what is left of it has no program any more. */
static void wait_for_main(void)
{
    char path[64], program[256];
    snprintf(path, sizeof path, "/proc/self/task/%d/exe", getpid());
    while (readlink(path, program, sizeof program) >= 0)
        usleep(1000);
}

static void *last(void *stays)
{
    wait_for_main();
    printf("the main thread has left\n");
    fflush(stdout);
    if (stays)
        for (;;)
            pause();
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t thread;
    sigset_t signals;
    (void)argv;
    sigemptyset(&signals);
    sigaddset(&signals, SIGUSR1);
    REQUIRE(pthread_sigmask(SIG_BLOCK, &signals, NULL) == 0);
    start_on(0);
    /* Behind the driver's own handler, so that it runs before that one. */
    REQUIRE(atexit(at_exit) == 0);
    CHECK(cuMemAlloc_v2(&block, 8 * MIB));
    REQUIRE(pthread_create(&thread, NULL, last, argc > 1 ? argv : NULL) == 0);
    pthread_exit(NULL);
}
