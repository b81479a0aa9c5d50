#!/usr/bin/env bash
# What the preload adds to a process that never touches CUDA: /bin/true with and without it, in alternation; the medians
# and their difference in milliseconds. Goal: under 1 ms.
#   tests/bench/startup.sh path/to/libgpupool.so
set -eu
library=$(realpath "$1")
exec python3 - "$library" <<'PY'
import os, statistics, subprocess, sys, time
library, plain = sys.argv[1], dict(os.environ)
loaded = dict(os.environ, LD_PRELOAD=library)
def once(environment):
    begin = time.perf_counter()
    subprocess.run(["/bin/true"], env=environment, check=True)
    return (time.perf_counter() - begin) * 1e3
once(plain), once(loaded)
pairs = [(once(plain), once(loaded)) for _ in range(400)]
bare, with_us = (statistics.median(column) for column in zip(*pairs))
more = statistics.median(b - a for a, b in pairs)
print(f"/bin/true: bare {bare:.3f} ms, preloaded {with_us:.3f} ms, median difference {more:+.3f} ms")
PY
