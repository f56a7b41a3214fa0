"""Squares that float32 does not hold: a norm that is too small, or infinite, lets a record through unclipped.

The attacker is one who may choose a record, or a clipping threshold. Squares of numbers below 1e-19 are zero, squares
of numbers above 1.8e19 are infinite, and a clip that trusts such a norm sends a multiple of what is claimed: 28 to
2,866 times as much for softmax records of tiny residuals at c = 1e-12 to 1e-14, 1,030 times as much for as many records
at c = 1.9e16, and 3e38 times as much for one gradient of a custom model that is nearly as large as float32 allows.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc.privacy.promise import CLIPS
from wflmc.support.errors import InputError

from ..conftest import FULL

FEW_ROWS = 3
MANY_ROWS = 9
PAIRED_ROWS = 1030
"""Records of a device: of a path for few rows, of the usual one, and of one that adds pairs of floats."""
OVERFLOWING_ROWS = 20_000
"""Records whose sum is longer than 1.8e19 where each is as long as the largest clip."""
CLIPS_TRIED = np.array([1.01e-15, 1e-14, 1e-12, 1e-6, 1.0, 1e6, 1e12, 9.9e14])
SIZES = (
    1e-40,
    1e-38,
    1e-30,
    1e-20,
    2e-19,
    1e-12,
    1e-5,
    1.0,
    1e5,
    1e9,
    1e13,
    1.7e19,
    1e20,
    1e28,
    1e38,
    3e38,
)
"""Of a record's numbers: the smallest are subnormal."""
LOGIT_GAPS = (0.0, 20.0, 43.0, 45.0, 60.0, 86.0)
"""By which the right class leads: residuals from 0.5 down to 1e-38."""
DIRECTION = np.array([0.6, -0.48, 0.64])
ROUNDING = 1e-6


@jax.jit
def _totals(posterior, theta, clips, example_clips):
    def chain(clip, example_clip):
        return posterior.unrounded_sum(
            theta, jnp.ones(1), clip, None, example_clip
        ).total

    return jax.vmap(chain)(clips, example_clips)


def sent(posterior, theta, clips, example_clips=None):
    """What a device sends at each of some clips, [clip, m], in float64."""
    limits = [
        None if values is None else np.float32(values)[:, None]
        for values in (clips, example_clips)
    ]
    return _totals(posterior, np.asarray(theta, np.float32), *limits).double


def _prior(theta):
    return -0.5 * jnp.sum(theta**2)


def _linear_cost(theta, example):
    return theta @ example


def _layer_cost(weights, example):
    return -jnp.sum((example[:2] @ weights) * example[2:])


class GaussianPath:
    """Records (u, v) of a linear regression, whose gradient at zero is −v u."""

    def __init__(self, rows, by_record):
        features = np.random.default_rng(0).standard_normal((rows, 3))
        posterior = wflmc.gaussian_regression(
            jax.random.key(0), 1, X=features, y=features[:, 0]
        )
        self.posterior = posterior.on_accelerator(1, 2.0**30, by_record)
        self.theta = np.zeros(3)

    def records(self):
        for size in SIZES:
            for target in SIZES[:: 1 if FULL else 3]:
                yield size, target, self.theta

    def holding(self, size, target, rows=slice(1)):
        features = np.zeros(self.posterior.features.shape, np.float32)
        outcomes = np.zeros(self.posterior.target.shape, np.float32)
        features[0, rows] = size * DIRECTION
        outcomes[0, rows] = -target
        return dataclasses.replace(self.posterior, features=features, target=outcomes)


class GaussianDevicePath(GaussianPath):
    """The same, as a device's sum of v u."""

    def holding(self, size, target, rows=slice(1)):
        del rows
        linear = np.clip(size * target * DIRECTION, -3e38, 3e38).astype(np.float32)
        return dataclasses.replace(
            self.posterior, hessian=0 * self.posterior.hessian, linear=linear[None]
        )


