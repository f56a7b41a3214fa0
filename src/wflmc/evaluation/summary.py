"""One look at a trace: everything `summary.json` says, as a value."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.evaluation.conditioning import central_interval, noise_aware
from wflmc.evaluation.coverage import LEVELS, probability_inside
from wflmc.evaluation.diagnostics import Diagnostics, diagnose, diagnose_functions
from wflmc.evaluation.scores import (
    SMALLEST_PROBABILITY,
    Calibration,
    RegressionScores,
    calibration,
    predictive_scores,
    regression_scores,
)
from wflmc.evaluation.wasserstein import (
    DistanceEstimate,
    ExactLaw,
    Spread,
    estimate_w2_sq,
    exact_law,
    with_floor,
)
from wflmc.planning import Plan
from wflmc.posterior import (
    CustomPosterior,
    Gaussian,
    GaussianPosterior,
    HasLaw,
    Posterior,
    Predicts,
)
from wflmc.posterior.regression import Regression
from wflmc.sampling import Trace
from wflmc.support.errors import InputError, Shown, ShownValues
from wflmc.support.notices import Notice, NoticeCode, texts
from wflmc.support.trees import DrawFunction

TestSet = tuple[ArrayLike, ArrayLike]
"""Features[n, d], and targets or labels[n]."""

EXAMPLE_CHAINS = 20
"""Chains at whose last samples clipped examples are counted."""
RHAT_CONCERN = 1.2
"""Well above what chains of fifty correlated draws show when all is well."""
CLIP_RATE_CONCERN = 0.01
"""The fraction of clipped gradients above which bound and exact law are off."""
SHOWN_PARAMETERS = 5
"""Frozen parameters that a notice lists."""
NOISE_RATIO_SHOWN = 1.05
"""The least excess of noise that is worth a line."""
FUNCTION_NAME_WIDTH = 24
"""Characters of a function's name that a line has room for."""

FORGETTING = "the chains have not forgotten their start, or are too short to tell."
SYMMETRIC = (
    "hidden units of a network can change places, so that weights of different chains "
    "need not agree, however long they are. R-hat of predictions, which functions={…} "
    "gives, tells whether these have converged."
)
FROM_CHAINS = (
    "{0.worst:.3g} ± {0.worst_se:.1g} (from chains); as many perfect ones show "
    "{0.floor:.2g}"
)
EXCESS = "{:.3g} times what sampling needs: samples spread some {:.2g} times too wide"
SCORE_WORDS = {
    "accuracy": "accuracy",
    "rmse": "RMSE",
    "ece": "ECE",
    "nll": "NLL",
    "brier": "Brier",
}
"""The words for scores, in the order in which they are shown."""
MEAN_SCORES = ("accuracy", "ece", "nll", "brier", "rmse")
"""The scores that `Evaluation.mean_scores` has, in its order."""
UNKNOWN = DistanceEstimate(np.zeros(0), np.nan, np.nan)
"""A distance above nothing: no comparison with nan is true."""


