"""How soon memory that PyTorch gives back is free for others, as NVML tells: its used bytes while a tensor lives and once that is gone.

Then what PyTorch's own test of device_memory_used asks: a tensor made after others were freed shows in what the GPU has in use.
"""

import ctypes
import json
import time

import torch

GIB, MIB = 1 << 30, 1 << 20
SIZE = 4 * GIB
# What is not of the tensor: what frameworks and driver take and give by themselves.
SLACK = 64 * MIB
LONGEST = 15


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def nvml_used():
    """A function that tells the bytes in use of the first GPU that this process sees."""
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    device = ctypes.c_void_p()
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
    for answer in (nvml.nvmlInit_v2(), nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(device))):
        if answer:
            raise SystemExit(f"NVML answers {answer}")

    def used():
        memory = _Memory()
        if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
            raise SystemExit("NVML does not tell the memory in use")
        return memory.used

    return used


def main():
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    used = nvml_used()
    before = used()
    tensor = torch.empty(SIZE, dtype=torch.int8, device="cuda")
    torch.cuda.synchronize()
    grown = used() - before
    del tensor
    torch.cuda.empty_cache()
    since = time.monotonic()
    while used() > before + SLACK and time.monotonic() - since < LONGEST:
        time.sleep(0.005)
    seconds, left = time.monotonic() - since, used() - before
    again = used()
    tensor = torch.empty(SIZE // 8, dtype=torch.int8, device="cuda")
    torch.cuda.synchronize()
    shows = used() - again
    print("measured: " + json.dumps({"grown": grown, "seconds": seconds, "left": left, "shows": shows}))
    print("a tensor shows" if SIZE // 8 // 32 <= shows <= SIZE * 4 else f"a tensor of {SIZE // 8} bytes shows as {shows}")
    del tensor


main()
