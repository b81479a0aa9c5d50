"""The Python programs in clients/: what they need, how they are started, and what they must have shown."""

import importlib.util
import os
import pathlib
import socket
import sys

from machine import GIB
from running import Failed, NotRun

CLIENTS = pathlib.Path(__file__).resolve().parent / "clients"


def client(name, *arguments):
    """The command that runs clients/NAME."""
    return [sys.executable, CLIENTS / name, *arguments]


def rank_client(name, *arguments, ranks=2):
    """The command that runs clients/NAME as so many ranks of a job on this host."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"]
    # By number, since a machine without a network need not resolve its own name.
    return [*launcher, "--master-addr=127.0.0.1", f"--master-port={free_port()}", CLIENTS / name, *arguments]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def needs_modules(*modules):
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        raise NotRun(f"no {', '.join(missing)} in {sys.executable}")


def site(variable):
    """The environment for a package that is not installed but lies in the folder which this variable names."""
    folder = os.environ.get(variable)
    if not folder:
        raise NotRun(f"{variable} is not set; it names a folder with wheels installed by pip install --target")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))}


def needs_two_gpus(lab):
    if len(lab.machine.gpus) < 2:
        raise NotRun("needs two GPUs")


def share(lab, part):
    """Bytes of this part of the first GPU."""
    return int(lab.machine.gpus[0].total * part)


def printed(finished, expected):
    if finished.lines() != expected:
        raise Failed(f"{finished.command}: printed {finished.lines()}, expected {expected}")


def served(finished):
    """The run, if the pool served it: otherwise bare would be compared with bare."""
    if not any(record["allocations"] for record in finished.events("process.exit")):
        raise Failed(f"{finished.command}: the pool served nothing")
    return finished


def past_one_gpu(lab, command, holding, env=None):
    """A client that needs more than one GPU: bare it says so and ends with 3; under the shim it prints a line that starts
    with `holding` and waits, with memory on another GPU. Both runs, and GiB in use by GPU, as words."""
    needs_two_gpus(lab)
    bare = lab.bare(command, 90, env).succeeded(3)
    before = lab.machine.used() if lab.machine.has_smi else None
    child = lab.start(command, env, {"HOST_LIMIT": "0"})
    said = child.read_until(holding, 120)
    # Asked from outside, since memory that the program took by itself is not in the pool's books.
    during = lab.machine.used() if before else None
    shim = child.finish(120, said).succeeded()
    if before:
        used = [now - was for now, was in zip(during, before)]
    else:
        used = [shim.peaks().get(f"gpu{gpu}", 0) for gpu in range(len(lab.machine.gpus))]
    if max(used[1:]) < GIB:
        raise Failed(f"{shim.command}: nothing lay on another GPU; bytes in use by GPU: {used}")
    return bare, shim, ", ".join(f"gpu{gpu} {size / GIB:.1f}" for gpu, size in enumerate(used))


def on_peers(held):
    """Bytes that lie on GPUs other than the first, of bytes by place."""
    return sum(size for place, size in held.items() if place.startswith("gpu") and place != "gpu0")


def marked(script, mark):
    """`file:line` of the line of a client that ends with this comment."""
    path = CLIENTS / script
    lines = path.read_text(encoding="utf-8").splitlines()
    return f"{path}:{next(number for number, line in enumerate(lines, 1) if line.endswith(f'# {mark}'))}"
