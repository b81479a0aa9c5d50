/*
 * The kernels the programs launch, as PTX so that no CUDA compiler is needed. All are grid-stride loops: any launch
 * shape gives the same result. The simulated driver knows them by name and runs its own version.
 */
#ifndef KERNELS_H
#define KERNELS_H

#include "program.h"

/* i = index of this thread in %rd8; its stride in %rd9. */
#define PTX_INDEX                                                                                                  \
    "mov.u32 %r1, %ctaid.x;\n mov.u32 %r2, %ntid.x;\n mov.u32 %r3, %tid.x;\n mov.u32 %r4, %nctaid.x;\n"            \
    "mul.wide.u32 %rd8, %r1, %r2;\n cvt.u64.u32 %rd10, %r3;\n add.s64 %rd8, %rd8, %rd10;\n"                        \
    "mul.wide.u32 %rd9, %r2, %r4;\n"
#define PTX_REGISTERS ".reg .pred %p<3>;\n .reg .b32 %r<12>;\n .reg .b64 %rd<16>;\n"
/* Runs the body for this thread's share of i < n; PTX_ELEMENT puts the address of array[i] into a register. */
#define PTX_LOOP(n, body)                                                                                          \
    "again:\n setp.ge.u64 %p1, %rd8, " n ";\n @%p1 bra done;\n" body                                              \
    "add.s64 %rd8, %rd8, %rd9;\n bra again;\n done:\n"
#define PTX_ELEMENT(to, array) "shl.b64 " to ", %rd8, 2;\n add.s64 " to ", " to ", " array ";\n"
#define PTX_LOAD(name, at, type, to) "ld.param." type " " to ", [" name "_" at "];\n"
#define PTX_GLOBAL(name, at, to) PTX_LOAD(name, at, "u64", to) "cvta.to.global.u64 " to ", " to ";\n"

