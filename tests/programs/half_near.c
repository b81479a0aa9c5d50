/*
 * half_near MIB FIRST SECOND FREE TIMES TAKEN: two arrays of MIB, of which FIRST and SECOND MiB find room on the first GPU, where FREE MiB become free after
 * that, are read in turn, each TIMES times by a kernel. Of the free memory TAKEN MiB are taken past all hooks, as another program takes them, so that the
 * driver has less than the limit says. Says how much of both has been near at first, and at least and in the end behind each reading. Simulated driver only.
 */
#include "simulator.h"

#include "control.h"
#include "kernels.h"
#include "sum_again.h"

enum { ROUNDS = 40 };

static Control control;

static size_t near(CUdeviceptr array, size_t bytes)
{
    enum { MOST = 512 };
    gpupool_piece pieces[MOST];
    size_t count = MOST, sum = 0;
    REQUIRE(control.pieces(as_pointer(array), bytes, pieces, &count) == 0 && count <= MOST);
    for (size_t i = 0; i < count; i++)
        sum += pieces[i].place == 0 ? pieces[i].bytes : 0;
    return sum;
}

static void take_past(size_t bytes)
{
    CUdeviceptr taken;
    CUresult (*allocate)(CUdeviceptr *, size_t);
    void *(*look_up)(void *, const char *) = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!look_up)
        look_up = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    REQUIRE(look_up);
    *(void **)&allocate = look_up(dlopen("libcuda.so.1", RTLD_NOW), "cuMemAlloc_v2");
    REQUIRE(allocate);
    CHECK(allocate(&taken, bytes));
}

int main(int count, char **arguments)
{
    REQUIRE(count == 7);
    size_t bytes = strtoull(arguments[1], NULL, 0) * MIB, part[3];
    for (int i = 0; i < 3; i++)
        part[i] = strtoull(arguments[2 + i], NULL, 0) * MIB;
    uint64_t n = bytes / 4, times = strtoull(arguments[5], NULL, 0), taken = strtoull(arguments[6], NULL, 0) * MIB, sum = 0, expected = 0;
    CUdeviceptr arrays[2], before, beside, out;
    start_on(0);
    control = find_control(RTLD_DEFAULT);
    REQUIRE(control.pieces);
    Kernels k = load_kernels();
    CUfunction sum_again = load_sum_again();
    CHECK(cuMemAlloc_v2(&out, 8));
    /* While the first array is made there is room for FIRST beside this, and for SECOND while the second one is. */
    CHECK(cuMemAlloc_v2(&beside, part[2]));
    CHECK(cuMemAlloc_v2(&before, part[1]));
    CHECK(cuMemAlloc_v2(&arrays[0], bytes));
    CHECK(cuMemFree_v2(before));
    control.trim();
    CHECK(cuMemAlloc_v2(&arrays[1], bytes));
    CHECK(cuMemFree_v2(beside));
    control.trim();
    if (taken)
        take_past(taken);
    for (int i = 0; i < 2; i++) {
        iota(&k, NULL, arrays[i], n, (uint32_t)i);
        for (uint64_t at = 0; at < n; at++)
            expected += times * (uint32_t)(at + (uint64_t)i);
    }
    CHECK(cuMemsetD32_v2(out, 0, 2));
    CHECK(cuCtxSynchronize());
    size_t first = near(arrays[0], bytes) + near(arrays[1], bytes), least = SIZE_MAX, now = 0;
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < 2; i++) {
            launch(sum_again, NULL, (void *[]){&arrays[i], &n, &times, &out});
            CHECK(cuCtxSynchronize());
            now = near(arrays[0], bytes) + near(arrays[1], bytes);
            least = now < least ? now : least;
        }
    }
    CHECK(cuMemcpyDtoH_v2(&sum, out, sizeof sum));
    printf("near: %zu MiB at first, %zu at least, %zu in the end\n", first / MIB, least / MIB, now / MIB);
    printf("sums %s\n", sum == expected * ROUNDS ? "right" : "WRONG");
    for (int i = 0; i < 2; i++)
        printf("array %d: %llu wrong\n", i, (unsigned long long)count_wrong(&k, arrays[i], n, (uint32_t)i));
    return 0;
}
