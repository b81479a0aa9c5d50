/*
 * Green contexts, declared as in cuda_driver.h. Drivers from 12.4 on have them.
 */
#ifndef GREEN_H
#define GREEN_H

#include "program.h"

typedef struct CUgreenCtx_st *CUgreenCtx;
typedef struct CUdevResourceDesc_st *CUdevResourceDesc;
typedef struct {
    int kind;
    unsigned char hidden[92];
    unsigned count, least, alignment;
    /* Later headers have more here, which the driver may write. */
    unsigned char more[64];
} CUdevResource;

enum { CU_DEV_RESOURCE_TYPE_SM = 1, CU_GREEN_CTX_DEFAULT_STREAM = 1 };

CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource *resource, int type);
CUresult cuDevSmResourceSplitByCount(CUdevResource *groups, unsigned *count, const CUdevResource *input,
                                     CUdevResource *rest, unsigned flags, unsigned least);
CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *desc, CUdevResource *resources, unsigned count);
CUresult cuGreenCtxCreate(CUgreenCtx *green, CUdevResourceDesc desc, CUdevice device, unsigned flags);
CUresult cuGreenCtxDestroy(CUgreenCtx green);
CUresult cuCtxFromGreenCtx(CUcontext *context, CUgreenCtx green);
CUresult cuGreenCtxStreamCreate(CUstream *stream, CUgreenCtx green, unsigned flags, int priority);
CUresult cuStreamGetGreenCtx(CUstream stream, CUgreenCtx *green);

/* A green context of 16 multiprocessors. */
static inline CUgreenCtx green_on(CUdevice device)
{
    CUdevResource all, part;
    CUdevResourceDesc desc;
    CUgreenCtx green;
    unsigned groups = 1;
    CHECK(cuDeviceGetDevResource(device, &all, CU_DEV_RESOURCE_TYPE_SM));
    CHECK(cuDevSmResourceSplitByCount(&part, &groups, &all, NULL, 0, 16));
    CHECK(cuDevResourceGenerateDesc(&desc, &part, 1));
    CHECK(cuGreenCtxCreate(&green, desc, device, CU_GREEN_CTX_DEFAULT_STREAM));
    return green;
}

#endif
