/*
 * When what a process had is free for others that is killed: once whoever waits for it hears that it has ended, with its last thread, or later.
 *
 *   probe_ended [MIB [ROUNDS]]     what it has, by cuMemCreate in chunks of up to 512 MiB (1024), and how often (8)
 */
#include "probe.h"

#include <signal.h>
#include <sys/wait.h>

enum { CHUNK = 512, LONG = 5000, READY = 9 };

static const char RULE[] = "what a killed process had is free within half a second of its end";

static size_t free_now(void)
{
    size_t free = 0, total = 0;
    CHECK(cuMemGetInfo_v2(&free, &total));
    return free;
}

/* What is killed: it says when it has all of it, and waits. */
static int holder(size_t bytes)
{
    begin_probe(120);
    CUdeviceptr at = reserve(bytes);
    for (size_t offset = 0; offset < bytes; offset += CHUNK * MIB) {
        size_t part = bytes - offset < CHUNK * MIB ? bytes - offset : CHUNK * MIB;
        map_here(at + offset, physical(0, part), part, 1);
    }
    CHECK(cuMemsetD32_v2(at, 7, bytes / 4));
    CHECK(cuCtxSynchronize());
    REQUIRE(write(READY, "", 1) == 1);
    for (;;)
        pause();
}

static pid_t start_holder(const char *program, const char *megabytes)
{
    int ready[2];
    char byte;
    REQUIRE(pipe(ready) == 0);
    pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (!pid) {
        REQUIRE(dup2(ready[1], READY) == READY);
        close(ready[0]);
        close(ready[1]);
        execl(program, program, "holds", megabytes, (char *)NULL);
        _exit(127);
    }
    close(ready[1]);
    REQUIRE(read(ready[0], &byte, 1) == 1);
    close(ready[0]);
    return pid;
}

int main(int argc, char **argv)
{
    if (argc == 3 && !strcmp(argv[1], "holds"))
        return holder((size_t)atoi(argv[2]) * MIB);
    const char *megabytes = argc > 1 ? argv[1] : "1024";
    size_t bytes = (size_t)atoi(megabytes) * MIB;
    int rounds = argc > 2 ? atoi(argv[2]) : 8, late = 0;
    double ended = 0, back = 0, longest = 0;
    begin_probe(120);
    for (int round = 0; round < rounds; round++) {
        pid_t pid = start_holder("/proc/self/exe", megabytes);
        size_t before = free_now();
        siginfo_t what;
        double killed = now_us();
        REQUIRE(kill(pid, SIGKILL) == 0);
        REQUIRE(waitid(P_PID, (id_t)pid, &what, WEXITED | WNOWAIT) == 0);
        double over = now_us();
        ended += (over - killed) / 1e3;
        double after = 0;
        int was_late = 0;
        while (free_now() < before + bytes / 100 * 99 && (after = (now_us() - over) / 1e3) < LONG)
            was_late = 1;
        late += was_late;
        back += after;
        longest = after > longest ? after : longest;
        REQUIRE(waitpid(pid, NULL, 0) == pid);
    }
    answer(RULE, longest < 500, "%s MiB, %d times: %s", megabytes, rounds, longest < 500 ? "free again" : "not free yet");
    tell("%s MiB: it had ended %.1f ms after the kill, and all was free %.2f ms behind that, at most %.2f; not at the first look %d of %d times", megabytes,
         ended / rounds, back / rounds, longest, late, rounds);
    return end_probe();
}
