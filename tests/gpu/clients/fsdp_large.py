"""One rank of a job that shares a model's parameters (FSDP) over NCCL, about 14 GiB a rank; started by torchrun. Prints whether its
losses fell, and the time of each step.

fsdp_large.py STEPS
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from places import held

WIDTH, LAYERS, ROWS = 4096, 16, 16384


def main():
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(100 + rank)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    losses, milliseconds = [], []
    for _ in range(int(sys.argv[1])):
        since = time.perf_counter()
        loss = (model(x) - x).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        milliseconds.append((time.perf_counter() - since) * 1e3)
        # One write, since both ranks share the terminal.
        os.write(2, f"rank {rank}: loss {losses[-1]!r}, {milliseconds[-1]:.1f} ms\n".encode())
    os.write(1, f"rank {rank}: the loss fell: {losses[-1] < losses[0]}; last {losses[-1]!r}; {held()}\n".encode())
    dist.destroy_process_group()


main()
