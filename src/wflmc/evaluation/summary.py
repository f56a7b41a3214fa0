"""One look at a trace: everything `summary.json` says, as a value."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.evaluation.conditioning import central_interval, noise_aware
from wflmc.evaluation.coverage import LEVELS, held
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
    estimate_w2_sq,
    exact_law,
    with_floor,
)
from wflmc.posterior import (
    CustomPosterior,
    Gaussian,
    GaussianPosterior,
    HasLaw,
    Posterior,
    Predicts,
)
from wflmc.sampling import Trace
from wflmc.support.errors import InputError, Shown, ShownValues
from wflmc.support.notices import Notice, NoticeCode, texts
from wflmc.support.trees import DrawFunction

FORGETTING = "the chains have not forgotten their start, or are too short to tell."
SYMMETRIC = (
    "hidden units of a network can change places, so that weights of different chains need not agree, however long "
    "they are. R-hat of predictions, which functions={…} gives, tells whether these have converged."
)
FEW_CHAINS = 20
RHAT_CONCERN = 1.2
"""Well above what chains of fifty correlated draws show when all is well."""


FROM_CHAINS = "{0.worst:.3g} ± {0.worst_se:.1g} (from chains); as many perfect ones show {0.floor:.2g}"
EXCESS = "{:.3g} times what sampling needs: samples spread some {:.2g} times too wide"
TestSet = tuple[ArrayLike, ArrayLike]
UNKNOWN = DistanceEstimate(np.zeros(0), np.nan, np.nan)


@dataclass(frozen=True, repr=False)
class Evaluation(Shown):
    """Results of `evaluate`; None where a quantity does not exist."""

    w2_sq: DistanceEstimate | None
    """Estimated from the chains against the exact posterior."""
    moving_w2_sq: DistanceEstimate | None
    """The same in the coordinates that chains move in, which the bound is about; None where they are the parameters."""
    exact_w2_sq: tuple[float, ...] | None
    """Exact for every round 1..S while nothing is clipped."""
    exact_ess_min: float | None
    """Of one chain, the parameter with the smallest, exact while nothing is clipped."""
    bound: float | None
    """The plan's bound on W2², worst after burn-in; None for kinetic dynamics, which have none."""
    burn_in: int
    """S_b."""
    rhat_max: float | None
    """ArviZ's R-hat, the largest of all parameters; None without ArviZ or with too few draws."""
    ess_min: float | None
    """ArviZ's bulk effective sample size of all chains together, the smallest of all parameters."""
    ess_tail_min: float | None
    """The same in the tails."""
    clip_rate: dict[str, float | None]
    """Share of the gradients that were clipped, in `burn_in` and in `samples`."""
    example_clip_rate: float | None
    """Share of the examples that are clipped one by one at the last samples; None where none are to be."""
    scores: Calibration | RegressionScores | None
    """Of each chain's predictions on test data, where there are some: of labels, or of numbers."""
    epsilon_spent: float | None
    """ε of one chain for the worst device."""
    noise_ratio: float
    """Noise of the kept rounds over what sampling needs, on average."""
    coverage: dict[str, float] | None = None
    """The posterior's probability of 90 % and 50 % intervals, mean over chains and parameters: of the chain's own
    (`chain_90`, `chain_50`) and, with a transcript, of noise-aware ones (`noise_aware_90`, `noise_aware_50`)."""
    adjacency: str = "replace"
    """Of the promise that ε is about."""
    spent_before: bool = False
    """Whether ε includes what was spent before the first round."""
    frozen: tuple[int, ...] = ()
    """Parameters that never move in at least one chain: R-hat leaves them out, and their effective sample size is 0."""
    functions: Mapping[str, Diagnostics] = field(default_factory=dict)
    """Of functions of the parameters, such as predictions, by the names that the caller gave."""
    symmetric: bool = False
    """Whether hidden units of a network may change places."""

    @property
    def mean_scores(self) -> dict[str, float | None]:
        """Return the scores on test data, averaged over chains; None for those that do not exist."""
        scores = {} if self.scores is None else self.scores._asdict()
        names = ("accuracy", "ece", "nll", "brier", "rmse")
        return {
            name: float(scores[name].mean()) if name in scores else None
            for name in names
        }

    @property
    def worst_exact(self) -> float | None:
        """Return the exact W2², worst after burn-in, while nothing is clipped."""
        return (
            None if self.exact_w2_sq is None else max(self.exact_w2_sq[self.burn_in :])
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the texts of `notices`."""
        return texts(self.notices)

    @property
    def notices(self) -> tuple[Notice, ...]:
        """Return warnings derived from the samples; `wflmc.advise` says what would help."""
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
        if gradients > 0.01:
            yield Notice(
                NoticeCode.CLIPPED_GRADIENTS,
                f"{gradients:.0%} of the gradients of the kept rounds were clipped, which the {law} ignores.",
            )
        if examples > 0.01:
            yield Notice(
                NoticeCode.CLIPPED_EXAMPLES,
                f"{examples:.0%} of the examples are clipped, which the bound and the exact law ignore: the chains "
                "sample a posterior in which these weigh less.",
            )

    def _agreement_notices(self) -> Iterator[Notice]:
        """Yield notices about chains that do not agree, and parameters that do not move."""
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
            listed = ", ".join(map(str, self.frozen[:5])) + ", …" * (
                len(self.frozen) > 5
            )
            yield Notice(
                NoticeCode.FROZEN_PARAMETERS,
                f"{len(self.frozen)} of the parameters never moved in at least one chain ({listed}): these have not "
                "converged, whatever R-hat says of the others. The step size may be too small for float32.",
            )

    def _distance_notices(self) -> Iterator[Notice]:
        """Yield notices about chains that are further from the posterior than is known of them."""
        distance = self.w2_sq or UNKNOWN
        exact = np.nan if self.worst_exact is None else self.worst_exact
        if distance.worst > 10 * exact + distance.resolution:
            yield Notice(
                NoticeCode.CLIPPING_KEEPS_AWAY,
                f"The chains are at W2² = {distance.worst:.3g}, the exact law without clipping at {exact:.3g}: "
                "clipping keeps them away from it.",
            )
        moved = self.moving_w2_sq or distance
        bound = np.nan if self.bound is None else self.bound
        if moved.worst > bound + moved.resolution:
            where = (
                ""
                if self.moving_w2_sq is None
                else " in the coordinates that they move in"
            )
            yield Notice(
                NoticeCode.ABOVE_BOUND,
                f"The chains are at W2² = {moved.worst:.3g}{where}, above the plan's bound of {bound:.3g}.",
            )

    def _facts(self) -> ShownValues:
        facts = {
            "w2_sq": None if self.w2_sq is None else self.w2_sq.worst,
            "exact_w2_sq": self.worst_exact,
        }
        facts |= {
            name: getattr(self, name)
            for name in ("bound", "rhat_max", "ess_min", "epsilon_spent")
        }
        adjacency = None if self.epsilon_spent is None else self.adjacency
        counts = {
            "clip_rate": self.clip_rate["samples"],
            "warnings": len(self.warnings),
        }
        return {**facts, "adjacency": adjacency, **self.mean_scores, **counts}

    def __str__(self) -> str:
        clip_rates = (
            "–" if rate is None else f"{rate:.2%}" for rate in self.clip_rate.values()
        )
        clipping = _line("gradients clipped", "{} in burn-in, {} after", *clip_rates)
        return "\n".join(
            [
                *self._sample_lines(),
                *clipping,
                *self._example_lines(),
                *self._epsilon_lines(),
            ]
        )

    @property
    def lines_of_samples(self) -> list[str]:
        """Lines about the samples alone.

        They leave out what `str` says of clipped gradients and of ε, which devices of a
        federation do not tell and its ledger knows better.
        """
        return [*self._sample_lines(), *self._example_lines()]

    def _sample_lines(self) -> Iterator[str]:
        """Yield lines about distance, intervals, convergence, scores and noise."""
        yield from _line("W2² worst after burn-in", FROM_CHAINS, self.w2_sq)
        yield from _line(
            "W2² worst after burn-in", "{:.3g} (exact, no clipping)", self.worst_exact
        )
        draws = len(self.exact_w2_sq or ()) - self.burn_in
        exact_ess = "{:.3g} of {} draws (exact, no clipping)"
        yield from _line("ESS min of one chain", exact_ess, self.exact_ess_min, draws)
        coverage = self.coverage or {}
        yield from _line(
            "90 % intervals hold", "{:.1%} (chain's own)", coverage.get("chain_90")
        )
        yield from _line(
            "90 % intervals hold",
            "{:.1%} (noise-aware)",
            coverage.get("noise_aware_90"),
        )
        yield from _line("R-hat max", "{:.4f}", self.rhat_max)
        yield from _line(
            "ESS min", "{:.0f} bulk, {:.0f} tail", self.ess_min, self.ess_tail_min
        )
        for name, diagnostics in self.functions.items():
            of_function = "R-hat {:.4f}, ESS {:.0f} bulk, {:.0f} tail"
            yield from _line(f"of {name}"[:24], of_function, *diagnostics[:3])
        words = {
            "accuracy": "accuracy",
            "rmse": "RMSE",
            "ece": "ECE",
            "nll": "NLL",
            "brier": "Brier",
        }
        means = self.mean_scores
        scores = ", ".join(
            f"{word} {means[name]:.4f}"
            for name, word in words.items()
            if means[name] is not None
        )
        yield from _line("test set", "{} (mean over chains)", scores or None)
        if self.noise_ratio > 1.05:
            yield from _line(
                "noise after burn-in", EXCESS, self.noise_ratio, self.noise_ratio**0.5
            )

    def _example_lines(self) -> Iterator[str]:
        """Yield a line about clipped examples."""
        yield from _line(
            "examples clipped", "{:.2%} at the last samples", self.example_clip_rate
        )

    def _epsilon_lines(self) -> Iterator[str]:
        """Yield a line about ε of one chain."""
        label = "ε spent (per chain)"
        if self.epsilon_spent is None:
            yield from _line(label, "none stated")
            return
        whose = f"for the worst device ({self.adjacency})"
        if self.spent_before:
            whose += ", earlier spending included"
        yield from _line(label, "{:.4g} {}", self.epsilon_spent, whose)


def _line(label: str, form: str, *values: object) -> Iterator[str]:
    """Yield a line with values in it; none where one of the values does not exist."""
    if None not in values:
        yield f"{label:<25}{form.format(*values)}"


def evaluate(
    trace: Trace,
    posterior: Posterior | None,
    test: TestSet | None = None,
    law: ExactLaw | None = None,
    functions: Mapping[str, DrawFunction] | None = None,
) -> Evaluation:
    """Return distance to the posterior (where it is known), R-hat, ESS, clip rate, test scores and privacy spent.

    The privacy is that of one chain; chains are replicas for evaluation, and publishing several from the same
    devices would add their losses up.

    Args:
        trace: of `sample`.
        posterior: None where nobody holds all of the data: then only R-hat, ESS and the privacy are evaluated.
        test: features[n, d] and targets[n], or labels[n] as in the training data, on which predictions are scored.
        law: of the plan's chains, where it has been computed already.
        functions: of the parameters of one draw, by name, such as predictions, whose R-hat and ESS stand beside those
            of the parameters; by default those of `posterior_from`.
    """
    if not isinstance(trace, Trace):
        raise InputError("trace", type(trace).__name__, "a trace of wflmc.sample(…)")
    parameters_of_trace = trace.theta.shape[-1]
    if posterior is not None and posterior.dim != parameters_of_trace:
        allowed = f"the one that was sampled, of {parameters_of_trace} parameters"
        raise InputError("posterior", f"one of {posterior.dim} parameters", allowed)
    plans, model, distance, moving = trace.plans, cast("object", posterior), None, None
    known = model if isinstance(model, HasLaw) else None
    if known is not None and trace.theta.shape[0] > 1:
        distance = _distance(trace.theta, known.exact)
        if known.coordinates is not None:
            moving = _distance(
                known.coordinates.of(trace.theta), known.exact_in_coordinates
            )
    own = model if isinstance(model, CustomPosterior) else None
    functions = functions or ({} if own is None else own.model.sites.functions)
    parameters = (
        trace.theta if own is None or not functions else own.unflatten(trace.theta)
    )
    law = law or exact_law(posterior, plans)
    spent = [plan.epsilon_spent for plan in plans if plan.epsilon_spent is not None]
    bounds = [
        plan.bound[plan.burn_in :].max() for plan in plans if plan.bound is not None
    ]
    return Evaluation(
        w2_sq=distance,
        moving_w2_sq=moving,
        exact_w2_sq=law.w2_sq,
        exact_ess_min=law.ess_min,
        bound=None if len(bounds) < len(plans) else float(max(bounds)),
        burn_in=trace.plan.burn_in,
        **diagnose(
            trace.theta if trace.predictions is None else trace.predictions.logits
        )._asdict(),
        clip_rate={
            "burn_in": _mean(trace.burn_in_clip_rate),
            "samples": _mean(trace.clip_rate),
        },
        example_clip_rate=_examples_clipped(trace, posterior),
        scores=None if test is None else _scores(trace, posterior, test),
        epsilon_spent=None if len(spent) < len(plans) else max(spent),
        spent_before=any(np.any(plan.ledger) for plan in plans),
        noise_ratio=float(np.mean([plan.noise_ratio for plan in plans])),
        coverage=None if known is None else _coverage(trace, posterior, known.exact),
        adjacency=trace.plan.privacy.adjacency,
        functions=diagnose_functions(parameters, functions),
        symmetric=own is not None and own.model.sites.symmetric,
    )


def _distance(theta: NDArray[np.floating], exact: Gaussian) -> DistanceEstimate:
    return with_floor(estimate_w2_sq(theta, exact), theta, exact)


def _coverage(
    trace: Trace, posterior: Posterior | None, exact: Gaussian
) -> dict[str, float]:
    """Return the posterior's probability of the chain's and of noise-aware intervals."""
    found = {
        f"chain_{100 * level:.0f}": held(exact, central_interval(trace.theta, level))
        for level in LEVELS
    }
    if trace.transcript is not None and posterior is not None:
        made = noise_aware(trace, posterior, draws=1)
        found |= {
            f"noise_aware_{100 * level:.0f}": held(exact, made.interval(level))
            for level in LEVELS
        }
    return found


def _mean(rates: NDArray[np.floating]) -> float | None:
    """Return the mean; None where there are no rates, or where devices do not report them (nan)."""
    return None if not rates.size or np.isnan(rates).any() else float(rates.mean())


def _scores(
    trace: Trace, posterior: object, test: TestSet
) -> Calibration | RegressionScores:
    if len(test) != 2:
        raise InputError(
            "test",
            f"{len(test)} values",
            "two: features[n, d] and targets or labels[n]",
        )
    try:
        if isinstance(posterior, GaussianPosterior):
            return regression_scores(posterior, trace.theta, *test)
        if isinstance(posterior, Predicts) and trace.predictions is not None:
            return calibration(
                np.maximum(trace.predictions.probability, SMALLEST_PROBABILITY),
                posterior.classes_of(test[1]),
            )
        if isinstance(posterior, Predicts):
            return predictive_scores(posterior, trace.theta, *test)
    except InputError as error:
        raise InputError("test", error.given, error.allowed) from None
    raise InputError(
        "test", "a test set", "left out for a model that does not predict by itself"
    )


def _examples_clipped(trace: Trace, posterior: Posterior | None) -> float | None:
    """Return the share of examples whose gradient exceeds its clip, at the last sample of a few chains."""
    plans, last = trace.plans, trace.theta[:FEW_CHAINS, -1]
    unreported = bool(
        np.all(np.isnan(trace.clip_rate))
    )  # by the devices of a federation
    if (
        posterior is None
        or unreported
        or not any(np.isfinite(plan.example_clip).any() for plan in plans)
    ):
        return None
    limits = [
        np.repeat(plan.clips_at[1], posterior.sizes) for plan in plans[: len(last)]
    ]
    return float(np.mean(posterior.example_norms(last) > np.stack(limits)))
