"""A program that comes to a GPU and says when it has got how far, by the monotonic clock, in lines "mark NAME SECONDS" for comers.c.

comes.py cupy|torch GPU COUNT     takes COUNT blocks of a gibibyte at once
"""

import sys
import time

GIB = 1 << 30


def _mark(name):
    print(f"mark {name} {time.monotonic():.6f}", flush=True)


def _cupy(gpu):
    import cupy

    _mark("imported")
    runtime = cupy.cuda.runtime
    runtime.setDevice(gpu)
    runtime.free(0)
    _mark("context-is-made")
    return lambda: runtime.malloc(GIB)


def _torch(gpu):
    import torch

    _mark("imported")
    torch.cuda.set_device(gpu)
    _mark("device-is-set")
    torch.cuda.init()
    torch.cuda.synchronize()
    _mark("context-is-made")
    return lambda: torch.empty(GIB, dtype=torch.uint8, device="cuda")


def main():
    how, gpu, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    _mark("starts")
    take = {"cupy": _cupy, "torch": _torch}[how](gpu)
    blocks = []
    try:
        while len(blocks) < count:
            blocks.append(take())
            if len(blocks) == 1:
                _mark("first-block")
    except Exception as error:  # each framework has an error of its own for this
        print(f"{type(error).__name__}: {error}"[:200])
    _mark("all-blocks" if len(blocks) == count else "refused")
    print(f"{len(blocks)} of {count} GiB", flush=True)
    # So that whatever shows late shows at all.
    time.sleep(0.5)


main()
