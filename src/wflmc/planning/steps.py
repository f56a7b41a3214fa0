"""Step sizes of burn-in, planned together with the power.

With all devices active and the noise that Langevin sampling needs, a round costs a
privacy loss of ℓ²η: diffusion time is what a budget buys, and rounds are not. So most
of burn-in may rest, the start is forgotten in a few large steps, and the last rounds of
burn-in get rid of the noise that large steps leave. The kept rounds keep their step
size.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from wflmc.dynamics import Array
from wflmc.planning.plan import Plan
from wflmc.support.errors import InputError

SCHEDULES = ("constant", "planned")
"""The names that `Sampler.step_schedule` may have."""
REST = 0.05
"""The step size of resting rounds, over that of the kept rounds."""
GRID_LEVELS = 3
"""Sizes of the large steps on the coarse grid."""
GRID_LENGTHS = 5
"""Numbers of rounds on the coarse grid, at most."""
REFINEMENTS = (1.4, 1.2, 1.1)
"""Factors by which the best schedule is changed, after the coarse grid."""
MIN_IMPROVEMENT = 1e-9
"""A schedule must be relatively better than the best one by this."""


class BurnInSteps(NamedTuple):
    """A schedule of burn-in: rest, then large steps, then steps of the kept size."""

    level: float
    """Size of the large steps, over that of the kept ones."""
    large: int
    """Rounds with large steps."""
    settle: int
    """Rounds of the kept step size at the end of burn-in."""

    def sizes(self, kept_step: float, burn_in: int, samples: int) -> Array:
        """Return the step size of every round.

        Where burn-in is shorter than the large and the settling rounds, resting rounds
        are left out first and large ones next.

        Args:
            kept_step: η of the kept rounds.
            burn_in: S_b.
            samples: S_u.

        Returns:
            η[S].
        """
        large_end = max(0, burn_in - self.settle)
        large_start = max(0, large_end - self.large)
        factors = np.ones(burn_in + samples)
        factors[:large_start] = REST
        factors[large_start:large_end] = self.level
        return kept_step * factors


def plan_steps(
    make_plan: Callable[[Array], Plan], kept_step: float, burn_in: int, samples: int
) -> Array:
    """Choose the step sizes of burn-in.

    The bound alone would mislead: it counts excess noise κ ≈ 4/(ημ) times, the less
    often the larger the step, and so asks for large steps up to the end of burn-in,
    which is far worse in truth. A schedule therefore counts for the worse of two ratios
    to the constant one, that of the objective and that of `clipped_law`, a simple model
    of the chain, and is never worse than the constant one in either. A coarse grid
    comes first, then finer steps around its best.

    Args:
        make_plan: from the step sizes η[S] to their plan; an InputError rules them out.
        kept_step: η of the kept rounds, which stays.
        burn_in: S_b; with 0 nothing is searched.
        samples: S_u.

    Returns:
        η[S], constant where nothing better was found.

    Raises:
        InputError: the constant step size has no plan.
    """
    search = _StepSearch(make_plan, kept_step, burn_in, samples)
    if burn_in:
        search.try_grid()
        for factor in REFINEMENTS:
            search.refine(factor)
    return search.best.sizes(kept_step, burn_in, samples)


class _StepSearch:
    """The schedules that were tried, and the best of them.

    Args:
        make_plan: as of `plan_steps`.
        kept_step: η of the kept rounds.
        burn_in: S_b.
        samples: S_u.
    """

    def __init__(
        self,
        make_plan: Callable[[Array], Plan],
        kept_step: float,
        burn_in: int,
        samples: int,
    ) -> None:
        self.make_plan = make_plan
        self.kept_step = kept_step
        self.burn_in = burn_in
        self.samples = samples
        constant = make_plan(np.full(burn_in + samples, kept_step))
        self.reference = _scores(constant)
        most_forgetful = 2 / (constant.mu + constant.L)
        self.largest_level = max(1.0, most_forgetful / kept_step)
        self.best = BurnInSteps(level=1.0, large=burn_in, settle=0)
        self.best_ratio = 1.0
        self.ratios: dict[BurnInSteps, float] = {}
        """Of every schedule that was tried, to the constant one."""

    def try_grid(self) -> None:
        """Try the schedules of a coarse grid."""
        grid = np.geomspace(1, self.burn_in, GRID_LENGTHS).astype(int)
        lengths = np.unique(grid).tolist()
        for level in np.geomspace(1, self.largest_level, GRID_LEVELS):
            settle_lengths = [0, *lengths] if level > 1 else [0]
            for large in lengths:
                for settle in settle_lengths:
                    self.attempt(level, large, settle)

    def refine(self, factor: float) -> None:
        """Try schedules near the best one.

        Args:
            factor: by which each of its numbers is changed, up and down.
        """
        large_change = max(1, round(self.best.large * (factor - 1)))
        settle_change = max(1, round(self.best.settle * (factor - 1)))
        for sign in (-1, 1):
            best = self.best
            self.attempt(best.level * factor**sign, best.large, best.settle)
            best = self.best
            self.attempt(best.level, best.large + sign * large_change, best.settle)
            best = self.best
            self.attempt(best.level, best.large, best.settle + sign * settle_change)

    def attempt(self, level: float, large: int, settle: int) -> None:
        """Try a schedule, and keep it if it is the best so far.

        Args:
            level: size of the large steps; clipped to what is useful.
            large: rounds with large steps; clipped to what is possible.
            settle: rounds of the kept step size.
        """
        steps = BurnInSteps(
            level=float(np.clip(level, 1.0, self.largest_level)),
            large=max(1, min(large, self.burn_in - settle)),
            settle=settle,
        )
        if steps in self.ratios or not 0 <= settle < self.burn_in:
            return
        ratio = self._ratio(steps)
        self.ratios[steps] = ratio
        if ratio < self.best_ratio * (1 - MIN_IMPROVEMENT):
            self.best = steps
            self.best_ratio = ratio

    def _ratio(self, steps: BurnInSteps) -> float:
        """Return the worse of both ratios to the constant schedule."""
        step_sizes = steps.sizes(self.kept_step, self.burn_in, self.samples)
        try:
            plan = self.make_plan(step_sizes)
        except InputError:
            return np.inf
        return float(np.max(_scores(plan) / self.reference))


def _scores(plan: Plan) -> Array:
    """Return the objective of a plan, and that of the model of its chain."""
    kept_law = clipped_law(plan)[plan.burn_in :]
    by_model = kept_law.max()
    if plan.certificate.objective_name == "average":
        by_model = kept_law.mean()
    return np.array([plan.objective, by_model])


def clipped_law(plan: Plan) -> Array:
    """Return W2² of a simple model of the chain, in which gradients saturate.

    The chain runs on a quadratic of curvature μ or L, whichever is worse. A gradient of
    norm g acts as g/(1 + g/Σℓ_k), so that noise which clipped gradients cannot undo is
    seen. This is a model to compare schedules by, neither a bound nor the law of any
    chain.

    Args:
        plan: of which step sizes, noise, clips and constants are used.

    Returns:
        W2²[S].
    """
    return np.maximum(_law_on_quadratic(plan, plan.mu), _law_on_quadratic(plan, plan.L))


def _law_on_quadratic(plan: Plan, curvature: float) -> Array:
    """Return W2²[S] of the model on a quadratic, from its squared mean and variance."""
    reach = float(plan.clip.sum())
    distance_sq = plan.initial_w2_sq
    variance = 1 / curvature
    distances_sq = []
    variances = []
    rounds = zip(plan.step_size.tolist(), plan.noise_variance.tolist(), strict=True)
    for step_size, noise in rounds:
        gradient_norm = curvature * math.sqrt(distance_sq + plan.dim * variance)
        factor = 1 - step_size * curvature / (1 + gradient_norm / reach)
        distance_sq = factor * factor * distance_sq
        variance = factor * factor * variance + noise
        distances_sq.append(distance_sq)
        variances.append(variance)
    spread = np.sqrt(np.array(variances)) - curvature**-0.5
    return np.asarray(np.array(distances_sq) + plan.dim * spread**2)
