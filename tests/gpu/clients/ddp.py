"""One rank of a data-parallel job over NCCL; started by torchrun. Prints its own last losses and the sum over the ranks.

ddp.py [STEPS]
"""

import os
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch import nn


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
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 20):
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    losses = losses[-20:]
    total = torch.tensor(losses, device="cuda")
    dist.all_reduce(total)
    # One write, since both ranks share the terminal.
    os.write(1, f"rank {rank}: {losses!r}, summed {total.tolist()!r}\n".encode())
    dist.destroy_process_group()


main()