@dataclass(frozen=True, repr=False)
class Evaluation(Shown):
    """Results of `evaluate`; None where a quantity does not exist."""

    w2_sq: DistanceEstimate | None
    """Estimated from the chains against the exact posterior."""
    moving_w2_sq: DistanceEstimate | None
    """The same in the coordinates that chains move in, which the bound is about; None
    where they are the parameters."""
    exact_w2_sq: tuple[float, ...] | None
    """Exact for every round 1..S while nothing is clipped."""
    exact_ess_min: float | None
    """Of one chain, the smallest of all parameters, exact while nothing is clipped."""
    bound: float | None
    """The plan's bound on W2², worst after burn-in; None for kinetic dynamics, which
    have none."""
    burn_in: int
    """S_b."""
    rhat_max: float | None
    """ArviZ's R-hat, the largest of all parameters; None without ArviZ or with too few
    draws."""
    ess_min: float | None
    """ArviZ's bulk effective sample size of all chains together, the smallest of all
    parameters."""
    ess_tail_min: float | None
    """The same in the tails."""
    clip_rate: dict[str, float | None]
    """The fraction of gradients that were clipped, in `burn_in` and in `samples`."""
    example_clip_rate: float | None
    """The fraction of the examples that are clipped one by one at the last samples;
    None where none are to be."""
    scores: Calibration | RegressionScores | None
    """Of each chain's predictions on test data, where there are some: of labels, or of
    numbers."""
    epsilon_spent: float | None
    """ε of one chain for the worst device."""
    noise_ratio: float
    """Noise of the rounds after burn-in over what sampling needs, on average."""
    coverage: dict[str, float] | None = None
    """The posterior's probability of 90 % and 50 % intervals, mean over chains and
    parameters: of the chain's own (`chain_90`, `chain_50`) and, with a transcript, of
    noise-aware ones (`noise_aware_90`, `noise_aware_50`)."""
    spread: Spread | None = None
    """How wide the law of a chain is beside the posterior, at the first and the last
    kept round, exact while nothing is clipped."""
    prior_distance: float | None = None
    """How far the mean of a chain's draws is from the prior's mean, in standard
    deviations of the prior: the root mean square over parameters and chains. Above 1,
    the data contradict the prior; None for a prior around zero."""
    adjacency: str = "replace"
    """Of the promise that ε is about."""
    spent_before: bool = False
    """Whether ε includes what was spent before the first round."""
    frozen: tuple[int, ...] = ()
    """Parameters that never move in at least one chain: R-hat leaves them out, and
    their effective sample size is 0."""
    functions: Mapping[str, Diagnostics] = field(default_factory=dict)
    """Of functions of the parameters, such as predictions, by the names that the caller
    gave."""
    symmetric: bool = False
    """Whether hidden units of a network may change places."""

    @property
    def mean_scores(self) -> dict[str, float | None]:
        """Return the scores on test data, averaged over chains.

        Each chain predicts with the mean over its draws. All five names are there:
        `accuracy`, `ece`, `nll`, `brier` and `rmse`; those that do not exist are None.
        """
        means: dict[str, float | None] = dict.fromkeys(MEAN_SCORES)
        if self.scores is None:
            return means
        for name, of_chains in self.scores._asdict().items():
            if name in means:
                means[name] = float(of_chains.mean())
        return means

    @property
    def worst_exact(self) -> float | None:
        """Return the exact W2², worst after burn-in, while nothing is clipped.

        It is what `w2_sq.worst` estimates then, without its floor. None for models
        whose law is not known.
        """
        if self.exact_w2_sq is None:
            return None
        return max(self.exact_w2_sq[self.burn_in :])

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the texts of `notices`, for people; programs decide by their codes."""
        return texts(self.notices)

    @property
    def notices(self) -> tuple[Notice, ...]:
        """Return warnings derived from the samples, each with a code and a text.

        They are about clipped gradients, chains that disagree or do not move, and
        distances above the bound. `wflmc.advise` says what would help.
        """
        return (
            *self._clipping_notices(),
            *self._agreement_notices(),
            *self._distance_notices(),
        )

    def _clipping_notices(self) -> Iterator[Notice]:
        """Yield notices about clipped gradients of devices and of examples."""
        gradients = self.clip_rate["samples"] or 0.0
        examples = self.example_clip_rate or 0.0
        law = "exact law" if self.bound is None else "bound"
        if gradients > CLIP_RATE_CONCERN:
            yield Notice(
                NoticeCode.CLIPPED_GRADIENTS,
                f"{gradients:.0%} of the gradients of the kept rounds were clipped, "
                f"which the {law} ignores.",
            )
        if examples > CLIP_RATE_CONCERN:
            yield Notice(
                NoticeCode.CLIPPED_EXAMPLES,
                f"{examples:.0%} of the examples are clipped, which the bound and the "
                "exact law ignore: the chains sample a posterior in which these weigh "
                "less.",
            )

    def _agreement_notices(self) -> Iterator[Notice]:
        """Yield notices about chains that disagree, and parameters that never move.

        An R-hat that is not known gives none.
        """
        rhat = self.rhat_max or 0.0
        if rhat > RHAT_CONCERN:
            reason = SYMMETRIC if self.symmetric else FORGETTING
            yield Notice(NoticeCode.CHAINS_DISAGREE, f"R-hat is {rhat:.3g}: {reason}")
        for name, diagnostics in self.functions.items():
            rhat = diagnostics.rhat_max or 0.0
            if rhat > RHAT_CONCERN:
                text = f"R-hat of {name} is {rhat:.3g}: the chains do not agree on it."
                yield Notice(NoticeCode.FUNCTION_DISAGREES, text)
        if self.frozen:
            listed = ", ".join(map(str, self.frozen[:SHOWN_PARAMETERS]))
            if len(self.frozen) > SHOWN_PARAMETERS:
                listed += ", …"
            yield Notice(
                NoticeCode.FROZEN_PARAMETERS,
                f"{len(self.frozen)} of the parameters never moved in at least one "
                f"chain ({listed}): these have not converged, whatever R-hat says of "
                "the others. The step size may be too small for float32.",
            )

    def _distance_notices(self) -> Iterator[Notice]:
        """Yield notices about chains that are too far from the posterior."""
        distance = self.w2_sq or UNKNOWN
        exact = np.nan if self.worst_exact is None else self.worst_exact
        if distance.worst > 10 * exact + distance.resolution:
            yield Notice(
                NoticeCode.CLIPPING_KEEPS_AWAY,
                f"The chains are at W2² = {distance.worst:.3g}, the exact law without "
                f"clipping at {exact:.3g}: clipping keeps them away from it.",
            )
        # The bound is about the coordinates that chains move in.
        bounded = self.moving_w2_sq or distance
        bound = np.nan if self.bound is None else self.bound
        if bounded.worst > bound + bounded.resolution:
            space = ""
            if self.moving_w2_sq is not None:
                space = " in the coordinates that they move in"
            yield Notice(
                NoticeCode.ABOVE_BOUND,
                f"The chains are at W2² = {bounded.worst:.3g}{space}, above the plan's "
                f"bound of {bound:.3g}.",
            )

    def _facts(self) -> ShownValues:
        return {
            "w2_sq": None if self.w2_sq is None else self.w2_sq.worst,
            "exact_w2_sq": self.worst_exact,
            "bound": self.bound,
            "rhat_max": self.rhat_max,
            "ess_min": self.ess_min,
            "epsilon_spent": self.epsilon_spent,
            "adjacency": None if self.epsilon_spent is None else self.adjacency,
            **self.mean_scores,
            "clip_rate": self.clip_rate["samples"],
            "warnings": len(self.warnings),
        }

    def __str__(self) -> str:
        lines = [
            *self._sample_lines(),
            *self._clipping_lines(),
            *self._example_lines(),
            *self._epsilon_lines(),
        ]
        return "\n".join(lines)

    @property
    def lines_of_samples(self) -> list[str]:
        """Return lines about the samples alone, as `str` has them.

        They leave out what `str` says of clipped gradients and of ε, which devices of a
        federation do not report and its ledger knows better.
        """
        return [*self._sample_lines(), *self._example_lines()]

    def _sample_lines(self) -> Iterator[str]:
        """Yield lines about distance, intervals, convergence, scores and noise."""
        yield from self._distance_lines()
        yield from self._coverage_lines()
        yield from self._convergence_lines()
        yield from self._score_lines()
        away = "{:.3g} of its standard deviations away (root mean square)"
        yield from _line("prior's mean", away, self.prior_distance)
        if self.noise_ratio > NOISE_RATIO_SHOWN:
            spread = self.noise_ratio**0.5
            yield from _line("noise after burn-in", EXCESS, self.noise_ratio, spread)

    def _distance_lines(self) -> Iterator[str]:
        label = "W2² worst after burn-in"
        yield from _line(label, FROM_CHAINS, self.w2_sq)
        yield from _line(label, "{:.3g} (exact, no clipping)", self.worst_exact)
        yield from self._spread_lines()
        draws = len(self.exact_w2_sq or ()) - self.burn_in
        exact_ess = "{:.3g} of {} draws (exact, no clipping)"
        yield from _line("ESS min of one chain", exact_ess, self.exact_ess_min, draws)

    def _spread_lines(self) -> Iterator[str]:
        if self.spread is not None and self.spread.is_narrow:
            yield from _line("variance (no clipping)", "{}", self.spread.words)

    def _coverage_lines(self) -> Iterator[str]:
        label = "90 % intervals hold"
        coverage = self.coverage or {}
        of_chain = coverage.get("chain_90")
        of_noise_aware = coverage.get("noise_aware_90")
        yield from _line(label, "{:.1%} (chain's own)", of_chain)
        yield from _line(label, "{:.1%} (noise-aware)", of_noise_aware)

    def _convergence_lines(self) -> Iterator[str]:
        ess = "{:.0f} bulk, {:.0f} tail"
        yield from _line("R-hat max", "{:.4f}", self.rhat_max)
        yield from _line("ESS min", ess, self.ess_min, self.ess_tail_min)
        for name, diagnostics in self.functions.items():
            yield from _line(
                f"of {name}"[:FUNCTION_NAME_WIDTH],
                f"R-hat {{:.4f}}, ESS {ess}",
                diagnostics.rhat_max,
                diagnostics.ess_min,
                diagnostics.ess_tail_min,
            )

    def _score_lines(self) -> Iterator[str]:
        means = self.mean_scores
        scores = []
        for name, word in SCORE_WORDS.items():
            mean = means[name]
            if mean is not None:
                scores.append(f"{word} {mean:.4f}")
        if scores:
            yield from _line("test set", "{} (mean over chains)", ", ".join(scores))

    def _clipping_lines(self) -> Iterator[str]:
        rates = [
            "–" if rate is None else f"{rate:.2%}" for rate in self.clip_rate.values()
        ]
        yield from _line("gradients clipped", "{} in burn-in, {} after", *rates)

    def _example_lines(self) -> Iterator[str]:
        template = "{:.2%} at the last samples"
        yield from _line("examples clipped", template, self.example_clip_rate)

    def _epsilon_lines(self) -> Iterator[str]:
        label = "ε spent (per chain)"
        if self.epsilon_spent is None:
            yield from _line(label, "none stated")
            return
        whose = f"for the worst device ({self.adjacency})"
        if self.spent_before:
            whose += ", earlier spending included"
        yield from _line(label, "{:.4g} {}", self.epsilon_spent, whose)


def _line(label: str, template: str, *values: object) -> Iterator[str]:
    """Yield a line with values in it; none where one of the values does not exist."""
    if None not in values:
        yield f"{label:<25}{template.format(*values)}"


def evaluate(
    trace: Trace,
    posterior: Posterior | None,
    test: TestSet | None = None,
    law: ExactLaw | None = None,
    functions: Mapping[str, DrawFunction] | None = None,
) -> Evaluation:
    """Evaluate a trace: distance, convergence, clipping, test scores and privacy spent.

    The privacy is that of one chain: chains are replicas for evaluation, and publishing
    several from the same devices would add their losses up. Distances need a posterior
    whose law is known, such as a linear regression, and several chains.

    Args:
        trace: of `sample`.
        posterior: None where nobody holds all of the data: then what needs them is
            None, such as distances, intervals and scores.
        test: features[n, d] and targets[n], or labels[n] as in the training data, on
            which predictions are scored.
        law: of the plan's chains, where it has been computed already.
        functions: of the parameters of one draw, by name, such as predictions, whose
            R-hat and ESS stand beside those of the parameters; by default those of
            `posterior_from`.

    Returns:
        The evaluation; `print` shows it in a few lines.

    Raises:
        InputError: for what is not a trace, a posterior of another size, a test set
            that does not fit the model, or a function that JAX cannot trace.
    """
    _check_arguments(trace, posterior)
    plans = trace.plans
    functions = functions or _own_functions(posterior)
    law = law or exact_law(posterior, plans)
    diagnosed = trace.theta
    if trace.predictions is not None:
        diagnosed = trace.predictions.logits
    diagnostics = diagnose(diagnosed)
    distance: DistanceEstimate | None = None
    coverage: dict[str, float] | None = None
    exact = _exact_posterior(posterior)
    if posterior is not None and exact is not None:
        distance = _distance(trace.theta, exact)
        coverage = _coverage(trace, posterior, exact)
    scores: Calibration | RegressionScores | None = None
    if test is not None:
        scores = _scores(trace, posterior, test)
    clip_rate = {
        "burn_in": _mean(trace.burn_in_clip_rate),
        "samples": _mean(trace.clip_rate),
    }
    noise_ratios = [plan.noise_ratio for plan in plans]
    return Evaluation(
        w2_sq=distance,
        moving_w2_sq=_distance_in_coordinates(trace, posterior),
        exact_w2_sq=law.w2_sq,
        exact_ess_min=law.ess_min,
        spread=law.spread,
        bound=_largest_bound(plans),
        burn_in=trace.plan.burn_in,
        rhat_max=diagnostics.rhat_max,
        ess_min=diagnostics.ess_min,
        ess_tail_min=diagnostics.ess_tail_min,
        frozen=diagnostics.frozen,
        clip_rate=clip_rate,
        example_clip_rate=_example_clip_rate(trace, posterior),
        scores=scores,
        epsilon_spent=_largest_epsilon(plans),
        spent_before=any(np.any(plan.ledger) for plan in plans),
        noise_ratio=float(np.mean(noise_ratios)),
        coverage=coverage,
        adjacency=trace.plan.privacy.adjacency,
        functions=_function_diagnostics(trace, posterior, functions),
        symmetric=_is_symmetric(posterior),
        prior_distance=prior_distance(trace, posterior),
    )


def _check_arguments(trace: object, posterior: Posterior | None) -> None:
    if not isinstance(trace, Trace):
        raise InputError("trace", type(trace).__name__, "a trace of wflmc.sample(…)")
    parameters = trace.theta.shape[-1]
    if posterior is not None and posterior.dim != parameters:
        raise InputError(
            "posterior",
            f"one of {posterior.dim} parameters",
            f"the one that was sampled, of {parameters} parameters",
        )


def _exact_posterior(posterior: object) -> Gaussian | None:
    """Return the exact posterior of the parameters, where it is known."""
    return posterior.exact if isinstance(posterior, HasLaw) else None


def _distance(theta: NDArray[np.floating], exact: Gaussian) -> DistanceEstimate | None:
    """Return the distance of chains with its floor; None of a single chain."""
    if len(theta) < 2:
        return None
    return with_floor(estimate_w2_sq(theta, exact), theta, exact)


def _distance_in_coordinates(
    trace: Trace, posterior: object
) -> DistanceEstimate | None:
    """Return the distance in the coordinates of chains; None in the parameters."""
    if not isinstance(posterior, HasLaw) or posterior.coordinates is None:
        return None
    positions = posterior.coordinates.of(trace.theta)
    return _distance(positions, posterior.exact_in_coordinates)


def _largest_bound(plans: Sequence[Plan]) -> float | None:
    """Return the largest bound after burn-in; None where a plan has none."""
    bounds = []
    for plan in plans:
        if plan.bound is None:
            return None
        bounds.append(float(plan.bound[plan.burn_in :].max()))
    return max(bounds)


def _largest_epsilon(plans: Sequence[Plan]) -> float | None:
    """Return the largest ε that a plan spends; None where a plan states none."""
    spent = []
    for plan in plans:
        if plan.epsilon_spent is None:
            return None
        spent.append(plan.epsilon_spent)
    return max(spent)


def _own_functions(posterior: object) -> Mapping[str, DrawFunction]:
    """Return the functions that a custom model brings along."""
    if isinstance(posterior, CustomPosterior):
        return posterior.model.sites.functions
    return {}


def _function_diagnostics(
    trace: Trace, posterior: object, functions: Mapping[str, DrawFunction]
) -> dict[str, Diagnostics]:
    """Return diagnostics of functions of the parameters, in the model's own pytree."""
    if functions and isinstance(posterior, CustomPosterior):
        return diagnose_functions(posterior.unflatten(trace.theta), functions)
    return diagnose_functions(trace.theta, functions)


