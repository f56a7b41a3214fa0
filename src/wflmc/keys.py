"""Random keys by name, so that changing one part of an experiment leaves the draws of the others alone.

The order is always name (data, channel, init, noise), then chain, then round: two policies share data,
channels and noise, and a longer run begins with the draws of the shorter one.
"""

import hashlib
import secrets
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from wflmc.errors import Found, InputError


def check_key(key: object, name: str = "key") -> None:
    """Refuse what is not one key of JAX's, new-style or old."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not ((typed and shape == ()) or (dtype == np.uint32 and shape in ((2,), (4,)))):
        given = key if dtype is not None or isinstance(key, int) else Found("is not a key")  # a list may be its numbers
        raise InputError(name, given, "one key, such as jax.random.key(0)")


def secret_key(secret: bytes | None = None) -> jax.Array:
    """Return a key that nobody can guess, drawn from the operating system's entropy, or again the one of `secret`.

    A seed has at most 32 bits: whoever sees samples tries them all within minutes, and the noise is gone. All 64 bits
    of a threefry key are random here. An attacker who can recognise the right key needs 2⁶³ tries on average, which is
    out of reach of most, but less than the 128 bits of cryptography.
    """
    words = np.frombuffer(secrets.token_bytes(8) if secret is None else secret, np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


def named(key: jax.Array, name: str) -> jax.Array:
    """Return the sub-key of `key` that belongs to `name`."""
    check_key(key)
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def host_generator(key: jax.Array, name: str) -> np.random.Generator:
    """Return a NumPy generator for float64 draws on the host, seeded by the sub-key of `key` for `name`."""
    words = np.asarray(jax.random.key_data(named(key, name))).ravel()
    return np.random.default_rng([int(word) for word in words])


def digest(*values: ArrayLike | bytes) -> str:
    """Return a short name for arrays and texts; equal ones have equal names, others practically never."""
    total = hashlib.sha256()
    for value in values:
        if not isinstance(value, bytes):
            array = np.ascontiguousarray(value)
            value = f"{array.dtype}{array.shape}".encode() + array.tobytes()
        total.update(len(value).to_bytes(8, "little") + value)
    return total.hexdigest()[:32]
