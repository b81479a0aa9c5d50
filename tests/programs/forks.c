/*
 * forks before|after|thread|exec: a child made before cuInit uses the driver on its own; one made after it cannot, and
 * must get the driver's own refusal; the parent's memory is unharmed either way. exec starts over with nothing of ours.
 */
#include "program.h"

#include <sys/wait.h>
#include <unistd.h>

#define WORDS (8 * MIB / 4)

static CUdeviceptr fill(uint32_t value)
{
    CUdeviceptr block;
    CHECK(cuMemAlloc_v2(&block, 4 * WORDS));
    CHECK(cuMemsetD32_v2(block, value, WORDS));
    return block;
}

static void verify_and_free(const char *who, CUdeviceptr block, uint32_t value)
{
    uint32_t first, last;
    CHECK(cuMemcpyDtoH_v2(&first, block, 4));
    CHECK(cuMemcpyDtoH_v2(&last, block + 4 * (WORDS - 1), 4));
    printf("%s: contents %s\n", who, first == value && last == value ? "right" : "wrong");
    CHECK(cuMemFree_v2(block));
}

static void wait_for(pid_t child)
{
    int status;
    REQUIRE(waitpid(child, &status, 0) == child);
    printf("child ended with %d, signal %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1,
           WIFSIGNALED(status) ? WTERMSIG(status) : 0);
}

static pid_t fork_flushed(void)
{
    fflush(stdout);
    pid_t child = fork();
    REQUIRE(child >= 0);
    return child;
}

int main(int argc, char **argv)
{
    const char *when = argc > 1 ? argv[1] : "before";
    if (strcmp(when, "executed") == 0) {
        start_on(0);
        verify_and_free("after exec", fill(3), 3);
        return 9;
    }
    if (strcmp(when, "before") == 0) {
        pid_t child = fork_flushed();
        start_on(0);
        verify_and_free(child ? "parent" : "child", fill(child ? 1 : 2), child ? 1 : 2);
        if (child)
            wait_for(child);
        return child ? 0 : 3;
    }
    start_on(0);
    CUdeviceptr block = fill(1);
    if (strcmp(when, "exec") == 0) {
        fflush(stdout);
        execl("/proc/self/exe", argv[0], "executed", (char *)NULL);
        return 1;
    }
    pid_t child = fork_flushed();
    if (!child) {
        CUdeviceptr other = 0;
        size_t bytes = 0;
        SHOW(cuMemAlloc_v2(&other, 4 * WORDS));
        SHOW(cuMemAlloc_v2(&other, 16));
        SHOW(cuMemGetAddressRange_v2(NULL, &bytes, block));
        SHOW(cuMemFree_v2(block));
        SHOW(cuInit(0));
        fflush(stdout);
        _exit(2);
    }
    wait_for(child);
    verify_and_free("parent", block, 1);
    verify_and_free("parent again", fill(5), 5);
    return 0;
}
