"""Gradients of the softmax model on a GPU, by a kernel that writes no logits to memory.

A program of the kernel takes some chains and one device and goes through the device's
rows, a few at a time: logits, softmax, and its products with the rows stay in
registers. Tensor cores multiply: a float32 number x, scaled to at most 1, is high +
low, two float16 numbers, and xy is high·high + high·low + low·high, to 2⁻²² of xy or
2⁻²⁵ of the largest.

Numbers are scaled by the device's own data and by θ alone. What a device sends
therefore depends on no other device's data and is clipped by its own norm: its
sensitivity is that of `softmax.likelihood_gradients`, the plain path that computes the
same.
"""

import functools
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

CHAINS_PER_PROGRAM = 16
"""Chains of a program: the fewest that tensor cores multiply."""
ROWS_PER_STEP = 16
"""Rows that a program takes at a time: the fewest that tensor cores multiply."""
NARROWEST_ROW = 16
"""Features of a row at least: the fewest that tensor cores multiply."""
LARGEST_SUM = 640
"""Classes times features, up to a power of 2, whose sums still fit in registers."""
FEWEST_PROGRAMS = 128
"""Programs that keep a GPU busy; with fewer, separate matrix products are faster."""
OLDEST_TENSOR_CORES = 8
"""NVIDIA's compute capability from which on tensor cores are as assumed here."""
HALF_BITS = -8192
"""Mask of a float32's sign, exponent and first 11 bits; int32 in two's complement."""


class Halves(NamedTuple):
    """Numbers of at most 1 as sums of two float16 numbers."""

    high: jax.Array
    low: jax.Array


def fits(features: jax.Array, columns: jax.Array) -> bool:
    """Return whether the kernel is for these data.

    It is for NVIDIA GPUs with tensor cores, parameters that all devices share, few
    features and classes, and chains times devices enough to keep a GPU busy. All of it
    depends on shapes and the machine, never on values.

    Args:
        features: u[block, n, d].
        columns: θ as [d, C, chain], or [block, d, C, chain].
    """
    if jax.default_backend() != "gpu" or columns.ndim != 3:
        return False
    if features.dtype != jnp.float32 or not _has_tensor_cores():
        return False
    # Triton's part of Pallas is to be replaced some day.
    if find_spec("jax.experimental.pallas.triton") is None:
        return False
    fits_registers = _width(features.shape[-1]) * columns.shape[1] <= LARGEST_SUM
    programs = len(features) * columns.shape[2] / CHAINS_PER_PROGRAM
    return fits_registers and programs >= FEWEST_PROGRAMS


def _has_tensor_cores() -> bool:
    """Return whether the GPU is one of NVIDIA's with tensor cores."""
    capability = getattr(jax.local_devices()[0], "compute_capability", "")
    major = str(capability).split(".")[0]  # AMD's are words
    return major.isdigit() and int(major) >= OLDEST_TENSOR_CORES


