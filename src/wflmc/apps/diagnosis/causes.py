"""Causes of error of a plan or a run, worst first.

Causes are ranked by what each of them costs in a forecast of the chains
(`wflmc.evaluation.clipped_law`); `wflmc.apps.diagnosis.search` finds the changes that
help. A diagnosis uses the plan, the chains and their diagnostics, not test scores:
settings chosen by these would be fitted to the test set.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from wflmc.apps.diagnosis.best_first import GOOD_W2_SQ
from wflmc.apps.diagnosis.replanning import Replanner
from wflmc.apps.diagnosis.search import (
    NO_CHANGES,
    ChangeSearch,
    Diagnosed,
    is_uniform,
    rounded,
)
from wflmc.apps.diagnosis.values import (
    CAUSES_SHOWN,
    NOTHING_MEASURED,
    TOO_FEW_DRAWS,
    Cause,
    Change,
    Measured,
)
from wflmc.channel import Link
from wflmc.evaluation.clipped_law import (
    ChainForecast,
    ForecastModel,
    forecast,
    model_of,
)
from wflmc.evaluation.summary import Evaluation
from wflmc.planning import Plan, Policy, Sampler
from wflmc.planning.build import complete_request
from wflmc.planning.options import DEFAULT_POLICY, DEFAULT_SAMPLER
from wflmc.planning.solvers.closed_form import LIMITS, POLICY, POWER
from wflmc.posterior import GaussianPosterior, Posterior, SoftmaxPosterior
from wflmc.privacy import Privacy
from wflmc.support.notices import NoticeCode

MAX_INVERSE_ESS = 0.1
"""1/ESS of one chain above which its draws are too few."""
LEAST_SHARE_OF_ERROR = 0.1
"""A cause is named if it accounts for at least this fraction of W2²."""
NARROW_PRIOR = 3.0
"""How much farther from its mean than the prior expects data may put parameters."""
MAX_FORECAST_PARAMETERS = 20_000
"""Beyond this there is no forecast: the mode alone takes longer to find than most
chains take to run."""
NOISE_RATIO_OF_KEPT_ROUNDS = 1.05
"""Noise over what sampling needs from which on it is too much after burn-in."""
NAMES_BY_CHANGE = {
    ("clipping", "privacy.clip", "up"): "clip too small",
    ("clipping", "privacy.example_clip", "up"): "clip too small",
    ("start", "sampler.step_size", "up"): "step size too small",
    ("start", "sampler.burn_in", "up"): "burn-in too short",
}
"""Names of causes by their kind, the key that helps, and its direction."""


class _Cost(NamedTuple):
    """What a kind of cause costs: W2² in posterior variances, or 1/ESS of draws."""

    kind: str
    cost: float


class _Evidence(NamedTuple):
    """The usual name of a cause, and what shows it."""

    name: str
    text: str


def advise(  # noqa: PLR0913 (the arguments of `plan`, and an evaluation)
    posterior: Posterior,
    link: Link,
    privacy: Privacy,
    *,
    evaluation: Evaluation | None = None,
    step_size: ArrayLike | None = None,
    burn_in: int | None = None,
    samples: int | None = None,
    sampler: Sampler = DEFAULT_SAMPLER,
    policy: Policy = DEFAULT_POLICY,
    ledger: ArrayLike | None = None,
    initial_w2_sq: float | None = None,
) -> tuple[Cause, ...]:
    """Return the causes that keep samples from the posterior, and what would help.

    The plan is made, its chains are forecast, and for the two worst causes plans with
    one setting changed are made and forecast too: some dozens of plans.

    Args:
        posterior: the model, its data split over devices.
        link: the channels, and what devices may transmit.
        privacy: the promise.
        evaluation: of a trace of that plan, where there is one; it then provides the
            evidence. Its test scores are not used.
        step_size, burn_in, samples, sampler, policy, ledger, initial_w2_sq: those of
            `wflmc.plan`.

    Returns:
        The causes, worst first; none where samples are expected to be good. Their keys
        are those of scenario files, which are the arguments of `Link`, `Privacy`,
        `Sampler`, `Policy` and `plan` behind the point. Clips are suggested by the size
        of the devices' gradients: epsilon does not cover the advice.

    Raises:
        InputError: as `wflmc.plan` does.
    """
    request = complete_request(
        posterior,
        link,
        privacy,
        step_size=step_size,
        burn_in=burn_in,
        samples=samples,
        sampler=sampler,
        policy=policy,
        ledger=ledger,
        initial_w2_sq=initial_w2_sq,
    )
    measured = NOTHING_MEASURED
    if evaluation is not None:
        measured = Measured.from_evaluation(evaluation)
    replanner = Replanner(posterior, request)
    return find_causes(replanner.plan({}), posterior, replanner, measured)


def find_causes(
    plan: Plan,
    posterior: Posterior | None,
    replanner: Replanner | None = None,
    measured: Measured = NOTHING_MEASURED,
) -> tuple[Cause, ...]:
    """Return the causes of error of a plan, worst first, as `advise` does.

    For at most two of them, changes are searched. A plan with very many parameters gets
    one entry, which says that there is no forecast.

    Args:
        plan: to be judged.
        posterior: None where the data are not to be looked at.
        replanner: makes the plan again; None where no changes are to be tried.
        measured: by chains of the plan.

    Returns:
        The causes, worst first.
    """
    if plan.dim > MAX_FORECAST_PARAMETERS:
        size = f"{plan.dim:,} parameters"
        evidence = f"no forecast is made for {size}, which would take long"
        return (Cause("not diagnosed", evidence, 0.0, None),)
    model = model_of(plan, posterior)
    diagnosed = Diagnosed(plan, posterior, model, forecast(plan, model))
    search = None if replanner is None else ChangeSearch(diagnosed, replanner)
    # What is wrong with the model comes before what is wrong with its chains.
    causes = _narrow_prior(model, posterior)
    for kind, cost in _costs(diagnosed):
        best = NO_CHANGES
        if search is not None and len(causes) < CAUSES_SHOWN:
            best = search.best(kind)
        evidence_of_kind = _evidence(kind, cost, diagnosed, measured)
        name = evidence_of_kind.name
        if best.change is not None:
            reason = (kind, best.change.key, best.change.direction)
            name = NAMES_BY_CHANGE.get(reason, name)
        cause = Cause(name, evidence_of_kind.text, cost, best.change, best.instead)
        causes.append(cause)
    return tuple(causes)


def _costs(diagnosed: Diagnosed) -> list[_Cost]:
    """Return what each cause costs, the largest first; too few draws come last.

    Where the error is large, a cause costs what the forecast gains without it: without
    noise in excess of what sampling needs, without clipping, or from a start at the
    posterior. The step costs what it alone spreads samples too widely, but no more than
    they are spread. Burn-in that is too cold has a cost of its own (`_cost_of_cold`),
    and counts also where the error is small but a notice says that draws are narrow.
    Too few draws are measured in another unit, 1/ESS, and so cannot be ranked with the
    others.
    """
    plan = diagnosed.plan
    model = diagnosed.model
    actual = diagnosed.forecast
    ideal = forecast(plan, model, clipping=False, excess=False, cold=False, start=False)
    has_large_error = actual.scaled_w2_sq >= GOOD_W2_SQ
    costs: list[_Cost] = []
    if has_large_error:
        without = {
            "noise": forecast(plan, model, excess=False),
            "clipping": forecast(plan, model, clipping=False),
            "start": forecast(plan, model, start=False),
        }
        for kind, counterfactual in without.items():
            costs.append(_Cost(kind, _difference(actual, counterfactual)))
        costs.append(_Cost("step", min(ideal.wide_w2_sq, actual.wide_w2_sq)))
    threshold = LEAST_SHARE_OF_ERROR * actual.scaled_w2_sq
    large = [item for item in costs if item.cost >= threshold]
    # Users read this notice beside the diagnosis, which must not contradict it.
    has_notice = NoticeCode.COLD_DRAWS in [notice.code for notice in plan.notices]
    if has_large_error or has_notice:
        cold = _Cost("cold", _cost_of_cold(diagnosed))
        if cold.cost > (0.0 if has_notice else threshold):
            large.append(cold)
    large.sort(key=lambda item: -item.cost)
    has_several_draws = len(plan.rounds) - plan.burn_in > 1
    has_few_independent = ideal.inverse_ess > MAX_INVERSE_ESS
    # Samples that are too bad are no reason to draw more of them.
    is_usable = actual.scaled_w2_sq < 1
    if has_several_draws and has_few_independent and is_usable:
        large.append(_Cost("draws", ideal.inverse_ess))
    return large


def _cost_of_cold(diagnosed: Diagnosed) -> float:
    """Return what burn-in with less noise than sampling needs costs.

    It is the W2² of directions in which draws are narrower than the posterior, less
    that without cold. Directions in which they would then be wider do not count: an
    overdamped round with all its noise takes a variance v to (1 − ηλ)² v + 2η, which is
    above 1/λ if v is, so that the width is of long steps.
    """
    actual = diagnosed.forecast
    warm = forecast(diagnosed.plan, diagnosed.model, cold=False)
    return actual.narrow_w2_sq - warm.narrow_w2_sq


def _difference(actual: ChainForecast, counterfactual: ChainForecast) -> float:
    """Return how much larger W2² is than in another forecast; both may be infinite."""
    if counterfactual.scaled_w2_sq == actual.scaled_w2_sq:
        return 0.0
    return actual.scaled_w2_sq - counterfactual.scaled_w2_sq


def _evidence(
    kind: str,
    cost: float,
    diagnosed: Diagnosed,
    measured: Measured,
) -> _Evidence:
    """Return the usual name of a cause, and what shows it."""
    plan = diagnosed.plan
    rhat = "" if measured.rhat_max is None else f" (R-hat is {measured.rhat_max:.3g})"
    if kind == "noise":
        return _noise_evidence(plan)
    if kind == "cold":
        return _cold_evidence(plan)
    if kind == "clipping":
        at_posterior = forecast(plan, diagnosed.model, excess=False, start=False)
        left = f"at the posterior {at_posterior.fraction_left:.0%} would be left"
        clipped = _clipped(plan, diagnosed.forecast, measured)
        return _Evidence("clipped gradients", f"{clipped}; {left}")
    if kind == "start":
        deviations = f"{cost**0.5:.2g} posterior standard deviations"
        distance = f"chains are {deviations} from where they should be{rhat}"
        text = f"after {plan.burn_in} rounds {distance}"
        return _Evidence("start not forgotten", text)
    if kind == "step":
        text = f"{_step_sizes(plan)} alone spreads samples too widely"
        return _Evidence("step size too large", text)
    draws = f"{len(plan.rounds) - plan.burn_in} draws of a chain"
    text = f"{draws} are worth {1 / cost:.2g} independent ones{rhat}"
    return _Evidence(TOO_FEW_DRAWS, text)


def _cold_evidence(plan: Plan) -> _Evidence:
    """Return the name of burn-in that is too cold, and how much noise it has."""
    ratio = plan.noise_variance / plan.langevin_noise
    # A plan has a tiny ratio where burn-in has no noise.
    percent = round(100 * float(ratio[: plan.burn_in].min()), 1)
    narrow = "draws are narrower than the posterior in some direction"
    noise = f"as little as {percent:g}% of the noise that sampling needs"
    return _Evidence("burn-in too cold", f"{narrow}; its rounds have {noise}")


def _step_sizes(plan: Plan) -> str:
    """Return the step size, or the range of several, as the subject of a sentence."""
    smallest = float(plan.step_size.min())
    largest = float(plan.step_size.max())
    if is_uniform(plan.step_size):
        return f"step_size = {largest:.3g}"
    return f"a step size between {smallest:.3g} and {largest:.3g}"


def _noise_evidence(plan: Plan) -> _Evidence:
    """Return the name of excess noise, and what keeps rounds from less of it."""
    if plan.noise_ratio <= NOISE_RATIO_OF_KEPT_ROUNDS:
        largest_ratio = float((plan.noise_variance / plan.langevin_noise).max())
        times = (
            f"up to {largest_ratio:.3g} times what Langevin sampling needs in early "
            "rounds"
        )
        return _Evidence("noise of burn-in", times)
    times = f"{plan.noise_ratio:.3g} times what Langevin sampling needs after burn-in"
    limit = plan.limit[plan.burn_in :]
    if np.mean(limit == LIMITS.index(POWER)) > 0.5:
        return _Evidence("channel noise", f"{times}, limited by power")
    if np.mean(limit == LIMITS.index(POLICY)) > 0.5:
        return _Evidence("channel noise", f"{times}, limited by the policy")
    return _Evidence("privacy noise", f"{times}, limited by privacy")


def _clipped(plan: Plan, chain_forecast: ChainForecast, measured: Measured) -> str:
    """Return how many gradients were clipped, or are expected to be."""
    if np.isfinite(plan.example_clip).any():
        if measured.example_clip_rate is None:
            return "examples are clipped"
        return f"{measured.example_clip_rate:.0%} of examples were clipped"
    if measured.clip_rate is None:
        return f"{chain_forecast.clip_rate:.0%} of gradients are expected to be clipped"
    return f"{measured.clip_rate:.0%} of gradients were clipped"


def _narrow_prior(model: ForecastModel, posterior: Posterior | None) -> list[Cause]:
    """Return the cause that the data contradict the prior, if they do.

    The most likely parameters are m λ/(λ − p) from the prior's mean, for a mode that is
    m from it and a precision λ of the posterior, and under a prior of precision p have a
    variance of 1/p + 1/(λ − p). Another prior cannot be forecast, as the posterior
    changes with it.
    """
    if not isinstance(posterior, GaussianPosterior | SoftmaxPosterior):
        return []
    if posterior.coordinates is not None:
        return []
    cost = model.cost
    if posterior.prior_mean is not None:
        # Chains may start at zero instead.
        cost = posterior.quadratic("prior-mean")
    precision = cost.precision
    prior_std = posterior.prior_std
    of_data = np.maximum(precision - prior_std**-2, 1e-6 * precision)  # λ − p
    likely = cost.start_mean * precision / of_data  # the sign does not matter
    away = float(np.sqrt(np.mean(likely**2 / (prior_std**2 + 1 / of_data))))
    if away <= NARROW_PRIOR:
        return []
    wide_enough = rounded(np.sqrt(np.mean(likely**2)))
    change = Change("posterior.prior_std", wide_enough, "up")
    origin = "0" if posterior.prior_mean is None else "the prior's mean"
    times = f"{away:.2g} times as far from {origin} as the prior expects"
    evidence = f"the data put parameters {times}"
    return [Cause("prior too narrow", evidence, away, change)]
