"""Draws of JAX's default generator, computed by NumPy.

`jax.random` compiles a program for every shape, of which each takes up to half a
second: more than the draws of a pilot or a command. These functions return the same
bits. Normal draws differ from JAX's in the last digits alone, by which the inverse of
the error function is rounded.

A key is its two words, as `jax.random.key_data` returns them.
"""

from typing import TypeAlias

import numpy as np
import scipy  # its parts are imported when used
from numpy.typing import ArrayLike, NDArray

WordPairs: TypeAlias = NDArray[np.uint32]
"""Keys, or blocks of random bits, as two words each, [..., 2]."""

PARITY = np.uint32(0x1BD11BDA)
"""Of the key schedule (Salmon et al., 2011)."""
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
"""Of the rounds of Threefry-2x32, in groups of four that take turns."""
GROUPS = 5
"""Of four rounds each: 20 rounds, as JAX has them."""
MANTISSA_BITS = np.finfo(np.float64).nmant
NUMBERS_AT_A_TIME = 2**16
"""Of normal draws: their intermediate results fit into a cache."""


def threefry(key: ArrayLike, counts: ArrayLike) -> WordPairs:
    """Return blocks of Threefry-2x32 with its 20 rounds (Salmon et al., 2011).

    Args:
        key: two words, [..., 2].
        counts: two words for every block, [..., 2], of any shape that broadcasts.

    Returns:
        Two words for every block, [..., 2].
    """
    words = _blocks(np.asarray(key, np.uint32), np.asarray(counts, np.uint32))
    return np.concatenate(words, axis=-1)


def _blocks(key: WordPairs, counts: WordPairs) -> tuple[WordPairs, WordPairs]:
    """Return the first and the second word of every block, [..., 1] each."""
    first = key[..., :1]
    second = key[..., 1:]
    schedule = (first, second, first ^ second ^ PARITY)
    left = counts[..., :1] + schedule[0]
    right = counts[..., 1:] + schedule[1]
    shifted = np.empty_like(right)
    for group in range(GROUPS):
        for rotation in ROTATIONS[group % 2]:
            left += right
            np.right_shift(right, 32 - rotation, out=shifted)
            right <<= rotation
            right |= shifted
            right ^= left
        left += schedule[(group + 1) % 3]
        right += schedule[(group + 2) % 3] + np.uint32(group + 1)
    return left, right


def fold_in(key: ArrayLike, number: int) -> WordPairs:
    """Return the words of `jax.random.fold_in(key, number)`.

    Args:
        key: two words, [..., 2].
        number: from 0 to 2³² − 1.

    Returns:
        The two words of the new key, [..., 2].
    """
    return threefry(key, [0, number])


def split(key: ArrayLike, count: int) -> WordPairs:
    """Return the words of `jax.random.split(key, count)`.

    It is the split of JAX's partitionable generator, its default.

    Args:
        key: two words, [2].
        count: how many keys.

    Returns:
        The two words of every new key, [count, 2].
    """
    return threefry(key, _counts(count))


def normals(keys: WordPairs, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return `jax.random.normal` of keys[n, 2] in float64, up to rounding, [n, *shape].

    Args:
        keys: the words of every key.
        shape: of the draws of one key.

    Returns:
        Independent draws from the standard normal distribution. They differ from JAX's
        in the last digits alone. No keys make an empty array.
    """
    size = int(np.prod(shape))
    keys_at_a_time = max(1, NUMBERS_AT_A_TIME // max(1, size))
    parts = [np.zeros((0, size))]
    for start in range(0, len(keys), keys_at_a_time):
        batch = keys[start : start + keys_at_a_time]
        parts.append(_normals(batch, size))
    return np.concatenate(parts).reshape(len(keys), *shape)


def _normals(keys: WordPairs, size: int) -> NDArray[np.float64]:
    """Return so many normal draws of every key, [n, size]."""
    high, low = _blocks(keys[:, None, :], _counts(size))
    bits = high[..., 0].astype(np.uint64)
    bits <<= 32
    bits |= low[..., 0]
    # Random digits of a number from 1 to 2, as JAX makes uniform draws.
    bits >>= 64 - MANTISSA_BITS
    bits |= np.ones((), np.float64).view(np.uint64)
    draws = bits.view(np.float64)
    draws -= 1.0
    lowest = np.nextafter(-1.0, 0.0)
    draws *= 1.0 - lowest
    draws += lowest
    np.maximum(draws, lowest, out=draws)
    scipy.special.erfinv(draws, out=draws)
    draws *= np.sqrt(2.0)
    return draws


def _counts(count: int) -> WordPairs:
    """Return the numbers from 0 on as high and low words, [count, 2]."""
    numbers = np.arange(count, dtype=np.uint64)
    high = numbers >> np.uint64(32)
    low = numbers & np.uint64(2**32 - 1)
    return np.stack([high, low], axis=-1).astype(np.uint32)
