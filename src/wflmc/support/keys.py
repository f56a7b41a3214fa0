"""Random keys by name, so that changing one part of an experiment leaves the draws of the others alone.

The order is always name (data, channel, init, noise), then chain, then round: two policies share data,
channels and noise, and a longer run begins with the draws of the shorter one.
"""

import hashlib
import operator
import secrets
import zlib
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from wflmc.support import threefry
from wflmc.support.errors import Fault, InputError

WORD = 2**32 - 1
"""The largest number of 32 bits."""


def check_key(key: object, name: str = "key") -> None:
    """Refuse what is not one key of JAX's, new-style or old."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not ((typed and shape == ()) or (dtype == np.uint32 and shape in ((2,), (4,)))):
        given = (
            key if dtype is not None or isinstance(key, int) else Fault("is not a key")
        )  # a list may be its numbers
        raise InputError(name, given, "one key, such as jax.random.key(0)")


def secret_key(secret: bytes | None = None) -> jax.Array:
    """Return a key that nobody can guess, drawn from the operating system's entropy, or again the one of `secret`.

    A seed has at most 32 bits: whoever sees samples tries them all within minutes, and the noise is gone. All 64 bits
    of a threefry key are random here. An attacker who can recognise the right key needs 2⁶³ tries on average, which is
    out of reach of most, but less than the 128 bits of cryptography.
    """
    words = np.frombuffer(
        secrets.token_bytes(8) if secret is None else secret, np.uint32
    )
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


def named(key: jax.Array, name: str) -> jax.Array:
    """Return the sub-key of `key` that belongs to `name`.

    That of a usual key is computed on the host, so that commands that only plan compile nothing.
    """
    check_key(key)
    number = zlib.crc32(name.encode())
    if (
        isinstance(key, jax.core.Tracer) or key.ndim or len(_words(key)) != 2
    ):  # or one of another kind
        return jax.random.fold_in(key, number)
    return _key(threefry.fold_in(_words(key), number))


def _key(words: ArrayLike) -> jax.Array:
    # An array of JAX, as the signature asks for, would compile something.
    data = np.asarray(words, np.uint32)
    return jax.random.wrap_key_data(data, impl="threefry2x32")  # type: ignore[arg-type]


def seeded(seed: int) -> jax.Array:
    """Return `jax.random.key(seed)`, without compiling anything where the seed has 32 bits and keys are the usual."""
    seed = operator.index(seed)
    return _key([0, seed]) if _is_usual_seed(seed) else jax.random.key(seed)


def _is_usual_seed(seed: int) -> bool:
    """Return whether a seed has 32 bits, and keys are of the usual kind."""
    is_usual_kind: bool = jax.config.jax_default_prng_impl == "threefry2x32"  # type: ignore[attr-defined]
    return is_usual_kind and 0 <= operator.index(seed) <= WORD


def split(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `jax.random.split(key)`, without compiling anything for a usual key."""
    usual = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    if not usual or len(_words(key)) != 2:
        first, second = jax.random.split(key)
    else:
        first, second = map(_key, threefry.split(_words(key), 2))
    return first, second


def host_generator(key: jax.Array, *names: str) -> np.random.Generator:
    """Return a NumPy generator for float64 draws on the host, seeded by the sub-key of `key` for a name.

    Of several names, each is a sub-key of the one before.
    """
    return np.random.default_rng(_words(reduce(named, names, key)))


def seeded_generator(seed: int, *names: str) -> np.random.Generator:
    """Return `host_generator(seeded(seed), *names)`.

    Keys of the usual kind stay numbers on the way, as JAX takes a millisecond for each.

    Args:
        seed: of a key.
        names: of sub-keys, each of the one before.
    """
    if not _is_usual_seed(seed):
        return host_generator(seeded(seed), *names)
    words = np.array([0, operator.index(seed)], np.uint32)
    for name in names:
        words = threefry.fold_in(words, zlib.crc32(name.encode()))
    return np.random.default_rng([int(word) for word in words])


def _words(key: jax.Array) -> list[int]:
    return [int(word) for word in np.asarray(jax.random.key_data(key)).ravel()]


def digest(*values: ArrayLike | bytes) -> str:
    """Return a short name for arrays and texts; equal ones have equal names, others practically never."""
    total = hashlib.sha256()
    for value in values:
        if not isinstance(value, bytes):
            array = np.ascontiguousarray(value)
            value = f"{array.dtype}{array.shape}".encode() + array.tobytes()
        total.update(len(value).to_bytes(8, "little") + value)
    return total.hexdigest()[:32]
