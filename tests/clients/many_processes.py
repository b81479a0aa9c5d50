"""multiprocessing in its three ways of starting, without CUDA: what the preload must not disturb."""

import multiprocessing
import subprocess
import sys
import threading


def square(number):
    return number * number


def main():
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with context.Pool(2) as pool:
            print(method, pool.map(square, range(8)))
    print("threads:", threading.active_count())
    print(subprocess.run(["echo", "from a child"], capture_output=True, text=True, check=True).stdout.strip())
    sys.stderr.write("standard error passes\n")


if __name__ == "__main__":
    main()
