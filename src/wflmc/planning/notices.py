"""Notices about a plan: what its numbers do not cover, and inputs that look wrong.

`wflmc.apps.diagnosis` says what would help.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from wflmc.channel import Link
from wflmc.planning.bound import Problem
from wflmc.planning.options import PlanRequest
from wflmc.planning.plan import Plan
from wflmc.posterior.base import Posterior
from wflmc.privacy import Privacy
from wflmc.support.notices import Notice, NoticeCode

UNSCALED = 30.0
"""Size of a feature from which on it alone decides L, step size and clipping."""
UNLIKE = 100.0
"""The same, over the median size of all features."""
ROUND_NOTICES = (
    NoticeCode.EXCESS_NOISE,
    NoticeCode.OPTIMALITY_GAP,
    NoticeCode.BUDGET_EXCEEDED,
    NoticeCode.CHAINS_MAY_BE_LOST,
)
"""Codes of notices that follow from the rounds of a plan alone."""
WIDE = 2.0
"""Noise over what sampling needs, from which on samples hide the spread."""
PRIVATE_DATA = "the devices' private data, which epsilon does not cover"
"""The source of numbers from private data, as the end of a sentence."""


def oracle_notice(source: str = PRIVATE_DATA) -> Notice:
    """Return the notice about plans by the exact law of the posterior itself.

    Args:
        source: of the data that the law depends on.
    """
    text = f"The objective 'exact' is an oracle: it depends on {source}."
    return Notice(NoticeCode.ORACLE, text)


def input_notices(
    posterior: Posterior, link: Link | None, privacy: Privacy
) -> Iterator[Notice]:
    """Yield what to look at before anything is sent.

    Args:
        posterior: the model with its data.
        link: None where it is ideal.
        privacy: the promise.
    """
    if link is not None:
        yield from link.fading.notices
    if privacy.epsilon is not None and privacy.delta is not None:
        yield from _large_delta(posterior, privacy.unit, float(np.max(privacy.delta)))
    yield from _unscaled(posterior)


def _large_delta(posterior: Posterior, unit: str, delta: float) -> Iterator[Notice]:
    # A mechanism that publishes one of N units in full, picked at random, is
    # (0, 1/N)-private.
    if unit == "record":
        count = int(np.sum(posterior.sizes))
        units = "examples"
    else:
        count = len(posterior.sizes)
        units = "devices"
    if delta > 1 / count:
        yield Notice(
            NoticeCode.DELTA_TOO_LARGE,
            f"delta = {delta:g} is above 1/{count}, one over the number of {units}. It should be far below that.",
        )


def _unscaled(posterior: Posterior) -> Iterator[Notice]:
    """Yield a notice about features of unlike or large size, by which chains move.

    Sizes are told only to a power of ten.
    """
    scales = posterior.feature_scales
    if scales is None or not scales.any():
        return
    largest = int(np.argmax(scales))
    median = float(np.median(scales[scales > 0]))
    whitened = posterior.coordinates is not None
    columns = posterior.columns
    unlike = scales[largest] > UNLIKE * median and not whitened
    if unlike or scales[largest] > UNSCALED:
        size = 10 ** round(np.log10(scales[largest] / (median if unlike else 1.0)))
        name = f" ({columns[largest]})" if columns else ""
        column = f"column {largest} of X{name}, counted from 0,"
        if whitened:
            column = "after whitening a direction"
        compared = "the median column" if unlike else "a standardised one"
        yield Notice(
            NoticeCode.FEATURES_NOT_SCALED,
            f"Features are not scaled: {column} is some {size:,} times as large as "
            f"{compared}. Standardise all columns, by public means and scales.",
        )


def estimate_notices(posterior: Posterior) -> Iterator[Notice]:
    """Yield notices about models that estimate their constants or their gradients.

    Args:
        posterior: the model.
    """
    if posterior.estimated:
        names = " and ".join(posterior.estimated)
        yield Notice(
            NoticeCode.ESTIMATED_CONSTANTS,
            f"With {names} estimated by a Hessian, the bound is no proof, and epsilon does not cover what they tell.",
        )
    if posterior.batch:
        yield Notice(
            NoticeCode.MINI_BATCHES,
            "Mini-batches make gradients noisier, which the bound and the server's noise do not know.",
        )


def start_notices(posterior: Posterior, request: PlanRequest) -> Iterator[Notice]:
    """Yield a notice where the start's distance, which a bound uses, is estimated."""
    if request.initial_w2_sq is None and posterior.start_is_estimate:
        text = "W2² of the start is a Laplace estimate, and a bound is no better."
        yield Notice(NoticeCode.ESTIMATED_START, text)


def _expands(posterior: Posterior, plan: Plan) -> bool:
    """Return whether a round is known to stretch errors.

    Partial participation may undo what η < 2/L or h < 2/√L ensures; models that know
    their Hessian can tell.
    """
    step = plan.dynamics.stretching_step(plan.step_size)
    partial = plan.active_devices.min() < plan.devices
    weight = plan.weight * (step / step.max())[:, None]
    return partial and posterior.expansion(step.max(), weight) > 1


