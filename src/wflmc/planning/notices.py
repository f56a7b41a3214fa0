"""Notices about a plan: what its numbers do not cover, and inputs that look wrong.

`wflmc.apps.diagnosis` says what would help.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from wflmc.channel import Link
from wflmc.dynamics import Array
from wflmc.planning.bound import Problem
from wflmc.planning.options import PlanRequest
from wflmc.planning.plan import Plan
from wflmc.posterior.base import Posterior
from wflmc.posterior.inputs import starts_at_point
from wflmc.privacy import Privacy
from wflmc.privacy.ledger import TOLERANCE
from wflmc.support.notices import Notice, NoticeCode
from wflmc.support.recursion import covariances

LARGE_FEATURE = 30.0
"""Size of a feature from which on it alone decides L, step size and clipping."""
UNLIKE_FEATURE = 100.0
"""The same, over the median size of all features."""
ROUND_NOTICES = (
    NoticeCode.EXCESS_NOISE,
    NoticeCode.OPTIMALITY_GAP,
    NoticeCode.BUDGET_EXCEEDED,
    NoticeCode.CHAINS_MAY_BE_LOST,
)
"""Codes of the notices of `_round_notices`, all of which must stand here.

Where plans are joined these are derived anew, and all others are taken from the parts.
"""
WIDE_NOISE_RATIO = 2.0
"""Noise over what sampling needs, above which samples spread too widely."""
NOTHING_GAINED_RATIO = 10
"""Objective over the distance at the start, from which on sampling gains nothing."""
SMALLEST_MISSING_VARIANCE = 0.05
"""Fraction of the variance missing at the first draw, up to which nothing is said."""
DIRECTIONS_TRIED = 200
"""Curvatures from μ to L at which missing variance is computed; that of kinetic
dynamics oscillates between them."""
COLD_NOISE = 1 - 1e-9
"""Noise over Langevin's own, below which a round is colder than the posterior."""
REPORTED_GAP = 1e-6
"""The largest gap that is not worth a notice."""
EXCESS_MARGIN = 1.05
"""Noise over Langevin's own, up to which a round counts as having no excess."""
PRIVATE_DATA = "the devices' private data, which epsilon does not cover"
"""The source of numbers from private data, as the end of a sentence."""


def oracle_notice(source: str = PRIVATE_DATA) -> Notice:
    """Return the notice about plans by the exact law of the posterior itself.

    Such a plan is chosen by numbers that a real server could not know without looking
    at the data. It serves as a benchmark, or with data that are public.

    Args:
        source: of the data that the law depends on, as the end of a sentence.

    Returns:
        A notice with the code `NoticeCode.ORACLE`.
    """
    text = f"The objective 'exact' is an oracle: it depends on {source}."
    return Notice(NoticeCode.ORACLE, text)


def input_notices(
    posterior: Posterior, link: Link | None, privacy: Privacy
) -> Iterator[Notice]:
    """Yield notices about inputs that look wrong, before anything is transmitted.

    They are about gains that look like decibels, a δ that promises little, and features
    of very different or large scales. None of them depends on the plan.

    Args:
        posterior: the model with its data.
        link: None where it is ideal.
        privacy: the promise.
    """
    if link is not None:
        yield from link.fading.notices
    if privacy.epsilon is not None and privacy.delta is not None:
        largest_delta = float(np.max(np.asarray(privacy.delta)))
        yield from _large_delta(posterior, privacy.unit, largest_delta)
    yield from _unscaled_features(posterior)


def _large_delta(posterior: Posterior, unit: str, delta: float) -> Iterator[Notice]:
    """Yield a notice about a δ above 1/N.

    A mechanism that publishes one of N units in full, picked at random, is
    (0, 1/N)-private.
    """
    count = len(posterior.sizes)
    units = "devices"
    if unit == "record":
        count = int(np.sum(posterior.sizes))
        units = "examples"
    if delta <= 1 / count:
        return
    yield Notice(
        NoticeCode.DELTA_TOO_LARGE,
        f"delta = {delta:g} is above 1/{count}, one over the number of {units}. It "
        "should be far below that.",
    )


