/*
 * freed_near: an array of 16 MiB is read again and again; there is one of 32 MiB beside it, which has all the room of the first GPU if the
 * test says so, until it is freed. Prints where the array lies before and after that, and whether what was added up is right.
 */
#include "control.h"
#include "kernels.h"
#include "streams.h"
#include "sum_again.h"

enum { BEFORE = 64, MOST = 20000 };

static uint64_t n = 16 * MIB / 4, times = 2000, launches;
static CUstream stream;
static CUdeviceptr array, out;
static CUfunction sum_again;
static Control control;

static void read_again(void)
{
    launch(sum_again, stream, (void *[]){&array, &n, &times, &out});
    CHECK(cuStreamSynchronize(stream));
    launches++;
}

static int is_near(void)
{
    gpupool_piece pieces[16];
    size_t count = 16;
    REQUIRE(control.pieces((void *)array, 16 * MIB, pieces, &count) == 0 && count <= 16);
    for (size_t i = 0; i < count; i++)
        if (pieces[i].place != 0)
            return 0;
    return 1;
}

int main(void)
{
    CUdeviceptr beside;
    uint64_t sum = 0, once = 0;
    start_on(0);
    Kernels k = load_kernels();
    sum_again = load_sum_again();
    control = find_control(RTLD_DEFAULT);
    CHECK(cuStreamCreate(&stream, 1));
    CHECK(cuMemAlloc_v2(&beside, 32 * MIB));
    CHECK(cuMemAlloc_v2(&array, 16 * MIB));
    CHECK(cuMemAlloc_v2(&out, sizeof sum));
    CHECK(cuMemsetD32_v2(out, 0, 2));
    iota(&k, stream, beside, 32 * MIB / 4, 3);
    iota(&k, stream, array, n, 7);
    for (uint64_t i = 0; i < n; i++)
        once += times * (uint32_t)(i + 7);
    /* What is beside it is used as much, so it does not leave. */
    for (int i = 0; i < BEFORE; i++) {
        uint64_t all = 32 * MIB / 4;
        launch(sum_again, stream, (void *[]){&beside, &all, &times, &out});
        CHECK(cuStreamSynchronize(stream));
        read_again();
    }
    printf("before: %s\n", is_near() ? "near" : "far");
    CHECK(cuMemsetD32_v2(out, 0, 2));
    CHECK(cuMemFree_v2(beside));
    launches = 0;
    while (!is_near() && launches < MOST)
        read_again();
    printf("after: %s\n", is_near() ? "near" : "far");
    read_again();
    CHECK(cuMemcpyDtoH_v2(&sum, out, sizeof sum));
    printf("sum: %s\n", sum == once * launches ? "right" : "WRONG");
    printf("array: %llu wrong\n", (unsigned long long)count_wrong(&k, array, n, 7));
    return 0;
}
