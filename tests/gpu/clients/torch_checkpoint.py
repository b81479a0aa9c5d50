"""A model that trains while images of it are written, or (`again`) one that is built anew and gets its bytes back by name.

usage: torch_checkpoint.py WORDS_FILE [again]

The model (weights in bfloat16 and their state in float32), one block of activations and one of zeros are named. Each step's time goes to WORDS_FILE, a line
with its end and its seconds, until that file's neighbour WORDS_FILE.stop is there. `again` prints a hash of each range that came back.
"""

import ctypes
import hashlib
import os
import sys
import time

import torch

LAYERS, WIDTH, BATCH = 12, 8192, 2048
words, again = sys.argv[1], len(sys.argv) > 2
torch.manual_seed(0)
device = torch.device("cuda", 0)


def made(dtype, *shape):
    return torch.randn(*shape, device=device, dtype=torch.float32).mul_(0.02).to(dtype)


if again:
    ranges = {f"weights.{at}": torch.empty(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) for at in range(LAYERS)}
    ranges |= {f"state.{at}": torch.empty(WIDTH, WIDTH, device=device) for at in range(LAYERS)}
    ranges["activations"] = torch.empty(LAYERS, BATCH, WIDTH, device=device, dtype=torch.bfloat16)
    ranges["zeros"] = torch.empty(WIDTH, WIDTH, device=device)
else:
    ranges = {f"weights.{at}": made(torch.bfloat16, WIDTH, WIDTH) for at in range(LAYERS)}
    ranges |= {f"state.{at}": torch.zeros(WIDTH, WIDTH, device=device) for at in range(LAYERS)}
    ranges["activations"] = torch.zeros(LAYERS, BATCH, WIDTH, device=device, dtype=torch.bfloat16)
    ranges["zeros"] = torch.zeros(WIDTH, WIDTH, device=device)
torch.cuda.synchronize()
begun = time.monotonic()
# What the Python module calls, which need not be installed here.
named = ctypes.CDLL(None).gpupool_name
named.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
for name, tensor in ranges.items():
    code = named(tensor.data_ptr(), tensor.numel() * tensor.element_size(), name.encode())
    if code:
        sys.exit(f"{name}: gpupool_name answered {code}")


def hashes():
    # On the host: what a GPU computes twice is the same twice also where it is wrong.
    return {name: hashlib.sha256(tensor.cpu().view(torch.uint8).numpy()).hexdigest()[:16] for name, tensor in ranges.items()}


if again:
    size = sum(tensor.numel() * tensor.element_size() for tensor in ranges.values())
    print(f"back {size} {time.monotonic() - begun:.3f}")
    print("hashes", *(f"{name}={value}" for name, value in hashes().items()))
    sys.exit(0)

batch = made(torch.bfloat16, BATCH, WIDTH)
with open(words, "w", buffering=1, encoding="utf-8") as log:
    while not os.path.exists(f"{words}.stop"):
        step = time.monotonic()
        value = batch
        for at in range(LAYERS):
            value = torch.nn.functional.gelu(value @ ranges[f"weights.{at}"])
            ranges["activations"][at].copy_(value)
        for at in range(LAYERS // 2):
            # Half of the model is frozen, as in fine-tuning.
            noise = torch.randn_like(ranges[f"state.{at}"]).mul_(1e-4)
            ranges[f"state.{at}"].mul_(0.9).add_(noise)
            ranges[f"weights.{at}"].add_(ranges[f"state.{at}"].to(torch.bfloat16))
        torch.cuda.synchronize()
        log.write(f"{time.time():.6f} {time.monotonic() - step:.6f}\n")
print("hashes", *(f"{name}={value}" for name, value in hashes().items()))
sys.stdout.flush()
# The last image is written of what does not change any more.
print("rests", flush=True)
while not os.path.exists(f"{words}.end"):
    time.sleep(0.02)
