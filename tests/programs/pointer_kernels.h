/*
 * Kernels that follow pointers in memory, a module of their own: tables of blocks, and lists of nodes { next, value }.
 */
#ifndef POINTER_KERNELS_H
#define POINTER_KERNELS_H

#include "kernels.h"

/* The address of word i % n behind pointer i / n of a table. */
#define PTX_BEHIND(to, table, n)                                                                                   \
    "div.u64 " to ", %rd8, " n ";\n rem.u64 %rd12, %rd8, " n ";\n shl.b64 " to ", " to ", 3;\n"                    \
    "add.s64 " to ", " to ", " table ";\n ld.global.u64 " to ", [" to "];\n cvta.to.global.u64 " to ", " to ";\n"  \
    "shl.b64 %rd12, %rd12, 2;\n add.s64 " to ", " to ", %rd12;\n"
/* A list is one thread's work. */
#define PTX_FIRST_THREAD "setp.ne.u64 %p1, %rd8, 0;\n @%p1 bra done;\n"

static const char POINTER_KERNELS[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"

    ".visible .entry sum_table_u32(.param .u64 sum_table_u32_0, .param .u64 sum_table_u32_1,"
    " .param .u64 sum_table_u32_2, .param .u64 sum_table_u32_3)\n{\n"
    PTX_REGISTERS PTX_GLOBAL("sum_table_u32", "0", "%rd1") PTX_LOAD("sum_table_u32", "1", "u64", "%rd2")
    PTX_LOAD("sum_table_u32", "2", "u64", "%rd3") PTX_GLOBAL("sum_table_u32", "3", "%rd4") PTX_INDEX
    "mul.lo.u64 %rd2, %rd2, %rd3;\n mov.u64 %rd14, 0;\n"
    PTX_LOOP("%rd2", PTX_BEHIND("%rd11", "%rd1", "%rd3")
             "ld.global.u32 %r6, [%rd11];\n cvt.u64.u32 %rd12, %r6;\n add.s64 %rd14, %rd14, %rd12;\n")
    "red.global.add.u64 [%rd4], %rd14;\n ret;\n}\n"

    ".visible .entry fill_table_u32(.param .u64 fill_table_u32_0, .param .u64 fill_table_u32_1,"
    " .param .u64 fill_table_u32_2, .param .u32 fill_table_u32_3)\n{\n"
    PTX_REGISTERS PTX_GLOBAL("fill_table_u32", "0", "%rd1") PTX_LOAD("fill_table_u32", "1", "u64", "%rd2")
    PTX_LOAD("fill_table_u32", "2", "u64", "%rd3") PTX_LOAD("fill_table_u32", "3", "u32", "%r5") PTX_INDEX
    "mul.lo.u64 %rd2, %rd2, %rd3;\n"
    PTX_LOOP("%rd2", PTX_BEHIND("%rd11", "%rd1", "%rd3") "st.global.u32 [%rd11], %r5;\n")
    "ret;\n}\n"

    ".visible .entry sum_list_u64(.param .u64 sum_list_u64_0, .param .u64 sum_list_u64_1,"
    " .param .u64 sum_list_u64_2)\n{\n"
    PTX_REGISTERS PTX_LOAD("sum_list_u64", "0", "u64", "%rd1") PTX_GLOBAL("sum_list_u64", "1", "%rd4")
    PTX_LOAD("sum_list_u64", "2", "u64", "%rd5") PTX_INDEX PTX_FIRST_THREAD
    "setp.eq.u64 %p1, %rd5, 0;\n @%p1 bra walk;\n cvta.to.global.u64 %rd5, %rd5;\n"
    "held:\n ld.volatile.global.u32 %r5, [%rd5];\n setp.eq.u32 %p1, %r5, 0;\n @%p1 bra held;\n"
    "walk:\n mov.u64 %rd14, 0;\n"
    "again:\n setp.eq.u64 %p1, %rd1, 0;\n @%p1 bra over;\n cvta.to.global.u64 %rd11, %rd1;\n"
    "ld.volatile.global.u64 %rd12, [%rd11+8];\n add.s64 %rd14, %rd14, %rd12;\n"
    "ld.volatile.global.u64 %rd1, [%rd11];\n bra again;\n"
    "over:\n red.global.add.u64 [%rd4], %rd14;\n done:\n ret;\n}\n"

    ".visible .entry add_list_u64(.param .u64 add_list_u64_0, .param .u64 add_list_u64_1)\n{\n"
    PTX_REGISTERS PTX_LOAD("add_list_u64", "0", "u64", "%rd1") PTX_LOAD("add_list_u64", "1", "u64", "%rd2")
    PTX_INDEX PTX_FIRST_THREAD
    "again:\n setp.eq.u64 %p1, %rd1, 0;\n @%p1 bra done;\n cvta.to.global.u64 %rd11, %rd1;\n"
    "ld.global.u64 %rd12, [%rd11+8];\n add.s64 %rd12, %rd12, %rd2;\n st.global.u64 [%rd11+8], %rd12;\n"
    "ld.global.u64 %rd1, [%rd11];\n bra again;\n done:\n ret;\n}\n";

typedef struct {
    CUmodule module;
    CUfunction sum_table, fill_table, sum_list, add_list;
} PointerKernels;

static inline PointerKernels load_pointer_kernels(void)
{
    PointerKernels k;
    CHECK(cuModuleLoadData(&k.module, POINTER_KERNELS));
    CHECK(cuModuleGetFunction(&k.sum_table, k.module, "sum_table_u32"));
    CHECK(cuModuleGetFunction(&k.fill_table, k.module, "fill_table_u32"));
    CHECK(cuModuleGetFunction(&k.sum_list, k.module, "sum_list_u64"));
    CHECK(cuModuleGetFunction(&k.add_list, k.module, "add_list_u64"));
    return k;
}

#endif
