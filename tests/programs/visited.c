/*
 * visited: has two blocks, of 64 and 2 MiB, of which most lies on GPU 1 where GPU 0 may not hold them, until somebody comes to work there: itself once more, as
 * `visited visitor`, without gpupool. Then it waits until its log tells what became of that. Bare there is nothing to wait for.
 */
#define _GNU_SOURCE
#include "diagnosed.h"

#include <stdlib.h>
#include <unistd.h>

static const size_t sizes[2] = {64 * MIB, 2 * MIB};

static int visit(void)
{
    char word[8];
    CHECK(cuInit(0));
    (void)retain(1);
    return fgets(word, sizeof word, stdin) ? 0 : 1;
}

static int log_has(const char *file, const char *what)
{
    static char line[1 << 16];
    FILE *log = fopen(file, "r");
    int found = 0;
    while (log && !found && fgets(line, sizeof line, log))
        found = strstr(line, what) != NULL;
    if (log)
        fclose(log);
    return found;
}

int main(int arguments, char **values)
{
    char command[512];
    CUdeviceptr blocks[2];
    if (arguments > 1)
        return visit();
    CHECK(cuInit(0));
    compute_on(0);
    for (int i = 0; i < 2; i++) {
        CHECK(cuMemAlloc_v2(&blocks[i], sizes[i]));
        CHECK(cuMemsetD32_v2(blocks[i], 7u + (unsigned)i, sizes[i] / 4));
    }
    const char *log = getenv("GPUPOOL_LOG_FILE");
    snprintf(command, sizeof command, "exec env -u LD_PRELOAD \"%s\" visitor", values[0]);
    FILE *visitor = popen(command, "w");
    REQUIRE(visitor);
    for (int looks = 0; log && looks < 6000 && !log_has(log, "GP023") && !log_has(log, "recall.give"); looks++)
        usleep(10000);
    REQUIRE(fputs("go\n", visitor) >= 0 && pclose(visitor) == 0);
    for (int i = 0; i < 2; i++) {
        uint32_t last = 0;
        CHECK(cuMemcpyDtoH_v2(&last, blocks[i] + sizes[i] - 4, 4));
        printf("%u\n", last);
        CHECK(cuMemFree_v2(blocks[i]));
    }
    return 0;
}
