/*
 * by_value COUNT MIB TIMES: arrays whose addresses no kernel is given but inside a structure that is passed by value. The last two are added to the
 * first, again and again; what comes out.
 */
#include "kernels.h"

#define MOST 64
/* Copies of less are not told of. */
enum { PIECE = 32 * KIB };

static const char ADD[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry add_struct(.param .align 8 .b8 add_struct_0[32])\n{\n" PTX_REGISTERS
    "ld.param.u64 %rd1, [add_struct_0];\n cvta.to.global.u64 %rd1, %rd1;\n"
    "ld.param.u64 %rd2, [add_struct_0+8];\n cvta.to.global.u64 %rd2, %rd2;\n"
    "ld.param.u64 %rd3, [add_struct_0+16];\n cvta.to.global.u64 %rd3, %rd3;\n"
    "ld.param.u64 %rd4, [add_struct_0+24];\n" PTX_INDEX
    PTX_LOOP("%rd4", PTX_ELEMENT("%rd11", "%rd1") PTX_ELEMENT("%rd12", "%rd2") PTX_ELEMENT("%rd13", "%rd3")
             "ld.global.u32 %r5, [%rd12];\n ld.global.u32 %r6, [%rd13];\n add.u32 %r7, %r5, %r6;\n st.global.u32 [%rd11], %r7;\n")
    "ret;\n}\n";

typedef struct {
    CUdeviceptr to, one, other;
    uint64_t n;
} Arrays;

int main(int argc, char **argv)
{
    REQUIRE(argc == 4);
    int count = atoi(argv[1]), times = atoi(argv[3]);
    size_t bytes = strtoull(argv[2], NULL, 0) * MIB, wrong = 0;
    CUdeviceptr arrays[MOST];
    CUmodule module;
    CUfunction add;
    REQUIRE(count >= 3 && count <= MOST);
    start_on(0);
    CHECK(cuModuleLoadData(&module, ADD));
    CHECK(cuModuleGetFunction(&add, module, "add_struct"));
    uint32_t *words = malloc(PIECE);
    for (int i = 0; i < count; i++) {
        CHECK(cuMemAlloc_v2(&arrays[i], bytes));
        for (size_t at = 0; at < bytes; at += PIECE) {
            for (size_t word = 0; word < PIECE / 4; word++)
                words[word] = (uint32_t)(i * (at / 4 + word));
            CHECK(cuMemcpyHtoD_v2(arrays[i] + at, words, PIECE));
        }
    }
    for (int time = 0; time < times; time++) {
        Arrays given = {arrays[0], arrays[count - 2], arrays[count - 1], bytes / 4};
        launch(add, NULL, (void *[]){&given});
        CHECK(cuCtxSynchronize());
    }
    for (size_t at = 0; at < bytes; at += PIECE) {
        CHECK(cuMemcpyDtoH_v2(words, arrays[0] + at, PIECE));
        for (size_t word = 0; word < PIECE / 4; word++)
            wrong += words[word] != (uint32_t)((2 * count - 3) * (at / 4 + word));
    }
    printf("%zu wrong\n", wrong);
    free(words);
    return 0;
}
