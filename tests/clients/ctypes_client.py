"""The driver interface by ctypes, as many tools use it: no toolkit, versioned names straight from the handle."""

import ctypes

cuda = ctypes.CDLL("libcuda.so.1")
SIZE = 48 << 20


def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        raise SystemExit(f"{name}: {code}")


def main():
    context = ctypes.c_void_p()
    device = ctypes.c_int()
    count = ctypes.c_int()
    call("cuInit", 0)
    call("cuDeviceGetCount", ctypes.byref(count))
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)

    blocks = []
    for value in range(4):
        block = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(SIZE))
        call("cuMemsetD8_v2", block, ctypes.c_ubyte(value + 1), ctypes.c_size_t(SIZE))
        blocks.append(block)
    page = (ctypes.c_ubyte * 4096)()
    for value, block in enumerate(blocks):
        for offset in (0, SIZE // 2, SIZE - 4096):
            call("cuMemcpyDtoH_v2", page, ctypes.c_uint64(block.value + offset), ctypes.c_size_t(4096))
            right = bytes(page) == bytes([value + 1]) * 4096
            print(f"block {value} at {offset}: {'right' if right else 'wrong'}")
    for block in blocks:
        call("cuMemFree_v2", block)
    print("again:", cuda.cuMemFree_v2(blocks[0]))
    print("absent:", hasattr(cuda, "cuNoSuchFunction"))


main()
