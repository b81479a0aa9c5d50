"""contexts CASE: work on GPU 3, and what else touches GPUs on the way."""

import ctypes
import sys
import threading

import cuda_calls


def warm_up():
    cuda_calls.use(0)


def in_background(library):
    ctypes.CDLL(library).start_and_join()


def sweep():
    for device in range(4):
        cuda_calls.use(device)


def main():
    case = sys.argv[1]
    cuda_calls.init()
    if case == "stray":
        warm_up()
    elif case == "sweep":
        sweep()
    elif case == "thread":
        thread = threading.Thread(target=warm_up, name="prefetch")
        thread.start()
        thread.join()
    elif case == "native":
        in_background(sys.argv[2])
    cuda_calls.compute(3)
    if case == "late":
        cuda_calls.compute(0)


main()
