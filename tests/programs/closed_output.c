/*
 * A program that has closed its standard input, output and error, as a daemon does, uses CUDA, and then opens files of its
 * own, which get those numbers, and prints. What it printed is in its file, and its data is what it was.
 */
#define _GNU_SOURCE
#include "kernels.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

enum { WORDS = 1 << 20 };

/* How many of the three numbers are taken by something that the program did not open. */
static int taken(void)
{
    int count = 0;
    for (int fd = 0; fd < 3; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

static CUdeviceptr filled(const Kernels *kernels, uint32_t start)
{
    CUdeviceptr block;
    CHECK(cuMemAlloc_v2(&block, WORDS * 4));
    iota(kernels, NULL, block, WORDS, start);
    return block;
}

int main(void)
{
    char read_back[64] = "";
    int told = fcntl(1, F_DUPFD_CLOEXEC, 10);
    REQUIRE(told >= 0);
    for (int fd = 0; fd < 3; fd++)
        close(fd);
    start_on(0);
    Kernels kernels = load_kernels();
    CUdeviceptr before = filled(&kernels, 5);
    void *pinned;
    CHECK(cuMemHostAlloc(&pinned, WORDS * 4, 0));
    memset(pinned, 7, WORDS * 4);
    int strangers = taken();
    for (int fd = 0; fd < 3; fd++)
        (void)!memfd_create("own", 0);
    printf("the program's own words\n");
    fflush(stdout);
    CUdeviceptr after = filled(&kernels, 9);
    unsigned long long wrong = count_wrong(&kernels, before, WORDS, 5) + count_wrong(&kernels, after, WORDS, 9);
    for (int i = 0; i < WORDS * 4; i++)
        wrong += ((char *)pinned)[i] != 7;
    (void)!pread(1, read_back, sizeof read_back - 1, 0);
    dprintf(told, "numbers taken: %d\nin the file: %swords that are wrong: %llu\n", strangers, read_back, wrong);
    return 0;
}
