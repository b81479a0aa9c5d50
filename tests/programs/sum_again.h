/*
 * A kernel that goes through an array again and again: sum_again_u32(array, n, times, out) adds up n elements so many times.
 */
#ifndef SUM_AGAIN_H
#define SUM_AGAIN_H

#include "kernels.h"

static const char SUM_AGAIN[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry sum_again_u32(.param .u64 sum_again_u32_0, .param .u64 sum_again_u32_1,"
    " .param .u64 sum_again_u32_2, .param .u64 sum_again_u32_3)\n{\n"
    PTX_REGISTERS PTX_GLOBAL("sum_again_u32", "0", "%rd1") PTX_LOAD("sum_again_u32", "1", "u64", "%rd2")
    PTX_LOAD("sum_again_u32", "2", "u64", "%rd5") PTX_GLOBAL("sum_again_u32", "3", "%rd3")
    "mov.u64 %rd14, 0;\n"
    "pass:\n setp.eq.u64 %p2, %rd5, 0;\n @%p2 bra over;\n sub.s64 %rd5, %rd5, 1;\n"
    PTX_INDEX
    PTX_LOOP("%rd2", PTX_ELEMENT("%rd11", "%rd1")
             "ld.volatile.global.u32 %r6, [%rd11];\n cvt.u64.u32 %rd12, %r6;\n add.s64 %rd14, %rd14, %rd12;\n")
    "bra pass;\n"
    "over:\n red.global.add.u64 [%rd3], %rd14;\n ret;\n}\n";

static inline CUfunction load_sum_again(void)
{
    CUmodule module;
    CUfunction sum_again;
    CHECK(cuModuleLoadData(&module, SUM_AGAIN));
    CHECK(cuModuleGetFunction(&sum_again, module, "sum_again_u32"));
    return sum_again;
}

#endif
