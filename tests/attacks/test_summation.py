"""The summation attack: records or devices whose float32 sum tells more of one of them than its clip allows.

The attacker knows all records but one (or all devices but one) and has chosen them: large terms that bring the running
sum to a power of two, many terms of less than half the spacing of floats above it, and large ones that bring it back.
The unknown one decides on which side of the power of two the sum is, and so whether thousands of small terms are
rounded away. The attacker gets a sum that differs by far more than one clipped record can make it differ: at 40,000
records 6.8 times as much, 46 times the privacy loss (Casacuberta et al., "Widespread underestimation of sensitivity in
differentially private libraries and how to fix it", CCS 2022).
"""

from __future__ import annotations

from itertools import islice, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc import channel
from wflmc.apps import audit
from wflmc.apps.audit import summation
from wflmc.apps.audit.summation import (
    change,
    linear_terms,
    neighbours,
    padded_neighbours,
    softmax_terms,
)

from ..conftest import FULL, count
from ..error_tools import missing_facts

ADJACENCIES = {"replace": -1.0, "add-remove": 0.0}
RECORDS = (4_000, 40_000, 100_000) if FULL else (40_000,)
ROUNDING = 1e-6


def _likelihood(theta, term):
    return -theta[0] * term


def _prior(theta):
    return -0.5 * jnp.sum(theta**2)


def own_terms(terms, devices=1, likelihood=_likelihood, initial=(2,)):
    """A model of one's own whose gradients are these terms, in the first of its parameters."""
    return wflmc.posterior_from(
        likelihood,
        _prior,
        np.asarray(terms, np.float32),
        initial=jnp.zeros(initial),
        devices=devices,
        partition="blocks",
        mu=1.0,
        L=1.0,
    )


def layer_terms(terms, devices=1):
    """The same in a matrix of weights: the gradient of a record is the product of two vectors."""
    rows = np.pad(np.asarray(terms, np.float32)[:, None], ((0, 0), (0, 2)))
    posterior = own_terms(
        rows, devices, lambda weights, row: -(row @ weights)[0], (3, 2)
    )
    assert posterior.model.record_gradient.size == 5
    return posterior


MODELS = {
    "gaussian": (linear_terms, 1.0),
    "softmax": (softmax_terms, 2**0.5),
    "own": (own_terms, 1.0),
    "layer": (layer_terms, 1.0),
}
MODELS_AND_ADJACENCIES = list(product(MODELS, ADJACENCIES))
OF_RECORDS = (
    MODELS_AND_ADJACENCIES
    if FULL
    else [("gaussian", "replace"), ("softmax", "replace"), ("layer", "replace")]
)
OF_DEVICES = (
    MODELS_AND_ADJACENCIES
    if FULL
    else [("gaussian", "replace"), ("softmax", "add-remove"), ("own", "replace")]
)


def numbers_of_chains(model):
    """The softmax model has a layout for few chains; compiling the others takes long."""
    if FULL:
        return 1, 2, 4
    return (1, 4) if model == "softmax" else (4,)


def worst_of(model, terms, away, devices):
    """Return the largest change of the sum over what one clipped record, or device, may change: 2c or c, c = 1."""
    make, norm = MODELS[model]
    chains = numbers_of_chains(model)
    limits = (1e4, 1.0) if devices == 1 else (1.0, np.inf)
    ratios = []
    for sides in islice(padded_neighbours(terms, 1 / norm, away), count(3, 99)):
        pair = [make(side, devices) for side in sides]
        less = (
            pair[0].rounding(*(np.full(devices, limit) for limit in limits)).total
            * 2
            / (1 - away)
        )
        ratios += [
            change(pair, *limits, chains=number, rounding=less) for number in chains
        ]
    return max(ratios) / (1 - away)


@pytest.mark.parametrize("records", RECORDS)
@pytest.mark.parametrize(("model", "adjacency"), OF_RECORDS)
def test_one_record_moves_a_devices_sum_by_its_clip_at_most(model, records, adjacency):
    ratio = worst_of(model, records, ADJACENCIES[adjacency], devices=1)
    assert 0.95 < ratio <= 1 + ROUNDING


@pytest.mark.parametrize(("model", "adjacency"), OF_DEVICES)
def test_one_device_moves_the_superposition_by_its_clip_at_most(model, adjacency):
    devices = count(4_000, 40_000)
    ratio = worst_of(model, devices, ADJACENCIES[adjacency], devices)
    assert 0.95 < ratio <= 1 + ROUNDING


@pytest.mark.parametrize("away", ADJACENCIES.values())
@pytest.mark.parametrize(("terms", "size"), [(16, 1.0), (333, 9.0), (40_000, 30.0)])
def test_the_neighbours_are_neighbours_and_break_a_plain_sum(terms, size, away):
    first, second = neighbours(terms, size, away)
    assert first.shape == second.shape == (terms,)
    assert np.max(np.abs([first, second])) <= size
    np.testing.assert_array_equal(first[1:], second[1:])
    assert (first[0] > 0.98 * size, second[0]) == (True, away * first[0])
    plain = [
        np.cumsum(side.astype(np.float32), dtype=np.float32)[-1]
        for side in (first, second)
    ]
    assert (plain[0] - plain[1]) / (first[0] - second[0]) > (
        6 if terms == 40_000 else 1
    )


@pytest.fixture(scope="module")
def plan_of_many_records():
    posterior = wflmc.gaussian_regression(
        jax.random.key(0), devices=1, examples=40_000, dim=1
    )
    promise = wflmc.Privacy(1, 1e-5, 1e3, unit="record", example_clip=9.0)
    link = wflmc.Link(channel.static(1.0), snr_db=60)
    return posterior, wflmc.plan(
        posterior, link, promise, step_size=0.1 / posterior.L, burn_in=1, samples=1
    )


def test_an_audit_tries_it_and_says_so(plan_of_many_records):
    posterior, plan = plan_of_many_records
    report = audit.audit(
        jax.random.key(0), plan, posterior, trials=1000, attacks=["summation"]
    )
    assert report.consistent, str(report)
    (tested_sum,) = report.sums
    assert (tested_sum.name, tested_sum.terms) == ("sum over records", 40_000)
    assert tested_sum.tried >= 10
    assert 0.9 < tested_sum.ratio <= 1 + ROUNDING
    assert not missing_facts(
        str(tested_sum), ("40,000", "float32", f"{tested_sum.ratio:.6g}")
    )


def test_an_audit_finds_a_plain_sum(plan_of_many_records, monkeypatch):
    """A build that adds records one after the other in float32 is flagged."""

    def plainly(pair, clip, example_clip, gain, chains, rounding):
        del clip, example_clip, chains, rounding
        terms = [
            (side.target[0] * side.features[0, :, 0]).astype(np.float32)
            for side in pair
        ]
        return gain * abs(
            float(
                np.subtract(*[np.cumsum(side, dtype=np.float32)[-1] for side in terms])
            )
        )

    monkeypatch.setattr(summation, "change", plainly)
    posterior, plan = plan_of_many_records
    report = audit.audit(
        jax.random.key(0), plan, posterior, trials=1000, attacks=["summation"]
    )
    assert not report.consistent
    assert report.sums[0].ratio > 6
    assert not missing_facts(report.verdict, ("BROKEN", "records"))
    assert report.as_dict()["consistent"] is False