def _is_symmetric(posterior: object) -> bool:
    """Return whether hidden units of the model may change places."""
    if isinstance(posterior, CustomPosterior):
        return posterior.model.sites.symmetric
    return False


def prior_distance(trace: Trace, posterior: object) -> float | None:
    """Return how far the means of chains are from the mean of a prior that has one.

    With φ̄ the mean of a chain, the prior's mean φ₀ and its precision Λ, it is the root
    of (φ̄ − φ₀)ᵀ Λ (φ̄ − φ₀)/m, averaged over chains under the root.

    Args:
        trace: of the chains.
        posterior: that they sampled; its data are not looked at.

    Returns:
        The distance in standard deviations of the prior, by parameter; None for a prior
        around zero, and for models that are no regression.
    """
    if not isinstance(posterior, Regression) or posterior.prior_mean is None:
        return None
    if trace.predictions is None:
        mean = np.asarray(trace.theta, dtype=float).mean(1)
    else:
        mean = np.asarray(trace.predictions.mean, dtype=float)
    deviation = posterior.coordinates_of(mean) - posterior.prior_mean
    precision = posterior.prior_precision
    by_class = deviation.reshape(-1, len(precision))
    squares = np.einsum("ni,ij,nj->n", by_class, precision, by_class)
    return float((squares.sum() / deviation.size) ** 0.5)


