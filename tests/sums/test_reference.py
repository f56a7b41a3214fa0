"""Every fast path of clipped sums against its plain float64 reference."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc.sums import reference
from wflmc.sums.constants import MAX_ROWS_OF_SHORT_DEVICE

from ..conftest import FULL

CHAINS = (1, 4)
DIM = 3
CLASSES = 4
TOLERANCE = 2e-4
SIZES = {
    "short devices": (5, 20),
    "one block of records": (5, 100),
    "more than 128 devices": (130, 1300),
    "several blocks of records": (2, 1200),
    "clipping in pairs": (2, 2400),
    "a loop over blocks": (1, 5000),
    "rows that fill no whole step": (1, 1301),
}
"""Devices and records of all of them."""


class GaussianCase:
    """A linear regression."""

    def __init__(self, devices, records):
        self.posterior = wflmc.gaussian_regression(
            jax.random.key(0),
            devices,
            examples=records,
            dim=DIM,
        )

    def record_gradients(self, theta):
        posterior = self.posterior
        rows = zip(posterior.features, posterior.target, posterior.sizes, strict=True)
        gradients = reference.gaussian_record_gradients
        return [gradients(theta, u[:size], v[:size]) for u, v, size in rows]

    def device_gradients(self, theta):
        posterior = self.posterior
        return reference.gaussian_device_gradients(
            theta,
            posterior.features,
            posterior.target,
            theta / posterior.devices,
        )


class SoftmaxCase:
    """A softmax regression."""

    chains_last = False
    feature_padding = 0

    def __init__(self, devices, records):
        self.posterior = wflmc.softmax_regression(
            jax.random.key(0),
            devices,
            examples=records,
            dim=DIM,
            classes=CLASSES,
        )

    def record_gradients(self, theta):
        posterior = self.posterior
        rows = zip(posterior.features, posterior.labels, posterior.sizes, strict=True)
        gradients = reference.softmax_record_gradients
        return [gradients(theta, u[:size], y[:size], CLASSES) for u, y, size in rows]

    def device_gradients(self, theta):
        posterior = self.posterior
        return reference.softmax_device_gradients(
            theta,
            posterior.features,
            posterior.labels,
            classes=CLASSES,
            prior_share=theta / posterior.devices,
        )


class ChainsLastCase(SoftmaxCase):
    """The same in the layout for accelerators with many chains."""

    chains_last = True


class FilledUpCase(ChainsLastCase):
    """The same, with rows of features that are filled up with zeros."""

    feature_padding = 5


def log_likelihood(parameters, record):
    return jnp.tanh(record @ parameters)


def log_prior(parameters):
    return -0.5 * jnp.sum(parameters**2)


class CustomCase:
    """A custom model whose gradients are known: −(1 − tanh²(xθ)) x."""

    def __init__(self, devices, records):
        generator = np.random.default_rng(3)
        data = generator.standard_normal((records, DIM)).astype(np.float32)
        self.posterior = wflmc.posterior_from(
            log_likelihood,
            log_prior,
            data,
            initial=np.zeros(DIM),
            devices=devices,
            mu=1.0,
            L=10.0,
        )

    def record_gradients(self, theta):
        posterior = self.posterior
        gradients = []
        for rows, size in zip(posterior.data, posterior.sizes, strict=True):
            records = np.asarray(rows[:size], float)
            slopes = 1 - np.tanh(records @ theta) ** 2
            gradients.append(-slopes[:, None] * records)
        return gradients

    def device_gradients(self, theta):
        prior_gradient = theta / self.posterior.devices
        return [
            records.sum(0) + prior_gradient for records in self.record_gradients(theta)
        ]


MODELS = {
    "gaussian": GaussianCase,
    "softmax": SoftmaxCase,
    "softmax, chains last": ChainsLastCase,
    "softmax, rows filled up": FilledUpCase,
    "custom": CustomCase,
}


COMBINATIONS = [
    (model, size, chains) for model in MODELS for size in SIZES for chains in CHAINS
]
"""Models, sizes and numbers of chains."""
if not FULL:
    # Softmax models have a path of their own for every size, other models for few.
    FEW_SIZES = {
        "gaussian": ("more than 128 devices", "clipping in pairs"),
        "softmax": tuple(SIZES),
        "softmax, chains last": ("several blocks of records", "clipping in pairs"),
        "softmax, rows filled up": ("one block of records", "a loop over blocks"),
        "custom": ("short devices", "rows that fill no whole step"),
    }
    COMBINATIONS = [
        (model, size, 4) for model, sizes in FEW_SIZES.items() for size in sizes
    ] + [("softmax", "short devices", 1), ("softmax", "a loop over blocks", 1)]


@pytest.fixture(scope="module")
def case_named():
    cases = {}

    def case(model, size):
        if (model, size) not in cases:
            cases[model, size] = MODELS[model](*SIZES[size])
        return cases[model, size]

    return case


def fast_sums(case, theta, weight, clip, example_clip):
    """The sums of all chains by the fast path, [chain, m]."""
    by_record = example_clip is not None
    ready = case.posterior.on_accelerator(len(theta), 2.0**30, by_record)
    if getattr(case, "chains_last", False):
        is_short = ready.features.shape[1] <= MAX_ROWS_OF_SHORT_DEVICE
        padding = 0 if is_short else case.feature_padding
        features = np.pad(ready.features, [(0, 0), (0, 0), (0, padding)])
        ready = replace(
            ready,
            chains_last=True,
            features=features,
            feature_padding=padding,
        )

    @jax.jit
    def of_chains(model, places):
        def of_chain(place):
            return model.unrounded_sum(
                place,
                weight,
                clip,
                example_clip=example_clip,
            ).total

        return jax.vmap(of_chain)(places)

    return of_chains(ready, theta.astype(np.float32)).double


def inputs_of(case, chains, seed):
    """θ of some chains, weights with a zero, and a clip that half the devices meet."""
    posterior = case.posterior
    generator = np.random.default_rng(seed)
    theta = 0.5 * generator.standard_normal((chains, posterior.dim))
    weight = generator.uniform(0.2, 1, posterior.devices)
    if posterior.devices > 1:
        weight[0] = 0.0
    norms = np.linalg.norm(case.device_gradients(theta[0]), axis=1)
    return theta, weight, np.full(posterior.devices, float(np.median(norms)))


@pytest.mark.parametrize(("model", "size", "chains"), COMBINATIONS)
def test_devices_are_clipped_as_by_definition(model, size, chains, case_named):
    case = case_named(model, size)
    theta, weight, clip = inputs_of(case, chains, seed=1)
    actual = fast_sums(case, theta, weight, clip, None)
    for chain, place in enumerate(theta):
        expected = definition(case, place, weight, clip)
        scale = float(weight @ clip)
        np.testing.assert_allclose(actual[chain], expected, atol=TOLERANCE * scale)


def definition(case, place, weight, clip):
    """The sum where whole devices are clipped; softmax devices of few rows have a rule of their own."""
    posterior = case.posterior
    is_softmax = isinstance(posterior, wflmc.posterior.SoftmaxPosterior)
    if is_softmax and posterior.features.shape[1] <= MAX_ROWS_OF_SHORT_DEVICE:
        return reference.short_device_clipped_sum(
            case.record_gradients(place),
            place / posterior.devices,
            weight=weight,
            clip=clip,
        )
    return reference.device_clipped_sum(case.device_gradients(place), weight, clip)


@pytest.mark.parametrize(("model", "size", "chains"), COMBINATIONS)
def test_records_are_clipped_as_by_definition(model, size, chains, case_named):
    case = case_named(model, size)
    theta, weight, clip = inputs_of(case, chains, seed=2)
    example_clip = np.full(case.posterior.devices, 0.6)
    actual = fast_sums(case, theta, weight, clip, example_clip)
    for chain, place in enumerate(theta):
        expected = reference.record_clipped_sum(
            case.record_gradients(place),
            place / case.posterior.devices,
            weight=weight,
            clip=clip,
            example_clip=example_clip,
        )
        scale = float(weight @ clip)
        np.testing.assert_allclose(actual[chain], expected, atol=TOLERANCE * scale)


@pytest.mark.parametrize("size", ["several blocks of records", "a loop over blocks"])
@pytest.mark.parametrize("model", [ChainsLastCase, FilledUpCase])
def test_steps_of_many_chains_are_taken_in_turn(model, size):
    """The sums of all steps of a device would be larger than its features."""
    devices, records = SIZES[size]
    case = model(devices, records)
    chains = 80
    theta, weight, clip = inputs_of(case, chains, seed=5)
    example_clip = np.full(devices, 0.6)
    actual = fast_sums(case, theta, weight, clip, example_clip)
    for chain in (0, chains - 1):
        expected = reference.record_clipped_sum(
            case.record_gradients(theta[chain]),
            theta[chain] / devices,
            weight=weight,
            clip=clip,
            example_clip=example_clip,
        )
        scale = float(weight @ clip)
        np.testing.assert_allclose(actual[chain], expected, atol=TOLERANCE * scale)


@pytest.mark.parametrize("records", [3, 12])
def test_devices_that_fill_no_whole_group(records):
    """131 devices come one by one, and no group of up to 128 of them divides 131."""
    case = SoftmaxCase(131, 131 * records)
    theta, weight, clip = inputs_of(case, chains=1, seed=3)
    place = theta[0].astype(np.float32)
    actual = clipped_sum(case.posterior, place, weight, clip, None)[0]
    gradients = case.device_gradients(theta[0])
    expected = reference.device_clipped_sum(gradients, weight, clip)
    scale = float(weight @ clip)
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE * scale)


@pytest.mark.parametrize("by_record", [False, True])
@pytest.mark.parametrize(("devices", "records"), [(30, 1200), (3, 3000), (40, 100)])
def test_softmax_blocks_depend_on_shapes_alone(devices, records, by_record):
    """Other data of the same shapes are cut in the same way, however large they are."""
    case = SoftmaxCase(devices, records)
    other_features = 1e6 * case.posterior.features[:, ::-1] ** 3
    other_labels = (case.posterior.labels + 1) % CLASSES
    other = replace(case.posterior, features=other_features, labels=other_labels)
    ready = case.posterior.on_accelerator(4, 2.0**30, by_record)
    other_ready = other.on_accelerator(4, 2.0**30, by_record)
    assert (ready.block, ready.example_block) == (
        other_ready.block,
        other_ready.example_block,
    )
    assert ready.chains_last == other_ready.chains_last
    assert ready.features.shape == other_ready.features.shape


@pytest.mark.parametrize("rows_per_step", [30, 75, 150] if FULL else [30, 150])
@pytest.mark.parametrize("by_record", [False, True])
def test_softmax_sums_do_not_depend_on_steps(rows_per_step, by_record):
    """Every device received a θ of its own, and its 150 rows are taken in steps."""
    devices = 6
    case = SoftmaxCase(devices, devices * 150)
    generator = np.random.default_rng(4)
    theta = generator.standard_normal((devices, case.posterior.dim)).astype(np.float32)
    weight = generator.uniform(0.2, 1, devices).astype(np.float32)
    clip = np.full(devices, 40.0, np.float32)
    example_clip = np.full(devices, 0.6, np.float32) if by_record else None
    ready = case.posterior.on_accelerator(1, 2.0**30, by_record)
    in_steps = replace(ready, block=3, example_block=rows_per_step)
    total, _ = jax.jit(in_steps.clipped_sum)(theta, weight, clip, None, example_clip)
    records = [
        case.record_gradients(place)[device] for device, place in enumerate(theta)
    ]
    limit = 0.6 if by_record else np.inf
    gradients = [reference.clip_vectors(rows, limit).sum(0) for rows in records]
    with_prior = np.array(gradients) + theta / devices
    expected = reference.device_clipped_sum(with_prior, weight, clip)
    np.testing.assert_allclose(total, expected, atol=TOLERANCE * float(weight @ clip))


@jax.jit
def clipped_sum(posterior, theta, weight, clip, example_clip):
    return posterior.clipped_sum(theta, weight, clip, None, example_clip)


@pytest.mark.parametrize("example_clip", [None, 0.5, 2.0])
@pytest.mark.parametrize("rows", [1, 2, 5, 8] if FULL else [2, 8])
def test_short_devices_whose_rows_cancel(rows, example_clip):
    """They are clipped by a quarter of the sum of their rows' norms, and count as clipped."""
    devices = 4
    generator = np.random.default_rng(rows)
    features = np.ones((devices * rows, DIM))
    features[::rows] *= generator.uniform(1.0, 1.5, (devices, 1))
    posterior = wflmc.softmax_regression(
        jax.random.key(0),
        devices,
        X=features,
        y=np.arange(devices * rows) % 2,
        classes=2,
        partition="blocks",
        prior_std=10.0,
    )
    theta = 0.01 * generator.standard_normal(posterior.dim)
    record_gradients = [
        reference.softmax_record_gradients(theta, u[:size], y[:size], 2)
        for u, y, size in zip(
            posterior.features, posterior.labels, posterior.sizes, strict=True
        )
    ]
    weight = generator.uniform(0.2, 1, devices)
    prior_share = theta / (devices * 100.0)
    limit = np.inf if example_clip is None else example_clip
    for size in (0.05, 0.3, 1.0, 3.0, 30.0):
        clip = np.full(devices, size)
        example_clips = None if example_clip is None else np.full(devices, limit)
        total, norms = clipped_sum(
            posterior, theta.astype(np.float32), weight, clip, example_clips
        )
        by_device = [
            reference.short_device_clipped_sum(
                [records],
                prior_share,
                weight=weight[[k]],
                clip=clip[[k]],
                example_clip=limit,
            )
            for k, records in enumerate(record_gradients)
        ]
        scale = float(weight @ clip)
        np.testing.assert_allclose(total, sum(by_device), atol=TOLERANCE * scale)
        clipped = [
            reference.clip_vectors(records, limit) for records in record_gradients
        ]
        unclipped = weight[:, None] * [rows.sum(0) + prior_share for rows in clipped]
        is_shortened = np.linalg.norm(by_device, axis=1) < (1 - TOLERANCE) * (
            np.linalg.norm(unclipped, axis=1)
        )
        np.testing.assert_array_equal(np.asarray(norms) > clip, is_shortened)