def _unscaled_features(posterior: Posterior) -> Iterator[Notice]:
    """Yield a notice about features of very different or large sizes.

    Sizes are those of the coordinates that chains move in, and are reported to a power
    of ten alone.
    """
    scales = posterior.feature_scales
    if scales is None or not scales.any():
        return
    largest = int(np.argmax(scales))
    scale = scales[largest]
    median = float(np.median(scales[scales > 0]))
    is_whitened = posterior.coordinates is not None
    is_unlike = scale > UNLIKE_FEATURE * median and not is_whitened
    if not is_unlike and scale <= LARGE_FEATURE:
        return
    reference = "the median column" if is_unlike else "a standardised one"
    ratio = scale / (median if is_unlike else 1.0)
    size = 10 ** round(np.log10(ratio))
    name = _column_name(posterior, largest)
    yield Notice(
        NoticeCode.FEATURES_NOT_SCALED,
        f"Features are not scaled: {name} is some {size:,} times as large as "
        f"{reference}. Standardise all columns, by public means and scales.",
    )


def _column_name(posterior: Posterior, index: int) -> str:
    """Return what a sentence calls a column of the features."""
    if posterior.coordinates is not None:
        return "after whitening a direction"
    columns = posterior.columns
    name = f" ({columns[index]})" if columns else ""
    return f"column {index} of X{name}, counted from 0,"


def estimate_notices(posterior: Posterior) -> Iterator[Notice]:
    """Yield notices about models that estimate their constants or their gradients.

    A bound with an estimated μ or L is not proven, and estimates from private data leak
    something of them. Mini-batches add noise that neither the bound nor the server's
    noise accounts for.

    Args:
        posterior: the model.
    """
    if posterior.estimated:
        names = " and ".join(posterior.estimated)
        yield Notice(
            NoticeCode.ESTIMATED_CONSTANTS,
            f"With {names} estimated by a Hessian, the bound is no proof, and epsilon "
            "does not cover what they tell.",
        )
    if posterior.batch:
        yield Notice(
            NoticeCode.MINI_BATCHES,
            "Mini-batches make gradients noisier, which the bound and the server's "
            "noise do not know.",
        )


def start_notices(posterior: Posterior, request: PlanRequest) -> Iterator[Notice]:
    """Yield a notice where the start's distance, which a bound uses, is estimated.

    It concerns models whose W2² between start and posterior has no closed form. A
    public value in the request replaces the estimate, and the notice is then left out.

    Args:
        posterior: the model.
        request: what planning was asked for.
    """
    if request.initial_w2_sq is None and posterior.start_is_estimate:
        text = "W2² of the start is a Laplace estimate, and a bound is no better."
        yield Notice(NoticeCode.ESTIMATED_START, text)


def _expands(posterior: Posterior, plan: Plan) -> bool:
    """Return whether a round is known to stretch errors.

    Partial participation may undo what η < 2/L or h < 2/√L ensures; models that know
    their Hessian can tell.
    """
    if plan.active_devices.min() >= plan.devices:
        return False
    step = plan.dynamics.stretching_step(plan.step_size)
    longest_step = step.max()
    # A model is asked about one step size: shorter steps count as smaller weights.
    weight = plan.weight * (step / longest_step)[:, None]
    return posterior.expansion(longest_step, weight) > 1


def plan_notices(
    posterior: Posterior, plan: Plan, problem: Problem, request: PlanRequest
) -> Iterator[Notice]:
    """Yield all notices about a plan.

    Those about its rounds come first, and those that every plan of the same model has
    come last. They say what bound, objective and ε do not cover. Code that decides by
    them compares their codes.

    Args:
        posterior: the model.
        plan: the plan, without notices.
        problem: the power problem that it solves.
        request: what planning was asked for.
    """
    yield from _round_notices(plan)
    yield from _unclipped(plan)
    yield from _nothing_gained(posterior, plan, problem)
    yield from _loose_curvature(posterior, problem)
    temperature = request.sampler.burn_in_temperature
    yield from _temperature_notices(plan, problem, temperature)
    yield from plan.dynamics.notices(plan.mu, plan.L)
    if _expands(posterior, plan):
        yield Notice(
            NoticeCode.EXPANDING_ROUNDS,
            "Some rounds have devices so unlike the rest that a step stretches errors: "
            "the chain may diverge.",
        )
    if _is_oracle(plan, problem, request):
        yield oracle_notice()
    yield from estimate_notices(posterior)
    if problem.contracts:
        yield from start_notices(posterior, request)


