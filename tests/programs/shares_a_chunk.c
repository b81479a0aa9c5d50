/*
 * shares_a_chunk: an array of 40 MiB for which there is no room is read again and again. 32 MiB that nobody reads could leave for it, and so could
 * 8 MiB that stand on one chunk together with an array that each round reads. Says when some of it has come near, how much has in the
 * end, and whether the sums were right.
 */
#include "control.h"
#include "kernels.h"
#include "sum_again.h"

enum { ROUNDS = 60, TIMES = 1500 };

static Control control;
static CUfunction sum_again;
static CUdeviceptr out;

static size_t near(CUdeviceptr array, size_t bytes)
{
    gpupool_piece pieces[32];
    size_t count = 32, sum = 0;
    REQUIRE(control.pieces(as_pointer(array), bytes, pieces, &count) == 0 && count <= 32);
    for (size_t i = 0; i < count; i++)
        sum += pieces[i].place == 0 ? pieces[i].bytes : 0;
    return sum;
}

static uint64_t sum_of(CUdeviceptr array, size_t bytes, uint64_t times)
{
    uint64_t n = bytes / 4, sum;
    CHECK(cuMemsetD32_v2(out, 0, 2));
    launch(sum_again, NULL, (void *[]){&array, &n, &times, &out});
    CHECK(cuMemcpyDtoH_v2(&sum, out, sizeof sum));
    return sum;
}

int main(void)
{
    CUdeviceptr freed, shared, read, unread, far;
    control = find_control(RTLD_DEFAULT);
    REQUIRE(control.pieces);
    start_on(0);
    Kernels k = load_kernels();
    sum_again = load_sum_again();
    CHECK(cuMemAlloc_v2(&out, 8));
    CHECK(cuMemAlloc_v2(&freed, 16 * MIB));
    CHECK(cuMemFree_v2(freed));
    CHECK(cuMemAlloc_v2(&shared, 8 * MIB));
    CHECK(cuMemAlloc_v2(&read, 8 * MIB));
    REQUIRE(shared == freed && read == freed + 8 * MIB);
    CHECK(cuMemAlloc_v2(&unread, 32 * MIB));
    CHECK(cuMemAlloc_v2(&far, 40 * MIB));
    CUdeviceptr all[] = {shared, read, unread, far};
    uint64_t n[] = {2 * MIB, 2 * MIB, 8 * MIB, 10 * MIB};
    for (int i = 0; i < 4; i++)
        iota(&k, NULL, all[i], n[i], (uint32_t)i);
    CHECK(cuCtxSynchronize());
    printf("at first: %zu MiB near\n", near(far, 40 * MIB) / MIB);
    uint64_t expected = sum_of(far, 40 * MIB, 1), wrong = 0;
    for (int round = 0; round < ROUNDS; round++) {
        wrong += sum_of(far, 40 * MIB, TIMES) != expected * TIMES;
        sum_of(read, 8 * MIB, TIMES);
    }
    printf("in the end: %zu MiB near\n", near(far, 40 * MIB) / MIB);
    for (int i = 0; i < 4; i++)
        wrong += count_wrong(&k, all[i], n[i], (uint32_t)i);
    printf("%llu wrong\n", (unsigned long long)wrong);
    return 0;
}
