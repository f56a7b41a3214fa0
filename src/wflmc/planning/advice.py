"""Warnings of a plan: what its numbers do not cover, and inputs that are allowed and yet look like a mistake.

`wflmc.evaluation.causes` says what would help.
"""

from collections.abc import Iterator

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
ORACLE = "The objective 'exact' is an oracle: it depends on the devices' private data, which epsilon does not cover."
WIDE = 2.0
"""Noise over what sampling needs, from which on samples say too little of the posterior's spread."""


def input_warnings(posterior: Posterior, link: Link | None, privacy: Privacy) -> Iterator[str]:
    """Yield what to look at before anything is sent; without a link, it is an ideal one."""
    if link is not None:
        yield from link.fading.warnings
    if privacy.epsilon is not None and privacy.delta is not None:
        # A mechanism that publishes one of N units in full, picked at random, is (0, 1/N)-private.
        units = {"record": ("examples", int(np.sum(posterior.sizes))), "device": ("devices", len(posterior.sizes))}
        (unit, count), delta = units[privacy.unit], float(np.max(privacy.delta))
        if delta > 1 / count:
            yield f"delta = {delta:g} is above 1/{count}, one over the number of {unit}. It should be far below that."
    yield from _unscaled(posterior)


def _unscaled(posterior: Posterior) -> Iterator[str]:
    """Yield a warning of features of unlike or large size, by which chains move; sizes only to a power of ten."""
    scales = posterior.feature_scales
    if scales is None or not scales.any():
        return
    largest, median = int(np.argmax(scales)), float(np.median(scales[scales > 0]))
    whitened, columns = posterior.coordinates is not None, posterior.columns
    unlike = scales[largest] > UNLIKE * median and not whitened
    if unlike or scales[largest] > UNSCALED:
        size = 10 ** round(np.log10(scales[largest] / (median if unlike else 1.0)))
        name = f" ({columns[largest]})" if columns else ""
        column = "after whitening a direction" if whitened else f"column {largest} of X{name}, counted from 0,"
        compared = "the median column" if unlike else "a standardised one"
        advice = "Standardise all columns, by public means and scales"
        yield f"{UNSCALED_FEATURES}: {column} is some {size:,} times as large as {compared}. {advice}."


def estimates(posterior: Posterior, options: Options, bounded: bool = True) -> Iterator[str]:
    """Yield warnings of models without a closed form, which estimate their constants and the start's distance.

    Args:
        bounded: whether the distance is used.
    """
    if posterior.estimated:
        names = " and ".join(posterior.estimated)
        yield f"With {names} estimated by a Hessian, the bound is no proof, and epsilon does not cover what they tell."
    if posterior.batch:
        yield "Mini-batches make gradients noisier, which the bound and the server's noise do not know."
    if options.initial_w2_sq is None and posterior.start_is_estimate and bounded:
        yield "W2² of the start is a Laplace estimate, and a bound is no better."


def _expands(posterior: Posterior, made: Plan) -> bool:
    """Return whether a round is known to stretch errors.

    Partial participation may undo what η < 2/L or h < 2/√L ensures; models that know their Hessian can tell.
    """
    step = made.dynamics.stretching_step(made.step_size)
    partial = made.active_devices.min() < made.devices
    return partial and posterior.expansion(step.max(), made.weight * (step / step.max())[:, None]) > 1


def plan_warnings(posterior: Posterior, made: Plan, problem: Problem, options: Options) -> Iterator[str]:
    """Yield all warnings about a plan; those that every plan like it has come last."""
    exact, epsilon = made.objective_name == "exact", made.privacy.epsilon
    if made.noise_ratio > WIDE:  # which no diagnostic of the chains can see
        yield f"After burn-in, {made.noise_ratio:.3g} times the noise that sampling needs spreads samples too widely."
    if made.gap is not None and made.gap > 1e-6:
        yield f"The power is proven optimal only to a relative gap of {made.gap:.1g}."
    if made.clips:
        over = np.sum(made.spent + made.ledger > made.privacy.budget(made.devices) * (1 + 1e-9))
        if over:
            yield f"{over} of {made.devices} devices spend more than the privacy budget, which this policy ignores."
        yield from _lost_chains(made, problem.noise_limit if np.isfinite(problem.noise_limit) else 1.0)
    elif epsilon is not None:
        yield "This scheme does not clip: epsilon is not kept, and no finite one would be true."
    # A plan by the exact law is measured in parameters, its start in the coordinates that chains move in.
    alike = made.objective_name != "transcript" and (not exact or posterior.coordinates is None)
    if alike and made.objective > 10 * max(made.initial_w2_sq, 1e-300):
        yield "The objective is far above the distance at the start: sampling gains nothing, or the bound says nothing."
    if not problem.contracts:
        loose = f"Steps are above what L = {posterior.L:.3g} allows, a bound on the curvature that may be loose"
        yield f"{loose}: W2² has no bound, power is in equal parts, and chains are stable only if it is."
    yield from made.dynamics.warnings(made.mu, made.L)
    if _expands(posterior, made):
        yield "Some rounds have devices so unlike the rest that a step stretches errors: the chain may diverge."
    if exact and made.lower_bound is not None and options.policy.proxy is None and epsilon is not None:
        yield ORACLE
    yield from estimates(posterior, options, problem.contracts)


def _lost_chains(made: Plan, factor: float) -> Iterator[str]:
    """Yield a warning of rounds whose noise is more than `factor` times what all clipped gradients can undo."""
    # A round of a small step makes little noise, and the rounds after it undo that.
    reach = factor * np.maximum(made.kick, made.kick[-1]) * made.clip.sum()
    spread = made.dim * made.noise_variance
    # Langevin's own noise is undone over many rounds: clipped gradients hold it within m σ²/(2η Σ ℓ_k).
    beyond = made.noise_variance > 1.05 * made.langevin_noise
    beyond |= spread / (2 * reach) > made.initial_w2_sq**0.5
    loud = np.sum((np.sqrt(spread) > reach * (1 + 1e-9)) & beyond)
    if loud:
        rounds, times = f"In {loud} of {len(made.rounds)} rounds", "" if factor == 1 else f"{factor:g} times "
        yield f"{rounds} the noise of one round exceeds {times}what all clipped gradients can undo: chains may be lost."
