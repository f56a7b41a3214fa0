"""The solver for the true law of a chain: against an independent one, brute force and the law itself."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wflmc.dynamics import Motion, Response, diagonal_response
from wflmc.planning.exact import NoiseProblem, distances, solve
from wflmc.posterior import Gaussian, w2_squared
from wflmc.posterior.law import LinearChain

from ..conftest import count


class Case(NamedTuple):
    """A problem as `solve` takes it."""

    response: Response
    cost: np.ndarray
    low: np.ndarray
    high: np.ndarray
    active: np.ndarray
    budget: np.ndarray
    calm: np.ndarray


def draw(seed, most_rounds=30, most_dim=4, tight=None, limited=None) -> Case:
    """Few unlike devices, some silent, of which each round knows the weighted Hessian alone."""
    rng = np.random.default_rng(seed)
    dim, rounds, devices = rng.integers(1, [most_dim + 1, most_rounds + 1, 7])
    burn_in = int(rng.integers(rounds))
    features = rng.standard_normal((devices, 12, dim))
    hessian = features.swapaxes(1, 2) @ features + np.eye(dim) / devices
    total = hessian.sum(0)
    values = np.linalg.eigvalsh(total)
    eta = rng.choice([0.1, 0.4, 1.0]) / (values[0] + values[-1])
    active = rng.random((rounds, devices)) < rng.choice([0.7, 1.0])
    active[np.arange(rounds), rng.integers(devices, size=rounds)] = True
    scale = devices / active.sum(1)
    matrix = np.eye(dim) - eta * np.tensordot(active * scale[:, None], hessian, 1)
    start = Gaussian(rng.standard_normal(dim), float(rng.integers(2)) * np.eye(dim))
    chain = LinearChain(
        start, matrix, np.zeros((rounds, dim)), np.eye(dim), np.eye(dim)
    )
    response = chain.response(burn_in, Gaussian(np.zeros(dim), np.linalg.inv(total)))
    low = 2 * eta * 10 ** rng.uniform(-2, 0.5, rounds)
    cost = (eta * scale) ** 2
    tight = 10 ** rng.uniform(-2, 1) if tight is None else tight
    budget = tight * eta / 2 * rounds * rng.uniform(0.7, 1.4, devices)
    high = np.full(rounds, np.inf)
    if rng.random() < 0.3 if limited is None else limited:
        high = np.maximum(cost * rounds / (rng.uniform(0.1, 0.9) * budget.min()), low)
        budget = np.maximum(budget, 1.01 * (cost / high) @ active)
    return Case(
        response,
        cost,
        low,
        high,
        active,
        budget,
        np.minimum(high, 2 * np.maximum(low, 2 * eta)),
    )


def by_law(case: Case, v):
    """The worst W2² by the general formula."""
    r = case.response
    law = Gaussian(
        np.zeros(r.covariance.shape[:2]),
        r.covariance + np.einsum("s,usij->uij", v, r.effect),
    )
    return float(
        (
            r.shift + w2_squared(law, Gaussian(np.zeros(r.target.shape[0]), r.target))
        ).max()
    )


def is_feasible(case: Case, v):
    return (
        np.all((v >= case.low) & (v <= case.high))
        and np.all((case.cost / v) @ case.active <= case.budget)
        and np.all(np.isfinite(v))
    )


def clarabel(case: Case) -> float:
    """The same problem as a semidefinite program: tr (R C R)^½ is the largest tr Y with [[C, Y], [Yᵀ, C*]] ⪰ 0.

    Clarabel meets limits to an absolute 1e-8. In units far from those of the solution it calls noise optimal that
    overspends a budget by per cents, so v is near 1 here and every budget is 1, and what it returns is checked.
    """
    cp = pytest.importorskip("cvxpy")
    r = case.response
    rounds = case.low.size
    use = case.active.T * case.cost / case.budget[:, None]
    # The smallest noise, the same in all rounds, that keeps all budgets.
    unit_v = max(float(np.median(case.low)), float(use.sum(1).max()))
    unit = float(np.trace(r.target)) / r.target.shape[0]
    v = cp.Variable(rounds)
    t = cp.Variable()
    limits = [v >= case.low / unit_v, (use / unit_v) @ cp.inv_pos(v) <= 1]
    finite = np.isfinite(case.high)
    if finite.any():
        limits.append(v[finite] <= case.high[finite] / unit_v)
    for u in range(r.shift.size):
        C = r.covariance[u] / unit + sum(
            v[s] * (r.effect[u, s] * unit_v / unit) for s in range(rounds)
        )
        Y = cp.Variable(r.target.shape)
        target = r.target / unit
        limits += [
            cp.bmat([[C, Y], [Y.T, target]]) >> 0,
            r.shift[u] / unit + cp.trace(C) + np.trace(target) - 2 * cp.trace(Y) <= t,
        ]
    problem = cp.Problem(cp.Minimize(t), limits)
    problem.solve(solver=cp.CLARABEL)
    assert problem.status == cp.OPTIMAL
    noise = v.value * unit_v
    assert np.max(use @ (1 / noise)) < 1 + 1e-6
    assert np.all((noise > case.low * (1 - 1e-6)) & (noise < case.high * (1 + 1e-6)))
    return float(t.value) * unit


def test_agrees_with_a_semidefinite_program():
    for seed in range(count(12, 100)):
        case = draw(seed, most_rounds=6, most_dim=3)
        solution = solve(NoiseProblem(*case))
        theirs = clarabel(case)
        scale = max(theirs, 1e-5 * np.trace(case.response.target))
        assert is_feasible(case, solution.v)
        assert solution.value == pytest.approx(
            by_law(case, solution.v), rel=1e-9, abs=1e-14
        )
        assert abs(solution.value - theirs) < 1e-4 * scale
        assert solution.lower_bound <= theirs + 1e-5 * scale


def test_one_parameter_and_one_tight_budget_in_closed_form():
    """The least noise of the last round, (Σ √(cost effect))²/budget, where one device pays for every round."""
    case = draw(49, most_rounds=6, most_dim=3)
    r = case.response
    tight = 5
    effect = r.effect[-1, :, 0, 0]
    assert r.target.shape == (1, 1)
    assert case.active[:, tight].all()
    paid = np.sqrt(case.cost * effect)
    v = np.sqrt(case.cost / effect) * paid.sum() / case.budget[tight]
    law = r.covariance[-1, 0, 0] + effect @ v
    assert law > r.target[0, 0]
    assert is_feasible(case, v * (1 + 1e-12))
    best = r.shift[-1] + (np.sqrt(law) - np.sqrt(r.target[0, 0])) ** 2
    assert best == pytest.approx(by_law(case, v), rel=1e-12)
    solution = solve(NoiseProblem(*case))
    assert solution.v == pytest.approx(v, rel=1e-4)
    assert solution.value == pytest.approx(best, rel=1e-8)
    assert solution.lower_bound <= best


def test_gap_feasibility_and_certificate_over_random_problems():
    for seed in range(count(60, 600)):
        case = draw(1000 + seed)
        solution = solve(NoiseProblem(*case))
        assert is_feasible(case, solution.v), seed
        assert 0 <= solution.value - solution.lower_bound <= 1e-6 * solution.value, seed


@given(st.integers(0, 10**6))
def test_no_feasible_noise_goes_below_the_certificate(seed):
    case = draw(seed)
    rng = np.random.default_rng(seed)
    solution = solve(NoiseProblem(*case))
    rounding = 1e-13 * np.trace(case.response.target)
    for near in (0.0, 0.01, 0.3, 2.0):
        v = np.clip(
            solution.v * np.exp(near * rng.standard_normal(solution.v.size)),
            case.low,
            np.minimum(case.high, 1e9),
        )
        over = float(np.max((case.cost / v) @ case.active / case.budget))
        v = np.minimum(v * max(1.0, over * (1 + 1e-12)), case.high)
        feasible = is_feasible(case, v)
        assert feasible or near > 0  # the solution itself is compared in any case
        if feasible:
            assert by_law(case, v) >= solution.lower_bound - rounding


def brute_force(case: Case, start) -> float:
    """The best that SLSQP finds in log v from a start; infinite where it breaks a budget."""
    optimize = pytest.importorskip("scipy.optimize")

    def spare(x):
        return 1 - (case.cost / np.exp(x)) @ case.active / case.budget

    answer = optimize.minimize(
        lambda x: by_law(case, np.exp(x)),
        np.log(start),
        method="SLSQP",
        bounds=[(np.log(low), np.log(low) + 25) for low in case.low],
        constraints={"type": "ineq", "fun": spare},
        options={"maxiter": 300},
    )
    return answer.fun if spare(answer.x).min() > -1e-9 else np.inf


def test_brute_force_finds_nothing_better():
    for seed in range(count(4, 20)):
        case = draw(50 + seed, most_rounds=8, most_dim=2, tight=0.3, limited=False)
        solution = solve(NoiseProblem(*case))
        best = min(brute_force(case, solution.v * factor) for factor in (1.05, 2.0))
        assert best >= solution.value * (1 - 1e-6)


def test_derivatives_against_differences():
    case = draw(7, most_rounds=9, tight=0.2)
    rng = np.random.default_rng(0)
    eigen = np.linalg.eigvalsh(np.linalg.inv(case.response.target))
    size = case.low.size
    motion = Motion(np.full(size, 1e-3), np.ones((size, 2)))
    like = diagonal_response(
        np.repeat(eigen, 2), np.repeat(eigen, 2) ** 0, 1.0, motion, 0
    )
    for response in (case.response, like):
        distance = distances(response)
        v = case.low * 3
        step = case.low * rng.standard_normal(size)
        F, gradient, root = distance.expand(v)
        h = 1e-4
        up = distance(v + h * step)
        down = distance(v - h * step)
        assert distance(v) == pytest.approx(F, rel=1e-12)
        assert (up - down) / (2 * h) == pytest.approx(
            gradient @ step, rel=1e-6, abs=1e-9
        )
        curve = (
            (distance.expand(v + h * step)[1] - distance.expand(v - h * step)[1])
            @ step
            / (2 * h)
        )
        assert curve == pytest.approx(((step @ root) ** 2).sum(-1), rel=1e-5, abs=1e-10)


def test_equal_eigenvalues_are_one_matter():
    """A diagonal problem as matrices, and the same by eigenvalues."""
    precision = np.array([3.0, 3.0, 8.0, 20.0])
    rounds = 14
    mean_sq = np.array([0.1, 0.3, 0.2, 0.4])
    ones = np.ones((rounds, 3))
    eta = np.full(rounds, 0.05)
    matrix = np.repeat(np.diag(1 - 0.05 * precision)[None], rounds, 0)
    start = Gaussian(np.sqrt(mean_sq), np.eye(4))
    identity = np.eye(4)
    chain = LinearChain(start, matrix, np.zeros((rounds, 4)), identity, identity)
    full = chain.response(9, Gaussian(np.zeros(4), np.diag(1 / precision)))
    short = diagonal_response(precision, mean_sq, 1.0, Motion(eta, ones), 9)
    assert short.multiplicity.tolist() == [2, 1, 1]
    limits = np.full(rounds, 0.0025), np.full(rounds, 0.01), np.full(rounds, np.inf)
    budget = np.array([0.2, 0.3, 0.25])
    answers = [
        solve(NoiseProblem(r, *limits, ones > 0, budget, np.full(rounds, 0.2)))
        for r in (full, short)
    ]
    assert answers[0].value == pytest.approx(answers[1].value, rel=1e-8)
    assert answers[0].v == pytest.approx(answers[1].v, rel=1e-3)


def test_many_precisions_are_binned():
    rng = np.random.default_rng(0)
    precision = 10 ** rng.uniform(0, 4, 310)
    motion = Motion(np.full(20, 1e-5), np.ones((20, 4)))
    binned = diagonal_response(precision, np.full(310, 0.01), 1.0, motion, 10)
    assert binned.multiplicity.sum() == 310
    assert binned.multiplicity.size <= 64
    v = np.full(20, 2e-5)
    eta = motion.step_size[0]
    variances = np.ones(310)
    for s in range(20):
        variances = (1 - eta * precision) ** 2 * variances + v[s]
    mean_sq = 0.01 * ((1 - eta * precision) ** 40).sum()
    truth = mean_sq + ((np.sqrt(variances) - precision**-0.5) ** 2).sum()
    assert distances(binned)(v)[-1] == pytest.approx(truth, rel=0.01)
