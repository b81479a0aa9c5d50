/*
 * label_moves: eight blocks of 2 MiB with one label, of which 4 MiB may lie on the GPU, are read again and again, each in turn. The most
 * that did lie there is printed, and whether any changed places.
 */
#include "control.h"
#include "kernels.h"
#include "streams.h"
#include "sum_again.h"

#define BLOCKS 8
#define BUDGET (4 * MIB)

int main(void)
{
    CUdeviceptr blocks[BLOCKS], out;
    uint64_t bytes = 2 * MIB, n = bytes / 4, times = 200, most = 0;
    uint32_t places = 0;
    CUstream stream;
    start_on(0);
    Control control = find_control(RTLD_DEFAULT);
    Kernels k = load_kernels();
    CUfunction again = load_sum_again();
    CHECK(cuStreamCreate(&stream, 1));
    CHECK(cuMemAlloc_v2(&out, 8));
    REQUIRE(control.label_budget("kv", BUDGET) == 0);
    REQUIRE(control.label_scope("kv", NULL) == 0);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        CHECK(cuMemAlloc_v2(&blocks[i], bytes));
        launch(k.iota, stream, (void *[]){&blocks[i], &n, &i});
    }
    REQUIRE(control.label_scope(NULL, NULL) == 0);
    for (int turn = 0; turn < 400; turn++) {
        uint64_t near = 0;
        launch(again, stream, (void *[]){&blocks[turn % BLOCKS], &n, &times, &out});
        CHECK(cuStreamSynchronize(stream));
        for (int i = 0; i < BLOCKS; i++) {
            gpupool_piece piece;
            size_t count = 1;
            REQUIRE(control.pieces((const void *)blocks[i], bytes, &piece, &count) == 0);
            near += piece.place == 0 ? bytes : 0;
            places |= 1u << (2 * i + (piece.place != 0));
        }
        most = near > most ? near : most;
    }
    int moved = 0;
    for (int i = 0; i < BLOCKS; i++)
        moved += (places >> 2 * i & 3) == 3;
    printf("at most %llu MiB of 4 near, some moved: %d\n", (unsigned long long)(most >> 20), moved > 0);
    return 0;
}
