/*
 * far HOW TIMES LAUNCHES: a kernel goes TIMES times through an array of 16 MiB, LAUNCHES times. There is an array of 32 MiB beside it, and
 * room for that one alone if the test says so. What the last launch added up is printed.
 * HOW is plain; anchored: the first array must stay where it is; kept: the one beside it must; table: a private table of the
 * driver's is taken first; busy: a kernel runs meanwhile that waits for the host; turns: five arrays of 8 MiB are read in turn instead;
 * more: behind the launches a handle and a block of 16 MiB each are asked for; wait: it waits for the end of its input before it ends;
 * ready: it says so before the launches, and waits for a line of its input.
 */
#include "control.h"
#include "diagnosed.h"
#include "kernels.h"
#include "streams.h"
#include "sum_again.h"
#include "vmm.h"

#define TURNS 5

CUresult cuGetExportTable(const void **table, const unsigned char id[16]);

static uint64_t n, times;
static CUstream stream;
static CUdeviceptr out;
static CUfunction sum_again;

/* With a name that a finding can show. */
NAMED void read_again(CUdeviceptr array);
NAMED void read_again(CUdeviceptr array)
{
    launch(sum_again, stream, (void *[]){&array, &n, &times, &out});
    /* What is moved before a launch then waits for no other, however slow the machine is. */
    CHECK(cuStreamSynchronize(stream));
}

int main(int argc, char **argv)
{
    REQUIRE(argc == 4);
    const char *how = argv[1];
    int launches = atoi(argv[3]), turns = strcmp(how, "turns") == 0 ? TURNS : 1;
    CUdeviceptr near, arrays[TURNS];
    uint64_t sum = 0;
    size_t bytes = turns == 1 ? 16 * MIB : 8 * MIB;
    times = strtoull(argv[2], NULL, 0);
    n = bytes / 4;
    start_on(0);
    Kernels k = load_kernels();
    sum_again = load_sum_again();
    CHECK(cuStreamCreate(&stream, 1));
    CHECK(cuMemAlloc_v2(&near, turns == 1 ? 32 * MIB : 2 * MIB));
    for (int i = 0; i < turns; i++)
        CHECK(cuMemAlloc_v2(&arrays[i], bytes));
    CHECK(cuMemAlloc_v2(&out, sizeof sum));
    CHECK(cuMemsetD32_v2(out, 0, 2));
    if (strcmp(how, "anchored") == 0) {
        Control control = find_control(RTLD_DEFAULT);
        REQUIRE(!control.anchor || control.anchor((const void *)arrays[0], bytes) == 0);
    }
    if (strcmp(how, "kept") == 0) {
        Control control = find_control(RTLD_DEFAULT);
        REQUIRE(!control.anchor || control.anchor((const void *)near, 32 * MIB) == 0);
    }
    if (strcmp(how, "table") == 0) {
        const void *table;
        CHECK(cuGetExportTable(&table, (const unsigned char[16]){1}));
    }
    uint32_t *flag;
    CUstream other;
    CHECK(cuStreamCreate(&other, 1));
    CHECK(cuMemHostAlloc((void **)&flag, sizeof *flag, 0));
    *flag = 0;
    for (int i = 0; i < turns; i++)
        iota(&k, stream, arrays[i], n, (uint32_t)i);
    CHECK(cuStreamSynchronize(stream));
    if (strcmp(how, "ready") == 0) {
        puts("ready");
        fflush(stdout);
        getchar();
    }
    if (strcmp(how, "busy") == 0)
        CHECK(cuLaunchKernel(k.wait_flag, 1, 1, 1, 1, 1, 1, 0, other, (void *[]){&flag}, NULL));
    for (int i = 0; i < launches; i++)
        for (int turn = 0; turn < turns; turn++)
            read_again(arrays[turn]);
    if (strcmp(how, "busy") != 0)
        CHECK(cuCtxSynchronize());
    CHECK(cuMemcpyDtoH_v2(&sum, out, sizeof sum));
    printf("sum: %llu\n", (unsigned long long)sum);
    if (strcmp(how, "more") == 0) {
        CUdeviceptr more;
        uint64_t handle;
        CUmemAllocationProp properties = on_device(0);
        printf("handle: %d\n", cuMemCreate(&handle, 16 * MIB, &properties, 0));
        printf("more: %d\n", cuMemAlloc_v2(&more, 16 * MIB));
    }
    fflush(stdout);
    if (strcmp(how, "wait") == 0)
        while (getchar() != EOF) {
        }
    /* The kernel that waits ends with the process. A wait for it would be a moment at which memory can move. */
    *(volatile uint32_t *)flag = 1;
    return 0;
}
