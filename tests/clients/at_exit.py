"""at_exit WAY: memory of a GPU that is used when Python is past its program, by what WAY names; `used` is a file that says it was.

A line of its input is what it does next: `allocate`, or `use`, which is no end of anything.
"""

import atexit
import ctypes
import os
import sys

SIZE = 8 << 20

cuda = ctypes.CDLL("libcuda.so.1")
block = ctypes.c_uint64()


def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code != 0:
        raise SystemExit(f"{name}: {code}")


def allocate():
    context = ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(SIZE))
    call("cuMemsetD8_v2", block, ctypes.c_ubyte(7), ctypes.c_size_t(SIZE))


def note(open=os.open, close=os.close, flags=os.O_CREAT | os.O_WRONLY):
    close(open("used", flags))


def use(copy=cuda.cuMemcpyDtoH_v2, block=block, size=ctypes.c_size_t(SIZE), make=ctypes.create_string_buffer, note=note):
    back = make(size.value)
    if copy(back, block, size) == 0 and back.raw == b"\7" * size.value:
        note()


class Owner:
    def __del__(self, use=use):
        use()


way = sys.argv[1]
if way == "function":
    atexit.register(use)
elif way == "lambda":
    atexit.register(lambda: use())
elif way == "builtin":
    # The last one that is registered comes first.
    atexit.register(use)
    atexit.register(cuda.cuCtxSynchronize)
elif way == "object":
    owner = Owner()

for line in sys.stdin:
    if line == "allocate\n":
        allocate()
        print("allocated", flush=True)
    else:
        print("it begins", flush=True)
        use()
        print("used", flush=True)
