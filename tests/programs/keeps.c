/*
 * keeps FILE: has 20 MiB on the GPU, and again and again looks whether they are as it left them, says so in a line of the file, and changes them. It ends
 * when it is killed: for scripts/criu.sh.
 */
#include "program.h"

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

enum { BYTES = 20 << 20, WORDS = BYTES / 4 };

static uint32_t words[WORDS];

int main(int argc, char **argv)
{
    CUdeviceptr address;
    REQUIRE(argc == 2);
    int file = open(argv[1], O_WRONLY | O_CREAT | O_APPEND, 0600);
    REQUIRE(file >= 0);
    start_on(0);
    CHECK(cuMemAlloc_v2(&address, BYTES));
    for (uint32_t i = 0; i < WORDS; i++)
        words[i] = i * 7;
    CHECK(cuMemcpyHtoD_v2(address, words, BYTES));
    for (uint32_t round = 0;; round++) {
        uint32_t wrong = 0;
        memset(words, 0xff, BYTES);
        CHECK(cuMemcpyDtoH_v2(words, address, BYTES));
        for (uint32_t i = 0; i < WORDS; i++) {
            wrong += words[i] != i * 7 + round;
            words[i] = i * 7 + round + 1;
        }
        CHECK(cuMemcpyHtoD_v2(address, words, BYTES));
        REQUIRE(dprintf(file, "round %u: %u wrong\n", round, wrong) > 0);
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    }
}