def gradients(
    features: jax.Array,
    labels: jax.Array,
    columns: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """Return Σ_n u_n (p_n − 1[label_n])ᵀ of every device for all chains.

    It computes what `softmax.likelihood_gradients` does, to about 2⁻²². Numbers are
    scaled to at most 1 by powers of two, device by device.

    Args:
        features: u[block, n, d], zero where a device has fewer rows.
        labels: classes [block, n].
        columns: θ as [d, C, chain].
        interpret: run the kernel as plain JAX on any machine; halves are float32 then,
            as not every CPU has float16.

    Returns:
        [block, d, C, chain].
    """
    dim, classes, chains = columns.shape
    largest = jnp.abs(features).max(1)[..., None, None]
    feature_scale = _power_above(largest)  # [block, d, 1, 1]
    # Parameters of features that are always zero do not matter; nan stays nan.
    theta = jnp.where(largest > 0, columns * feature_scale, 0 * columns)
    chain_scale = _power_above(jnp.abs(theta).max((1, 2)))  # [block, chain]
    scaled_rows = features / feature_scale[:, None, :, 0, 0]
    scaled_theta = (theta / chain_scale[:, None, None]).transpose(0, 2, 3, 1)
    sums = _weighted_rows(scaled_rows, scaled_theta, chain_scale, interpret)
    expected = sums.transpose(0, 3, 1, 2)[:, :dim, :, :chains] * feature_scale
    # Labels are the same for all chains: taken off at the end, not from each p.
    seen = jax.nn.one_hot(labels, classes, dtype=features.dtype)
    observed = jnp.einsum("knd,knc->kdc", features, seen, precision="highest")
    return expected - observed[..., None]


def _weighted_rows(
    rows: jax.Array,
    theta: jax.Array,
    chain_scale: jax.Array,
    interpret: bool,
) -> jax.Array:
    """Return Σ_n p_n u_nᵀ of scaled data, [block, C, chain', d'].

    Args:
        rows: u[block, n, d].
        theta: θ[block, C, chain, d].
        chain_scale: what θ is to be multiplied by, [block, chain].
        interpret: as of `gradients`.
    """
    from jax.experimental import pallas as pl  # takes a second to import
    from jax.experimental.pallas import triton

    devices, count, dim = rows.shape
    classes, chains = theta.shape[1:3]
    width = _width(dim)
    kind = jnp.float32 if interpret else jnp.float16
    more_features = (0, width - dim)
    more_chains = (0, -chains % CHAINS_PER_PROGRAM)
    more_rows = (0, -count % ROWS_PER_STEP)
    u = jnp.pad(rows, ((0, 0), more_rows, more_features))
    padded_theta = jnp.pad(theta, ((0, 0), (0, 0), more_chains, more_features))
    # The kernel raises 2, not Euler's number, to the power of logits.
    scale = jnp.pad(chain_scale * np.float32(1 / np.log(2)), ((0, 0), more_chains))
    of_chains = pl.BlockSpec(
        (1, classes, CHAINS_PER_PROGRAM, width),
        lambda chain, device: (device, 0, chain, 0),
    )
    of_device = pl.BlockSpec(
        (1, u.shape[1], width),
        lambda chain, device: (device, 0, 0),
    )
    of_scale = pl.BlockSpec(
        (1, CHAINS_PER_PROGRAM),
        lambda chain, device: (device, chain),
    )
    kernel = pl.pallas_call(
        functools.partial(_program, pl.ds),
        grid=(padded_theta.shape[2] // CHAINS_PER_PROGRAM, devices),
        in_specs=[of_chains, of_chains, of_scale, of_device, of_device],
        out_specs=of_chains,
        out_shape=jax.eval_shape(lambda: jnp.zeros(padded_theta.shape, jnp.float32)),
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=3),
        interpret=interpret,
    )
    sums: jax.Array = kernel(*_halves(padded_theta, kind), scale, *_halves(u, kind))
    return sums


def _program(
    pallas_slice: Callable[[Any, int], Any],
    theta_high: Any,
    theta_low: Any,
    scale: Any,
    rows_high: Any,
    rows_low: Any,
    out: Any,
) -> None:
    """Write Σ p uᵀ[1, C, chain, d] of one device for some chains.

    Args:
        pallas_slice: `pallas.ds`: from a start and a length to the index of successive
            entries.
        theta_high: a reference, as all that follow: θ[1, C, chain, d], the high halves.
        theta_low: their low halves.
        scale: [1, chain]; e to the power of a logit is 2 to the power of scale times
            what θ and u give.
        rows_high: u[1, n, d], the high halves.
        rows_low: their low halves.
        out: where the sums go.
    """
    _, classes, chains, width = theta_high.shape
    stretch = scale[0, :][:, None]

    def add(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rows = pallas_slice(index * ROWS_PER_STEP, ROWS_PER_STEP)
        u = Halves(rows_high[0, rows, :], rows_low[0, rows, :])
        thetas = [Halves(theta_high[0, c], theta_low[0, c]) for c in range(classes)]
        logits = [_product(theta, u, 1) for theta in thetas]
        largest = functools.reduce(jnp.maximum, logits)
        raised = [jnp.exp2((logit - largest) * stretch) for logit in logits]
        inverse = 1 / functools.reduce(jnp.add, raised)
        return tuple(
            total + _product(_halves(value * inverse, rows_high.dtype), u, 0)
            for total, value in zip(sums, raised, strict=True)
        )

    zeros = (jnp.zeros((chains, width), jnp.float32),) * classes
    steps = rows_high.shape[1] // ROWS_PER_STEP
    sums = jax.lax.fori_loop(0, steps, add, zeros)
    for c, total in enumerate(sums):
        out[0, c] = total


def _halves(value: jax.Array, kind: DTypeLike) -> Halves:
    """Return float32 numbers of at most 1 as halves, to 2⁻²² of themselves or 2⁻²⁵.

    Bits are masked, not rounded, so that no compiler can take this for superfluous.
    """
    bits = jax.lax.bitcast_convert_type(value, jnp.int32) & jnp.int32(HALF_BITS)
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return Halves(_as_float16(high, kind), _as_float16(value - high, kind))


def _as_float16(value: jax.Array, kind: DTypeLike) -> jax.Array:
    """Return what float16 makes of numbers, as float16 or as float32."""
    if kind == jnp.float16:
        return value.astype(jnp.float16)
    subnormal = jnp.round(value * 2**24) / 2**24
    normal = jax.lax.reduce_precision(value, 5, 10)
    return jnp.where(jnp.abs(value) < 2**-14, subnormal, normal)


def _product(left: Halves, right: Halves, axis: int) -> jax.Array:
    """Return the product of left[i, j] along j and an axis of right, in float32."""

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.dot_general(
            a,
            b,
            (((1,), (axis,)), ((), ())),
            preferred_element_type=jnp.float32,
        )

    low_high = multiply(left.low, right.high)
    high_low = multiply(left.high, right.low)
    return low_high + high_low + multiply(left.high, right.high)


def _power_above(largest: jax.Array) -> jax.Array:
    """Return powers of 2 above numbers; 1 above zero."""
    return jnp.ldexp(jnp.float32(1), jnp.frexp(largest)[1])


def _width(dim: int) -> int:
    """Return a number of features, filled up to a power of 2."""
    return max(NARROWEST_ROW, 1 << (dim - 1).bit_length())
