/*
 * staging CASE: data on its way to the GPU, from memory that is pinned, through a second pinned buffer or straight.
 */
#include "diagnosed.h"

#define BYTES (512 * KIB)

static CUdeviceptr target;

/* Data that varies, other for each seed; zeros for 0. */
static void *fill(void *memory, uint64_t seed)
{
    uint64_t *data = memory;
    for (uint64_t i = 0; i < BYTES / sizeof *data; i++)
        data[i] = (i + 1) * seed * 0x9e3779b97f4a7c15u;
    return memory;
}

NAMED void *pinned_data(uint64_t seed);
NAMED void *pinned_data(uint64_t seed)
{
    void *memory;
    CHECK(cuMemHostAlloc(&memory, BYTES, CU_MEMHOSTALLOC_PORTABLE));
    return fill(memory, seed);
}

static void *pageable_data(void)
{
    void *memory = malloc(BYTES);
    REQUIRE(memory);
    return fill(memory, 1);
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

/*
 * What nvbandwidth does before and after each measurement: a pattern is computed into a new pinned buffer and sent to the
 * GPU once, and a kernel writes it to the memory that is measured, which may be pinned. Here copies do what the kernel does.
 */
NAMED void set_pattern(void *host, uint64_t seed);
NAMED void set_pattern(void *host, uint64_t seed)
{
    void *pattern = pinned_data(seed);
    CHECK(cuMemcpyHtoD_v2(target, pattern, BYTES));
    if (host)
        CHECK(cuMemcpyDtoH_v2(host, target, BYTES));
    CHECK(cuMemFreeHost(pattern));
}

/* Inlined, so that each measurement is a place of its own. */
__attribute__((always_inline)) static inline void measure(void *host)
{
    set_pattern(NULL, 0xcafebabe);
    set_pattern(host, 0xbaadf00d);
    CHECK(cuMemcpyHtoD_v2(target, host, BYTES));
    set_pattern(NULL, 0xbaadf00d);
}

/* The same data from pinned memory and, by way of a pinned buffer, from pageable memory, as a benchmark compares them. */
static void compare_both_ways(void *pinned, void *pageable)
{
    for (uint64_t round = 1; round <= 6; round++) {
        CHECK(cuMemcpyHtoD_v2(target, fill(pinned, round), BYTES));
        copy_staged(fill(pageable, round), 1);
    }
}

/* CUDA_MEMCPY2D. */
struct rows {
    struct side {
        size_t x, y;
        enum { HOST = 1, DEVICE = 2 } kind;
        void *host;
        CUdeviceptr device;
        void *array;
        size_t pitch;
    } from, to;
    size_t width, height;
};
CUresult cuMemcpy2D_v2(const struct rows *copy);

/* Both ways again, but straight by rows, or by a kernel that reads what is mapped for it. */
static void go_straight_otherwise(void *pinned, int mapped)
{
    const size_t row = BYTES / 64;
    const struct rows copy = {.from = {.kind = HOST, .host = pinned, .pitch = row},
                              .to = {.kind = DEVICE, .device = target, .pitch = row}, .width = row, .height = 64};
    CUdeviceptr seen;
    for (uint64_t i = 1; i <= 3; i++)
        copy_staged(fill(pinned, i), 1);
    if (mapped)
        CHECK(cuMemHostGetDevicePointer_v2(&seen, pinned, 0));
    else
        CHECK(cuMemcpy2D_v2(&copy));
}

/* Two pinned buffers with the same data, as for two GPUs: both are filled before either is copied. */
static void send_twins(void)
{
    void *first[3], *second[3];
    for (uint64_t i = 0; i < 3; i++) {
        first[i] = pinned_data(i + 1);
        second[i] = pinned_data(i + 1);
    }
    for (int i = 0; i < 3; i++) {
        CHECK(cuMemcpyHtoD_v2(target, second[i], BYTES));
        CHECK(cuMemFreeHost(second[i]));
    }
    for (int i = 0; i < 3; i++) {
        CHECK(cuMemcpyHtoD_v2(target, first[i], BYTES));
        CHECK(cuMemFreeHost(first[i]));
    }
}

/* A test of copies: what came back from the GPU lies in pinned memory when the same data is sent anew. */
static void send_and_fetch(void *back)
{
    for (uint64_t i = 1; i <= 3; i++) {
        set_pattern(back, i);
        set_pattern(NULL, i);
    }
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "";
    start_on(0);
    CHECK(cuMemAlloc_v2(&target, BYTES));
    if (strcmp(name, "twice") == 0) {
        /* Three lines of the program, one cause. */
        void *data = pinned_data(1);
        for (uint64_t i = 0; i < 3; i++) {
            copy_staged(fill(data, 3 * i + 1), 1);
            copy_staged(fill(data, 3 * i + 2), 1);
            copy_staged(fill(data, 3 * i + 3), 1);
        }
    } else if (strcmp(name, "registered") == 0) {
        void *data = pageable_data();
        CHECK(cuMemHostRegister_v2(data, BYTES, 0));
        for (uint64_t i = 1; i <= 3; i++)
            copy_staged(fill(data, i), 1);
    } else if (strcmp(name, "seldom") == 0) {
        void *data = pinned_data(1);
        for (uint64_t i = 1; i <= 2; i++)
            copy_staged(fill(data, i), 1);
    } else if (strcmp(name, "pattern") == 0) {
        void *host = pinned_data(1);
        measure(host);
        measure(host);
        measure(host);
    } else if (strcmp(name, "both_ways") == 0) {
        compare_both_ways(pinned_data(1), pageable_data());
    } else if (strcmp(name, "rows") == 0) {
        go_straight_otherwise(pinned_data(1), 0);
    } else if (strcmp(name, "mapped") == 0) {
        go_straight_otherwise(pinned_data(1), 1);
    } else if (strcmp(name, "twins") == 0) {
        send_twins();
    } else if (strcmp(name, "fetched") == 0) {
        send_and_fetch(pinned_data(9));
    } else if (strcmp(name, "freed") == 0) {
        for (uint64_t i = 1; i <= 3; i++) {
            void *data = pinned_data(i);
            copy_staged(data, 1);
            CHECK(cuMemFreeHost(data));
        }
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
