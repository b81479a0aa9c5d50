"""A jitted training step with Adam of a deep network in JAX, about 18 GiB: losses, and the time of each step.

jax_large.py STEPS
"""

import sys
import time

import jax
import jax.numpy as jnp

from places import held, report

WIDTH, LAYERS, ROWS = 8192, 16, 8192


def loss_of(weights, x):
    y = x
    for weight in weights:
        y = jax.nn.relu(y.astype(jnp.bfloat16) @ weight.astype(jnp.bfloat16)).astype(jnp.float32)
    return jnp.mean((y - x) ** 2)


def step(weights, first, second, x):
    loss, gradients = jax.value_and_grad(loss_of)(weights, x)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradients)
    weights = jax.tree.map(lambda w, m, v: w - 1e-4 * m / (jnp.sqrt(v) + 1e-8), weights, first, second)
    return loss, weights, first, second


def main():
    steps = int(sys.argv[1])
    # The second GPU lends and is no device of JAX's. CUDA_VISIBLE_DEVICES would hide it from the pool too.
    jax.config.update("jax_cuda_visible_devices", "0")
    train = jax.jit(step, donate_argnums=(0, 1, 2))
    keys = jax.random.split(jax.random.key(7), LAYERS + 1)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) * (2 / WIDTH) ** 0.5 for key in keys[1:]]
    first = [jnp.zeros_like(weight) for weight in weights]
    second = [jnp.zeros_like(weight) for weight in weights]
    x = jax.random.normal(keys[0], (ROWS, WIDTH))
    losses, milliseconds, ended = [], [], []
    for _ in range(steps):
        since = time.perf_counter()
        loss, weights, first, second = train(weights, first, second, x)
        losses.append(float(loss))
        jax.block_until_ready(weights)
        milliseconds.append((time.perf_counter() - since) * 1e3)
        ended.append(time.time())
    print(f"{steps} steps, the loss fell: {losses[-1] < losses[0]}")
    report(milliseconds=milliseconds, ended=ended, losses=losses, held=held())


main()
