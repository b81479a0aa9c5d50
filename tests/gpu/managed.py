"""Mode managed, in a small size: too much managed memory can take a GPU down."""

import json

import building
from client import needs_two_gpus
from paired import Pairs
from running import MEASURED, Failed

# Half of the array's 1 GiB has to go to GPU 1.
SETTINGS = {"MODE": "managed", "LIMIT": "0:512MiB,1:1GiB", "HOST_LIMIT": "0"}
GOAL = 0.95
SAYS = {
    "preferred: gpu0 512 gpu1 512",
    "prefetched: gpu0 512 gpu1 512",
    "mapped for: gpu0 gpu1",
    "GPU 0: 0 wrong",
    "GPU 1: 0 wrong",
    "cuMemFree_v2(array): 0 CUDA_SUCCESS",
}


def stripes(lab):
    """Stripes live where they were placed, hold their data, and are read like memory that was created there."""
    needs_two_gpus(lab)
    program = building.program(lab, "managed_stripes")
    pairs = Pairs("GB/s", ("managed", "native"), 1)
    for arguments in ([], ["context"]):
        finished = lab.shim([program, "1024", "20", *arguments], 60, SETTINGS).succeeded()
        missing = sorted(SAYS - set(finished.lines()))
        if missing:
            raise Failed(f"{finished.command}: expected the lines {missing}", finished.lines())
        if "was refused" in finished.stderr:
            raise Failed(f"{finished.command}: advice was refused", finished.stderr.splitlines())
        for line in finished.stdout.splitlines():
            if line.startswith(MEASURED):
                measured = json.loads(line[len(MEASURED) :])
                for ours, theirs in measured["pairs"]:
                    pairs.add(measured["what"], ours, theirs)
    return pairs.judged("1 GiB, half of it on GPU 1, data right; reading ", at_least=GOAL)
