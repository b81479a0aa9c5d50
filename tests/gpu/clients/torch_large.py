"""A transformer of 1.4 billion parameters trained with AdamW in bf16, about 44 GiB: losses, and the time of each step.

torch_large.py STEPS [graph]   graph: the step is a CUDA graph that is replayed
"""

import sys
import time

import torch
from torch import nn
from torch.nn import functional

from places import held, report

WIDTH, HEADS, LAYERS, TOKENS, BATCH = 2560, 20, 18, 1024, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        shape = (x.shape[0], x.shape[1], HEADS, WIDTH // HEADS)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.between(x))


def main():
    steps, graph = int(sys.argv[1]), "graph" in sys.argv
    torch.manual_seed(1234)
    # Made where it lies: random numbers for all of it take the processor 20 s.
    with torch.device("cuda"):
        model = nn.Sequential(*[Block() for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=graph)
    batch = torch.randn(BATCH, TOKENS, WIDTH, device="cuda")

    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = (model(batch) - batch.roll(1, dims=1)).float().pow(2).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if graph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(captured):
            result = step()

        def step():
            captured.replay()
            return result

    losses, milliseconds, ended = [], [], []
    for _ in range(steps):
        # By the host's clock, since a step that waits for memory to come counts with that wait.
        since = time.perf_counter()
        losses.append(step().item())
        milliseconds.append((time.perf_counter() - since) * 1e3)
        ended.append(time.time())
    print(f"{steps} steps, the loss fell: {losses[-1] < losses[0]}")
    peak = torch.cuda.max_memory_allocated()
    report(milliseconds=milliseconds, ended=ended, losses=losses, peak=peak, reserved=torch.cuda.max_memory_reserved(), held=held())


main()
