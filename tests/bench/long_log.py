"""Writes a log of level debug of about so many bytes, as a program would have that allocates and frees without end:

    python3 tests/bench/long_log.py 1GiB >long.jsonl
    for f in html memory-viz perfetto speedscope; do /usr/bin/time -f "$f %e s %M KiB" gpupool report --$f out.$f long.jsonl; done

About 2000 blocks (or half of what a second word says, then up to 40 MiB each) live on two GPUs and the host, from 200 places in the program; a tenth of them have a name, one in 64
lies at two places, and every 32nd event tells what is held. Field by field as the library writes it, and the same bytes each time.
"""

from __future__ import annotations

import json
import random
import sys

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
FRAME = 2 << 20
PLACES = ("gpu0", "gpu1", "host0")


def main() -> None:
    given, slots = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 4000
    most = int(given[:-3]) * UNITS[given[-3:]]
    chance = random.Random(1)
    out = sys.stdout
    clock, written = 1_760_000_000.0, 0
    base = 0x7F00_0000_0000

    def say(event: str, level: str, message: str, **fields: object) -> None:
        nonlocal clock, written
        clock += 0.0005
        head = f'{{"v":1,"t":{clock:.6f},"pid":4711,"tid":4711,"level":"{level}","message":{json.dumps(message)},"event":"{event}",'
        line = head + json.dumps(fields, separators=(",", ":"))[1:] + "\n"
        written += len(line)
        out.write(line)

    say("process.start", "info", "gpupool in /usr/bin/python3.12, mode pool", version="0.2.0", mode="pool", exe="/usr/bin/python3.12")
    say("pool.open", "info", "pool of gpu0, gpu1, host0", base=base, bytes=1 << 40, places=list(PLACES))
    for number in range(1, 201):
        python = [
            {"file": f"/home/user/model/layer{(number + depth) % 40}.py", "line": number + depth, "function": f"forward{depth}"}
            for depth in range(8)
        ]
        say("memory.site", "info", f"place {number} that asks for memory", id=number, site={"python": python})
    sizes = (1 << 16, 3 << 20, 40 << 20, 256 << 20)[: 4 if slots <= 4000 else 3]
    largest = max(sizes)
    free = [base + slot * largest for slot in range(slots)]
    live: list[tuple[int, int, int]] = []
    used = [0, 0, 0]
    while written < most:
        if free and (not live or chance.random() < len(free) / slots):
            address, size = free.pop(chance.randrange(len(free))), chance.choice(sizes)
            place = chance.choice((0, 0, 0, 0, 0, 1, 2))
            far = [size if place == at else 0 for at in (1, 2)]
            say("block.allocate", "debug", f"{size} at {address:#x} for GPU 0", address=address, bytes=size, home=0, reused=True,
                on_peers=far[0], on_host=far[1], site=chance.randrange(1, 201))
            if place:
                parts = [{"place": PLACES[place], "bytes": size}]
                if chance.random() < 0.25 and size > 2 * FRAME:
                    parts = [{"place": "gpu0", "bytes": FRAME}, {"place": PLACES[place], "bytes": size - FRAME}]
                say("block.placed", "debug", f"the block at {address:#x} lies elsewhere", address=address, places=parts)
            if chance.random() < 0.1:
                say("block.label", "debug", f"{size} at {address:#x} is kv", address=address, bytes=size, home=0,
                    label=f"name{chance.randrange(12)}")
            live.append((address, size, place))
            used[place] += -(-size // FRAME) * FRAME
        else:
            at = chance.randrange(len(live))
            live[at], live[-1] = live[-1], live[at]
            address, size, place = live.pop()
            say("block.free", "debug", f"freed {size} at {address:#x}", address=address, bytes=size, home=0)
            free.append(address)
            used[place] -= -(-size // FRAME) * FRAME
        if chance.random() < 1 / 32:
            told = [{"place": name, "held": bytes_ + (chance.randrange(4) << 28), "used": bytes_} for name, bytes_ in zip(PLACES, used)]
            say("pool.level", "info", "what is held and in use has changed", places=told)
    say("process.exit", "info", "end of the process", peak=[], live_blocks=len(live), live_bytes=sum(size for _, size, _ in live), allocations=1,
        reuses=0)


main()
