"""The pinned allocations of a log, in order, as tests/bench/pinned_replay reads them: `a ID BYTES FLAGS` and `f ID`.

sequence.py LOG > FILE, where LOG was written with GPUPOOL_LOG=gpupool::pinned=debug
"""

import json
import sys


def lines(records):
    """One line an event. Memory that the program registered is its own and takes no part."""
    numbers, count = {}, 0
    for record in records:
        if record.get("by") == "program":
            continue
        if record.get("event") == "pinned.allocate":
            numbers[record["address"]] = count
            yield f"a {count} {record['bytes']} {record['flags']}"
            count += 1
        elif record.get("event") == "pinned.free" and record["address"] in numbers:
            yield f"f {numbers.pop(record['address'])}"


def main():
    with open(sys.argv[1], encoding="utf-8") as log:
        print(*lines(json.loads(line) for line in log if line.strip()), sep="\n")


if __name__ == "__main__":
    main()
