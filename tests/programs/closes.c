/*
 * Whom cuIpcCloseMemHandle waits for: the context in which the handle was opened and the one that is current, and nobody
 * else. Memory of another process is opened in each of three contexts and closed in each, while a kernel waits for the
 * host in each. Needs two GPUs.
 */
#include "waiting.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static CUipcMemHandle shared;

static void open_handle(size_t bytes, unsigned flags)
{
    (void)bytes;
    CHECK(cuIpcOpenMemHandle_v2(&block, shared, flags));
}

static void close_handle(size_t bytes)
{
    (void)bytes;
    CHECK(cuIpcCloseMemHandle(block));
}

static const Case OPENED = {"", open_handle, close_handle, 0, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS};

/* A process with 8 MiB on GPU 0, which says its handle and stays until it is told to end. */
static pid_t exporter(int *end)
{
    int said[2], stay[2];
    REQUIRE(pipe(said) == 0 && pipe(stay) == 0);
    pid_t child = fork();
    REQUIRE(child >= 0);
    close(said[child ? 1 : 0]);
    close(stay[child ? 0 : 1]);
    if (!child) {
        start_on(0);
        CHECK(cuMemAlloc_v2(&block, 8 * MIB));
        CHECK(cuIpcGetMemHandle(&shared, block));
        REQUIRE(write(said[1], &shared, sizeof shared) == sizeof shared);
        REQUIRE(read(stay[0], &shared, 1) == 0);
        CHECK(cuMemFree_v2(block));
        exit(0);
    }
    REQUIRE(read(said[0], &shared, sizeof shared) == sizeof shared);
    *end = stay[1];
    return child;
}

int main(void)
{
    int end, status;
    pid_t child = exporter(&end);
    Place places[3];
    CUcontext context;
    open_both(places);
    CHECK(cuCtxCreate_v2(&context, 0, 0));
    places[2] = place_here("another context of GPU 0");
    for (int opened = 0; opened < 3; opened++)
        for (int current = 0; current < 3; current++)
            for (int busy = 0; busy < 3; busy++) {
                Call call = {.context = places[current].context, .of = &OPENED};
                int waits = busy == opened || busy == current;
                make_and_hold(&OPENED, &places[opened], &places[busy]);
                begin_call(&call);
                printf("opened in %s, closed in %s, a kernel in %s: %s\n", places[opened].name, places[current].name,
                       places[busy].name, has_returned(&call, !waits) ? "does not wait" : "waits");
                end_call(&call, &places[busy]);
            }
    close(end);
    REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return 0;
}
