#define _GNU_SOURCE
/* Threads look functions up by cuGetProcAddress while another one makes the first call of the process: all must get what is
 * got later, too. */
#include "kernels.h"

#include <pthread.h>
#include <stdatomic.h>

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status);

enum { THREADS = 5, LOOKS = 4096 };

static pthread_barrier_t barrier;
static atomic_int over;
static void *found[THREADS][LOOKS];

static void *look(void)
{
    void *function = NULL;
    int status;
    return cuGetProcAddress_v2("cuMemAlloc", &function, 12000, 0, &status) == CUDA_SUCCESS ? function : NULL;
}

static void *keep_looking(void *argument)
{
    void **kept = argument;
    pthread_barrier_wait(&barrier);
    for (int i = 0; i < LOOKS; i++) {
        kept[i] = look();
        if (atomic_load(&over))
            break;
    }
    return NULL;
}

int main(void)
{
    pthread_t threads[THREADS];
    int others = 0;
    REQUIRE(pthread_barrier_init(&barrier, NULL, THREADS + 1) == 0);
    for (int i = 0; i < THREADS; i++)
        REQUIRE(pthread_create(&threads[i], NULL, keep_looking, found[i]) == 0);
    pthread_barrier_wait(&barrier);
    CHECK(cuInit(0));
    atomic_store(&over, 1);
    for (int i = 0; i < THREADS; i++)
        REQUIRE(pthread_join(threads[i], NULL) == 0);
    void *later = look();
    for (int i = 0; i < THREADS; i++)
        for (int k = 0; k < LOOKS; k++)
            others += found[i][k] && found[i][k] != later;
    printf("%s\n", others ? "some got another function" : "all got the same function");
    return 0;
}
