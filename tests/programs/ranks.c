/*
 * ranks: two processes, each on a GPU of its own, whose kernels wait for each other at every step, as collectives do: a step is over once both
 * have come to it. Stopped one after the other, the second never comes to rest. Most of a step is work of their own, as in training. The first process answers lines of its standard input:
 *   other     the second one's number
 *   steps     how many both have done
 *   end       both end; words of their memory that were not what they should be
 * With OTHER_SESSION the second one is rank 1 of a job whose rank 0 is the first one's, on a host of its own: its pages are in that folder.
 */
#define _GNU_SOURCE
#include "kernels.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

/* What a rank's block counts up from says in which step, and which part of it, it was written. */
enum { MOST = 1 << 20, LETTERS = 32, PASSES = 8, PARTS = 16 };

/* Both processes have this. A step's flag is set by a kernel of the one whose it is, and waited for by a kernel of the other. */
typedef struct {
    uint32_t here[2][MOST];
    atomic_int steps, last, wrong[2];
} Shared;

static Shared *shared;

static void work(int rank)
{
    const uint64_t words = 8 * MIB / 4, one = 1;
    CUdeviceptr flags, block;
    CUstream stream;
    start_on(rank);
    Kernels kernels = load_kernels();
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(cuMemHostRegister_v2(shared, sizeof *shared, CU_MEMHOSTALLOC_DEVICEMAP));
    CHECK(cuMemHostGetDevicePointer_v2(&flags, shared, 0));
    CHECK(cuMemAlloc_v2(&block, words * 4));
    for (int step = 0; step < MOST; step++) {
        CUdeviceptr own = flags + ((size_t)rank * MOST + (size_t)step) * 4;
        CUdeviceptr theirs = flags + ((size_t)(1 - rank) * MOST + (size_t)step) * 4;
        uint32_t set = 1, last = 0;
        for (int pass = 0; pass < PASSES; pass++)
            iota(&kernels, stream, block, words, (uint32_t)(step * PARTS + pass));
        CHECK(cuStreamSynchronize(stream));
        launch(kernels.fill, stream, (void *[]){&own, (void *)&one, &set});
        CHECK(cuLaunchKernel(kernels.wait_flag, 1, 1, 1, 1, 1, 1, 0, stream, (void *[]){&theirs}, NULL));
        iota(&kernels, stream, block, words, (uint32_t)(step * PARTS + PASSES));
        /* Memory that is not pinned: the driver waits in this call, as it does for a loss that is read. */
        CHECK(cuMemcpyDtoHAsync_v2(&last, block + words * 4 - 4, 4, stream));
        CHECK(cuStreamSynchronize(stream));
        atomic_fetch_add(&shared->wrong[rank], last != (uint32_t)(step * PARTS + PASSES + words - 1));
        if (rank == 0)
            atomic_store(&shared->steps, step + 1);
        if (step == atomic_load(&shared->last))
            break;
    }
    CHECK(cuMemFree_v2(block));
    CHECK(cuMemHostUnregister(shared));
}

static void *first(void *argument)
{
    work(0);
    return argument;
}

int main(void)
{
    char line[LETTERS];
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(shared != MAP_FAILED);
    atomic_store(&shared->last, MOST);
    pid_t other = fork();
    REQUIRE(other >= 0);
    if (other == 0) {
        /* It would wait for the first one for good. */
        REQUIRE(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
        const char *session = getenv("OTHER_SESSION");
        if (session) {
            REQUIRE(setenv("XDG_RUNTIME_DIR", session, 1) == 0);
            REQUIRE(setenv("RANK", "1", 1) == 0);
        }
        work(1);
        return 0;
    }
    pthread_t worker;
    REQUIRE(pthread_create(&worker, NULL, first, NULL) == 0);
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        if (strcmp(line, "other") == 0) {
            printf("%d\n", other);
        } else if (strcmp(line, "steps") == 0) {
            printf("%d\n", atomic_load(&shared->steps));
        } else {
            int status;
            /* Neither can be further than one step ahead of this. */
            atomic_store(&shared->last, atomic_load(&shared->steps) + 4);
            REQUIRE(pthread_join(worker, NULL) == 0);
            REQUIRE(waitpid(other, &status, 0) == other && WIFEXITED(status) && WEXITSTATUS(status) == 0);
            printf("%d wrong\n", atomic_load(&shared->wrong[0]) + atomic_load(&shared->wrong[1]));
        }
        fflush(stdout);
    }
    return 0;
}
