"""Runs a kernel on GPU 1 with CuPy, after a look at GPU 0 that makes a context there."""

import cupy as cp

SCALE = 'extern "C" __global__ void scale(float *x) { x[blockIdx.x * blockDim.x + threadIdx.x] *= 3; }'


def main():
    cp.cuda.Device(0).synchronize()  # the stray
    cp.cuda.Device(1).use()
    x = cp.ones(1 << 20, dtype=cp.float32)
    cp.RawKernel(SCALE, "scale")((x.size // 256,), (256,), (x,))
    print(float(x.sum()))


main()
