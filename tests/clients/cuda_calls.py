"""The driver interface as an installed package would offer it; findings must name the line that calls it, not this one."""

import ctypes

cuda = ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        raise SystemExit(f"{name}: {code}")


def init():
    call("cuInit", 0)


def use(device):
    """Makes the primary context of a GPU current."""
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)


def compute(device):
    """The least work there is."""
    use(device)
    block = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(4096))
    call("cuMemsetD8_v2", block, ctypes.c_ubyte(1), ctypes.c_size_t(4096))
    call("cuMemFree_v2", block)
    print("computed on GPU", device)


def answer(name, *arguments):
    return getattr(cuda, name)(*arguments)