class SoftmaxPath:
    """Records of a softmax regression of three classes, which θ classifies right, by a gap of logits."""

    def __init__(self, rows, by_record):
        features = np.ones((rows, 3))
        labels = np.zeros(rows, int)
        self.posterior = wflmc.softmax_regression(
            jax.random.key(0), 1, X=features, y=labels, classes=3, prior_std=1e9
        )
        self.by_record = by_record

    def records(self):
        for size in SIZES:
            for gap in LOGIT_GAPS[:: 1 if FULL else 2] if size < 1 else LOGIT_GAPS:
                if gap / size < 1e18:
                    yield size, gap, np.pad([gap / size], (0, 8))

    def holding(self, size, gap, rows=slice(1)):
        del gap
        features = np.zeros(self.posterior.features.shape)
        features[0, rows, 0] = np.float32(size)
        return dataclasses.replace(self.posterior, features=features).on_accelerator(
            1, 2.0**30, self.by_record
        )


class CustomPath:
    """Records of a model of one's own whose gradient is the record."""

    likelihood = staticmethod(_linear_cost)
    initial = np.zeros(3)
    width = 3

    def __init__(self, rows, by_record):
        data = np.ones((rows, self.width), np.float32)
        posterior = wflmc.posterior_from(
            self.likelihood,
            _prior,
            data,
            initial=self.initial,
            devices=1,
            partition="blocks",
            mu=1.0,
            L=1.0,
        )
        self.posterior = posterior.on_accelerator(1, 2.0**30, by_record)
        self.theta = np.zeros(self.initial.size)

    def records(self):
        for size in SIZES:
            yield size, 1.0, self.theta

    def holding(self, size, other, rows=slice(1)):
        data = np.zeros(self.posterior.data.shape, np.float32)
        data[0, rows] = self.example(size, other)
        return dataclasses.replace(self.posterior, data=data)

    def example(self, size, _):
        return size * DIRECTION


class LayerPath(CustomPath):
    """Records whose gradient is a product of two vectors, as in a dense layer."""

    likelihood = staticmethod(_layer_cost)
    initial = np.zeros((2, 3))
    width = 5

    def records(self):
        for size in SIZES:
            for other in SIZES[:: 1 if FULL else 3]:
                yield size, other, self.theta

    def example(self, size, other):
        return np.concatenate([size * DIRECTION[:2], other * DIRECTION])


PATHS = {
    "gaussian device": (GaussianDevicePath, MANY_ROWS, False),
    "gaussian records": (GaussianPath, MANY_ROWS, True),
    "gaussian paired records": (GaussianPath, PAIRED_ROWS, True),
    "softmax device": (SoftmaxPath, MANY_ROWS, False),
    "softmax records": (SoftmaxPath, MANY_ROWS, True),
    "softmax device of few rows": (SoftmaxPath, FEW_ROWS, False),
    "softmax records of few rows": (SoftmaxPath, FEW_ROWS, True),
    "custom device": (CustomPath, MANY_ROWS, False),
    "custom records": (CustomPath, MANY_ROWS, True),
    "custom paired records": (CustomPath, PAIRED_ROWS, True),
    "layer records": (LayerPath, MANY_ROWS, True),
}
SLOW = ("custom paired records", "layer records")
"""Paths whose parts others have as well; `make test-full` takes them."""


@pytest.fixture(scope="module")
def path_named():
    paths = {}

    def path(name):
        if name not in paths:
            kind, rows, by_record = PATHS[name]
            paths[name] = kind(rows, by_record)
        return paths[name]

    return path


@pytest.mark.parametrize("name", [name for name in PATHS if FULL or name not in SLOW])
def test_what_one_record_adds_is_no_longer_than_its_clip(name, path_named):
    """Alone on a device whose clip is larger; or a device as a whole, by the device's clip."""
    path = path_named(name)
    by_record = PATHS[name][2]
    limits = (
        (np.minimum(1e3 * CLIPS_TRIED, CLIPS_TRIED[-1]), CLIPS_TRIED)
        if by_record
        else (CLIPS_TRIED,)
    )
    empty = path.holding(0.0, 0.0)
    reached = np.zeros(CLIPS_TRIED.size)
    for size, other, theta in path.records():
        added = sent(path.holding(size, other), theta, *limits)
        if by_record:
            added = added - sent(empty, theta, *limits)
        norms = np.linalg.norm(added, axis=1)
        assert np.all(norms <= CLIPS_TRIED * (1 + ROUNDING)), (
            size,
            other,
            norms / CLIPS_TRIED,
        )
        reached = np.maximum(reached, norms / CLIPS_TRIED)
    # Some record is as long as its clip, but for the largest clips.
    assert np.all(reached[:-2] > 0.99), reached


