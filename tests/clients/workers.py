"""workers METHOD use|spare: multiprocessing's workers, started after CUDA was initialised."""

import ctypes
import multiprocessing
import sys

import cuda_calls


def use(queue):
    block = ctypes.c_uint64()
    queue.put(("cuMemAlloc_v2", cuda_calls.answer("cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(2 << 20))))


def spare(queue):
    queue.put(("without CUDA", 0))


def main():
    methods = multiprocessing.get_context(sys.argv[1])
    cuda_calls.init()
    cuda_calls.compute(0)
    queue = methods.Queue()
    worker = methods.Process(target=use if sys.argv[2] == "use" else spare, args=(queue,))
    worker.start()
    print("worker:", *queue.get())
    worker.join()
    print("ended with", worker.exitcode)


if __name__ == "__main__":
    main()
