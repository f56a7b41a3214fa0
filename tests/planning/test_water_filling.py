"""Water-filling by prices: against the interior point, and harmless where it is wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

import wflmc
from wflmc import channel
from wflmc.planning import POLICIES
from wflmc.planning.solvers.allocation import allocate
from wflmc.planning.solvers.program import Usage, round_bounds
from wflmc.planning.solvers.water_filling import fill, pool

from ..conftest import count
from .problems import check, kept_value, random_program, written_out_dual

seeds = st.integers(0, 2**32 - 1)


def test_water_filling_agrees_with_the_interior_point(monkeypatch):
    """What it returns is optimal as it is, without the caller's check, and it hardly ever gives up."""
    rng, filled = np.random.default_rng(6), []
    programs = [replace(random_program(rng), objective=o) for _ in range(count(60, 400)) for o in ("worst", "average")]
    programs = [p for p in programs if np.any(p.cap @ p.active > p.budget)]
    found = [fill(p, Usage(p.active), p.budget, 1e-10) for p in programs]
    monkeypatch.setattr("wflmc.planning.solvers.allocation.fill", lambda *_: None)
    for p, answer in zip(programs, found, strict=True):
        if answer is None:
            continue
        a, w, lam = answer
        value = kept_value(p, round_bounds(p, a))
        assert value == pytest.approx(allocate(p).objective, rel=3e-9)
        assert value == pytest.approx(written_out_dual(p, w, lam), rel=3e-9)
        assert np.all(a <= p.cap * (1 + 1e-15))
        assert np.all(a @ p.active <= p.budget * (1 + 1e-9))
        filled.append((p.objective, min(3, np.count_nonzero(lam)), bool(np.any(a >= p.cap))))
    assert len(filled) >= 0.85 * len(programs)
    # One, two and many priced devices, with and without rounds at their caps: each for both objectives.
    assert len(set(filled)) == 12


def test_water_filling_suffices_for_the_papers_study(posterior, monkeypatch):
    """100 rounds, 30 devices: the interior point is not needed."""
    monkeypatch.setattr("wflmc.planning.solvers.allocation.CentralPath", None)
    solutions = []

    def keep(problem):
        solutions.append(allocate(problem.program()))
        return wflmc.planning.Allocation(solutions[-1].a)

    for objective in ("worst", "average"):
        for snr_db in (10, 20, 30):
            wflmc.plan(
                posterior, wflmc.Link(channel.rayleigh(0.01), snr_db), wflmc.Privacy(15, 0.01, 30, "paper"),
                step_size=0.4 / (posterior.mu + posterior.L), burn_in=50, samples=50, objective=objective,
                power=POLICIES["optimized"]._replace(allocate=keep),
            )  # fmt: skip
    assert max(x.gap for x in solutions) <= 1e-9
    assert len(solutions) == 6


@pytest.mark.parametrize("spoil", [(0.9, 1.0, 1.0), (1.1, 1.0, 1.0), (1.0, 3.0, 1.0), (1.0, 1.0, 0.3), (0.0, 0.0, 0.0)])
def test_wrong_water_filling_does_no_harm(monkeypatch, spoil):
    """Whatever powers, weights and prices it might return, the plan is still proven."""

    def wrong(p, use, budget, tol):
        a, w, lam = fill(p, use, budget, tol) or (p.cap, np.full(p.cap.size, 1 / p.cap.size), budget)
        w = w ** spoil[1] * (np.arange(w.size) >= p.burn_in)
        return a * spoil[0], w / w.sum(), lam * spoil[2]

    monkeypatch.setattr("wflmc.planning.solvers.allocation.fill", wrong)
    rng = np.random.default_rng(7)
    for _ in range(20):
        p = replace(random_program(rng), objective="worst")  # the average has no choice of weights
        check(p, allocate(p))


@given(seeds, st.integers(1, 60))
def test_pooling_is_isotonic_regression(seed, items):
    rng = np.random.default_rng(seed)
    total, weight = rng.normal(size=items) + 0.1 * np.arange(items), rng.uniform(0.1, 3, items)
    edges, weights, values = pool(total, weight)
    fit = isotonic_regression(total / weight, weights=weight)
    np.testing.assert_allclose(np.repeat(values, np.diff(edges)), fit.x, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(weights, fit.weights)
