"""What `gpupool top` and `gpupool export` cost beside so many processes: processor time a look, and so of a core at one look a second.

    gpupool sim --gpus 4x140GiB -- python3 tests/bench/viewers.py target/release/gpupool AGENT [PROCESSES] [LOOKS]

AGENT is the compiled tests/programs/agent.c. Each process holds eight blocks of two names, some of them far, and pinned memory. What is counted is
what the kernel says of the viewer when it has ended, user and system time together, less that of one which looks but once.
"""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import tempfile
import time
import urllib.request

GPUPOOL, AGENT = sys.argv[1:3]
PROCESSES = int(sys.argv[3]) if len(sys.argv) > 3 else 64
LOOKS = int(sys.argv[4]) if len(sys.argv) > 4 else 60
ORDERS = ["init", *["allocate 96", "label kv", "allocate 300", "label act"] * 4, "pin 1"]


def start():
    child = subprocess.Popen(
        [GPUPOOL, "run", "--set", "limit=1GiB", "--set", "summary=off", "--", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    for order in ORDERS:
        child.stdin.write(order + "\n")
    child.stdin.flush()
    for order in ORDERS:
        if not child.stdout.readline():
            sys.exit(f"{order}: it ended with {child.wait()}; is there room for it on these GPUs?")
    return child


def ended(child):
    """Seconds of processor time that it took."""
    _, _, used = os.wait4(child.pid, 0)
    child.returncode = 0
    return used.ru_utime + used.ru_stime


def top_json(looks):
    child = subprocess.Popen([GPUPOOL, "top", "--json", "--interval", "100ms"], stdout=subprocess.PIPE)
    for _ in range(looks):
        child.stdout.readline()
    child.terminate()
    return ended(child)


def top_live(looks):
    """On a terminal; a look is what is written within its interval."""
    master, slave = pty.openpty()
    os.set_blocking(master, False)
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    child = subprocess.Popen([GPUPOOL, "top", "--interval", "100ms"], stdin=slave, stdout=slave, env=environment)
    os.close(slave)
    until = time.monotonic() + 0.1 * looks
    while time.monotonic() < until:
        if select.select([master], [], [], 0.05)[0]:
            os.read(master, 1 << 16)
    child.terminate()
    # All that it still says, until it has closed its end.
    try:
        while select.select([master], [], [], 10)[0]:
            os.read(master, 1 << 16)
    except OSError:
        pass
    os.close(master)
    return ended(child)


def export(looks):
    child = subprocess.Popen([GPUPOOL, "export", "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True)
    address = child.stderr.readline().split(" at ")[1].strip()
    for _ in range(looks):
        text = urllib.request.urlopen(address, timeout=30).read()
    assert text.count(b"gpupool_process_info{") == PROCESSES, text[:2000]
    child.terminate()
    return ended(child)


def export_file(looks):
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen([GPUPOOL, "export", "--textfile", folder, "--interval", "100ms"])
        file, seen, last = os.path.join(folder, "gpupool.prom"), 0, None
        while seen < looks:
            try:
                now = os.stat(file).st_ino
            except FileNotFoundError:
                now = None
            seen, last = seen + (now is not None and now != last), now
            time.sleep(0.02)
        child.terminate()
        return ended(child)


def main():
    with tempfile.TemporaryDirectory() as session:
        os.environ["XDG_RUNTIME_DIR"] = session
        children = [start() for _ in range(PROCESSES)]
        # As many pages as processes, each with all that its process holds.
        while subprocess.run([GPUPOOL, "ps", "--json"], capture_output=True, text=True, check=True).stdout.count('"live_blocks": 8,') < PROCESSES:
            pass
        print(f"{PROCESSES} processes, {LOOKS} looks, user and system time, three runs each")
        for name, viewer in (("top", top_live), ("top --json", top_json), ("export --listen", export), ("export --textfile", export_file)):
            looks = [(viewer(LOOKS) - viewer(1)) / (LOOKS - 1) * 1e3 for _ in range(3)]
            told = ", ".join(f"{look:.2f}" for look in looks)
            print(f"{name}: {told} ms a look; {min(looks) / 10:.2f} % of a core at one a second", flush=True)
        for child in children:
            child.stdin.close()
        for child in children:
            child.wait()


main()
