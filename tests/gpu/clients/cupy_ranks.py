"""One rank of two of a job of cupyx.distributed over NCCL: cupy_ranks.py RANK PORT."""

import sys

# CuPy looks for MPI, whose library ends a process that no launcher of MPI's has started.
sys.modules["mpi4py"] = None

import cupy as cp
from cupyx.distributed import init_process_group


def main():
    rank, port = int(sys.argv[1]), int(sys.argv[2])
    cp.cuda.Device(rank).use()
    group = init_process_group(2, rank, host="127.0.0.1", port=port)
    n = 24 << 20
    mine = cp.arange(n, dtype=cp.int64) * (rank + 1)
    out = cp.zeros_like(mine)
    group.all_reduce(mine, out)
    print("all-reduce:", "right" if bool((out == 3 * cp.arange(n)).all()) else "wrong", int(out.sum()))
    both = cp.zeros((2, n), dtype=cp.int64)
    group.all_gather(mine, both, n)
    print("all-gather:", [int(row.sum()) for row in both])
    if rank == 0:
        group.send(mine[: n // 2], 1)
    else:
        got = cp.zeros(n // 2, dtype=cp.int64)
        group.recv(got, 0)
        print("received:", int(got.sum()))
    cp.cuda.Device().synchronize()
    if rank == 0:
        # The store where the ranks met is a process of its own.
        group.stop()


if __name__ == "__main__":
    main()
