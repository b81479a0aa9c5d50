/*
 * rights [USER]: a program that uses CUDA, and says whether it has rights that who started it does not have (a set-user-ID or
 * set-group-ID file, or one with capabilities). With USER it becomes that user halfway, for good.
 */
#define _GNU_SOURCE
#include "program.h"

#include <sys/auxv.h>
#include <unistd.h>

static void work(void)
{
    CUdeviceptr block;
    uint32_t word = 0;
    CHECK(cuMemAlloc_v2(&block, 4 * MIB));
    CHECK(cuMemsetD32_v2(block, 7, 1024));
    CHECK(cuMemcpyDtoH_v2(&word, block + 4092, 4));
    CHECK(cuMemFree_v2(block));
    printf("its word: %u\n", word);
}

int main(int argc, char **argv)
{
    printf("rights of its file: %lu\n", getauxval(AT_SECURE));
    start_on(0);
    work();
    if (argc > 1) {
        uid_t user = (uid_t)atoi(argv[1]);
        if (setresuid(user, user, user)) {
            printf("not allowed\n");
            return 0;
        }
        for (int i = 0; i < 3; i++)
            work();
    }
    return 0;
}
