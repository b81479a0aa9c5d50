"""A jitted training step of a small network in JAX, on the first device: the losses, and the time of a step."""

import statistics
import time

import jax
import jax.numpy as jnp

from places import report

WIDTH, BATCH, STEPS, TIMED = 2048, 1024, 20, 200


def forward(parameters, x):
    for weight, bias in parameters[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = parameters[-1]
    return x @ weight + bias


@jax.jit
def step(parameters, moments, x):
    def loss_of(candidate):
        return jnp.mean((forward(candidate, x) - jnp.roll(x, 1, axis=1)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(parameters)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return loss, jax.tree.map(lambda p, m: p - 0.01 * m, parameters, moments), moments


def main():
    jax.config.update("jax_default_matmul_precision", "highest")
    keys = jax.random.split(jax.random.key(7), 5)
    parameters = [(jax.random.normal(key, (WIDTH, WIDTH)) * WIDTH**-0.5, jnp.zeros(WIDTH)) for key in keys[:4]]
    moments = jax.tree.map(jnp.zeros_like, parameters)
    x = jax.random.normal(keys[4], (BATCH, WIDTH))
    losses, seconds = [], []
    for number in range(STEPS + TIMED):
        begin = time.perf_counter()
        loss, parameters, moments = step(parameters, moments, x)
        loss = float(loss)
        seconds.append(time.perf_counter() - begin)
        if number < STEPS:
            losses.append(loss)
    print(f"losses: {losses!r}")
    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    milliseconds = {"step": 1000 * statistics.median(seconds[STEPS:])}
    report(platform=device.platform, devices=jax.device_count(), limit=limit, milliseconds=milliseconds)


main()
