"""Touches so many bytes of the machine's memory, by several threads, and gives them back: a virtual machine gets its own memory when it is first touched.

touch.py BYTES   fewer where that would leave less than 2 GiB free
"""

import ctypes
import mmap
import os
import pathlib
import sys
import threading
import time

from places import report

SPARE, PAGE = 2 << 30, 2 << 20


def available():
    """Bytes that this process may take: of the machine, and of its control group, of either version."""
    with open("/proc/meminfo", encoding="utf-8") as lines:
        free = [int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) << 10]
    groups = pathlib.Path("/sys/fs/cgroup")
    for most, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        try:
            free.append(int((groups / most).read_text()) - int((groups / used).read_text()))
        except (OSError, ValueError):
            # There is no such file, or it says "max".
            continue
    return min(free)


def main():
    size = min(int(sys.argv[1]), available() - SPARE) // PAGE * PAGE
    if size <= 0:
        report(bytes=0, seconds=0)
        return
    begun = time.monotonic()
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    count = min(32, os.cpu_count() or 1)
    part = size // count
    # The interpreter's lock is free meanwhile.
    threads = [threading.Thread(target=ctypes.memset, args=(start + at * part, 1, part)) for at in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report(bytes=size, seconds=time.monotonic() - begun)


main()
