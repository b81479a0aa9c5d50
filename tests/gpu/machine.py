"""What the machine is: its GPUs in CUDA's order, its driver, its processor."""

import ctypes
import datetime
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass

MIB = 1 << 20
GIB = 1 << 30


@dataclass
class Gpu:
    """`selector` is what nvidia-smi and CUDA_VISIBLE_DEVICES call it; empty where the driver itself was asked."""

    selector: str
    name: str
    total: int
    uuid: str


@dataclass
class Machine:
    gpus: list
    driver: str
    has_smi: bool

    def used(self):
        """Bytes in use on each GPU by every process, as nvidia-smi counts them. The shim is not asked: it answers for
        the whole pool."""
        return [int(_smi("memory.used", gpu.selector)[0][0]) * MIB for gpu in self.gpus]

    def facts(self, gpupool):
        """Lines of Markdown."""
        sizes = ", ".join(f"{gpu.name} with {gpu.total // MIB} MiB" for gpu in self.gpus)
        lines = [
            f"- date: {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
            f"- GPUs: {len(self.gpus)} ({sizes}), driver {self.driver}",
            f"- processor: {_processor()}, {os.cpu_count()} cores; host memory {_memory_kib() // MIB} GiB",
            f"- Linux {platform.release()}, {' '.join(platform.libc_ver())}, Python {platform.python_version()}",
        ]
        version = subprocess.run([str(gpupool), "--version"], capture_output=True, text=True, check=False)
        return lines + [f"- {version.stdout.strip() or 'gpupool does not say its version'}"]


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`."""

    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def watch(gpu):
    """A function that says how many bytes of a GPU are in use by all processes, as NVML tells this one, which holds no context. `None`
    where there is no NVML."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device, memory = ctypes.c_void_p(), _Memory()
    if nvml.nvmlInit_v2():
        return None
    found = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid.encode(), ctypes.byref(device)) if gpu.uuid else None
    if found is None:
        found = nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
    if found:
        return None

    def used():
        if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
            sys.exit("gpu-check: NVML does not tell the memory in use")
        return memory.used

    return used


def find():
    """The GPUs that a CUDA program started here would see. Ends the program if there are none."""
    if shutil.which("nvidia-smi"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        selectors = [row[0] for row in _smi("index")] if visible is None else visible.split(",")
        rows = [(selector, _smi("name,memory.total,uuid,driver_version", selector)[0]) for selector in selectors]
        gpus = [Gpu(selector, name, int(total) * MIB, uuid) for selector, (name, total, uuid, _) in rows]
        if gpus:
            return Machine(gpus, rows[0][1][3], True)
    # A simulated driver, or an image without nvidia-smi. In a child, since a process that called cuInit holds the GPUs.
    asked = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    lines = [line.split(",") for line in asked.stdout.splitlines()]
    if asked.returncode or len(lines) < 2:
        reason = asked.stderr.strip() or "no device"
        sys.exit(f"gpu-check: no GPU here: nvidia-smi lists none, and the driver says: {reason}")
    return Machine([Gpu("", name, int(total), "") for name, total in lines[1:]], lines[0][0], False)


def _smi(fields, selector=None):
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    command += ["-i", selector] if selector else []
    output = subprocess.run(command, capture_output=True, text=True, check=False)
    if output.returncode:
        sys.exit(f"gpu-check: {' '.join(command)} failed: {output.stdout.strip()} {output.stderr.strip()}")
    return [[field.strip() for field in line.split(",")] for line in output.stdout.splitlines() if line.strip()]


def _processor():
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        return next(names, platform.machine())


def _memory_kib():
    with open("/proc/meminfo", encoding="utf-8") as lines:
        return int(next(line for line in lines if line.startswith("MemTotal")).split()[1])


def _ask_driver():
    """Prints the driver's version and then a line `name,bytes` for each GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        sys.exit(str(error))
    version, count = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDriverGetVersion(ctypes.byref(version)) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        sys.exit("cuInit fails")
    print(f"CUDA {version.value}")
    for ordinal in range(count.value):
        name, total = ctypes.create_string_buffer(256), ctypes.c_size_t()
        if cuda.cuDeviceGetName(name, 256, ordinal) or cuda.cuDeviceTotalMem_v2(ctypes.byref(total), ordinal):
            sys.exit(f"GPU {ordinal} does not answer")
        print(f"{name.value.decode().replace(',', ' ')},{total.value}")


if __name__ == "__main__":
    _ask_driver()
