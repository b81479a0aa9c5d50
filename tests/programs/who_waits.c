/*
 * Who waits for whom: whether a call that gives memory of GPU 0 back returns while a kernel that waits for the host runs on
 * GPU 0, or on GPU 1; without peer access, with access from 0 to 1, and with access both ways. Needs two GPUs. Each call is
 * made by a thread of its own. When that has not returned after a while the kernel is let go, so nothing here hangs.
 *
 * What was measured of these is in waits.c. Of memory of a stream's order and with peer access, only this program asks.
 */
#include "waiting.h"

static const Case CASES[] = {
    {"cuMemFree, 4 KiB", make_plain, free_plain, 4 * KIB, 0},
    {"cuMemFree, 64 MiB", make_plain, free_plain, 64 * MIB, 0},
    {"cuMemFreeHost, 4 KiB", make_pinned, free_pinned, 4 * KIB, 0},
    {"cuMemFreeHost, 4 KiB, portable", make_pinned, free_pinned, 4 * KIB, CU_MEMHOSTALLOC_PORTABLE},
    {"cuMemFreeHost, 64 MiB", make_pinned, free_pinned, 64 * MIB, 0},
    {"cuMemFreeHost, 64 MiB, portable", make_pinned, free_pinned, 64 * MIB, CU_MEMHOSTALLOC_PORTABLE},
    {"cuMemFree of managed memory, 64 MiB", make_managed, free_plain, 64 * MIB, MANAGED_GLOBAL},
    {"cuMemUnmap and cuMemRelease, 64 MiB", make_mapped, unmap, 64 * MIB, 0},
    {"cuMemFreeAsync and wait for its stream, 64 MiB", make_ordered, free_ordered, 64 * MIB, 0},
};

static int returns_within(Call *call, long milliseconds)
{
    const struct timespec pause = {.tv_nsec = 1000000};
    for (; milliseconds > 0 && !atomic_load(&call->returned); milliseconds--)
        nanosleep(&pause, NULL);
    return atomic_load(&call->returned);
}

static void ask(const Case *of, Place *gpus, int busy, long milliseconds)
{
    Call call = {.context = gpus[0].context, .of = of};
    make_and_hold(of, &gpus[0], &gpus[busy]);
    begin_call(&call);
    int waits = !returns_within(&call, milliseconds);
    end_call(&call, &gpus[busy]);
    printf("  %s, a kernel on GPU %d: waits: %s\n", of->what, busy, waits ? "yes" : "no");
}

/* who_waits [MILLISECONDS [free]]: how long a call has to return; with "free" only cuMemFree is asked about. */
int main(int argc, char **argv)
{
    static const char *const access[] = {"no peer access", "access from 0 to 1", "access both ways"};
    long milliseconds = argc > 1 ? atol(argv[1]) : 500;
    size_t count = argc > 2 && strcmp(argv[2], "free") == 0 ? 2 : sizeof CASES / sizeof *CASES;
    Place gpus[2];
    open_both(gpus);
    for (int peer = 0; peer < 3; peer++) {
        if (peer > 0) {
            CHECK(cuCtxSetCurrent(gpus[peer - 1].context));
            CHECK(cuCtxEnablePeerAccess(gpus[2 - peer].context, 0));
        }
        printf("%s\n", access[peer]);
        for (size_t i = 0; i < count; i++)
            for (int busy = 0; busy < 2; busy++)
                ask(&CASES[i], gpus, busy, milliseconds);
    }
    CHECK(cuCtxSetCurrent(gpus[0].context));
    CHECK(cuMemFreeHost((void *)flag));
    return 0;
}
