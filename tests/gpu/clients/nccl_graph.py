"""One rank of a job that captures all-reduces in a CUDA graph and replays it; started by torchrun.

One buffer is small and one of many chunks. All values are small integers, so every order of summing gives the same.
"""

import os

import torch
import torch.distributed as dist


def main():
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    buffers = [torch.zeros(size, device="cuda") for size in (1 << 10, 48 << 20)]
    for buffer in buffers:
        dist.all_reduce(buffer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for buffer in buffers:
            dist.all_reduce(buffer)
            buffer.add_(1)
    sums = []
    for number in range(3):
        for buffer in buffers:
            buffer.fill_(10 * number + rank)
        # Memory of others that is taken and freed between replays.
        other = torch.full((32 << 20,), 7.0, device="cuda")
        graph.replay()
        sums += [buffer.sum(dtype=torch.float64).item() for buffer in buffers]
        wrong = sum(int((buffer != 20 * number + 2).sum()) for buffer in buffers)
        sums.append(f"wrong {wrong}")
        del other
        torch.cuda.empty_cache()
    # One write, since both ranks share the terminal.
    os.write(1, f"rank {rank}: {sums!r}\n".encode())
    torch.cuda.synchronize()
    del graph
    dist.destroy_process_group()


main()
