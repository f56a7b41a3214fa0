"""Budgets against published values, dp-accounting, and high-precision arithmetic."""

from __future__ import annotations

import dp_accounting.pld.privacy_loss_distribution as pld
import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wflmc
from wflmc import privacy

from ..conftest import FULL
from ..error_tools import raises_input_error

CHECK_VALUES = [
    (8, 0.01, 2.341635, 2.998315),
    (15, 0.01, 5.967267, 7.041820),
    (50, 0.1, 35.33877, 39.53552),
    (1, 1e-5, 0.02428758, 0.03592570),
]
epsilons = st.floats(1e-6, 1e4)
deltas = st.floats(-690, np.log(0.5)).map(np.exp)


@pytest.mark.parametrize(("epsilon", "delta", "paper", "exact"), CHECK_VALUES)
def test_budgets_match_the_check_values(epsilon, delta, paper, exact):
    assert float(f"{privacy.budget(epsilon, delta, 'paper'):.7g}") == paper
    assert float(f"{privacy.budget(epsilon, delta, 'exact'):.7g}") == exact


def log_delta(epsilon: float, mu: float) -> mpmath.mpf:
    """log of Balle & Wang's δ, in 400 digits."""
    with mpmath.workdps(400):
        epsilon, mu = mpmath.mpf(epsilon), mpmath.mpf(mu)
        ncdf = lambda x: mpmath.erfc(-x / mpmath.sqrt(2)) / 2  # noqa: E731
        return mpmath.log(
            ncdf(-epsilon / mu + mu / 2)
            - mpmath.exp(epsilon) * ncdf(-epsilon / mu - mu / 2)
        )


