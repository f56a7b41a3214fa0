"""Noise on a lattice: its draws are the discrete Gaussian's, and its losses no larger than those of Gaussian noise."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy import stats

pytest.importorskip(
    "flwr", reason="Flower is not installed: pip install 'wflmc[flower]'"
)

from wflmc.privacy import delta_spent, lattice
from wflmc.privacy.lattice import FLOAT32_CHANGE, Lattice, discrete_gaussian

from ..conftest import count
from ..error_tools import raises_input_error


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system's entropy, but the same in every test."""
    monkeypatch.setattr(lattice, "token_bytes", np.random.default_rng(7).bytes)


def probabilities(scale: int) -> tuple[Any, Any]:
    """All values that matter, and their probabilities."""
    values = np.arange(-40 * scale, 40 * scale + 1)
    weights = np.exp(-(values**2) / (2 * scale**2))
    return values, weights / weights.sum()


@pytest.mark.parametrize("scale", [1, 2, 7])
@pytest.mark.parametrize("decided", ["by float64", "exactly"])
def test_draws_have_the_probabilities_of_the_discrete_gaussian(
    monkeypatch: pytest.MonkeyPatch, scale: int, decided: str
) -> None:
    if decided == "exactly":
        # With this margin no draw is left to float64.
        monkeypatch.setattr(lattice, "DECISION_MARGIN", 2.0)
    size = count(50_000, 1_000_000) if decided == "by float64" else count(500, 20_000)
    draws = discrete_gaussian(scale, size)
    values, chance = probabilities(scale)
    common = values[chance * size > 8]
    counts = [np.sum(draws == value) for value in common]
    expected = chance[chance * size > 8] * size
    assert (
        stats.chisquare(
            [*counts, size - sum(counts)], [*expected, size - expected.sum()]
        ).pvalue
        > 1e-4
    )


def test_draws_on_a_fine_lattice_are_gaussian() -> None:
    scale = 2**45 + 12345
    assert stats.kstest(discrete_gaussian(scale, 20_000) / scale, "norm").pvalue > 1e-4


def test_draws_are_those_of_opendp() -> None:
    dp = pytest.importorskip(
        "opendp.prelude", reason="compares with OpenDP where it is installed"
    )
    dp.enable_features("contrib")
    domain = dp.vector_domain(dp.atom_domain(T="i64"))
    theirs = np.array(
        dp.m.make_gaussian(domain, dp.l2_distance(T="f64"), scale=5.0)([0] * 20_000)
    )
    ours = discrete_gaussian(5, 20_000)
    both = [
        [np.sum(draws == value) for value in range(-12, 13)] for draws in (ours, theirs)
    ]
    # OpenDP takes no seed, so the level is small.
    assert stats.chi2_contingency(both).pvalue > 1e-6


def test_close_calls_are_decided_by_more_bits() -> None:
    power = Fraction(1, 3)
    bits = int(np.floor(np.exp(-1 / 3) * 2**53)) << 11
    assert lattice._below_exactly(bits - 2**13, power)
    assert not lattice._below_exactly(bits + 2**13, power)
    exact = 13217669706954385033  # ⌊2⁶⁴ exp(−1/3)⌋; 0.77 of what may follow these bits is below
    assert abs(
        np.mean([lattice._below_exactly(exact, power) for _ in range(400)]) - 0.7719
    ) < 4 * np.sqrt(0.18 / 400)


@pytest.mark.parametrize("scale", [16, 40])
@pytest.mark.parametrize("moved", [1, 5, 60])
def test_discrete_noise_costs_what_slightly_narrower_gaussian_noise_does(
    scale: int, moved: int
) -> None:
    """With variance scale² − 16, by the convolution with noise of four steps that the documentation proves it by."""
    values, chance = probabilities(scale)
    other = np.interp(values - moved, values, chance)
    loss = moved**2 / (2 * (scale**2 - 16))
    for epsilon in (0.01, 0.3, 1.0, 4.0):
        delta = float(np.sum(np.maximum(chance - np.exp(epsilon) * other, 0.0)))
        assert delta <= float(delta_spent(loss, epsilon)) * (1 + 1e-9) + 1e-15


def test_noise_is_wider_by_what_rounding_moves() -> None:
    """So that the loss of two signals after rounding is at most that of Gaussian noise before."""
    change = np.array([[0.02, 0.0], [1.5, 0.003]])
    norm = np.array([[4.0, 4.0], [4.0, 9.0]])
    dim = 8000
    lattice_fit = Lattice.fitted(1.7, change, norm, 500.0, dim)
    sent = change > 0
    moved = change[sent] + np.sqrt(dim) * lattice_fit.step + FLOAT32_CHANGE * norm[sent]
    assert np.all(moved / np.sqrt(lattice_fit.variance) <= change[sent] / 1.7)
    assert np.sqrt(lattice_fit.variance) < 1.7 * 1.01
    assert np.log2(lattice_fit.step) % 1 == 0
    signals = np.random.default_rng(0).normal(size=(1000, 20)) / 2
    parts = lattice_fit.rounded(signals)
    assert np.abs(parts - signals).max() <= lattice_fit.step / 2
    # Sums are exact, so equal in any order.
    np.testing.assert_array_equal(parts.sum(0), parts[::-1].sum(0))


@pytest.mark.parametrize(("deviation", "change"), [(1e-12, 1.0), (1.0, 1e-9)])
def test_what_float64_cannot_hide_is_refused(deviation: float, change: float) -> None:
    with raises_input_error("noise"):
        Lattice.fitted(deviation, np.array([change]), np.array([1.0]), 1e4, 5)