def _temperature_notices(
    plan: Plan, problem: Problem, temperature: float
) -> Iterator[Notice]:
    """Yield a notice about burn-in that is colder than the posterior, or cannot be.

    Args:
        plan: the plan.
        problem: the power problem that it solves.
        temperature: τ of burn-in, as requested.
    """
    continues_without_burn_in = plan.start > 0 and problem.burn_in == 0
    if temperature == 1 or continues_without_burn_in:
        return
    if np.all(problem.temperature == 1):
        reason = "less noise in burn-in only adds to the bound that is minimized"
        if problem.burn_in == 0:
            reason = "there is no burn-in"
        elif not problem.fills_up:
            reason = "the optimum of the exact law chooses all noise"
        text = f"burn_in_temperature has no effect: {reason}."
        yield Notice(NoticeCode.NO_EFFECT, text)
        return
    yield from _cold_draws(plan)


def _cold_draws(plan: Plan) -> Iterator[Notice]:
    """Yield a notice about draws that are narrower than the posterior.

    There is none where privacy or transmit power leaves every round of burn-in as much
    noise as sampling needs: the plan is then that of temperature 1.

    Args:
        plan: whose burn-in may be colder than the posterior.
    """
    relative_noise = plan.noise_variance / plan.langevin_noise
    if np.all(relative_noise[: plan.burn_in] >= COLD_NOISE):
        return
    missing = 1 - _variance_ratio(plan)
    at_first = float(missing[plan.burn_in].max())
    # Kept rounds may spread wider than the posterior.
    at_last = max(float(missing[-1].max()), 0.0)
    if at_first <= SMALLEST_MISSING_VARIANCE:
        return
    start = " and starts at one point" if starts_at_point(plan.init) else ""
    yield Notice(
        NoticeCode.COLD_DRAWS,
        f"Burn-in is colder than the posterior{start}: in some direction up to "
        f"{at_first:.0%} of the variance may be missing at the first kept round, "
        f"and {at_last:.0%} at the last.",
    )


def _variance_ratio(plan: Plan) -> Array:
    """Return the least variance that draws may have, over the posterior's.

    Along a direction of curvature λ the posterior has the variance 1/λ, and a round
    x' = A x + G ξ with noise of variance v has P' = A P Aᵀ + v G Gᵀ. The start is as
    wide as the posterior, or a point where all chains start at one, and v ~ N(0, 1); a
    wider start leaves more. All devices are active, and no gradient is clipped.

    Args:
        plan: with its noise.

    Returns:
        Of every round and some directions between μ and L, [S, directions]; infinite
        where steps are unstable.
    """
    curvature = np.geomspace(plan.mu, plan.L, DIRECTIONS_TRIED)
    shape = (DIRECTIONS_TRIED, len(plan.rounds))
    step_size = np.broadcast_to(plan.step_size, shape)
    hessian = np.broadcast_to(curvature[:, None, None, None], (*shape, 1, 1))
    linear_round = plan.dynamics.linear_round(step_size, hessian, np.zeros((*shape, 1)))
    noise_matrix = linear_round.noise_matrix
    noise_variance = plan.noise_variance[:, None, None]
    noise_covariance = noise_variance * (noise_matrix @ noise_matrix.swapaxes(-1, -2))
    start_variance = 1 / curvature
    if starts_at_point(plan.init):
        start_variance = np.zeros_like(curvature)
    of_directions = [
        plan.dynamics.initial_law(np.zeros(1), variance.reshape(1, 1))
        for variance in start_variance
    ]
    start = np.stack([covariance for _, covariance in of_directions])
    with np.errstate(over="ignore", invalid="ignore"):
        law = covariances(linear_round.matrix, noise_covariance, start)
        ratio = curvature[:, None] * law[..., 0, 0]
    return np.nan_to_num(ratio, nan=np.inf, posinf=np.inf).T


def _unclipped(plan: Plan) -> Iterator[Notice]:
    """Yield a notice about a promise that a scheme without clipping cannot keep."""
    if not plan.clips and plan.privacy.epsilon is not None:
        yield Notice(
            NoticeCode.NOT_CLIPPED,
            "This scheme does not clip: epsilon is not kept, and no finite one would "
            "be true.",
        )


def _nothing_gained(
    posterior: Posterior, plan: Plan, problem: Problem
) -> Iterator[Notice]:
    """Yield a notice about an objective far above the distance at the start."""
    # A plan by the exact law is measured in parameters, its start in the coordinates
    # that chains move in.
    is_exact = problem.objective == "exact"
    has_same_units = not is_exact or posterior.coordinates is None
    is_comparable = problem.objective != "transcript" and has_same_units
    start = max(plan.initial_w2_sq, 1e-300)
    if is_comparable and plan.objective > NOTHING_GAINED_RATIO * start:
        yield Notice(
            NoticeCode.NOTHING_GAINED,
            "The objective is far above the distance at the start: sampling gains "
            "nothing, or the bound says nothing.",
        )


