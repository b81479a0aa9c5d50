"""cuda.bindings.driver, which looks every function up by cuGetProcAddress."""

from cuda.bindings import driver

SIZE = 48 << 20


def call(function, *arguments):
    code, *results = function(*arguments)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"{function.__name__}: {code}")
    return results[0] if len(results) == 1 else tuple(results)


def main():
    call(driver.cuInit, 0)
    device = call(driver.cuDeviceGet, 0)
    context = call(driver.cuDevicePrimaryCtxRetain, device)
    call(driver.cuCtxSetCurrent, context)

    block = call(driver.cuMemAlloc, SIZE)
    other = call(driver.cuMemAlloc, SIZE)
    words = bytes(range(256)) * (SIZE // 256)
    call(driver.cuMemcpyHtoD, block, words, SIZE)
    call(driver.cuMemcpyDtoD, other, block, SIZE)
    back = bytearray(SIZE)
    call(driver.cuMemcpyDtoH, back, other, SIZE)
    print("copied:", "right" if bytes(back) == words else "wrong")

    base, size = call(driver.cuMemGetAddressRange, int(block) + 12345)
    print("address range:", int(base) == int(block), size)
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    print("ordinal:", call(driver.cuPointerGetAttribute, attribute, int(other) + SIZE - 1))
    free, total = call(driver.cuMemGetInfo)
    print("free is at most total:", free <= total)
    call(driver.cuMemFree, block)
    call(driver.cuMemFree, other)
    print("again:", driver.cuMemFree(block)[0].name)
    print("0 bytes:", driver.cuMemAlloc(0)[0].name)


main()