def plan_notices(
    posterior: Posterior, plan: Plan, problem: Problem, request: PlanRequest
) -> Iterator[Notice]:
    """Yield all notices about a plan; those that every plan like it has come last.

    Args:
        posterior: the model.
        plan: the plan, without notices.
        problem: the power problem that it solves.
        request: what planning was asked for.
    """
    exact = problem.objective == "exact"
    epsilon = plan.privacy.epsilon
    yield from _round_notices(plan)
    if not plan.clips and epsilon is not None:
        yield Notice(
            NoticeCode.NOT_CLIPPED,
            "This scheme does not clip: epsilon is not kept, and no finite one would be true.",
        )
    # A plan by the exact law is measured in parameters, its start in the coordinates
    # that chains move in.
    same_units = not exact or posterior.coordinates is None
    comparable = problem.objective != "transcript" and same_units
    if comparable and plan.objective > 10 * max(plan.initial_w2_sq, 1e-300):
        yield Notice(
            NoticeCode.NOTHING_GAINED,
            "The objective is far above the distance at the start: sampling gains nothing, or the bound says nothing.",
        )
    if not problem.contracts:
        yield Notice(
            NoticeCode.LOOSE_CURVATURE,
            f"Steps are above what L = {posterior.L:.3g} allows, a bound on the "
            "curvature that may be loose: W2² has no bound, power is in equal parts, "
            "and chains are stable only if it is.",
        )
    yield from plan.dynamics.notices(plan.mu, plan.L)
    if _expands(posterior, plan):
        yield Notice(
            NoticeCode.EXPANDING_ROUNDS,
            "Some rounds have devices so unlike the rest that a step stretches errors: the chain may diverge.",
        )
    by_posterior = (
        exact and plan.lower_bound is not None and request.policy.proxy is None
    )
    if by_posterior and epsilon is not None:
        yield oracle_notice()
    yield from estimate_notices(posterior)
    if problem.contracts:
        yield from start_notices(posterior, request)


def _round_notices(plan: Plan) -> Iterator[Notice]:
    """Yield notices that follow from the rounds of a plan alone: `ROUND_NOTICES`."""
    if plan.noise_ratio > WIDE:  # which no diagnostic of the chains can see
        yield Notice(
            NoticeCode.EXCESS_NOISE,
            f"After burn-in, {plan.noise_ratio:.3g} times the noise that sampling needs spreads samples too widely.",
        )
    if plan.gap is not None and plan.gap > 1e-6:
        text = f"The power is proven optimal only to a relative gap of {plan.gap:.1g}."
        yield Notice(NoticeCode.OPTIMALITY_GAP, text)
    if plan.clips:
        yield from _overspending(plan)
        noise_limit = plan.certificate.noise_limit
        yield from _lost_chains(plan, noise_limit if np.isfinite(noise_limit) else 1.0)


def joined_notices(whole: Plan, parts: Sequence[Plan]) -> Iterator[Notice]:
    """Yield the notices about a plan that was made in parts, each code once.

    Args:
        whole: the plan of all rounds.
        parts: the plans that it was joined from, in their order.

    Yields:
        What follows from the rounds, about all of them; and what else the parts say.
    """
    yield from _round_notices(whole)
    seen: set[str] = set(ROUND_NOTICES)
    for notice in (notice for part in parts for notice in part.notices):
        if notice.code not in seen:
            seen.add(notice.code)
            yield notice


def _overspending(plan: Plan) -> Iterator[Notice]:
    """Yield a notice about devices that spend more than their privacy budget."""
    budget = plan.privacy.budget(plan.devices)
    count = np.sum(plan.spent + plan.ledger > budget * (1 + 1e-9))
    if count:
        yield Notice(
            NoticeCode.BUDGET_EXCEEDED,
            f"{count} of {plan.devices} devices spend more than the privacy budget, which this policy ignores.",
        )


def _lost_chains(plan: Plan, factor: float) -> Iterator[Notice]:
    """Yield a notice about rounds that are too noisy.

    Args:
        plan: the plan.
        factor: the largest noise of a round that is allowed, over what all clipped
            gradients can undo.
    """
    # A round of a small step makes little noise, and the rounds after it undo that.
    reach = factor * np.maximum(plan.kick, plan.kick[-1]) * plan.clip.sum()
    spread = plan.dim * plan.noise_variance
    # Langevin's own noise is undone over many rounds: clipped gradients hold it within
    # m σ²/(2η Σ ℓ_k).
    beyond = plan.noise_variance > 1.05 * plan.langevin_noise
    beyond |= spread / (2 * reach) > plan.initial_w2_sq**0.5
    count = np.sum((np.sqrt(spread) > reach * (1 + 1e-9)) & beyond)
    if count:
        times = "" if factor == 1 else f"{factor:g} times "
        yield Notice(
            NoticeCode.CHAINS_MAY_BE_LOST,
            f"In {count} of {len(plan.rounds)} rounds the noise of one round exceeds "
            f"{times}what all clipped gradients can undo: chains may be lost.",
        )
