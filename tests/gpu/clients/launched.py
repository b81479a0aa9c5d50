"""Workers of a job, one for each GPU, as a launcher starts them. Each fills blocks on its GPU, and looks at every word of them once all have.

launched.py spawn|ray|dask WORKERS MIB FOLDER     starts them; torchrun starts launched.py rank WORKERS MIB FOLDER

The driver is called by ctypes: what is tried is the launcher, not a framework. FOLDER is an empty one, by which the workers wait for each other.
"""

import ctypes
import os
import pathlib
import sys
import time

BLOCK = 32 << 20
# A worker that knows of no other for so long works by itself.
PATIENCE = 60
# Processes find each other once a second.
TO_KNOW = 3


def _call(cuda, name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        raise RuntimeError(f"{name}: {code}")


def _meet(folder, step, workers):
    (pathlib.Path(folder) / f"{step}.{os.getpid()}").touch()
    until = time.monotonic() + PATIENCE
    while len(list(pathlib.Path(folder).glob(f"{step}.*"))) < workers:
        if time.monotonic() > until:
            raise RuntimeError(f"of {workers} workers not all came to step {step}")
        time.sleep(0.02)


def work(gpu, workers, mib, folder):
    """What one worker has to say. `gpu`: which one it is to use, by its own numbering."""
    cuda = ctypes.CDLL("libcuda.so.1")
    context, bus = ctypes.c_void_p(), ctypes.create_string_buffer(32)
    _call(cuda, "cuInit", 0)
    _call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), gpu)
    _call(cuda, "cuCtxSetCurrent", context)
    _call(cuda, "cuDeviceGetPCIBusId", bus, 32, gpu)
    blocks = []

    def take():
        block = ctypes.c_uint64()
        word = (os.getpid() * 1000 + len(blocks)) & 0xFFFFFFFF
        _call(cuda, "cuMemAlloc_v2", ctypes.byref(block), ctypes.c_size_t(BLOCK))
        _call(cuda, "cuMemsetD32_v2", block, ctypes.c_uint(word), ctypes.c_size_t(BLOCK // 4))
        blocks.append((block, word))

    take()
    _meet(folder, "begun", workers)
    time.sleep(TO_KNOW)
    while len(blocks) * BLOCK < mib << 20:
        take()
    _meet(folder, "filled", workers)
    wrong, read = 0, ctypes.create_string_buffer(BLOCK)
    for block, word in blocks:
        _call(cuda, "cuMemcpyDtoH_v2", read, block, ctypes.c_size_t(BLOCK))
        wrong += read.raw != word.to_bytes(4, "little") * (BLOCK // 4)
    _meet(folder, "read", workers)
    for block, _ in blocks:
        _call(cuda, "cuMemFree_v2", block)
    return f"{bus.value.decode()}: {wrong} of {len(blocks)} blocks wrong"


def _say(line):
    # One write, since workers share the terminal.
    os.write(1, f"{line}\n".encode())


def _spawned(number, arguments):
    _say(work(number, *arguments))


def spawn(workers, *arguments):
    from torch.multiprocessing import spawn as start

    start(_spawned, ((workers, *arguments),), nprocs=workers)


def ray(workers, *arguments):
    import ray as cluster

    cluster.init(num_cpus=workers, num_gpus=workers, include_dashboard=False, log_to_driver=False)
    # Ray shows each worker its own GPU alone.
    worker = cluster.remote(num_cpus=1, num_gpus=1)(work)
    for line in cluster.get([worker.remote(0, workers, *arguments) for _ in range(workers)]):
        _say(line)
    cluster.shutdown()


def dask(workers, *arguments):
    from dask_cuda import LocalCUDACluster
    from distributed import Client

    with LocalCUDACluster(n_workers=workers, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as client:
        # Each sees all GPUs, its own one first.
        futures = [
            client.submit(work, 0, workers, *arguments, workers=[name], pure=False)
            for name in client.scheduler_info(n_workers=-1)["workers"]
        ]
        for line in client.gather(futures):
            _say(line)


def rank(workers, *arguments):
    # As torchrun, Open MPI and Slurm number the workers of a host.
    names = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
    number = next(os.environ[name] for name in names if name in os.environ)
    _say(work(int(number), workers, *arguments))


if __name__ == "__main__":
    how, count, size, meeting = sys.argv[1:]
    {"spawn": spawn, "ray": ray, "dask": dask, "rank": rank}[how](int(count), int(size), meeting)
