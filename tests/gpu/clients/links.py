"""What a copy of 512 MiB to GPU 0 reaches from another GPU and from pinned memory, in bytes a second: the best of ten each.

links.py
"""

import torch

from places import report

BYTES = 512 << 20


def rate(source):
    target = torch.empty(BYTES, dtype=torch.uint8, device="cuda:0")
    best = None
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        took = begin.elapsed_time(end) / 1e3
        best = took if best is None else min(best, took)
    return BYTES / best


def main():
    rates = {"host": rate(torch.empty(BYTES, dtype=torch.uint8, pin_memory=True))}
    if torch.cuda.device_count() > 1:
        rates["peer"] = rate(torch.empty(BYTES, dtype=torch.uint8, device="cuda:1"))
    report(**rates)


main()
