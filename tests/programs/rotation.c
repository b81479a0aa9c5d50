/*
 * rotation COUNT MIB TIMES ROUNDS [graph|wait]: arrays that are read in turn, each by a kernel that goes through it TIMES times; what they add up to.
 * With graph, an empty graph is made first; with wait, it waits for the end of its input before it frees the arrays.
 * On stderr the GPU's time for each round, in microseconds.
 */
#include "kernels.h"
#include "streams.h"
#include "sum_again.h"

#define MOST 64

CUresult cuEventElapsedTime(float *milliseconds, CUevent begin, CUevent end);

int main(int argc, char **argv)
{
    REQUIRE(argc == 5 || argc == 6);
    int count = atoi(argv[1]), rounds = atoi(argv[4]);
    uint64_t n = strtoull(argv[2], NULL, 0) * MIB / 4, times = strtoull(argv[3], NULL, 0), sum = 0, expected = 0;
    CUdeviceptr arrays[MOST], out;
    CUfunction sum_again;
    CUstream stream;
    CUevent begin, end;
    REQUIRE(count <= MOST);
    start_on(0);
    Kernels k = load_kernels();
    sum_again = load_sum_again();
    CHECK(cuStreamCreate(&stream, 1));
    CHECK(cuEventCreate(&begin, 0));
    CHECK(cuEventCreate(&end, 0));
    CHECK(cuMemAlloc_v2(&out, sizeof sum));
    CHECK(cuMemsetD32_v2(out, 0, 2));
    for (int i = 0; i < count; i++) {
        CHECK(cuMemAlloc_v2(&arrays[i], 4 * n));
        iota(&k, stream, arrays[i], n, (uint32_t)i);
        for (uint64_t at = 0; at < n; at++)
            expected += times * (uint32_t)(at + (uint64_t)i);
    }
    if (argc == 6 && strcmp(argv[5], "graph") == 0) {
        CUgraph graph;
        CUgraphExec exec;
        CHECK(cuStreamBeginCapture_v2(stream, CAPTURE_RELAXED));
        CHECK(cuStreamEndCapture(stream, &graph));
        CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    }
    for (int round = 0; round < rounds; round++) {
        float milliseconds;
        CHECK(cuEventRecord(begin, stream));
        for (int i = 0; i < count; i++) {
            launch(sum_again, stream, (void *[]){&arrays[i], &n, &times, &out});
            /* What is moved before a launch then waits for no other, however slow the machine is. */
            CHECK(cuStreamSynchronize(stream));
        }
        CHECK(cuEventRecord(end, stream));
        CHECK(cuStreamSynchronize(stream));
        CHECK(cuEventElapsedTime(&milliseconds, begin, end));
        fprintf(stderr, "round %d: %.0f us\n", round, milliseconds * 1e3);
        CHECK(cuMemcpyDtoH_v2(&sum, out, sizeof sum));
        printf("round %d: sums %s\n", round, sum == expected * (uint64_t)(round + 1) ? "right" : "WRONG");
    }
    for (int i = 0; i < count; i++)
        printf("array %d: %llu wrong\n", i, (unsigned long long)count_wrong(&k, arrays[i], n, (uint32_t)i));
    fflush(stdout);
    if (argc == 6 && strcmp(argv[5], "wait") == 0)
        while (getchar() != EOF) {
        }
    for (int i = 0; i < count; i++)
        CHECK(cuMemFree_v2(arrays[i]));
    return 0;
}
