"""Warnings of a plan: what its numbers do not cover, and inputs that are allowed and yet look like a mistake.

`wflmc.evaluation.causes` says what would help.
"""

from __future__ import annotations

import numpy as np

from wflmc.channel import Link
from wflmc.planning.bound import Problem
from wflmc.planning.options import Options
from wflmc.planning.plan import Plan
from wflmc.posterior.base import Posterior
from wflmc.privacy import Privacy

UNSCALED, UNLIKE = 30.0, 100.0
"""Size of a feature, and over the median of all, from which on it alone decides L, the step size and the clipping."""
UNSCALED_FEATURES = "Features are not scaled"


def input_warnings(posterior: Posterior, link: Link | None, privacy: Privacy) -> tuple[str, ...]:
    """What to look at before anything is sent; without a link, it is an ideal one."""
    fading = None if link is None else link.fading
    return (*getattr(fading, "warnings", ()), *_large_delta(posterior, privacy), *_unscaled(posterior))


def _large_delta(posterior: Posterior, privacy: Privacy) -> list[str]:
    """A mechanism that publishes one of N units in full, picked at random, is (0, 1/N)-private."""
    if privacy.epsilon is None or privacy.delta is None:
        return []
    sizes = posterior.sizes
    unit, count = ("example", int(np.sum(sizes))) if privacy.unit == "record" else ("device", len(sizes))
    delta = float(np.max(privacy.delta))
    if delta <= 1 / count:
        return []
    what = "an example" if unit == "example" else "all data of a device"
    return [
        f"delta = {delta:g} is above 1/{count}, one over the number of {unit}s: publishing {what} picked at random "
        "would keep such a promise. A delta far below that is usual."
    ]


def _unscaled(posterior: Posterior) -> list[str]:
    """Features of unlike or large size, by which chains move; sizes are only said to a power of ten."""
    scales = posterior.feature_scales
    if scales is None or not scales.any():
        return []
    largest, median = int(np.argmax(scales)), float(np.median(scales[scales > 0]))
    whitened = posterior.coordinates is not None
    unlike = scales[largest] > UNLIKE * median and not whitened
    if not unlike and scales[largest] <= UNSCALED:
        return []
    size = 10 ** round(np.log10(scales[largest] / (median if unlike else 1.0)))
    compared = "the median column" if unlike else "a standardised one"
    columns = posterior.columns
    name = f" ({columns[largest]})" if columns else ""
    column = "after whitening a direction" if whitened else f"column {largest} of X{name}, counted from 0,"
    return [
        f"{UNSCALED_FEATURES}: {column} is some {size:,} times as large as {compared}. It alone decides L, the "
        "step size and what is clipped. Standardise all columns, by public means and scales."
    ]


def plan_warnings(posterior: Posterior, made: Plan, problem: Problem, options: Options) -> tuple[str, ...]:
    """All warnings about a plan; those that every plan like it has come last."""
    return (
        *_spread(made),
        *_of_the_plan(made, problem, posterior.coordinates is not None),
        *_divergence(posterior, made),
        *_oracle(made, options),
        *estimates(posterior, options),
    )


ORACLE = (
    "The objective 'exact' is an oracle: without a public proxy the plan depends on the devices' private data, which "
    "epsilon does not cover."
)
WIDE = 2.0
"""Noise over what sampling needs, from which on samples say too little of the posterior's spread."""


def _spread(made: Plan) -> list[str]:
    """Noise that stays after burn-in widens the samples, and no diagnostic of the chains can see it."""
    ratio = made.noise_ratio
    if not ratio > WIDE:
        return []
    return [
        f"After burn-in there is {ratio:.3g} times the noise that sampling needs: samples spread some {ratio**0.5:.2g} "
        "times as wide as the posterior."
    ]