def test_many_records_are_no_longer_than_the_clip_of_their_device():
    """Each is within its own clip; the square of their sum overflows."""
    path = GaussianPath(OVERFLOWING_ROWS, by_record=True)
    example_clips = np.full_like(CLIPS_TRIED, CLIPS_TRIED[-1])
    for size in (1e9, 1e15):
        norms = np.linalg.norm(
            sent(
                path.holding(1.0, size, slice(None)),
                path.theta,
                CLIPS_TRIED,
                example_clips,
            ),
            axis=1,
        )
        assert np.all(norms <= CLIPS_TRIED * (1 + ROUNDING)), (
            size,
            norms / CLIPS_TRIED,
        )


@pytest.mark.parametrize(
    "name", ["gaussian records", "softmax records of few rows", "custom records"]
)
def test_a_record_moves_a_device_at_its_clip_by_no_more_than_is_claimed(
    name, path_named
):
    """A device is clipped by projection, however long its gradient is: also where an absurd prior makes it long."""
    path = path_named(name)
    clips = np.repeat([1e-9, 1e-3, 1.0, 9e14], 2)
    example_clips = clips / np.tile([100.0, 2.0], 4)
    claims = example_clips * (
        1 + path.posterior.rounding(clips[:1], example_clips[:1]).total
    )
    for theta in (0.0, 1e22):
        position = np.full(path.posterior.dim, theta)
        for crowd_size in 2 * example_clips[2 :: 1 if FULL else 2]:
            crowd = path.holding(crowd_size, 1.0, slice(1, None))
            before = sent(crowd, position, clips, example_clips)
            for size in [size for size in SIZES[3:] if size * theta < 1e37][
                :: 1 if FULL else 3
            ]:
                after = sent(
                    with_record(crowd, path.holding(size, 1.0)),
                    position,
                    clips,
                    example_clips,
                )
                changes = np.linalg.norm(after - before, axis=1)
                assert np.all(changes <= claims * (1 + ROUNDING)), (
                    theta,
                    crowd_size,
                    size,
                    changes / claims,
                )


def with_record(posterior, other):
    """The same posterior, with the first record of another one."""
    names = [
        name
        for name in ("features", "target", "norms", "data")
        if getattr(other, name, None) is not None
    ]
    held = {
        name: jnp.asarray(getattr(posterior, name))
        .at[0, 0]
        .set(getattr(other, name)[0, 0])
        for name in names
    }
    return dataclasses.replace(posterior, **held)


@pytest.mark.parametrize("key", ["clip", "example_clip"])
@pytest.mark.parametrize("value", [0.99e-15, 1.01e15, 1.9e16, 1e29, np.inf, np.nan])
def test_clips_outside_of_that_range_are_refused(key, value):
    clips = {"clip": 1.0, "example_clip": 1.0, key: value}
    with pytest.raises(InputError) as caught:
        wflmc.Privacy(1, 1e-5, unit="record", **clips)
    assert caught.value.key == key


def test_the_range_is_the_one_that_was_tried():
    assert (CLIPS_TRIED[0], CLIPS_TRIED[-1]) == pytest.approx(
        (CLIPS.above, CLIPS.below), rel=0.02
    )


def test_records_whose_sum_may_have_no_norm_are_refused():
    """More than 2⁵⁸ in all: a device would fall silent for one neighbour and not for the other."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), 1, examples=2000, dim=2)
    clip = np.array([9e14])
    assert posterior.rounding(clip, np.array([1e14])).total < 0.05
    with pytest.raises(InputError) as caught:
        posterior.rounding(clip, np.array([8e14]))
    assert caught.value.key == "example_clip"
