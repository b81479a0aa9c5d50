"""Memory of a GPU that is read again and again until somebody interrupts it (Ctrl-C); what the handler says is what it found.

A line of its input begins that.
"""

import ctypes
import signal
import sys

# A shell has what it starts in the background ignore it, and Python then raises nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)

SIZE = 8 << 20

cuda = ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code != 0:
        raise SystemExit(f"{name}: {code}")


def main():
    context, block = ctypes.c_void_p(), ctypes.c_uint64()
    back = ctypes.create_string_buffer(SIZE)
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(SIZE))
    call("cuMemsetD8_v2", block, ctypes.c_ubyte(7), ctypes.c_size_t(SIZE))
    sys.stdin.readline()
    print("it begins", flush=True)
    try:
        while True:
            call("cuMemcpyDtoH_v2", back, block, ctypes.c_size_t(4096))
    except KeyboardInterrupt:
        call("cuMemcpyDtoH_v2", back, block, ctypes.c_size_t(SIZE))
        call("cuMemFree_v2", block)
        print("interrupted:", "right" if back.raw == b"\7" * SIZE else "wrong", flush=True)


main()