def _loose_curvature(posterior: Posterior, problem: Problem) -> Iterator[Notice]:
    """Yield a notice about steps above what L allows, where L may be loose."""
    if problem.contracts:
        return
    yield Notice(
        NoticeCode.LOOSE_CURVATURE,
        f"Steps are above what L = {posterior.L:.3g} allows, a bound on the "
        "curvature that may be loose: W2² has no bound that power could minimize, and "
        "chains are stable only if L is loose.",
    )


def _is_oracle(plan: Plan, problem: Problem, request: PlanRequest) -> bool:
    """Return whether a plan with a promise is chosen by the posterior itself.

    Policies that do not optimize look at no law, and have no lower bound.
    """
    is_exact_optimum = problem.objective == "exact" and plan.lower_bound is not None
    has_promise = plan.privacy.epsilon is not None
    return is_exact_optimum and has_promise and request.policy.proxy is None


def _round_notices(plan: Plan) -> Iterator[Notice]:
    """Yield notices that follow from the rounds of a plan alone: `ROUND_NOTICES`."""
    # Excess noise: no diagnostic of the chains shows it.
    if plan.noise_ratio > WIDE_NOISE_RATIO:
        yield Notice(
            NoticeCode.EXCESS_NOISE,
            f"After burn-in, {plan.noise_ratio:.3g} times the noise that sampling "
            "needs spreads samples too widely.",
        )
    if plan.gap is not None and plan.gap > REPORTED_GAP:
        text = f"The power is proven optimal only to a relative gap of {plan.gap:.1g}."
        yield Notice(NoticeCode.OPTIMALITY_GAP, text)
    if plan.clips:
        yield from _overspending(plan)
        noise_limit = plan.certificate.noise_limit
        # Without a limit, what all clipped gradients can undo in a round.
        factor = noise_limit if np.isfinite(noise_limit) else 1.0
        yield from _lost_chains(plan, factor)


def joined_notices(joined: Plan, parts: Sequence[Plan]) -> Iterator[Notice]:
    """Yield the notices about a plan that was made in parts, each code once.

    Args:
        joined: the plan of all rounds.
        parts: the plans that it was joined from, in their order.

    Yields:
        What follows from the rounds, about all of them; and what else the parts say.
    """
    yield from _round_notices(joined)
    seen_codes: set[str] = set(ROUND_NOTICES)
    for part in parts:
        for notice in part.notices:
            if notice.code in seen_codes:
                continue
            seen_codes.add(notice.code)
            if notice.code == NoticeCode.COLD_DRAWS:
                # It says how narrow draws of the last round are.
                yield from _cold_draws(joined)
            else:
                yield notice


def _overspending(plan: Plan) -> Iterator[Notice]:
    """Yield a notice about devices that spend more than their privacy budget."""
    budget = plan.privacy.budget(plan.devices)
    total_spent = plan.spent + plan.ledger
    count = np.sum(total_spent > budget * (1 + TOLERANCE))
    if count:
        yield Notice(
            NoticeCode.BUDGET_EXCEEDED,
            f"{count} of {plan.devices} devices spend more than the privacy budget, "
            "which this policy ignores.",
        )


def _lost_chains(plan: Plan, factor: float) -> Iterator[Notice]:
    """Yield a notice about rounds that are too noisy.

    Args:
        plan: the plan.
        factor: the largest noise of a round that is allowed, over what all clipped
            gradients can undo.
    """
    # A round of a small step makes little noise, and the rounds after it undo that.
    kick = np.maximum(plan.kick, plan.kick[-1])
    reach = factor * kick * plan.clip.sum()
    squared_noise = plan.dim * plan.noise_variance
    # Langevin's own noise is undone over many rounds: clipped gradients hold it within
    # m σ²/(2η Σ ℓ_k).
    has_excess = plan.noise_variance > EXCESS_MARGIN * plan.langevin_noise
    is_too_wide = squared_noise / (2 * reach) > plan.initial_w2_sq**0.5
    exceeds_reach = np.sqrt(squared_noise) > reach * (1 + TOLERANCE)
    count = np.sum(exceeds_reach & (has_excess | is_too_wide))
    if count:
        times = "" if factor == 1 else f"{factor:g} times "
        yield Notice(
            NoticeCode.CHAINS_MAY_BE_LOST,
            f"In {count} of {len(plan.rounds)} rounds the noise of one round exceeds "
            f"{times}what all clipped gradients can undo: chains may be lost.",
        )
