"""Child processes, bare and under the shim, with a time limit each, and what they leave behind."""

import glob
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field

# Multicast over NVLink can leave GPUs that others share unusable, so no library may try it.
FIXED = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    # CUDA's own order is fastest first, nvidia-smi's is by bus.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "LC_ALL": "C",
}
# A launcher's variables would make a program one rank of several.
RANKS = ("LOCAL_WORLD_SIZE", "OMPI_", "MPI_", "MV2_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_RANK")
MEASURED = "measured: "
LONGEST = 30000


class _Shortfall(Exception):
    """`lines` go below the table, where a row would be too long."""

    def __init__(self, detail, lines=()):
        super().__init__(detail)
        self.lines = list(lines)


class Failed(_Shortfall):
    """A check did not hold; the text says what was found and what was expected."""


class BelowGoal(_Shortfall):
    """Everything was right but not fast enough."""


class NotRun(Exception):
    """This machine cannot do the check; the text says why."""


def side_by_side(check):
    """Marks a check that holds under 10 GiB of each GPU and times nothing: several such run at once."""
    check.side_by_side = True
    return check


@dataclass
class Finished:
    """One process (and its children) that has ended."""

    command: str
    status: int
    stdout: str
    stderr: str
    seconds: float
    # One list of records a process, each record a line of its JSON log.
    logs: list = field(default_factory=list)
    # The files they were read from.
    log_files: list = field(default_factory=list)

    def lines(self):
        """What must be the same bare and under the shim."""
        return [line for line in self.stdout.splitlines() if not line.startswith(MEASURED)]

    def measured(self, which=-1):
        """The client's own numbers, of its last such line or another."""
        found = [line for line in self.stdout.splitlines() if line.startswith(MEASURED)]
        if not found:
            raise Failed(f"{self.command}: no line of measurements")
        return json.loads(found[which][len(MEASURED) :])

    def events(self, name):
        return [record for log in self.logs for record in log if record.get("event") == name]

    def peaks(self):
        """Peak bytes by place, of the only process that used the pool."""
        exits = self.events("process.exit")
        if len(exits) != 1:
            raise Failed(f"{self.command}: expected one process.exit in the log, found {len(exits)}")
        return {peak["place"]: peak["peak_used"] for peak in exits[0]["peak"]}

    def succeeded(self, code=0):
        if self.status != code:
            why = self.stderr.strip().splitlines() or self.stdout.strip().splitlines() or ["no output"]
            raise Failed(f"{self.command}: exit code {self.status}, expected {code}; {why[-1]}")
        return self


class Lab:
    """Where children run: the library under test, the log of all of them, the time that is left."""

    def __init__(self, release, output, log, deadline, machine):
        # For files that a check leaves behind.
        self.output = output
        self.library = release / "libgpupool.so"
        self.gpupool = release / "gpupool"
        self.folder = tempfile.TemporaryDirectory(prefix="gpu-check-")
        self.machine = machine
        # With which GPUPOOL_MOVE programs that do not fit run.
        self.moves = ["off", "auto"]
        # And with which GPUPOOL_LENDERS.
        self.lenders = ["asleep"]
        # What one check measured and another one reads.
        self.kept = {}
        self._log = log
        self._deadline = deadline
        self._lock = threading.Lock()
        self._children = set()

    def left(self):
        """Seconds until the whole run must be over."""
        return self._deadline - time.monotonic()

    def bare(self, command, timeout, env=None):
        return self.start(command, env).finish(timeout)

    def shim(self, command, timeout, settings=None, env=None, library=None):
        """`settings` without their prefix: {"FREE": "lazy"}; None leaves one unset that is set otherwise. `library` is
        preloaded in place of the one under test."""
        return self.start(command, env, settings or {}, library).finish(timeout)

    def both(self, command, timeout, settings=None, env=None):
        """Bare, then under the shim; fails unless both end alike and print the same."""
        bare = self.bare(command, timeout, env)
        return bare, same(bare, self.shim(command, timeout, settings, env))

    def start(self, command, env=None, settings=None, library=None):
        """Starts a child, under the shim if there are settings."""
        variables = {
            name: value
            for name, value in os.environ.items()
            if name != "LD_PRELOAD" and not name.startswith("GPUPOOL_") and not name.startswith(RANKS)
        }
        variables.update(FIXED)
        variables.update({name: str(value) for name, value in (env or {}).items()})
        logs = None
        shown = dict(env or {})
        if settings is not None:
            logs = tempfile.mkdtemp(dir=self.folder.name)
            # Contexts and the libraries' own memory come on top of what the pool takes; 2 GiB must stay free.
            settings = {"RESERVE": "3GiB", "LOG_FILE": f"{logs}/%p.jsonl", **settings}
            named = {f"GPUPOOL_{name}": value for name, value in settings.items() if value is not None}
            variables.update({"LD_PRELOAD": str(library or self.library), **named})
            shown.update({"LD_PRELOAD": "libgpupool.so", **named})
            shown.pop("GPUPOOL_LOG_FILE", None)
        words = [str(word) for word in command]
        assignments = [f"{name}={value}" for name, value in shown.items()]
        title = " ".join(assignments + [os.path.basename(word) for word in words])
        return Running(self, words, variables, logs, title)

    def stop(self):
        """Ends what runs; what is started from here on ends within a second."""
        self._deadline = time.monotonic()
        self.end_children()

    def note(self, text):
        with self._lock:
            self._log.write(text + "\n")
            self._log.flush()

    def end_children(self):
        """For a check that was interrupted: nothing it started may go on holding a GPU."""
        for child in list(self._children):
            child.kill()

    def forget(self, child):
        """Of one that was killed and may never end: nobody reads what it says."""
        self._children.discard(child)


