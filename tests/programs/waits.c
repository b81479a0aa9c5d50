/*
 * Who waits for whom: memory is given back while a kernel somewhere waits for the host. A free waits for the context that
 * owns the memory and for nobody else: not for another context of the same GPU, not for another GPU, whatever peer access
 * there is and whichever context is current. Memory of a pool is no context's, and its free waits for nobody. Needs two GPUs.
 */
#include "waiting.h"

static const Case PLAIN[] = {
    {"cuMemFree, 4 KiB", make_plain, free_plain, 4 * KIB, 0},
    {"cuMemFree, 64 MiB", make_plain, free_plain, 64 * MIB, 0},
};

static const Case OTHERS[] = {
    {"cuMemFreeHost, 4 KiB", make_pinned, free_pinned, 4 * KIB, 0},
    {"cuMemFreeHost, 64 MiB", make_pinned, free_pinned, 64 * MIB, 0},
    {"cuMemFreeHost, 4 KiB, portable", make_pinned, free_pinned, 4 * KIB, CU_MEMHOSTALLOC_PORTABLE},
    {"cuMemFreeHost, 64 MiB, portable", make_pinned, free_pinned, 64 * MIB, CU_MEMHOSTALLOC_PORTABLE},
    {"cuMemHostUnregister, 64 MiB", make_registered, unregister, 64 * MIB, 0},
    {"cuMemUnmap and cuMemRelease, 64 MiB", make_mapped, unmap, 64 * MIB, 0},
};

static const Case MANAGED = {"cuMemFree of managed memory, 8 MiB", make_managed, free_plain, 8 * MIB, MANAGED_GLOBAL};
static const Case POOLED = {"cuMemFree of a pool's memory, 8 MiB", make_ordered, free_plain, 8 * MIB, 0};

/* Memory of `owner` is given back by a thread with `current` while a kernel is held in `busy`. */
static void ask(const Case *of, Place *owner, Place *busy, Place *current)
{
    Call call = {.context = current->context, .of = of};
    int waits = owner == busy && of->give_back != unmap && of != &POOLED;
    make_and_hold(of, owner, busy);
    begin_call(&call);
    printf("  %s, of %s, which is current: %s, a kernel in %s: %s\n", of->what, owner->name,
           owner == current ? "yes" : "no", busy->name, has_returned(&call, !waits) ? "does not wait" : "waits");
    end_call(&call, busy);
}

int main(void)
{
    static const char *const access[] = {"no peer access", "access from 0 to 1", "access both ways"};
    Place gpus[2], created;
    CUcontext context;
    open_both(gpus);

    for (size_t i = 0; i < sizeof OTHERS / sizeof *OTHERS; i++)
        for (int busy = 0; busy < 2; busy++)
            ask(&OTHERS[i], &gpus[0], &gpus[busy], &gpus[0]);

    puts("another context of GPU 0");
    CHECK(cuCtxCreate_v2(&context, 0, 0));
    created = place_here("another context");
    ask(&PLAIN[0], &gpus[0], &created, &gpus[0]);
    ask(&PLAIN[1], &gpus[0], &created, &gpus[0]);
    ask(&PLAIN[1], &gpus[0], &gpus[0], &created);
    ask(&PLAIN[1], &created, &gpus[0], &created);
    ask(&PLAIN[1], &created, &created, &gpus[1]);
    ask(&OTHERS[1], &gpus[0], &created, &gpus[0]);
    for (const Case *of = &MANAGED; of; of = of == &MANAGED ? &POOLED : NULL) {
        Place *all[] = {&gpus[0], &gpus[1], &created};
        for (int owner = 0; owner < 3; owner++)
            for (int busy = 0; busy < 3; busy++)
                ask(of, all[owner], all[busy], all[owner]);
        ask(of, &gpus[0], &gpus[1], &gpus[1]);
        ask(of, &gpus[1], &gpus[1], &created);
    }
    CHECK(cuCtxDestroy_v2(created.context));

    for (int peer = 0; peer < 3; peer++) {
        if (peer > 0) {
            CHECK(cuCtxSetCurrent(gpus[peer - 1].context));
            CHECK(cuCtxEnablePeerAccess(gpus[2 - peer].context, 0));
        }
        puts(access[peer]);
        for (int busy = 0; busy < 2; busy++)
            for (int i = 0; i < 2; i++)
                ask(&PLAIN[i], &gpus[0], &gpus[busy], &gpus[0]);
    }
    CHECK(cuCtxSetCurrent(gpus[0].context));
    CHECK(cuMemFreeHost((void *)flag));
    return 0;
}