@pytest.mark.parametrize("epsilon", [1e-6, 1e-3, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("delta", [1e-300, 1e-50, 1e-5, 0.1, 0.5])
def test_exact_budget_in_high_precision(epsilon, delta):
    """The true δ at the budget is δ: a relative error r in μ would show as r·dlogδ/dlogμ ≥ r."""
    mu = float(np.sqrt(2 * privacy.budget(epsilon, delta)))
    slope = (
        abs(float(log_delta(epsilon, mu * (1 + 1e-6)) - log_delta(epsilon, mu))) / 1e-6
    )
    error = float(log_delta(epsilon, mu) - mpmath.log(delta)) / slope
    assert abs(error) < 1e-9


@pytest.mark.parametrize("epsilon", [1e-300, 1e-50, 1e-45, 1e-30, 1e-24, 1e-14])
@pytest.mark.parametrize("delta", [1e-300, 1e-43, 1e-30, 1e-20, 1e-12, 1e-7, 0.5])
def test_no_budget_is_too_large_however_small_the_promise(epsilon, delta):
    loss = float(privacy.budget(epsilon, delta))
    with mpmath.workdps(800):
        mu = mpmath.sqrt(2 * mpmath.mpf(loss)) if loss else mpmath.mpf("1e-200")
    true_delta = mpmath.exp(log_delta(epsilon, mu)) if loss else 0
    assert true_delta <= delta * (1 + 1e-9)
    assert loss >= 0.999 * float(privacy.budget(epsilon, delta, "paper"))
    if loss:
        stated = float(privacy.delta_spent(loss, epsilon))
        assert stated == pytest.approx(float(true_delta), rel=1e-9)


def test_no_epsilon_is_too_small_for_a_small_loss():
    loss = 0.5 * 3e-20**2
    epsilon = float(privacy.epsilon_spent(loss, 1e-20))
    assert epsilon == pytest.approx(5.5e-21, rel=0.3)
    exact = float(mpmath.exp(log_delta(epsilon, 3e-20)))
    assert exact == pytest.approx(1e-20, rel=1e-9)


@pytest.mark.parametrize("epsilon", [1e12, 1e17, 1e20, 1e23])
@pytest.mark.parametrize("delta", [1e-300, 1e-5, 0.5])
def test_no_loss_is_underrated_however_large_the_promise(epsilon, delta):
    """Where a float of the size of ε lies next to one that is 10⁷ further."""
    mu = float(np.sqrt(2 * privacy.budget(epsilon, delta)))
    assert log_delta(epsilon, mu) <= np.log(delta) + 1e-5
    sufficient = float(privacy.epsilon_spent(mu**2 / 2, delta))
    assert log_delta(sufficient, mu) <= np.log(delta) + 1e-5
    stated = float(np.log(privacy.delta_spent(mu**2 / 2, epsilon)))
    assert stated == pytest.approx(float(log_delta(epsilon, mu)), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("epsilon", [1e30, 1e50])
def test_a_budget_beyond_the_range_is_the_largest_of_it(epsilon):
    assert privacy.budget(epsilon, 0.5) == pytest.approx(5e23)


@pytest.mark.parametrize("epsilon", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("delta", [1e-300, 1e-5, 0.5])
def test_paper_budget_by_its_definition(epsilon, delta):
    with mpmath.workdps(60):
        target = mpmath.log(1 / mpmath.mpf(delta))
        c = mpmath.findroot(
            lambda x: mpmath.log(mpmath.sqrt(mpmath.pi) * x) + x**2 - target,
            mpmath.sqrt(target) + 0.1,
        )
        expected = (mpmath.sqrt(epsilon + c**2) - c) ** 2
    assert privacy.budget(epsilon, delta, "paper") == pytest.approx(
        float(expected), rel=1e-12
    )


@pytest.mark.parametrize(
    ("epsilon", "delta"),
    [(0.5, 1e-6), (1, 1e-5), (15, 0.01), *([(8, 0.01)] if FULL else [])],
)
def test_exact_budget_agrees_with_dp_accounting(epsilon, delta):
    """Composition of unequal Gaussian rounds that together spend the budget, by privacy loss distributions."""
    losses = np.array([0.1, 0.2, 0.3, 0.4]) * float(privacy.budget(epsilon, delta))
    composed = None
    for loss in losses:
        one_round = pld.from_gaussian_mechanism(
            standard_deviation=1 / np.sqrt(2 * loss),
            sensitivity=1.0,
            value_discretization_interval=1e-4,
        )
        composed = one_round if composed is None else composed.compose(one_round)
    assert composed.get_epsilon_for_delta(delta) == pytest.approx(epsilon, rel=2e-3)


@pytest.mark.parametrize("accountant", privacy.ACCOUNTANTS)
def test_finite_and_monotone_over_the_whole_range(accountant):
    epsilon = np.logspace(-6, 4, 41)
    delta = np.logspace(-300, np.log10(0.5), 61)
    budget = privacy.budget(epsilon[:, None], delta[None, :], accountant)
    assert np.all(np.isfinite(budget))
    assert np.all(budget > 0)
    assert np.all(np.diff(budget, axis=0) > 0)
    assert np.all(np.diff(budget, axis=1) > 0)


@given(epsilons, deltas, st.sampled_from(sorted(privacy.ACCOUNTANTS)))
def test_inverses(epsilon, delta, accountant):
    loss = privacy.budget(epsilon, delta, accountant)
    assert privacy.epsilon_spent(loss, delta, accountant) == pytest.approx(
        epsilon, rel=1e-6
    )
    again = np.log(privacy.delta_spent(loss, epsilon, accountant))
    assert again == pytest.approx(np.log(delta), rel=1e-6, abs=1e-6)


@given(epsilons, deltas)
def test_exact_budget_is_at_least_that_of_the_paper(epsilon, delta):
    assert privacy.budget(epsilon, delta) >= privacy.budget(epsilon, delta, "paper") * (
        1 - 1e-9
    )


@given(st.floats(-30, 8), st.floats(-6, 4))
def test_delta_is_a_probability_for_any_loss(loss, epsilon):
    for accountant in privacy.ACCOUNTANTS:
        delta = privacy.delta_spent(10**loss, 10**epsilon, accountant)
        assert 0 <= delta <= 1


def test_edge_losses():
    assert privacy.epsilon_spent(0.0, 1e-5) == 0
    assert privacy.epsilon_spent(np.inf, 1e-5) == np.inf
    assert privacy.epsilon_spent(1e-12, 0.5) == 0  # such a loss is (0, 0.5)-private
    assert privacy.delta_spent(0.0, 1.0) == 0
    assert privacy.delta_spent(np.inf, 1.0) == 1


def test_round_loss_by_hand():
    loss = privacy.round_loss(
        gain=[2.0, 1.0],
        amplitude=[[1, 0], [1, 0.5]],
        sensitivity=[3.0, 4.0],
        noise_power=0.5,
    )
    np.testing.assert_allclose(loss, [[144.0, 0.0], [36.0, 16.0]])


def test_per_device_promises():
    promise = wflmc.Privacy(
        epsilon=[8, 15], delta=0.01, clip=[30, 10], accountant="paper"
    )
    np.testing.assert_allclose(promise.budget(2), [2.341635, 5.967267], rtol=1e-6)
    assert promise.epsilon_spent([2.3416347, 0.0]) == pytest.approx(8, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"epsilon": -1, "delta": 0.1}, "epsilon"),
        ({"epsilon": np.nan, "delta": 0.1}, "epsilon"),
        ({"epsilon": 1, "delta": 1}, "delta"),
        ({"epsilon": 1, "delta": 0}, "delta"),
        ({"epsilon": 1}, "delta"),
        ({"delta": 0.1}, "epsilon"),
        ({"clip": 0}, "clip"),
        ({"accountant": "rdp"}, "accountant"),
    ],
)
def test_bad_promises_are_refused_by_name(arguments, key):
    with pytest.raises(wflmc.InputError) as caught:
        wflmc.Privacy(**arguments)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("key", "clips"),
    [
        ("clip", {"clip": 1e-22}),
        ("clip", {"clip": 9e37}),
        ("example_clip", {"example_clip": [1.0, 1e-23]}),
        ("example_clip", {"example_clip": 9e37, "clip": 1e14}),
    ],
)
def test_clips_that_float32_would_not_keep_are_refused(key, clips):
    with raises_input_error(key, "1e-15", "1e+15", section="privacy"):
        wflmc.Privacy(1, 1e-5, **{"unit": "record", "example_clip": 1.0, **clips})


def test_who_does_not_send_spends_nothing():
    """Whatever its sensitivity, and whatever its share of a round is in which nobody sends."""
    loss = privacy.round_loss(
        [1.0, 2.0], [[0.0, 0.5], [1.0, np.nan]], [np.inf, 3.0], noise_power=2.0
    )
    np.testing.assert_array_equal(loss, [[0.0, 2.25], [np.inf, 0.0]])


@pytest.mark.parametrize(("rounds", "published"), [(200, 2.78), (600, 2.59)])
def test_poisson_batches_cost_no_less_than_all_examples(rounds, published):
    """With as much noise in the mean gradient, sampling a tenth of the examples in each
    of many rounds does not lower ε below that of all examples in each round.
    """
    epsilon, delta, sampled = 2.5, 1e-5, 0.1
    loss_of_round = float(privacy.budget(epsilon, delta)) / rounds
    deviation_of_full = (2 * loss_of_round) ** -0.5
    batches = pld.from_gaussian_mechanism(
        sampled * deviation_of_full, sampling_prob=sampled
    )
    epsilon_of_batches = batches.self_compose(rounds).get_epsilon_for_delta(delta)
    assert epsilon_of_batches == pytest.approx(published, abs=0.01)
    assert epsilon_of_batches > epsilon
