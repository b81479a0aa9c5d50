"""Jobs as launchers start them: the same results as bare, and nobody's memory on another worker's GPU."""

import tempfile

from client import client, needs_modules, needs_two_gpus, rank_client
from running import Failed, side_by_side

# What a worker fills, and what of that its GPU may hold: the rest goes to another GPU or the host.
MIB, LIMIT = 768, "256MiB"
SETTINGS = {"LIMIT": LIMIT, "HOST_LIMIT": "4GiB", "SOFT_OOM": "off"}


def _job(lab, command, settings, env):
    with tempfile.TemporaryDirectory(dir=lab.folder.name) as meeting:
        started = lab.start([*command, len(lab.machine.gpus), MIB, meeting], env, settings)
        return started.finish(180).succeeded()


def _keeps_to_its_own(job):
    """The GPUs of those who used one, by UUID."""
    homes = []
    for log in job.logs:
        contexts = {record["device"]: record["uuid"] for record in log if record["event"] == "context.create"}
        levels = [place for record in log if record["event"] == "pool.level" for place in record["places"]]
        held = sorted({place["place"] for place in levels if place["held"] and place["place"].startswith("gpu")})
        if not held:
            continue
        on_host = any(place["held"] for place in levels if place["place"].startswith("host"))
        if held != [f"gpu{device}" for device in contexts] or not on_host:
            raise Failed(f"process {log[0]['pid']} works on {sorted(contexts)} and had memory on {held}, on the host: {on_host}")
        homes.extend(contexts.values())
    return homes


def _check(lab, command, env=None):
    needs_two_gpus(lab)
    bare = _job(lab, command, None, env)
    shim = _job(lab, command, SETTINGS, env)
    count = len(lab.machine.gpus)
    if len(set(bare.lines())) != count or sorted(bare.lines()) != sorted(shim.lines()):
        raise Failed(f"lines differ: shim {sorted(shim.lines())}, bare {sorted(bare.lines())}"[:500])
    homes = _keeps_to_its_own(shim)
    if len(homes) != count or len(set(homes)) != count:
        raise Failed(f"{count} workers worked on {homes}, expected each on its own GPU")
    return f"{count} workers, {MIB} MiB each with {LIMIT} near: the same {count} lines as bare, each on its own GPU and the host"


@side_by_side
def torchrun(lab):
    needs_modules("torch")
    needs_two_gpus(lab)
    return _check(lab, rank_client("launched.py", "rank", ranks=len(lab.machine.gpus)))


@side_by_side
def spawned(lab):
    """No launcher's variables: the workers find each other."""
    needs_modules("torch")
    return _check(lab, client("launched.py", "spawn"))


@side_by_side
def ray(lab):
    """Each worker sees one GPU, which Ray names after the worker has begun."""
    needs_modules("ray")
    return _check(lab, client("launched.py", "ray"))


@side_by_side
def dask(lab):
    """Each worker sees all GPUs, its own one first."""
    needs_modules("dask_cuda", "distributed")
    return _check(lab, client("launched.py", "dask"))
