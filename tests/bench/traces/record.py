#!/usr/bin/env python3
"""Records what PyTorch, CuPy and JAX ask of the driver in a short loop each: record.py FOLDER [NAMES]

Writes FOLDER/NAME.txt.gz for ../replay.c. Each program runs twice: with its own cache of device memory, which asks for a few large
segments, and without, where each array is an allocation of the driver's. Needs cc, a GPU and the packages; one that is not there is
told and left out. Nothing but the program's own calls is in a recording: no path, no data.
"""

import gzip
import os
import pathlib
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
SECONDS = 120

TORCH = """
import random, torch
from torch import nn
random.seed(7)
torch.manual_seed(7)
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True), 6).cuda()
head = nn.Linear(768, 8192).cuda()
optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-4)
for step in range(STEPS):
    # Sentences of changing length, as a loader with buckets gives them.
    batch = torch.randn(random.choice((4, 8, 12)), random.randrange(64, 512, 8), 768, device="cuda")
    loss = head(model(batch)).float().logsumexp(-1).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        with torch.no_grad():
            model.eval()
            kept = [head(model(torch.randn(2, 700 + 40 * i, 768, device="cuda"))) for i in range(4)]
            total = sum(float(k.sum()) for k in kept)
            model.train()
        del kept
        torch.cuda.empty_cache()
torch.cuda.synchronize()
"""

CUPY = """
import random, cupy as cp
random.seed(7)
if CACHE:
    pool = cp.get_default_memory_pool()
else:
    cp.cuda.set_allocator(None)
state = cp.zeros((2048, 2048), dtype=cp.float32)
kept = []
for step in range(STEPS):
    rows = random.randrange(256, 4096)
    x = cp.arange(rows * 2048, dtype=cp.float32).reshape(rows, 2048) % 7
    y = cp.concatenate([x @ state, x[::-1]])
    state = (state + y[:2048].sum(axis=0) * 1e-6) % 3 if rows >= 2048 else state * 0.5
    kept.append((y * y).mean(axis=1))
    if len(kept) > 20:
        del kept[random.randrange(20)]
    if CACHE and step % 50 == 49:
        pool.free_all_blocks()
cp.cuda.Device().synchronize()
"""

JAX = """
import random, jax, jax.numpy as jnp
random.seed(7)
def forward(parameters, x):
    for weight in parameters:
        x = jax.nn.relu(x @ weight)
    return x
@jax.jit
def step(parameters, moments, x):
    gradients = jax.grad(lambda p: jnp.mean(forward(p, x) ** 2))(parameters)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return jax.tree.map(lambda p, m: p - 0.01 * m, parameters, moments), moments
keys = jax.random.split(jax.random.key(7), 6)
parameters = [jax.random.normal(key, (2048, 2048)) * 0.02 for key in keys[:5]]
moments = jax.tree.map(jnp.zeros_like, parameters)
lengths = [64 * random.randrange(1, 32) for _ in range(6)]
kept = []
for number in range(STEPS):
    x = jax.random.normal(jax.random.fold_in(keys[5], number), (random.choice(lengths), 2048))
    parameters, moments = step(parameters, moments, x)
    kept.append(jnp.sin(x) @ parameters[0])
    if len(kept) > 12:
        del kept[random.randrange(12)]
jax.block_until_ready(parameters)
"""

# Name: the program's text, its module, the settings of the run.
PROGRAMS = {
    "torch": ("torch", TORCH.replace("STEPS", "60"), {}),
    "torch_uncached": ("torch", TORCH.replace("STEPS", "20"), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    "cupy": ("cupy", CUPY.replace("STEPS", "1500").replace("CACHE", "True"), {}),
    "cupy_uncached": ("cupy", CUPY.replace("STEPS", "1500").replace("CACHE", "False"), {}),
    "jax": ("jax", JAX.replace("STEPS", "400"), {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
    "jax_uncached": ("jax", JAX.replace("STEPS", "400"), {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}),
}


def record(folder, recorder, name):
    """One recording; what it was, in a line."""
    module, text, settings = PROGRAMS[name]
    if subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, check=False).returncode:
        return f"{name}: not run, no module {module}"
    plain = folder / f"{name}.txt"
    plain.unlink(missing_ok=True)
    environment = {
        **os.environ,
        **settings,
        "CUDA_VISIBLE_DEVICES": "0",
        "RECORD_TO": str(plain),
        "RECORD_MOST": "40000",
        "LD_PRELOAD": str(recorder),
    }
    run = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=False, timeout=SECONDS)
    if run.returncode or not plain.exists():
        plain.unlink(missing_ok=True)
        last = (run.stderr.strip().splitlines() or ["nothing was allocated"])[-1]
        return f"{name}: FAILED, exit code {run.returncode}: {last}"
    lines = plain.read_text(encoding="ascii").splitlines()
    title = f"# {module}, {name}: the driver's allocations of a short loop, recorded by record.py"
    packed = folder / f"{name}.txt.gz"
    packed.write_bytes(gzip.compress("\n".join([title, *lines, ""]).encode(), 9, mtime=0))
    plain.unlink()
    taken = [int(line.split()[1]) for line in lines if line[0] == "+"]
    freed = sum(line[0] == "-" for line in lines)
    small = sum(size < 1 << 20 for size in taken)
    last = next((line for line in reversed(lines) if line[0] == "@"), "@0")
    return (
        f"{name}: {len(taken)} allocations, {small} of them under 1 MiB, largest {max(taken) / (1 << 20):.1f} MiB; "
        f"{freed} frees; {last[1:]} ms; {packed.stat().st_size / 1024:.0f} KiB"
    )


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        recorder = pathlib.Path(scratch) / "recorder.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", recorder, HERE / "recorder.c", "-ldl"], check=True)
        for name in sys.argv[2:] or PROGRAMS:
            print(record(folder, recorder, name), flush=True)


if __name__ == "__main__":
    main()
