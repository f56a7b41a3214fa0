"""The loop over rounds: the order of its parts, what it refuses, and that every way of running chains is it."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc import channel
from wflmc.dynamics import Overdamped, PhasePoint, kinetic, overdamped
from wflmc.evaluation.coverage import simulated_coverage
from wflmc.sampling import loop
from wflmc.sampling.loop import HostRound, check_finite, run_rounds, single_rounds
from wflmc.support.errors import OverspendError, SamplingError

from ..conftest import FULL
from ..error_tools import raises_input_error


class Finite(NamedTuple):
    finite: np.ndarray


class Diary:
    """Parts of a loop that count rounds and write down what they were asked."""

    def __init__(self, lost_round=None, unpaid_round=None):
        self.calls = []
        self.lost_round = lost_round
        self.unpaid_round = unpaid_round

    def transport(self, block, state):
        self.calls.append(("transport", block.start, state))
        return f"signal of {state}"

    def charge(self, block, signal):
        if self.unpaid_round in range(block.start, block.stop):
            raise OverspendError(self.unpaid_round, device=0, loss=2.0, budget=1.0)
        self.calls.append(("charge", block.start, signal))

    def advance(self, block, state, signal):
        self.calls.append(("advance", block.start, signal))
        rounds = np.arange(block.start, block.stop)
        return block.stop, Finite(rounds[:, None] != self.lost_round)

    def keep(self, block, state, info):
        self.calls.append(("keep", block.start, state))

    def run(self, blocks):
        parts = {
            "transport": self.transport,
            "charge": self.charge,
            "advance": self.advance,
            "keep": self.keep,
        }
        return run_rounds(0, blocks, **parts)


def test_a_block_is_exchanged_paid_drawn_and_kept_before_the_next_begins():
    diary = Diary()
    assert diary.run([slice(0, 3), slice(3, 5)]) == 5
    assert diary.calls == [
        ("transport", 0, 0),
        ("charge", 0, "signal of 0"),
        ("advance", 0, "signal of 0"),
        ("keep", 0, 3),
        ("transport", 3, 3),
        ("charge", 3, "signal of 3"),
        ("advance", 3, "signal of 3"),
        ("keep", 3, 5),
    ]


def test_nothing_is_drawn_that_is_not_paid_for():
    diary = Diary(unpaid_round=4)
    with pytest.raises(OverspendError):
        diary.run([slice(0, 3), slice(3, 5)])
    assert diary.calls[-1] == ("transport", 3, 3)


def test_nothing_is_kept_that_is_not_finite():
    diary = Diary(lost_round=4)
    with pytest.raises(SamplingError, match="round 5"):
        diary.run([slice(0, 3), slice(3, 6)])
    assert diary.calls[-1] == ("advance", 3, "signal of 3")


def test_rounds_that_fill_up_a_block_do_not_count():
    check_finite(np.array([[True, True], [True, False]]), slice(7, 8))
    with pytest.raises(SamplingError, match="round 9"):
        check_finite(np.array([[True, True], [True, False]]), slice(7, 9))


def test_a_round_without_reception_leaves_chains_where_they_are():
    receptions = {0: 1.0, 1: None, 2: 3.0}
    round_on_host = HostRound(
        receive=lambda index, signal: receptions[index],
        update=lambda index, point, signal, y: PhasePoint(point.position + y),
    )
    points = []
    run_rounds(
        PhasePoint(np.zeros(2)),
        single_rounds(0, 3),
        transport=loop.superpose_locally,
        charge=loop.charge_nothing,
        advance=round_on_host,
        keep=lambda block, point, info: points.append(
            (point.position[0], info.received)
        ),
    )
    assert points == [(1.0, 1.0), (1.0, None), (4.0, 3.0)]


# The four ways of running chains.


@pytest.fixture(scope="module")
def posterior():
    return wflmc.gaussian_regression(jax.random.key(0), devices=3, examples=30)


@pytest.fixture(scope="module")
def plan(posterior):
    link = wflmc.Link(channel.static())
    privacy = wflmc.Privacy(epsilon=8, delta=0.01, clip=30)
    step = 0.4 / (posterior.mu + posterior.L)
    policy = wflmc.Policy("noiseless-dp")
    return wflmc.plan(
        posterior, link, privacy, step_size=step, burn_in=2, samples=3, policy=policy
    )


def simulation(posterior, plan, folder):
    return wflmc.sample(jax.random.key(1), posterior, plan, 2, keep_burn_in=True).theta


def coverage(posterior, plan, folder):
    return simulated_coverage(jax.random.key(1), posterior, [plan], 4).trace.theta


def protected(posterior, plan, folder):
    from wflmc.apps.tables.protected import protected_chain

    return protected_chain(posterior, plan, np.zeros(posterior.dim)).theta


def federation(posterior, plan, folder):
    tools = pytest.importorskip("tests.federation_tools")
    from wflmc.apps.federation.server import run_in_process, trace_of

    setting = tools.make_federation(folder)
    server = setting.server()
    run_in_process(server, setting.devices())
    return trace_of(server).theta


WAYS = [simulation, coverage, protected, federation]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_running_chains_is_this_loop(
    way, posterior, plan, tmp_path, monkeypatch
):
    checked = []
    monkeypatch.setattr(
        loop, "check_finite", lambda finite, block: checked.append(block)
    )
    way(posterior, plan, tmp_path)
    assert checked
    assert checked[0].start == 0
    assert all(after.start == before.stop for before, after in pairwise(checked))


# Coverage runs the simulation, and tests/federation compares a federation with it.
@pytest.mark.parametrize("way", WAYS if FULL else [simulation, protected])
def test_every_way_of_running_chains_has_the_update_of_dynamics(
    way, posterior, plan, tmp_path, monkeypatch
):
    """With an update that goes one ahead in every round, whatever was received, chains do."""

    def go_ahead(self, point, received, *, noise, **constants):
        assert constants.keys() == {"step_size", "scale", "gain"}
        return PhasePoint(point.position + 1)

    monkeypatch.setattr(Overdamped, "step", go_ahead)
    jax.clear_caches()  # compiled code knows nothing of the change
    try:
        theta = np.asarray(way(posterior, plan, tmp_path))
    finally:
        jax.clear_caches()
    np.testing.assert_allclose(np.diff(theta, axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("dynamics", [overdamped(), kinetic(1.5)])
def test_the_update_is_the_same_for_numpy_and_jax(dynamics):
    generator = np.random.default_rng(0)
    position, velocity, received, noise = generator.standard_normal((4, 5))
    point = PhasePoint(position, velocity if dynamics.has_velocity else None)
    constants = {"step_size": 0.3, "scale": 1.2, "gain": 0.7}
    exact = dynamics.step(point, received, noise=noise, **constants)
    assert exact.position.dtype == np.float64
    single = jax.tree.map(lambda values: jnp.asarray(values, jnp.float32), point)
    rounded = dynamics.step(
        single, jnp.asarray(received), noise=jnp.asarray(noise), **constants
    )
    for expected, actual in zip(
        jax.tree.leaves(exact), jax.tree.leaves(rounded), strict=True
    ):
        assert isinstance(expected, np.ndarray)
        assert isinstance(actual, jax.Array)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    ahead = dynamics.gradient_position(point, 0.3)
    np.testing.assert_allclose(
        ahead, position + 0.15 * velocity if dynamics.has_velocity else position
    )


# How chains are executed, and where they start.


def test_executions_and_starts_are_checked_where_they_enter(posterior, plan):
    for wrong, key in (
        ({"memory": 0.0}, "memory"),
        ({"memory": "1GB"}, "memory"),
        ({"accelerators": []}, "accelerators"),
    ):
        with raises_input_error(key):
            wflmc.sampling.Execution(**wrong)
    with raises_input_error("execution"):
        wflmc.sample(jax.random.key(1), posterior, plan, 2, execution=1e9)
    start = wflmc.sampling.Start(
        np.zeros((2, posterior.dim)), np.zeros((2, posterior.dim))
    )
    with raises_input_error("initial.velocity"):
        wflmc.sample(jax.random.key(1), posterior, plan, 2, initial=start)
