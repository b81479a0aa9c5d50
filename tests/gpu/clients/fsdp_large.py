"""One rank of a job that shares a model's parameters (FSDP) over NCCL, about 28 GiB a rank; started by torchrun. Rank 0 prints
whether its losses fell, and the time of each step.

fsdp_large.py STEPS
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from places import held, report

WIDTH, LAYERS, ROWS = 4096, 16, 16384


def layer(made):
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH, **made), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, **made))


def main():
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    torch.manual_seed(0)
    # Made where it lies and as it is used: random numbers for all of it take the processor long.
    made = {"device": "cuda", "dtype": torch.bfloat16}
    model = nn.Sequential(*[layer(made) for _ in range(LAYERS)])
    for part in model:
        fully_shard(part)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(100 + rank)
    x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
    losses, milliseconds, ended = [], [], []
    for _ in range(int(sys.argv[1])):
        since = time.perf_counter()
        loss = (model(x) - x).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        milliseconds.append((time.perf_counter() - since) * 1e3)
        ended.append(time.time())
    if rank == 0:
        print(f"{len(losses)} steps, the loss fell: {losses[-1] < losses[0]}", flush=True)
        report(milliseconds=milliseconds, ended=ended, losses=losses, held=held())
    dist.destroy_process_group()


main()
