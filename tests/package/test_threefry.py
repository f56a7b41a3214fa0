"""Draws of JAX's generator by NumPy: the same bits as those of `jax.random`."""

import jax
import numpy as np
import pytest

from wflmc.support import threefry
from wflmc.support.keys import host_generator, seeded, seeded_generator

SEEDS = [0, 1, 7, 2**31, 2**32 - 1]


def words(key):
    return np.asarray(jax.random.key_data(key))


@pytest.mark.parametrize("seed", SEEDS)
def test_sub_keys_are_those_of_jax(seed):
    key = jax.random.key(np.uint32(seed))
    folded = threefry.fold_in(words(key), 123456789)
    np.testing.assert_array_equal(folded, words(jax.random.fold_in(key, 123456789)))
    np.testing.assert_array_equal(
        threefry.split(words(key), 3), words(jax.random.split(key, 3))
    )


@pytest.mark.parametrize("seed", [*SEEDS, 2**40])
def test_a_generator_of_a_seed_is_that_of_its_key(seed):
    drawn = seeded_generator(seed, "channel", "csi").random(4)
    expected = host_generator(seeded(seed), "channel", "csi").random(4)
    np.testing.assert_array_equal(drawn, expected)
