"""Keys computed on the host are JAX's own."""

from __future__ import annotations

import zlib

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wflmc.sampling import chain_keys
from wflmc.support.keys import host_generator, named, seeded


def folded(key, *names):
    """The sub-key as JAX makes it."""
    for name in names:
        key = jax.random.fold_in(key, zlib.crc32(name.encode()))
    return key


@given(st.integers(0, 2**32 - 1), st.text(max_size=9), st.text(max_size=9))
def test_sub_keys_on_the_host_are_those_of_jax(seed, first, second):
    key = jax.random.key(seed)
    assert seeded(seed) == key
    expected = folded(key, first, second)
    assert named(named(key, first), second) == expected
    generator = np.random.default_rng(
        np.asarray(jax.random.key_data(expected)).tolist()
    )
    drawn = generator.integers(2**62, size=3)
    np.testing.assert_array_equal(
        host_generator(seeded(seed), first, second).integers(2**62, size=3), drawn
    )


def test_sub_keys_in_compiled_functions_are_the_same():
    key = jax.random.key(7)
    assert (
        jax.jit(lambda key: named(key, "noise"))(key)
        == named(key, "noise")
        == folded(key, "noise")
    )
    keys = chain_keys(key, np.arange(3), "init")
    assert all(
        keys
        == jax.numpy.stack(
            [jax.random.fold_in(named(key, "init"), i) for i in range(3)]
        )
    )


@pytest.mark.parametrize(
    "key", [jax.random.PRNGKey(3), jax.random.key(3, impl="rbg")], ids=["old", "rbg"]
)
def test_keys_of_other_kinds_have_sub_keys_too(key):
    assert np.all(named(key, "data") == folded(key, "data"))
    words = np.asarray(jax.random.key_data(named(key, "data"))).tolist()
    assert host_generator(key, "data").random() == np.random.default_rng(words).random()
