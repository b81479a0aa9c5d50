"""Two processes of multiprocessing (spawn) share an array through cuda.bindings, as frameworks do."""

import multiprocessing

from cuda.bindings import driver

SIZE = 48 << 20
LAZY = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


def call(function, *arguments):
    code, *results = function(*arguments)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise SystemExit(f"{function.__name__}: {code}")
    return results[0] if len(results) == 1 else tuple(results)


def start():
    call(driver.cuInit, 0)
    device = call(driver.cuDeviceGet, 0)
    context = call(driver.cuDevicePrimaryCtxRetain, device)
    call(driver.cuCtxSetCurrent, context)


def pattern(seed):
    return bytes((seed + i) % 256 for i in range(256)) * (SIZE // 256)


def read(address):
    back = bytearray(SIZE)
    call(driver.cuMemcpyDtoH, back, address, SIZE)
    return bytes(back)


def wrong(found, expected):
    return 0 if found == expected else sum(a != b for a, b in zip(found, expected))


def receive(pipe):
    start()
    handle = driver.CUipcMemHandle()
    handle.reserved = pipe.recv()
    address = call(driver.cuIpcOpenMemHandle, handle, LAZY)
    found = wrong(read(address), pattern(1))
    call(driver.cuMemcpyHtoD, address, pattern(2), SIZE)
    call(driver.cuCtxSynchronize)
    call(driver.cuIpcCloseMemHandle, address)
    pipe.send(found)


def main():
    start()
    methods = multiprocessing.get_context("spawn")
    here, there = methods.Pipe()
    receiver = methods.Process(target=receive, args=(there,))
    receiver.start()
    block = call(driver.cuMemAlloc, SIZE)
    call(driver.cuMemcpyHtoD, block, pattern(1), SIZE)
    here.send(bytes(call(driver.cuIpcGetMemHandle, block).reserved))
    print("the receiver found", here.recv(), "wrong words and wrote its own")
    receiver.join()
    print("it ended with", receiver.exitcode)
    print("here", wrong(read(block), pattern(2)), "bytes are wrong")
    call(driver.cuMemFree, block)


if __name__ == "__main__":
    main()
