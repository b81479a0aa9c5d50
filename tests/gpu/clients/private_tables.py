"""Which functions of the driver's private tables a framework calls: as it starts, and in a loop that goes on.

    LD_PRELOAD=private_tables.so python3 private_tables.py torch|cupy|jax
"""

import ctypes
import sys

mark = ctypes.CDLL(None).private_tables_mark
mark.argtypes = [ctypes.c_char_p]


def torch():
    import torch

    inner = torch.nn.Linear(2048, 2048, device="cuda", dtype=torch.bfloat16)
    given = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)

    def step():
        made = inner(given).relu() @ given
        return torch.fft.fft(made.float()).abs().sum()

    return step, torch.cuda.synchronize


def cupy():
    import cupy

    given = cupy.random.rand(2048, 2048, dtype=cupy.float32)

    def step():
        return cupy.abs(cupy.fft.fft(given @ given)).sum()

    return step, cupy.cuda.Device().synchronize


def jax():
    import jax
    import jax.numpy as np

    given = np.ones((2048, 2048), np.bfloat16)

    @jax.jit
    def once(given):
        return np.abs(np.fft.fft((given @ given + 1).astype(np.float32))).sum()

    def step():
        return once(given).block_until_ready()

    return step, lambda: None


step, finish = {"torch": torch, "cupy": cupy, "jax": jax}[sys.argv[1]]()
for _ in range(3):
    step()
finish()
mark(b"start")
for _ in range(50):
    step()
finish()
mark(b"loop")
print("ok")
