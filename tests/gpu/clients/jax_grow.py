"""JAX arrays that together are larger than a GPU: jax_grow.py BYTES COUNT, at most 8 GiB each.

Each has its own contents, made and compared inside one kernel, so that no large temporary is needed.
"""

import functools
import sys

import jax
import jax.numpy as jnp

from places import held, report

COLUMNS = 1 << 20


def ramp(rows, seed):
    row = jax.lax.broadcasted_iota(jnp.uint32, (rows, COLUMNS), 0)
    column = jax.lax.broadcasted_iota(jnp.uint32, (rows, COLUMNS), 1)
    return row * jnp.uint32(0x9E3779B1) + column * jnp.uint32(0x85EBCA77) + seed


@functools.partial(jax.jit, static_argnums=0)
def made(rows, seed):
    return ramp(rows, seed)


@jax.jit
def wrong_words(array, seed):
    # Counted by rows: the number of all words may be more than 32 bits hold.
    return (array != ramp(array.shape[0], seed)).sum(axis=1, dtype=jnp.uint32)


def wrong(arrays, seeds):
    return sum(int(wrong_words(array, jnp.uint32(seed)).max()) for array, seed in zip(arrays, seeds))


def main():
    # The second GPU lends and is no device of JAX's. CUDA_VISIBLE_DEVICES would hide it from the pool too.
    jax.config.update("jax_cuda_visible_devices", "0")
    rows, count = int(sys.argv[1]) // (4 * COLUMNS), int(sys.argv[2])
    arrays = []
    try:
        for seed in range(count):
            arrays.append(made(rows, jnp.uint32(seed)).block_until_ready())
    except jax.errors.JaxRuntimeError as error:
        print(f"{str(error).split(':')[0]} after {len(arrays)} arrays")
        return 3
    # While all of them live, somebody may look at the GPUs from outside.
    print(f"{count} arrays", flush=True)
    sys.stdin.readline()
    print("wrong words:", wrong(arrays, range(count)))
    for seed in range(0, count, 3):
        arrays[seed] = None
        arrays[seed] = made(rows, jnp.uint32(count + seed)).block_until_ready()
    seeds = [count + seed if seed % 3 == 0 else seed for seed in range(count)]
    print("arrays that were made anew:", wrong(arrays, seeds), "wrong words")
    report(held=held())
    return 0


sys.exit(main())
