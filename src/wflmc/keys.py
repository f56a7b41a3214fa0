"""Random keys by name, so that changing one part of an experiment leaves the draws of the others alone.

The order is always name (data, channel, init, noise), then chain, then round: two policies share data,
channels and noise, and a longer run begins with the draws of the shorter one.
"""

from __future__ import annotations

import zlib

import jax
import numpy as np


def named(key: jax.Array, name: str) -> jax.Array:
    """The sub-key of `key` that belongs to `name`."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def host_generator(key: jax.Array, name: str) -> np.random.Generator:
    """A NumPy generator for float64 draws on the host, seeded by the sub-key of `key` for `name`."""
    words = np.asarray(jax.random.key_data(named(key, name))).ravel()
    return np.random.default_rng([int(word) for word in words])
