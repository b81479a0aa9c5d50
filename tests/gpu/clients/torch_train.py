"""A small transformer trained with AdamW, step by step and as a captured CUDA graph: losses, and the time of a step.

torch_train.py [short | small]   short: fewer steps; small: smaller batches, which need under 2 GiB
torch_train.py steps COUNT       six times as deep, about 13 GiB: so many steps, one by one
torch_train.py until FILE        the same until there is FILE.end; each step's loss goes to FILE at once
"""

import os
import pathlib
import statistics
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn

from places import allocator, report

LOOPS = "steps" in sys.argv or "until" in sys.argv
WIDTH, HEADS, LAYERS, TOKENS = 1024, 16, 24 if LOOPS else 4, 256
BATCH = 4 if "small" in sys.argv else 16
WARM, STEPS = (5, 10) if "short" in sys.argv else (10, 40)


class Block(nn.Module):
    """Attention is written out: the fused kernels choose their algorithm by more than the input."""

    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        shape = (x.shape[0], x.shape[1], HEADS, WIDTH // HEADS)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, dim=-1))
        weights = (q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5).softmax(dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.between(x))


def setup(capturable):
    torch.manual_seed(1234)
    model = nn.Sequential(*[Block() for _ in range(LAYERS)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=capturable)
    batches = [torch.randn(BATCH, TOKENS, WIDTH, device="cuda") for _ in range(4)]
    return model, optimizer, batches


def loss_of(model, batch):
    return (model(batch) - batch.roll(1, dims=1)).pow(2).mean()


def timed(step):
    """Runs all steps; the losses after warm-up and the median milliseconds of a step."""
    losses, marks = [], []
    for number in range(WARM + STEPS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        loss = step(number)
        end.record()
        losses.append(loss.detach().clone())
        marks.append((start, end))
    torch.cuda.synchronize()
    return [loss.item() for loss in losses[WARM:]], statistics.median(s.elapsed_time(e) for s, e in marks[WARM:])


def eager():
    model, optimizer, batches = setup(False)

    def step(number):
        loss = loss_of(model, batches[number % len(batches)])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss

    return timed(step)


def captured():
    model, optimizer, batches = setup(True)
    batch = batches[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            loss_of(model, batch).backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()

    def step(number):
        batch.copy_(batches[number % len(batches)])
        graph.replay()
        return loss

    return timed(step)


def loop(how, what):
    """Whoever looks at FILE and makes FILE.end decides how long it trains, so that it cannot be over before he is."""
    model, optimizer, batches = setup(False)
    told, end = pathlib.Path(what), pathlib.Path(f"{what}.end")
    losses = []
    while len(losses) < int(what) if how == "steps" else not end.exists():
        loss = loss_of(model, batches[len(losses) % len(batches)])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if how == "until":
            with told.open("a", encoding="utf-8") as lines:
                lines.write(f"{losses[-1]!r}\n")
    print(f"losses of {len(losses)} steps: {losses!r}", flush=True)
    report(reserved=torch.cuda.max_memory_reserved(), **allocator(torch))


def main():
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    if LOOPS:
        loop(*sys.argv[1:])
        return
    times = {}
    for name, train in (("eager", eager), ("graph", captured)):
        losses, times[name] = train()
        print(f"{name} losses: {losses!r}", flush=True)
    report(milliseconds=times, reserved=torch.cuda.max_memory_reserved(), **allocator(torch))


main()
