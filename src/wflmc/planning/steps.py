"""Step sizes of burn-in, planned together with the power: rest, then large steps, then the step of the kept rounds.

With all devices active and the noise that Langevin sampling needs, a round costs a privacy loss of ℓ²η: diffusion time
is what a budget buys, and rounds are not. So most of burn-in may rest, the start is forgotten in a few large steps,
and the last rounds of burn-in get rid of the noise that large steps leave. The kept rounds keep their step size.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from wflmc.dynamics import Array
from wflmc.planning.plan import Plan
from wflmc.support.errors import InputError

SCHEDULES = ("constant", "planned")
REST = 0.05
"""The step size of resting rounds, over that of the kept rounds."""
LEVELS, LENGTHS = 3, 5
"""Points of the coarse grid: sizes of the large steps, and numbers of rounds."""


class Steps(NamedTuple):
    """A schedule of burn-in: rest, then `large` rounds of size level·η, then `settle` rounds of the kept size η."""

    level: float
    large: int
    settle: int

    def sizes(self, kept: float, burn_in: int, samples: int) -> Array:
        """η[S]."""
        last = max(0, burn_in - self.settle)
        first = max(0, last - self.large)
        factors = np.ones(burn_in + samples)
        factors[:first], factors[first:last] = REST, self.level
        return kept * factors


def plan_steps(
    make: Callable[[Array], Plan], kept: float, burn_in: int, samples: int
) -> Array:
    """η[S] with `kept` after burn-in, such that both the objective and `clipped_law` of its plan are small.

    The bound alone would mislead: it counts excess noise κ ≈ 4/(ημ) times, the less often the larger the step, and
    so asks for large steps up to the end of burn-in, which is far worse in truth. A schedule therefore counts for
    the worse of two ratios to the constant one, that of the objective and that of a simple model of the chain, and
    is never worse than the constant one in either. A coarse grid comes first, then finer steps around its best.

    Args:
        make: the plan for given step sizes; an InputError rules them out.
    """
    constant = make(np.full(burn_in + samples, kept))
    reference = _worth(constant)
    best, score, tried = Steps(1.0, burn_in, 0), 1.0, {}
    top = max(
        1.0, 2 / (constant.mu + constant.L) / kept
    )  # where a step forgets the most

    def look(level: float, large: int, settle: int) -> None:
        nonlocal best, score
        steps = Steps(
            float(np.clip(level, 1.0, top)),
            max(1, min(large, burn_in - settle)),
            settle,
        )
        if steps in tried or not 0 <= settle < burn_in:
            return
        try:
            tried[steps] = float(
                np.max(_worth(make(steps.sizes(kept, burn_in, samples))) / reference)
            )
        except InputError:
            tried[steps] = np.inf
        if tried[steps] < score * (1 - 1e-9):
            best, score = steps, tried[steps]

    if burn_in:
        lengths = np.unique(np.geomspace(1, burn_in, LENGTHS).astype(int)).tolist()
        for level in np.geomspace(1, top, LEVELS):
            for large in lengths:
                for settle in [0, *lengths] if level > 1 else [0]:
                    look(level, large, settle)
        for factor in (1.4, 1.2, 1.1):
            more = [max(1, round(n * (factor - 1))) for n in best[1:]]
            for change in (-1, 1):
                look(best.level * factor**change, best.large, best.settle)
                look(best.level, best.large + change * more[0], best.settle)
                look(best.level, best.large, best.settle + change * more[1])
    return best.sizes(kept, burn_in, samples)


def _worth(plan: Plan) -> Array:
    kept = clipped_law(plan)[plan.burn_in :]
    return np.array(
        [
            plan.objective,
            kept.mean() if plan.certificate.objective_name == "average" else kept.max(),
        ]
    )


def clipped_law(plan: Plan) -> Array:
    """W2²[S] of the chain on a quadratic of curvature μ or L, whichever is worse, with gradients that are clipped.

    A gradient of norm g acts as g/(1 + g/Σℓ_k), so that noise which clipped gradients cannot undo is seen. This
    is a model to compare schedules by, neither a bound nor the law of any chain.
    """
    reach = float(plan.clip.sum())
    rounds = list(
        zip(plan.step_size.tolist(), plan.noise_variance.tolist(), strict=True)
    )

    def on_quadratic(curvature: float) -> Array:
        away, variance, history = plan.initial_w2_sq, 1 / curvature, []
        for eta, noise in rounds:
            pull = curvature * math.sqrt(away + plan.dim * variance)
            left = 1 - eta * curvature / (1 + pull / reach)
            away, variance = left * left * away, left * left * variance + noise
            history.append((away, variance))
        away_sq, variances = np.array(history).T
        return np.asarray(
            away_sq + plan.dim * (np.sqrt(variances) - curvature**-0.5) ** 2
        )

    return np.maximum(on_quadratic(plan.mu), on_quadratic(plan.L))
