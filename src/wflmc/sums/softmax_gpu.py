"""Gradients of the softmax model on a GPU, in one kernel that never writes logits to memory.

A kernel's program takes some chains and a device, and goes through the device's rows a few at a time: logits, softmax,
and its products with the rows stay in registers. Tensor cores multiply: a float32 number x, scaled to at most 1, is
high + low, two float16 numbers, and xy is high·high + high·low + low·high: to 2⁻²² of xy, or 2⁻²⁵ of the largest.
Numbers are scaled by the device's own data and by θ alone, so that what a device sends depends on no other device's
data, and is clipped by its own norm: its sensitivity is as before.
"""

import functools
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CHAINS = ROWS = 16
"""Chains of a program, and rows that it takes at a time: the smallest that tensor cores have."""
LARGEST, PROGRAMS = 640, 128
"""Classes times features, filled up to a power of 2, whose sums still fit near registers; and programs that keep a GPU
busy: where there are fewer, separate matrix products are faster."""


def fits(features: jax.Array, columns: jax.Array) -> bool:
    """Return whether the kernel is for these: on a GPU with tensor cores, many chains and few features."""
    if jax.default_backend() != "gpu" or columns.ndim != 3 or features.dtype != jnp.float32:
        return False
    if find_spec("jax.experimental.pallas.triton") is None:  # which is to be replaced some day
        return False
    major = str(getattr(jax.local_devices()[0], "compute_capability", "")).split(".")[0]  # AMD's are words
    few = _width(features.shape[-1]) * columns.shape[1] <= LARGEST
    return major.isdigit() and int(major) >= 8 and few and len(features) * columns.shape[2] >= PROGRAMS * CHAINS


def gradients(features: jax.Array, labels: jax.Array, columns: jax.Array, interpret: bool = False) -> jax.Array:
    """Return Σ (p − 1[label]) uᵀ of every device for all chains, [block, d, C, chain].

    Args:
        features, labels: u[block, n, d], zero where a device has fewer rows, and [block, n].
        columns: θ as [d, C, chain].
        interpret: run the kernel as plain JAX, wherever that is; halves are float32 then, as not every CPU has float16.
    """
    from jax.experimental import pallas as pl  # takes a second to import
    from jax.experimental.pallas import triton

    (devices, rows, dim), (classes, chains) = features.shape, columns.shape[1:]
    width, kind = _width(dim), jnp.float32 if interpret else jnp.float16
    largest = jnp.abs(features).max(1)[..., None, None]
    by_feature = _scale(largest)  # of each device, [block, d, 1, 1]
    theta = jnp.where(largest > 0, columns * by_feature, 0 * columns)  # not a number stays none
    by_chain = _scale(jnp.abs(theta).max((1, 2)))
    wide, more = (0, width - dim), (0, -chains % CHAINS)
    u = jnp.pad(features / by_feature[:, None, :, 0, 0], ((0, 0), (0, -rows % ROWS), wide))
    at = jnp.pad((theta / by_chain[:, None, None]).transpose(0, 2, 3, 1), ((0, 0), (0, 0), more, wide))
    scale = jnp.pad(by_chain * np.float32(1 / np.log(2)), ((0, 0), more))
    of_chains = pl.BlockSpec((1, classes, CHAINS, width), lambda chain, device: (device, 0, chain, 0))
    of_device = pl.BlockSpec((1, u.shape[1], width), lambda chain, device: (device, 0, 0))
    of_scale = pl.BlockSpec((1, CHAINS), lambda chain, device: (device, chain))
    made = pl.pallas_call(
        functools.partial(_program, pl.ds),
        grid=(at.shape[2] // CHAINS, devices),
        in_specs=[of_chains, of_chains, of_scale, of_device, of_device],
        out_specs=of_chains,
        out_shape=jax.ShapeDtypeStruct(at.shape, jnp.float32),  # type: ignore[no-untyped-call]
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=3),
        interpret=interpret,
    )(*_halves(at, kind), scale, *_halves(u, kind))
    # What was seen is the same for all chains: taken off at the end, not from every chain's p.
    hot = jax.nn.one_hot(labels, classes, dtype=features.dtype)
    seen = jnp.einsum("knd,knc->kdc", features, hot, precision="highest")[..., None]
    return made.transpose(0, 3, 1, 2)[:, :dim, :, :chains] * by_feature - seen


def _program(part: Any, at_high: Any, at_low: Any, scale: Any, u_high: Any, u_low: Any, out: Any) -> None:
    """Write Σ p uᵀ[1, C, chain, d] of one device for some chains; arguments are references to blocks."""
    _, classes, chains, width = at_high.shape
    stretch = scale[0, :][:, None]

    def add(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        some = part(index * ROWS, ROWS)
        u = u_high[0, some, :], u_low[0, some, :]
        logits = [_product((at_high[0, c], at_low[0, c]), u, 1) for c in range(classes)]
        largest = functools.reduce(jnp.maximum, logits)
        raised = [jnp.exp2((each - largest) * stretch) for each in logits]
        share = 1 / functools.reduce(jnp.add, raised)
        return tuple(
            total + _product(_halves(each * share, u_high.dtype), u, 0)
            for total, each in zip(sums, raised, strict=True)
        )

    nothing = (jnp.zeros((chains, width), jnp.float32),) * classes
    for c, total in enumerate(jax.lax.fori_loop(0, u_high.shape[1] // ROWS, add, nothing)):
        out[0, c] = total


Halves = tuple[jax.Array, jax.Array]


def _halves(value: jax.Array, kind: Any) -> Halves:
    """Return float32 numbers of at most 1 as sums of two float16 numbers, to 2⁻²² of themselves or 2⁻²⁵.

    Bits are masked, not rounded: no compiler can take that for superfluous.
    """
    bits = jax.lax.bitcast_convert_type(value, jnp.int32) & jnp.int32(-8192)
    high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return _short(high, kind), _short(value - high, kind)


def _short(value: jax.Array, kind: Any) -> jax.Array:
    """Return what float16 makes of numbers, as float16 or as float32."""
    if kind == jnp.float16:
        return value.astype(kind)
    return jnp.where(jnp.abs(value) < 2**-14, jnp.round(value * 2**24) / 2**24, jax.lax.reduce_precision(value, 5, 10))


def _product(left: Halves, right: Halves, axis: int) -> jax.Array:
    """Return the product along the last axis of left[i, j] and an axis of right, in float32."""

    def times(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)

    (a, a_low), (b, b_low) = left, right
    return times(a_low, b) + times(a, b_low) + times(a, b)


def _scale(largest: jax.Array) -> jax.Array:
    """Return powers of 2 above numbers; 1 above zero."""
    return jnp.ldexp(jnp.float32(1), jnp.frexp(largest)[1])


def _width(dim: int) -> int:
    """Return a number of features, filled up to a power of 2."""
    return max(16, 1 << (dim - 1).bit_length())
