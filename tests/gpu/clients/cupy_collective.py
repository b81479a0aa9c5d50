"""One process with two GPUs and NCCL: a sum over both is begun on the first one, which then has more to do, and on the second one later. What each
round adds up to. Each GPU's part is begun by a thread of its own, as NCCL asks for.

cupy_collective.py
"""

import threading

import cupy as cp
from cupy.cuda import nccl

ROUNDS, ARRAYS, WORDS = 30, 16, 1 << 24


def main():
    devices = [0, 1]
    communicators = nccl.NcclCommunicator.initAll(devices)
    arrays, streams, mine, both = [], [], [], []
    for device in devices:
        with cp.cuda.Device(device):
            # 64 MiB each, on the first GPU more than it lends.
            arrays.append([cp.full(WORDS, number + 1, cp.float32) for number in range(ARRAYS)])
            streams.append(cp.cuda.Stream(non_blocking=True))
            mine.append(cp.empty(WORDS, cp.float32))
            both.append(cp.empty(WORDS, cp.float32))
            cp.cuda.Device(device).synchronize()

    def fill(device, number):
        with cp.cuda.Device(device), streams[device]:
            cp.add(arrays[device][number % ARRAYS], arrays[device][(number + 5) % ARRAYS], out=mine[device])

    def begin(device):
        with cp.cuda.Device(device):
            sent, received = mine[device].data.ptr, both[device].data.ptr
            communicators[device].allReduce(sent, received, WORDS, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, streams[device].ptr)

    with cp.cuda.Device(0):
        others = [cp.full(WORDS, number, cp.float32) for number in range(ARRAYS // 2)]
        beside = cp.cuda.Stream(non_blocking=True)
    # Every kernel is launched once before any sum is begun: the driver loads a kernel only once its GPU is at rest, and no GPU is while a sum waits for the other.
    for device in devices:
        fill(device, 0)
        with cp.cuda.Device(device), streams[device]:
            arrays[device][0] += 0
            both[device].sum(dtype=cp.float64)
            streams[device].synchronize()
    # The first time they find each other, which needs both at once.
    nccl.groupStart()
    for device in devices:
        begin(device)
    nccl.groupEnd()
    for number in range(ROUNDS):
        for device in devices:
            fill(device, number)
        threads = [threading.Thread(target=begin, args=(device,)) for device in devices]
        threads[0].start()
        # Mostly it comes back at once. Where it waits for the other one, the rest goes on all the same.
        threads[0].join(1)
        # The first GPU's sum waits for the second one's, which is not begun before these are.
        with cp.cuda.Device(0), beside:
            for other in others:
                other += 1
        threads[1].start()
        for thread in threads:
            thread.join()
        for device in devices:
            with cp.cuda.Device(device):
                streams[device].synchronize()
        beside.synchronize()
        sums = []
        for device in devices:
            with cp.cuda.Device(device), streams[device]:
                for array in arrays[device]:
                    array += 1
                sums.append(float(both[device].sum(dtype=cp.float64)))
        with cp.cuda.Device(0), streams[0]:
            sums.append(float(sum(other.sum(dtype=cp.float64) for other in others)))
        print(f"round {number}: {sums}", flush=True)


main()
