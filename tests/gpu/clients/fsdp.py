"""One rank of a job that shares a model's parameters (FSDP) over NCCL; started by torchrun. Prints its losses and sums."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard


def main():
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 2048)) for _ in range(3)]
    model = nn.Sequential(*layers).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(100 + rank)
    x = torch.randn(256, 2048, device="cuda")
    losses = []
    for _ in range(10):
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    sums = [parameter.full_tensor().double().sum().item() for parameter in model.parameters()]
    # One write, since both ranks share the terminal.
    os.write(1, f"rank {rank}: {losses!r}, parameters {sums!r}\n".encode())
    dist.destroy_process_group()


main()