def estimates(posterior: Posterior, options: Options) -> list[str]:
    """Models without a closed form can only estimate their constants, and how far the start is from the posterior."""
    found = []
    guessed = posterior.estimated
    if guessed:
        found.append(
            f"{' and '.join(guessed)} {'is' if len(guessed) == 1 else 'are'} estimated by the Hessian at the start and "
            "at a mode: the bound is no proof, and epsilon does not cover what that tells of the data."
        )
    if posterior.batch:
        found.append("Mini-batches make gradients noisier, which the bound and the server's noise do not know.")
    if options.initial_w2_sq is None and posterior.start_is_estimate:
        so = ", and the bound is no better" if options.sampler.motion.has_bound else ""
        found.append(f"W2² of the start is a Laplace estimate{so}.")
    return found


def _oracle(made: Plan, options: Options) -> list[str]:
    """A plan for the exact law looks at the posterior."""
    if made.lower_bound is None or options.policy.proxy is not None or made.privacy.epsilon is None:
        return []
    if options.policy.objective != "exact":
        return []
    return [ORACLE]


def expansion(posterior: Posterior | None, made: Plan) -> float:
    """The largest factor by which a round of a plan can stretch an error; 1 where it is not known to be above it."""
    if posterior is None or made.active_devices.min() == made.devices:
        return 1.0
    step = made.dynamics.stretching_step(made.step_size)
    largest = float(step.max())
    return max(1.0, float(posterior.expansion(largest, made.weight * (step / largest)[:, None])))


def _divergence(posterior: Posterior, made: Plan) -> list[str]:
    """Partial participation may undo what η < 2/L or h < 2/√L ensures; models that know their Hessian can tell."""
    factor = expansion(posterior, made)
    if factor <= 1:
        return []
    return [
        "The devices that send in some rounds are so unlike the rest that a step "
        f"{made.dynamics.unstable.format(factor)}: without clipping the chain may diverge."
    ]


def _of_the_plan(made: Plan, problem: Problem, moves_elsewhere: bool) -> list[str]:
    found = []
    factor = problem.noise_limit if np.isfinite(problem.noise_limit) else 1.0
    if made.gap is not None and made.gap > 1e-6:
        found.append(f"The power is proven optimal only to a relative gap of {made.gap:.1g}.")
    if made.clips:
        # A round of a small step makes little noise, and the rounds after it undo that.
        reach = factor * np.maximum(made.kick, made.kick[-1]) * made.clip.sum()
        spread = made.dim * made.noise_variance
        # Langevin's own noise is undone over many rounds: clipped gradients hold it within m σ²/(2η Σ ℓ_k).
        beyond = made.noise_variance > 1.05 * made.langevin_noise
        beyond |= spread / (2 * reach) > made.initial_w2_sq**0.5
        loud = np.flatnonzero((np.sqrt(spread) > reach * (1 + 1e-9)) & beyond)
        if loud.size:
            found.append(
                f"In {loud.size} of {len(made.rounds)} rounds the noise of one round exceeds {_times(factor)}what all "
                f"clipped gradients together can undo ({made.dynamics.symbol} Σ ℓ_k); the "
                f"{'bound' if made.dynamics.has_bound else 'exact law'} ignores clipping, and chains may not come back."
            )
    if not made.clips and made.privacy.epsilon is not None:
        found.append("This scheme does not clip: epsilon is not kept, and no finite one would be true.")
    # A plan by the exact law is measured in parameters, its start in the coordinates that chains move in.
    alike = made.objective_name != "exact" or not moves_elsewhere
    if alike and made.objective > 10 * max(made.initial_w2_sq, 1e-300):
        found.append(
            "The chain is farther from the posterior after burn-in than at the start."
            if made.objective_name == "exact"
            else "The bound after burn-in is far above the distance at the start: it says nothing here."
        )
    if made.clips:
        limit = made.privacy.budget(made.devices)
        over = np.flatnonzero(made.spent + made.ledger > limit * (1 + 1e-9))
        if over.size:
            found.append(
                f"{over.size} of {made.devices} devices spend more than the privacy budget, which this policy ignores."
            )
    found += made.dynamics.warnings(made.mu, made.L)
    return found


def _times(factor: float) -> str:
    return "" if factor == 1 else f"{factor:g} times "
