"""Computes on two GPUs with JAX, so that the context of each is one that the program needs."""

import jax
import jax.numpy as jnp


def main():
    for device in jax.devices()[:2]:
        x = jax.device_put(jnp.ones(1 << 20), device)
        print(device.id, float((x * 2).sum()))


main()
