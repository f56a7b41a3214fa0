"""Keys computed on the host are JAX's own."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wflmc.keys import host_generator, named, seeded


@given(st.integers(0, 2**32 - 1), st.text(max_size=9), st.text(max_size=9))
def test_sub_keys_on_the_host_are_those_of_jax(seed, first, second):
    key = jax.random.key(seed)
    assert seeded(seed) == key
    words = np.asarray(jax.random.key_data(named(named(key, first), second))).tolist()
    wanted = np.random.default_rng(words).integers(2**62, size=3)
    np.testing.assert_array_equal(host_generator(seeded(seed), first, second).integers(2**62, size=3), wanted)


@pytest.mark.parametrize("key", [jax.random.PRNGKey(3), jax.random.key(3, impl="rbg")], ids=["old", "rbg"])
def test_keys_of_other_kinds_have_sub_keys_too(key):
    words = np.asarray(jax.random.key_data(named(key, "data"))).tolist()
    assert host_generator(key, "data").random() == np.random.default_rng(words).random()
