"""The GPU's kernel of the softmax model against plain JAX, as JAX itself runs it on any machine."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wflmc.sums import softmax as softmax_sums
from wflmc.sums import softmax_gpu
from wflmc.sums.prior import DevicePrior

from ..conftest import FULL

HERE = jax.default_backend() != "gpu"
"""Whether the kernel is interpreted; a GPU runs it as it is."""
gradients = jax.jit(functools.partial(softmax_gpu.gradients, interpret=HERE))
by_plain_jax = jax.jit(
    lambda *data_and_theta: softmax_sums.device_gradients(
        softmax_sums.LabelledRows(*data_and_theta[:2]),
        DevicePrior(0.0),
        data_and_theta[2],
    )
)


@pytest.mark.parametrize(
    ("devices", "rows", "dim", "classes", "chains", "size"),
    [
        (1, 16, 1, 2, 1, 1.0),
        (3, 21, 17, 3, 33, 5.0),
        *([(2, 40, 30, 10, 20, 0.3), (2, 9, 16, 10, 16, 0.0)] if FULL else []),
    ],
)
def test_kernel_agrees_with_plain_jax(devices, rows, dim, classes, chains, size):
    generator = np.random.default_rng(0)
    spread = 10.0 ** generator.uniform(-3, 2, dim)  # features of very different sizes
    u = (generator.standard_normal((devices, rows, dim)) * spread).astype(np.float32)
    u[:, -2:] = 0  # as where devices hold fewer examples
    labels = generator.integers(0, classes, (devices, rows))
    theta = (
        generator.standard_normal((dim, classes, chains)) / spread[:, None, None] * size
    ).astype(np.float32)
    theta *= 10.0 ** generator.uniform(-4, 0, chains).astype(np.float32)
    actual = gradients(jnp.asarray(u), jnp.asarray(labels), jnp.asarray(theta))
    p = jax.nn.softmax(
        np.einsum("knd,dcx->kncx", u.astype(float), theta.astype(float)),
        axis=2,
    )
    hot = np.eye(classes)[labels][..., None]
    residual = np.asarray(p, float) - hot
    expected = np.einsum("knd,kncx->kdcx", u.astype(float), residual)
    by_xla = by_plain_jax(jnp.asarray(u), jnp.asarray(labels), jnp.asarray(theta))
    # The magnitude that rounding is relative to.
    limit = np.einsum("knd,kncx->kdcx", np.abs(u.astype(float)), p + hot)
    assert np.all(np.abs(actual - expected) <= 1e-5 * limit + 1e-30)
    assert np.all(np.abs(np.asarray(by_xla) - expected) <= 1e-5 * limit + 1e-30)


def test_what_is_not_a_number_stays_none():
    u, labels = jnp.ones((1, 16, 4)), jnp.zeros((1, 16), int)
    theta = jnp.ones((4, 2, 3)).at[0, 0, 1].set(jnp.nan)
    actual = np.asarray(gradients(u, labels, theta))
    assert np.isnan(actual[..., 1]).all()
    assert np.isfinite(actual[..., [0, 2]]).all()


def test_gradients_of_a_device_depend_on_no_other():
    """Also where float16 numbers are as coarse as one device's data would make them for all."""
    generator = np.random.default_rng(1)
    u, labels = (
        generator.standard_normal((3, 20, 5)).astype(np.float32),
        generator.integers(0, 3, (3, 20)),
    )
    theta = jnp.asarray(generator.standard_normal((5, 3, 4)), jnp.float32)
    before = gradients(jnp.asarray(u), jnp.asarray(labels), theta)
    u[0] *= 1e8
    after = gradients(jnp.asarray(u), jnp.asarray(labels), theta)
    np.testing.assert_array_equal(before[1:], after[1:])
    assert not np.array_equal(before[0], after[0])


def test_parameters_of_features_that_are_always_zero_do_no_harm():
    generator = np.random.default_rng(2)
    u, labels = (
        generator.standard_normal((2, 20, 5)).astype(np.float32),
        jnp.zeros((2, 20), int),
    )
    u[:, :, 3] = 0
    theta = generator.standard_normal((5, 3, 4)).astype(np.float32)
    expected = gradients(jnp.asarray(u), labels, jnp.asarray(theta))
    theta[3] *= 1e8
    actual = gradients(jnp.asarray(u), labels, jnp.asarray(theta))
    np.testing.assert_array_equal(actual, expected)


def test_kernel_is_translated_for_gpus_without_one():
    shapes = (30, 40, 30), (30, 40), (30, 10, 100)
    arguments = [
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in zip(shapes, ("f4", "i4", "f4"), strict=True)
    ]
    traced = jax.jit(softmax_gpu.gradients).trace(*arguments)
    try:
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    except RuntimeError as error:
        if "GPU" not in str(error):
            raise
        pytest.skip(
            f"no GPU, and jax {jax.__version__} translates kernels for one that it sees alone"
        )
    assert "triton" in text
