"""The examples of include/examples: gpupool beneath a library's own interface for allocators, with and without preload."""

import re
import sys

from building import TESTS
from client import needs_modules, site
from running import Failed, NotRun, side_by_side

EXAMPLES = {"with_pytorch.py": "torch", "with_cupy.py": "cupy", "with_rmm.py": "rmm"}
POOLED = re.compile(r"pooled: ([1-9]\d*) blocks, (\d+) MiB")


@side_by_side
def examples(lab):
    """Each says that its data is right and that blocks of the pool hold it."""
    told, left_out = [], []
    for script, module in EXAMPLES.items():
        try:
            if module != "rmm":
                needs_modules(module)
            env = site("RMM_SITE") if module == "rmm" else {}
        except NotRun as reason:
            left_out.append(str(reason))
            continue
        command = [sys.executable, TESTS.parent / "include" / "examples" / script, lab.library]
        for run in (lab.bare(command, 90, env), lab.shim(command, 90, env=env)):
            lines = run.succeeded().lines()
            pooled = POOLED.fullmatch(lines[-1]) if len(lines) == 2 else None
            if not pooled or not lines[0].endswith(": right"):
                raise Failed(f"{run.command}: printed {lines}, expected right data in blocks of the pool")
        told.append(f"{script} ({pooled[0]})")
    if not told:
        raise NotRun("; ".join(left_out))
    return f"right, alone and preloaded: {', '.join(told)}{'; not run: ' if left_out else ''}{'; '.join(left_out)}"