def _coverage(trace: Trace, posterior: Posterior, exact: Gaussian) -> dict[str, float]:
    """Return the posterior's probability of a chain's and of noise-aware intervals."""
    coverage = {}
    for level in LEVELS:
        interval = central_interval(trace.theta, level)
        coverage[f"chain_{100 * level:.0f}"] = probability_inside(exact, interval)
    if trace.transcript is None:
        return coverage
    # Its intervals are those of a normal law, as the moments are known: no draws needed.
    aware = noise_aware(trace, posterior, draws=1)
    for level in LEVELS:
        interval = aware.interval(level)
        coverage[f"noise_aware_{100 * level:.0f}"] = probability_inside(exact, interval)
    return coverage


def _mean(rates: NDArray[np.floating]) -> float | None:
    """Return the mean; None of no rates, or where devices do not report them (nan)."""
    if not rates.size or np.isnan(rates).any():
        return None
    return float(rates.mean())


def _scores(
    trace: Trace, posterior: object, test: TestSet
) -> Calibration | RegressionScores:
    """Score predictions on a test set, by the kind of the model."""
    if len(test) != 2:
        raise InputError(
            "test",
            f"{len(test)} values",
            "two: features[n, d] and targets or labels[n]",
        )
    features, targets = test
    try:
        if isinstance(posterior, GaussianPosterior):
            return regression_scores(posterior, trace.theta, features, targets)
        if isinstance(posterior, Predicts) and trace.predictions is not None:
            averages = trace.predictions.probability
            probabilities = np.maximum(averages, SMALLEST_PROBABILITY)
            return calibration(probabilities, posterior.classes_of(targets))
        if isinstance(posterior, Predicts):
            return predictive_scores(posterior, trace.theta, features, targets)
    except InputError as error:
        raise InputError("test", error.value, error.requirement) from None
    raise InputError(
        "test", "a test set", "left out for a model that does not predict by itself"
    )


def _example_clip_rate(trace: Trace, posterior: Posterior | None) -> float | None:
    """Return the fraction of examples whose gradient exceeds its clip.

    It is counted at the last samples of a few chains; None where no examples are
    clipped, or the devices of a federation do not report clipping.
    """
    clips_examples = any(np.isfinite(plan.example_clip).any() for plan in trace.plans)
    is_unreported = bool(np.all(np.isnan(trace.clip_rate)))
    if posterior is None or is_unreported or not clips_examples:
        return None
    last_samples = trace.theta[:EXAMPLE_CHAINS, -1]
    limits = []  # of one plan for all chains, or of one for each
    for plan in trace.plans[: len(last_samples)]:
        _, example_clip = plan.clips_at
        limits.append(np.repeat(example_clip, posterior.sizes))
    norms = posterior.example_norms(last_samples)
    is_clipped = norms > np.stack(limits)
    return float(np.mean(is_clipped))
