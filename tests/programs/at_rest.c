/*
 * at_rest COUNT MIB ROUNDS USE WAIT: arrays, the last two of which are used after each of the others. Each round uses all of them, and
 * ends with a wait.
 * USE is copy (it is copied elsewhere) or fill (it gets the values that it has).
 * WAIT is context, stream, event or copy (one of eight bytes to the host).
 */
#include "kernels.h"
#include "streams.h"

#define MOST 64

static const char *use_by, *wait_by;
static Kernels k;
static CUstream stream;
static CUevent event;
static CUdeviceptr arrays[MOST], elsewhere, out;
static size_t bytes;

static void use(int i)
{
    uint64_t n = bytes / 4;
    if (strcmp(use_by, "copy") == 0)
        CHECK(cuMemcpyDtoDAsync_v2(elsewhere, arrays[i], bytes, stream));
    else
        CHECK(cuMemsetD32Async(arrays[i], (unsigned)i, n, stream));
}

static void wait_for_all(void)
{
    uint64_t word;
    if (strcmp(wait_by, "context") == 0)
        CHECK(cuCtxSynchronize());
    else if (strcmp(wait_by, "stream") == 0)
        CHECK(cuStreamSynchronize(stream));
    else if (strcmp(wait_by, "copy") == 0)
        CHECK(cuMemcpyDtoH_v2(&word, out, sizeof word));
    else {
        CHECK(cuEventRecord(event, stream));
        CHECK(cuEventSynchronize(event));
    }
}

int main(int argc, char **argv)
{
    REQUIRE(argc == 6);
    int count = atoi(argv[1]), rounds = atoi(argv[3]);
    bytes = strtoull(argv[2], NULL, 0) * MIB;
    use_by = argv[4];
    wait_by = argv[5];
    REQUIRE(count + 2 <= MOST);
    start_on(0);
    k = load_kernels();
    /* A stream that the default stream waits for, so that the copy does. */
    CHECK(cuStreamCreate(&stream, 0));
    CHECK(cuEventCreate(&event, 0));
    CHECK(cuMemAlloc_v2(&out, 8));
    CHECK(cuMemAlloc_v2(&elsewhere, bytes));
    uint64_t n = bytes / 4;
    for (int i = 0; i < count; i++) {
        uint32_t value = (uint32_t)i;
        CHECK(cuMemAlloc_v2(&arrays[i], bytes));
        launch(k.fill, stream, (void *[]){&arrays[i], &n, &value});
    }
    for (int round = 0; round < rounds; round++) {
        for (int i = 0; i < count - 2; i++) {
            use(i);
            use(count - 2);
            use(count - 1);
        }
        /* A launch that tells one round from the next, whatever else there is. */
        uint64_t one = 1;
        uint32_t none = 0;
        launch(k.fill, stream, (void *[]){&elsewhere, &one, &none});
        wait_for_all();
    }
    uint32_t *copy = malloc(bytes);
    for (int i = 0; i < count; i++) {
        size_t wrong = 0;
        CHECK(cuMemcpyDtoH_v2(copy, arrays[i], bytes));
        for (size_t at = 0; at < n; at++)
            wrong += copy[at] != (uint32_t)i;
        printf("array %d: %zu wrong\n", i, wrong);
        CHECK(cuMemFree_v2(arrays[i]));
    }
    return 0;
}
