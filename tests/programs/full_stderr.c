/*
 * full_stderr: its standard error is a pipe that is full and that nobody reads, as that of a program whose reader is stuck.
 * It takes memory; reads the pipe and takes more; and ends with the pipe full again. Whoever waits for it is ended by the alarm.
 */
#define _GNU_SOURCE
#include "program.h"

#include <fcntl.h>
#include <unistd.h>

static void fill(int pipe)
{
    char bytes[4096];
    memset(bytes, 'x', sizeof bytes);
    REQUIRE(fcntl(pipe, F_SETFL, O_NONBLOCK) == 0);
    while (write(pipe, bytes, sizeof bytes) > 0 || write(pipe, bytes, 1) > 0)
        ;
    REQUIRE(fcntl(pipe, F_SETFL, 0) == 0);
}

/* What lies in the pipe behind what filled it, on standard output. */
static void show(int pipe)
{
    char byte;
    REQUIRE(fcntl(pipe, F_SETFL, O_NONBLOCK) == 0);
    while (read(pipe, &byte, 1) > 0)
        if (byte != 'x')
            putchar(byte);
}

int main(int argc, char **argv)
{
    CUdeviceptr block;
    if (argc < 2) {
        int ends[2];
        char number[16];
        REQUIRE(pipe(ends) == 0);
        fill(ends[1]);
        REQUIRE(dup2(ends[1], 2) == 2);
        close(ends[1]);
        snprintf(number, sizeof number, "%d", ends[0]);
        alarm(20);
        execl("/proc/self/exe", argv[0], number, (char *)NULL);
        return 3;
    }
    int reader = atoi(argv[1]);
    start_on(0);
    CHECK(cuMemAlloc_v2(&block, 24 * MIB));
    /* The host has to lend: that is a warning. */
    CHECK(cuMemAlloc_v2(&block, 24 * MIB));
    printf("flags of the pipe: %d\n", fcntl(2, F_GETFL) & O_NONBLOCK);
    show(reader);
    CHECK(cuMemAlloc_v2(&block, 2 * MIB));
    printf("then:\n");
    show(reader);
    fill(2);
    return 0;
}