static const char KERNELS[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"

    ".visible .entry fill_u32(.param .u64 fill_u32_0, .param .u64 fill_u32_1, .param .u32 fill_u32_2)\n{\n"
    PTX_REGISTERS PTX_GLOBAL("fill_u32", "0", "%rd1") PTX_LOAD("fill_u32", "1", "u64", "%rd2")
    PTX_LOAD("fill_u32", "2", "u32", "%r5") PTX_INDEX
    PTX_LOOP("%rd2", PTX_ELEMENT("%rd11", "%rd1") "st.global.u32 [%rd11], %r5;\n")
    "ret;\n}\n"

    ".visible .entry iota_u32(.param .u64 iota_u32_0, .param .u64 iota_u32_1, .param .u32 iota_u32_2)\n{\n"
    PTX_REGISTERS PTX_GLOBAL("iota_u32", "0", "%rd1") PTX_LOAD("iota_u32", "1", "u64", "%rd2")
    PTX_LOAD("iota_u32", "2", "u32", "%r5") PTX_INDEX
    PTX_LOOP("%rd2", PTX_ELEMENT("%rd11", "%rd1")
             "cvt.u32.u64 %r6, %rd8;\n add.s32 %r6, %r6, %r5;\n st.global.u32 [%rd11], %r6;\n")
    "ret;\n}\n"

    ".visible .entry check_iota_u32(.param .u64 check_iota_u32_0, .param .u64 check_iota_u32_1,"
    " .param .u32 check_iota_u32_2, .param .u64 check_iota_u32_3)\n{\n"
    PTX_REGISTERS PTX_GLOBAL("check_iota_u32", "0", "%rd1") PTX_LOAD("check_iota_u32", "1", "u64", "%rd2")
    PTX_LOAD("check_iota_u32", "2", "u32", "%r5") PTX_GLOBAL("check_iota_u32", "3", "%rd3") PTX_INDEX
    PTX_LOOP("%rd2", PTX_ELEMENT("%rd11", "%rd1")
             "ld.global.u32 %r7, [%rd11];\n cvt.u32.u64 %r6, %rd8;\n add.s32 %r6, %r6, %r5;\n"
             "setp.ne.u32 %p2, %r6, %r7;\n @%p2 red.global.add.u64 [%rd3], 1;\n")
    "ret;\n}\n"

    ".visible .entry add_u32(.param .u64 add_u32_0, .param .u64 add_u32_1, .param .u64 add_u32_2,"
    " .param .u64 add_u32_3)\n{\n"
    PTX_REGISTERS PTX_GLOBAL("add_u32", "0", "%rd1") PTX_GLOBAL("add_u32", "1", "%rd2")
    PTX_GLOBAL("add_u32", "2", "%rd3") PTX_LOAD("add_u32", "3", "u64", "%rd4") PTX_INDEX
    PTX_LOOP("%rd4", PTX_ELEMENT("%rd11", "%rd2") "ld.global.u32 %r6, [%rd11];\n"
             PTX_ELEMENT("%rd12", "%rd3") "ld.global.u32 %r7, [%rd12];\n add.s32 %r6, %r6, %r7;\n"
             PTX_ELEMENT("%rd13", "%rd1") "st.global.u32 [%rd13], %r6;\n")
    "ret;\n}\n"

    ".visible .entry copy_u32(.param .u64 copy_u32_0, .param .u64 copy_u32_1, .param .u64 copy_u32_2)\n{\n"
    PTX_REGISTERS PTX_GLOBAL("copy_u32", "0", "%rd1") PTX_GLOBAL("copy_u32", "1", "%rd2")
    PTX_LOAD("copy_u32", "2", "u64", "%rd3") PTX_INDEX
    PTX_LOOP("%rd3", PTX_ELEMENT("%rd11", "%rd2") "ld.global.u32 %r6, [%rd11];\n"
             PTX_ELEMENT("%rd12", "%rd1") "st.global.u32 [%rd12], %r6;\n")
    "ret;\n}\n"

    ".visible .entry sum_u32(.param .u64 sum_u32_0, .param .u64 sum_u32_1, .param .u64 sum_u32_2)\n{\n"
    PTX_REGISTERS PTX_GLOBAL("sum_u32", "0", "%rd1") PTX_LOAD("sum_u32", "1", "u64", "%rd2")
    PTX_GLOBAL("sum_u32", "2", "%rd3") PTX_INDEX "mov.u64 %rd14, 0;\n"
    PTX_LOOP("%rd2", PTX_ELEMENT("%rd11", "%rd1")
             "ld.global.u32 %r6, [%rd11];\n cvt.u64.u32 %rd12, %r6;\n add.s64 %rd14, %rd14, %rd12;\n")
    "red.global.add.u64 [%rd3], %rd14;\n ret;\n}\n"

    ".visible .entry wait_flag(.param .u64 wait_flag_0)\n{\n"
    PTX_REGISTERS PTX_GLOBAL("wait_flag", "0", "%rd1")
    "again:\n ld.volatile.global.u32 %r5, [%rd1];\n setp.eq.u32 %p1, %r5, 0;\n @%p1 bra again;\n ret;\n}\n";

typedef struct {
    CUmodule module;
    CUfunction fill, iota, check_iota, add, copy, sum, wait_flag;
} Kernels;

static inline Kernels load_kernels(void)
{
    Kernels k;
    CHECK(cuModuleLoadData(&k.module, KERNELS));
    CHECK(cuModuleGetFunction(&k.fill, k.module, "fill_u32"));
    CHECK(cuModuleGetFunction(&k.iota, k.module, "iota_u32"));
    CHECK(cuModuleGetFunction(&k.check_iota, k.module, "check_iota_u32"));
    CHECK(cuModuleGetFunction(&k.add, k.module, "add_u32"));
    CHECK(cuModuleGetFunction(&k.copy, k.module, "copy_u32"));
    CHECK(cuModuleGetFunction(&k.sum, k.module, "sum_u32"));
    CHECK(cuModuleGetFunction(&k.wait_flag, k.module, "wait_flag"));
    return k;
}

static inline void launch(CUfunction function, CUstream stream, void **parameters)
{
    CHECK(cuLaunchKernel(function, 64, 1, 1, 256, 1, 1, 0, stream, parameters, NULL));
}

static inline void iota(const Kernels *k, CUstream stream, CUdeviceptr to, uint64_t n, uint32_t start)
{
    launch(k->iota, stream, (void *[]){&to, &n, &start});
}

static inline void copy(const Kernels *k, CUstream stream, CUdeviceptr to, CUdeviceptr from, uint64_t n)
{
    launch(k->copy, stream, (void *[]){&to, &from, &n});
}

/* How many of n elements are not start + index; waits for the device. */
static inline uint64_t count_wrong(const Kernels *k, CUdeviceptr array, uint64_t n, uint32_t start)
{
    CUdeviceptr counter;
    uint64_t wrong = 0;
    CHECK(cuMemAlloc_v2(&counter, sizeof wrong));
    CHECK(cuMemcpyHtoD_v2(counter, &wrong, sizeof wrong));
    launch(k->check_iota, NULL, (void *[]){&array, &n, &start, &counter});
    CHECK(cuMemcpyDtoH_v2(&wrong, counter, sizeof wrong));
    CHECK(cuMemFree_v2(counter));
    return wrong;
}

#endif
