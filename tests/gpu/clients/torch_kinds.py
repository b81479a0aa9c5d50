"""Kinds of memory of a program that trains, each alone on the GPU in turn: weights (bfloat16), the optimizer's state (32-bit floats), activations
(bfloat16), zeros. A network is trained with AdamW before, so that they are what they are in training.

torch_kinds.py

It says `kind NAME BYTES` and waits for a line, then says whether all of it is as it was.
"""

import sys

import torch
from torch import nn
from torch.nn import functional

from places import report

LAYERS, WIDTH, BATCH, STEPS = 12, 8192, 8192, 12


def trained():
    """Tensors on the host, by kind."""
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, device="cuda") for _ in range(LAYERS)]
    optimizer = torch.optim.AdamW([layer.weight for layer in layers], lr=1e-4)
    batch = torch.randn(BATCH, WIDTH, device="cuda")
    for _ in range(STEPS):
        values = [batch]
        with torch.autocast("cuda", dtype=torch.bfloat16):
            for layer in layers:
                values.append(functional.gelu(layer(values[-1])))
        loss = (values[-1].float() - batch.roll(1, dims=1)).pow(2).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    states = [optimizer.state[layer.weight] for layer in layers]
    return {
        "weights": [layer.weight.detach().to(torch.bfloat16).cpu() for layer in layers],
        "state": [state[name].cpu() for state in states for name in ("exp_avg", "exp_avg_sq")],
        "activations": [value.detach().to(torch.bfloat16).cpu() for value in values[1:]],
        "zeros": [torch.zeros(WIDTH, WIDTH) for _ in range(LAYERS)],
    }


def main():
    kinds = trained()
    for name, kept in kinds.items():
        torch.cuda.empty_cache()
        tensors = [tensor.cuda() for tensor in kept]
        torch.cuda.synchronize()
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        print(f"kind {name} {size}", flush=True)
        sys.stdin.readline()
        is_right = all(torch.equal(tensor.cpu().view(torch.uint8), was.view(torch.uint8)) for tensor, was in zip(tensors, kept))
        print(f"{name}: {'right' if is_right else 'WRONG'}", flush=True)
        del tensors
    report(kinds=list(kinds))


main()
