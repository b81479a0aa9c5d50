"""A program to look at: names of memory, spills, moves by hand, pinned memory, and what was freed again. It waits for the end of its input.

training.py [small]
"""

import ctypes
import sys
import time

cuda, pool = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)
GIB = 1 << 30


def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        raise SystemExit(f"{name}: {code}")


def allocate(gib, label):
    block = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(int(gib * GIB)))
    pool.gpupool_label(ctypes.c_void_p(block.value), label.encode())
    # A step of the program, so that the page has a time to draw over.
    time.sleep(0.05)
    return block


def load_weights(gib):
    return [allocate(gib / 4, "weights") for _ in range(4)]


def optimizer_state(gib):
    return [allocate(gib / 24, "optimizer") for _ in range(24)]


def forward(layers):
    return [allocate(1.5, "activations") for _ in range(layers)]


def backward(activations):
    while activations:
        call("cuMemFree_v2", activations.pop())
        time.sleep(0.03)


def offload(blocks, gib, place):
    for block in blocks:
        pool.gpupool_prefetch(ctypes.c_void_p(block.value), ctypes.c_size_t(int(gib * GIB)), place, None)
        time.sleep(0.1)


def pin_batches(count):
    for _ in range(count):
        batch = ctypes.c_void_p()
        call("cuMemHostAlloc", ctypes.byref(batch), ctypes.c_size_t(64 << 20), 0)


def main():
    context = ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    pin_batches(4)
    if "small" in sys.argv:
        load_weights(9)
        forward(4)
    else:
        load_weights(14)
        state = optimizer_state(12)
        for _ in range(3):
            backward(forward(8))
        # The simulated GPUs copy what moves, so it is not much.
        offload(state[:2], 0.5, 1)
        forward(14)
    print("ready", flush=True)
    sys.stdin.read()


main()
