"""Rounding of masked messages to integers: what fits, and what it costs in privacy."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from wflmc.errors import InputError
from wflmc.federated.lattice import FINE, LEVELS, MODULUS, TAIL, Lattice, extra_delta, lattice_of, rounding
from wflmc.federated.server import open_server, serve

from .secagg_tools import DEVICES, QUORUM, asks_of, devices_of, exchange_of, job_of, problem, silent


@pytest.fixture(scope="module")
def setting():
    return problem()


def _rounded(sigma: float, x: float, at: np.ndarray) -> np.ndarray:
    """Chances of N(x, σ²), rounded at random to an integer, being `at`."""

    def hinge(u: np.ndarray) -> np.ndarray:  # the second integral of the density
        return u * stats.norm.cdf(u / sigma) + sigma * stats.norm.pdf(u / sigma)

    return hinge(at + 1 - x) - 2 * hinge(at - x) + hinge(at - 1 - x)


def _rounded_sum(sigma: float, total: float, senders: int, at: np.ndarray) -> np.ndarray:
    """Chances of N(Σ x, Kσ²) plus 2K - 1 numbers uniform on ±1/2 being nearest to `at`."""
    t = np.linspace(-10 / sigma, 10 / sigma, 4001)
    spectrum = np.exp(-senders * (sigma * t) ** 2 / 2) * np.sinc(t / (2 * np.pi)) ** (2 * senders)
    return np.trapezoid(spectrum * np.cos(np.outer(at - total, t)), t, axis=1) / (2 * np.pi)


@pytest.mark.parametrize("sigma", [0.4, 0.6, 1.0, 1.5])
@pytest.mark.parametrize("messages", [(0.3,), (0.3, -0.45), (0.1, 0.2, 0.55, 0.9)])
def test_a_sum_of_rounded_messages_is_a_rounded_sum(sigma, messages):
    around = np.arange(-20, 21)
    law = np.ones(1)
    for x in messages:
        law = np.convolve(law, _rounded(sigma, x, around))
    assert law.sum() == pytest.approx(1, abs=1e-12)
    at = np.arange(-20 * len(messages), 20 * len(messages) + 1)
    distance = 0.5 * np.abs(law - _rounded_sum(sigma, sum(messages), len(messages), at)).sum()
    bound = rounding(sigma, len(messages))
    assert distance <= bound + 1e-12
    if len(messages) == 1:
        assert distance < 1e-9
    elif sigma == 0.4:
        assert distance > 1e-5  # the bound is about something


def test_at_the_coarsest_that_is_allowed_rounding_costs_nothing():
    assert rounding(FINE, 1023) < 1e-190


def test_the_whole_job_adds_next_to_nothing_to_delta(setting):
    job = job_of(setting)
    assert 0 < extra_delta(job) < 1e-20
    assert extra_delta(replace(job, start=np.repeat(job.start, 10, 0))) == pytest.approx(10 * extra_delta(job))


def test_a_message_fits_with_its_noise(setting):
    job = job_of(setting)
    lattice = lattice_of(job)
    loudest = max(ask.precoder for at in range(job.plan.rounds) for ask in asks_of(job, at)) * job.plan.clip[0]
    assert lattice.reach == pytest.approx(loudest + TAIL * math.sqrt(job.share.max()))
    assert lattice.levels == LEVELS
    assert lattice.quantum < 1e-5 * math.sqrt(job.share.max())


@pytest.mark.parametrize(("senders", "levels"), [(1023, 1 << 22), (1024, 1 << 21), (2047, 1 << 21), (2048, 1 << 20)])
def test_integers_get_coarser_as_senders_become_more(senders, levels):
    """With 1024 senders of 2²² levels the sum of Flower's weights would be 2³², hence 0."""
    found = Lattice.holding(10.0, senders)
    found.refuse_coarse(1.0, senders)
    assert found.levels == levels
    assert senders * found.levels < MODULUS


def test_what_cannot_be_represented_is_refused(setting):
    job = job_of(setting)
    with pytest.raises(InputError, match="fewer devices, or more noise"):
        Lattice.holding(10.0, 1 << 26).refuse_coarse(1.0, 1 << 26)
    with pytest.raises(InputError, match="fewer devices, or more noise"):
        lattice_of(replace(job, plan=replace(job.plan, clip=1e6 * job.plan.clip)))
    alone = replace(job.plan, weight=job.plan.weight * (np.arange(DEVICES) == 0))
    with pytest.raises(InputError, match="at least 2 senders"):
        lattice_of(replace(job, plan=alone, tolerate=0))
    with pytest.raises(InputError, match="sums below"):
        Lattice(1.0, LEVELS).refuse_coarse(1.0, 1024)
    with pytest.raises(InputError, match="holds the message"):
        Lattice(1.0, LEVELS).refuse_beyond(job.terms(0), 1.0)


def test_both_numbers_of_the_promise(setting):
    job = job_of(setting)
    promise, loss = job.plan.privacy, job.plan.loss.sum(0)
    masked, alone = job.epsilons()
    assert masked == pytest.approx(promise.epsilon_spent(loss))
    assert masked == pytest.approx(8)
    assert alone == pytest.approx(promise.epsilon_spent(QUORUM * loss))
    bare = job_of(setting, aggregated=False)
    assert bare.epsilons() == pytest.approx((alone, alone))
    assert job_of(setting, noise="channel", aggregated=False, tolerate=0).epsilons() == pytest.approx((8, math.inf))
    assert job.terms(0).fewest == QUORUM


def test_both_numbers_of_the_ledger(setting, tmp_path):
    job = job_of(setting)
    server = open_server(job, tmp_path)
    devices = devices_of(setting, job)
    serve(server, exchange_of(job, devices, fault=silent(d2=2)))
    masked, alone = job.epsilons(server.ledger)
    loss, promise = job.plan.loss.sum(0), job.plan.privacy
    # Four senders add more noise than the quorum of three needs.
    assert masked == pytest.approx(promise.epsilon_spent(loss * QUORUM / (DEVICES - 1)))
    assert alone == pytest.approx(promise.epsilon_spent(loss * QUORUM))
    np.testing.assert_allclose(server.ledger.spent[2], 0)
    np.testing.assert_allclose([device.ledger.spent[0] for device in devices], loss, rtol=1e-6)
