"""Why a program cannot be started anew under the library: package_refusals.py CASE"""

import sys
import threading

import gpupool


def refusal(**settings):
    try:
        gpupool.activate(**settings)
    except gpupool.NotActivated as error:
        return str(error)
    return "none"


def main():
    case = sys.argv[1]
    if case == "threads":
        done = threading.Event()
        thread = threading.Thread(target=done.wait, name="loader")
        thread.start()
        print(refusal())
        done.set()
        thread.join()
    elif case == "cuda":
        import ctypes

        ctypes.CDLL("libcuda.so.1").cuInit(0)
        print(refusal())
    elif case == "setting":
        print(refusal(limits="1GiB"))
    print("preloaded:", gpupool.is_preloaded())


main()
