"""One rank of a data-parallel job over NCCL; started by torchrun. Prints its own last losses and the sum over the ranks.

ddp.py [STEPS], ddp.py steps STEPS   so many steps
ddp.py until FILE                   until there is FILE.end; rank 0 writes each of its losses to FILE at once
"""

import os
import pathlib
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch import nn


def steps_of(words, rank):
    """For each step what its loss is told to, if anything. Rank 0 decides, so that all make as many."""
    if words[:1] != ["until"]:
        yield from [None] * (int(words[-1]) if words else 20)
        return
    told, end = pathlib.Path(words[1]), pathlib.Path(f"{words[1]}.end")
    ends = torch.zeros(1, device="cuda")
    with told.open("a", encoding="utf-8", buffering=1) as lines:
        while True:
            ends.fill_(rank == 0 and end.exists())
            dist.broadcast(ends, 0)
            if ends.item():
                return
            yield lines if rank == 0 else None


def main():
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True, warn_only=True)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 2048)).cuda()
    model = nn.parallel.DistributedDataParallel(network, device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + rank)
    x = torch.randn(512, 2048, device="cuda")
    losses = []
    for told in steps_of(sys.argv[1:], rank):
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if told:
            told.write(f"{losses[-1]!r}\n")
    losses = losses[-20:]
    total = torch.tensor(losses, device="cuda")
    dist.all_reduce(total)
    # One write, since both ranks share the terminal.
    os.write(1, f"rank {rank}: {losses!r}, summed {total.tolist()!r}\n".encode())
    dist.destroy_process_group()


main()
