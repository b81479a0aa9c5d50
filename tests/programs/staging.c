/*
 * staging CASE: data on its way to the GPU, from memory that is pinned, through a second pinned buffer or straight.
 */
#include "diagnosed.h"

#define BYTES (512 * KIB)

static CUdeviceptr target;

NAMED void *pinned_data(int varied);
NAMED void *pinned_data(int varied)
{
    uint64_t *data;
    void *memory;
    CHECK(cuMemHostAlloc(&memory, BYTES, CU_MEMHOSTALLOC_PORTABLE));
    data = memory;
    for (uint64_t i = 0; i < BYTES / sizeof *data; i++)
        data[i] = varied ? i * 0x9e3779b97f4a7c15u : 0;
    return memory;
}

static void *pageable_data(void)
{
    uint64_t *data = malloc(BYTES);
    REQUIRE(data);
    for (uint64_t i = 0; i < BYTES / sizeof *data; i++)
        data[i] = i * 0x9e3779b97f4a7c15u;
    return data;
}

/* What CuPy did before version 13, whatever memory the data came from. */
NAMED void copy_staged(const void *data, int times);
NAMED void copy_staged(const void *data, int times)
{
    void *staged;
    CHECK(cuMemHostAlloc(&staged, BYTES, 0));
    memcpy(staged, data, BYTES);
    for (int i = 0; i < times; i++)
        CHECK(cuMemcpyHtoD_v2(target, staged, BYTES));
    CHECK(cuMemFreeHost(staged));
}

/* Results come back into pinned memory, and go to another GPU from there. */
static void copy_back_and_forth(const void *data)
{
    void *result;
    CHECK(cuMemcpyHtoD_v2(target, data, BYTES));
    CHECK(cuMemHostAlloc(&result, BYTES, 0));
    CHECK(cuMemcpyDtoH_v2(result, target, BYTES));
    CHECK(cuMemcpyHtoD_v2(target, result, BYTES));
    CHECK(cuMemFreeHost(result));
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "";
    start_on(0);
    CHECK(cuMemAlloc_v2(&target, BYTES));
    if (strcmp(name, "twice") == 0) {
        void *data = pinned_data(1);
        for (int i = 0; i < 3; i++)
            copy_staged(data, 1);
    } else if (strcmp(name, "registered") == 0) {
        void *data = pageable_data();
        CHECK(cuMemHostRegister_v2(data, BYTES, 0));
        copy_staged((char *)data, 1);
    } else if (strcmp(name, "straight") == 0) {
        CHECK(cuMemcpyHtoD_v2(target, pinned_data(1), BYTES));
    } else if (strcmp(name, "pageable") == 0) {
        pinned_data(0);
        copy_staged(pageable_data(), 1);
    } else if (strcmp(name, "zeros") == 0) {
        copy_staged(pinned_data(0), 1);
    } else if (strcmp(name, "used_twice") == 0) {
        copy_staged(pinned_data(1), 2);
    } else if (strcmp(name, "back") == 0) {
        copy_back_and_forth(pinned_data(1));
    } else {
        printf("staging: no case %s\n", name);
        return 2;
    }
    puts("done");
    return 0;
}
