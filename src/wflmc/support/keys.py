"""Random keys by name: changing one part of an experiment leaves other draws alone.

The order is always name (data, channel, init, noise), then chain, then round: two
policies share data, channels and noise, and a longer run begins with the draws of the
shorter one. Names must not change: with others, the same seed gives other draws.
"""

import hashlib
import operator
import secrets
import zlib
from functools import reduce
from typing import Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from wflmc.support import threefry
from wflmc.support.errors import Fault, InputError

MAX_WORD = 2**32 - 1
"""The largest number of 32 bits."""
SECRET_BYTES = 8
"""Of the entropy in a secret key: all 64 bits of a key of Threefry-2x32."""
DIGEST_CHARACTERS = 32
"""Hexadecimal digits of a digest, which are 128 bits."""
RAW_KEY_SHAPES = ((2,), (4,))
"""Shapes of JAX's old-style keys, of Threefry-2x32 and of the other generators."""


class KeyOptions(Protocol):
    """JAX's options about keys, whose types JAX does not declare."""

    jax_default_prng_impl: str
    """The kind of key that `jax.random.key` makes."""
    jax_threefry_partitionable: bool
    """Whether keys are split in the way that is JAX's default."""


JAX_OPTIONS = cast(KeyOptions, jax.config)
"""The options as they are when they are read."""


def check_key(key: object, name: str = "key") -> None:
    """Refuse a value that is not one key of JAX's, new-style or old.

    An array of several keys is refused as well. The error shows no number of a list,
    which may be the words of a key.

    Args:
        key: to check.
        name: of the argument, for the error.

    Raises:
        InputError: the value is not one key.
    """
    dtype = getattr(key, "dtype", None)
    shape = getattr(key, "shape", None)
    is_new_style = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    is_one_key = is_new_style and shape == ()
    is_raw_key = dtype == np.uint32 and shape in RAW_KEY_SHAPES
    if is_one_key or is_raw_key:
        return
    may_be_shown = dtype is not None or isinstance(key, int)
    value = key if may_be_shown else Fault("is not a key")
    raise InputError(name, value, "one key, such as jax.random.key(0)")


def secret_key(secret: bytes | None = None) -> jax.Array:
    """Return a key that nobody can guess, drawn from the operating system's entropy.

    A seed has at most 32 bits: somebody who sees samples can try them all within
    minutes, and remove the noise. All 64 bits of a Threefry key are random here. An
    attacker who can recognise the right key needs 2⁶³ tries on average, which is out of
    reach of most, but less than the 128 bits of cryptography.

    Args:
        secret: eight bytes, to make the key of an earlier call again; None draws them.

    Returns:
        A new-style key of Threefry-2x32.
    """
    entropy = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
    words = np.frombuffer(entropy, np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


def named(key: jax.Array, name: str) -> jax.Array:
    """Return the sub-key of a key that belongs to a name.

    It is `jax.random.fold_in(key, CRC-32 of the name)`. That of a usual key is computed
    on the host, so that commands that only plan compile nothing.

    Args:
        key: one key, which may be traced.
        name: such as `data`, `channel`, `init` or `noise`.

    Returns:
        The sub-key, of the kind of the key.

    Raises:
        InputError: `key` is not one key.
    """
    check_key(key)
    number = zlib.crc32(name.encode())
    is_traced_or_raw = isinstance(key, jax.core.Tracer) or key.ndim > 0
    if is_traced_or_raw or len(_words(key)) != 2:
        return jax.random.fold_in(key, number)
    return _key(threefry.fold_in(_words(key), number))


def _key(words: ArrayLike) -> jax.Array:
    """Return the new-style key of two words."""
    # An array of JAX, as the signature asks for, would compile something.
    data = np.asarray(words, np.uint32)
    return jax.random.wrap_key_data(data, impl="threefry2x32")  # type: ignore[arg-type]


def seeded(seed: int) -> jax.Array:
    """Return `jax.random.key(seed)`, without compiling anything for a usual seed.

    A usual seed has 32 bits, and keys are of JAX's default kind, Threefry-2x32. Every
    other seed is passed on to JAX.
    """
    seed = operator.index(seed)
    return _key([0, seed]) if _is_usual_seed(seed) else jax.random.key(seed)


def _is_usual_seed(seed: int) -> bool:
    """Return whether a seed has 32 bits, and keys are of the usual kind."""
    is_usual_kind = JAX_OPTIONS.jax_default_prng_impl == "threefry2x32"
    return is_usual_kind and 0 <= operator.index(seed) <= MAX_WORD


def split(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return `jax.random.split(key)`, without compiling anything for a usual key.

    A usual key has two words, and JAX splits keys in its default, partitionable way.
    """
    is_default = JAX_OPTIONS.jax_threefry_partitionable
    if not is_default or len(_words(key)) != 2:
        first, second = jax.random.split(key)
    else:
        first, second = map(_key, threefry.split(_words(key), 2))
    return first, second


def host_generator(key: jax.Array, *names: str) -> np.random.Generator:
    """Return a NumPy generator for draws in float64 on the host.

    The words of a sub-key seed it, so that draws of different names are independent.

    Args:
        key: one key.
        *names: of sub-keys, each of the one before; none for the key itself.

    Returns:
        A generator of NumPy's default kind.
    """
    sub_key = reduce(named, names, key)
    return np.random.default_rng(_words(sub_key))


def seeded_generator(seed: int, *names: str) -> np.random.Generator:
    """Return `host_generator(seeded(seed), *names)`.

    Keys of the usual kind stay numbers on the way, as JAX takes a millisecond for each.

    Args:
        seed: of a key.
        *names: of sub-keys, each of the one before.

    Returns:
        A generator of NumPy's default kind.
    """
    if not _is_usual_seed(seed):
        return host_generator(seeded(seed), *names)
    words = np.array([0, operator.index(seed)], np.uint32)
    for name in names:
        words = threefry.fold_in(words, zlib.crc32(name.encode()))
    return np.random.default_rng([int(word) for word in words])


def _words(key: jax.Array) -> list[int]:
    words = np.asarray(jax.random.key_data(key)).ravel()
    return [int(word) for word in words]


def digest(*values: ArrayLike | bytes) -> str:
    """Return a short name for the content of arrays and byte strings.

    Equal contents have equal names, others practically never: the name is the beginning
    of their SHA-256, with the type, the shape and the length of each.

    Args:
        *values: arrays, numbers or bytes, in this order.

    Returns:
        32 hexadecimal digits.
    """
    total = hashlib.sha256()
    for value in values:
        if isinstance(value, bytes):
            content = value
        else:
            array = np.ascontiguousarray(value)
            header = f"{array.dtype}{array.shape}".encode()
            content = header + array.tobytes()
        total.update(len(content).to_bytes(8, "little") + content)
    return total.hexdigest()[:DIGEST_CHARACTERS]
