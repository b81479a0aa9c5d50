"""variables CASE: what a training script does with CUDA_VISIBLE_DEVICES, too late and in time."""

import os
import sys

import cuda_calls


def start():
    cuda_calls.init()


def choose(name):
    os.environ[name] = "3"


def main():
    case = sys.argv[1]
    name = "CUDA_DEVICE_ORDER" if case == "order" else "CUDA_VISIBLE_DEVICES"
    if case == "early":
        choose(name)
    start()
    if case in ("late", "order"):
        choose(name)
    elif case == "removed":
        del os.environ[name]
    elif case == "taken_back":
        before = os.environ[name]
        for gpu in ("0", "3"):
            os.environ[name] = gpu
            os.system("true")
        os.environ[name] = before
    elif case == "same":
        os.environ[name] = os.environ[name]
    elif case == "other":
        choose("OMP_NUM_THREADS")
    cuda_calls.compute(0)


main()