class Running:
    """A child in a process group of its own, so that all it started ends with it."""

    def __init__(self, lab, words, variables, logs, title):
        self.title, self._lab, self._logs, self._begin = title, lab, logs, time.monotonic()
        self.process = subprocess.Popen(
            words,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,
            cwd=lab.folder.name,
        )
        lab._children.add(self)

    def kill(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def log_files(self):
        """Its logs so far."""
        return sorted(glob.glob(f"{self._logs}/*.jsonl")) if self._logs else []

    def read_until(self, start, timeout):
        """Its output up to and with the line that begins with `start` (or one of several), or all of it if it ends before. The child must
        then wait for its stdin: what it said beyond that line would be lost to `finish`."""
        timer = threading.Timer(max(1.0, min(timeout, self._lab.left())), self.kill)
        timer.start()
        try:
            said = ""
            for line in self.process.stdout:
                said += line
                if line.startswith(start):
                    break
            return said
        finally:
            timer.cancel()

    def finish(self, timeout, said=""):
        """Waits for the end. `said` is what was already read of its output."""
        timeout = max(1.0, min(timeout, self._lab.left()))
        try:
            stdout, stderr = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            stdout, stderr = self.process.communicate()
            stderr += f"\nended by the check after {timeout:.0f} s"
        self._lab._children.discard(self)
        seconds = time.monotonic() - self._begin
        finished = Finished(self.title, self.process.returncode, said + stdout, stderr, seconds)
        for path in self.log_files():
            finished.logs.append(_records(path))
            finished.log_files.append(path)
        self._lab.note(_told(finished))
        return finished


def same(bare, shim):
    """The shim's run, if it ended and printed like the bare one."""
    if (bare.status, bare.lines()) == (shim.status, shim.lines()):
        return shim
    if bare.status != shim.status:
        last = (shim.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        raise Failed(f"{shim.command}: exit code {shim.status}, bare {bare.status}; {last}")
    pairs = zip(bare.lines() + [""] * len(shim.lines()), shim.lines() + [""] * len(bare.lines()))
    number, (one, other) = next((n, pair) for n, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    raise Failed(f"{shim.command}: line {number} is {other[:120]!r}, bare {one[:120]!r}")


def _records(path):
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def _told(finished):
    """One run as the log file shows it."""
    text = f"$ {finished.command}\n[exit code {finished.status}, {finished.seconds:.1f} s]\n"
    for name, stream in (("stdout", finished.stdout), ("stderr", finished.stderr)):
        if stream.strip():
            cut = "" if len(stream) <= LONGEST else f"\n[{len(stream) - LONGEST} more characters]"
            text += f"--- {name}\n{stream[:LONGEST].rstrip()}{cut}\n"
    for log in finished.logs:
        shown = [record for record in log if record.get("level") != "debug"][:60]
        text += f"--- gpupool log, {len(log)} records, the first {len(shown)}\n"
        text += "".join(json.dumps(record) + "\n" for record in shown)
    return text
