/* workers use|spare [N]: N children (1) forked from a process that has initialised CUDA, which call CUDA or leave it alone. */
#include "diagnosed.h"

#include <sys/wait.h>
#include <unistd.h>

NAMED pid_t start_worker(void);
NAMED pid_t start_worker(void)
{
    fflush(stdout);
    pid_t child = fork();
    REQUIRE(child >= 0);
    return child;
}

int main(int argc, char **argv)
{
    int use = argc > 1 && strcmp(argv[1], "use") == 0;
    CHECK(cuInit(0));
    compute_on(0);
    int workers = argc > 2 ? atoi(argv[2]) : 1;
    for (int worker = 0; worker < workers; worker++) {
        pid_t child = start_worker();
        if (child == 0) {
            CUdeviceptr block;
            if (use)
                printf("worker: cuMemAlloc_v2 answers %d\n", cuMemAlloc_v2(&block, 2 * MIB));
            else
                printf("worker: without CUDA\n");
            fflush(stdout);
            _exit(0);
        }
        int status;
        REQUIRE(waitpid(child, &status, 0) == child);
        printf("worker ended with %d\n", status);
    }
    return 0;
}
