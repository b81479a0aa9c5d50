/*
 * outside MODE: how much memory lay outside its GPU, by the C interface. Two GPUs of 128 MiB, of which 112 can be had.
 *   again   GPU 0 is full, and a block of 80 MiB is taken and given back ten times
 *   moved   a block that was near is put on the other GPU and stays there to the end
 *   back    the same, and it comes back
 */
#include "control.h"

static void say(const Control *c)
{
    gpupool_statistics s = {.size = sizeof s};
    REQUIRE(c->statistics(&s) == 0);
    printf("%llu MiB of %llu blocks, %llu reused\n", (unsigned long long)(s.spilled_bytes / MIB),
           (unsigned long long)s.allocations, (unsigned long long)s.reuses);
}

int main(int argc, char **argv)
{
    CUdeviceptr near, far;
    Control c = find_control(RTLD_DEFAULT);
    REQUIRE(argc == 2);
    start_on(0);
    if (strcmp(argv[1], "again") == 0) {
        CHECK(cuMemAlloc_v2(&near, 112 * MIB));
        for (int i = 0; i < 10; i++) {
            CHECK(cuMemAlloc_v2(&far, 80 * MIB));
            CHECK(cuMemFree_v2(far));
        }
        say(&c);
        return 0;
    }
    CHECK(cuMemAlloc_v2(&near, 64 * MIB));
    REQUIRE(c.prefetch(as_pointer(near), 64 * MIB, 1, NULL) == 0);
    if (strcmp(argv[1], "back") == 0)
        REQUIRE(c.prefetch(as_pointer(near), 64 * MIB, 0, NULL) == 0);
    say(&c);
    return 0;
}
