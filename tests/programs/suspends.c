/*
 * suspends: has itself suspended to the host and resumed by the command that COMMAND names, between two uses of two blocks, of 64 and
 * 2 MiB. Bare nobody is there to be asked, and the program does the same.
 */
#include "diagnosed.h"

#include <unistd.h>

static const size_t sizes[2] = {64 * MIB, 2 * MIB};

int main(void)
{
    char command[256];
    CUdeviceptr blocks[2];
    CHECK(cuInit(0));
    compute_on(0);
    for (int i = 0; i < 2; i++) {
        CHECK(cuMemAlloc_v2(&blocks[i], sizes[i]));
        CHECK(cuMemsetD32_v2(blocks[i], 7u + (unsigned)i, sizes[i] / 4));
    }
    for (int i = 0; i < 2; i++) {
        snprintf(command, sizeof command, "env -u LD_PRELOAD \"$COMMAND\" %s %d >/dev/null 2>&1",
                 i == 0 ? "suspend --to host" : "resume", (int)getpid());
        REQUIRE(system(command) != -1);
    }
    for (int i = 0; i < 2; i++) {
        uint32_t last = 0;
        CHECK(cuMemcpyDtoH_v2(&last, blocks[i] + sizes[i] - 4, 4));
        printf("%u\n", last);
        CHECK(cuMemFree_v2(blocks[i]));
    }
    return 0;
}
