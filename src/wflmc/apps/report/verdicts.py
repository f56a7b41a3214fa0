"""Verdicts on a run, by fixed rules, each with the numbers that it follows from.

`docs/guides/report.md` states the rules for users.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from wflmc.apps.report.numbers import format_number, format_percent
from wflmc.apps.report.templates import data_number
from wflmc.evaluation.burn_in import RHAT_LIMIT
from wflmc.evaluation.summary import RHAT_CONCERN
from wflmc.evaluation.wasserstein import (
    REPLICAS,
    Comparison,
    compare,
    floor_w2_sq,
    law_of,
)
from wflmc.posterior.base import HasLaw
from wflmc.runs.documents import PlanFile, Spending
from wflmc.runs.folder import Run
from wflmc.scenario.build import build_privacy

Mark = Literal["bad", "note-mark", "unknown", "good"]
"""What a verdict says at a glance; also the class of its element on the page."""
MARKS: dict[Mark, str] = {"bad": "✗", "note-mark": "!", "unknown": "–", "good": "✓"}
"""The symbol of every mark, the worst first."""
ENOUGH_ESS = 400
"""Effective samples that means, deviations and R-hat itself are usually based on."""
ROUNDING = 1e-6
"""Relative error of sums of losses, and of ε computed from them."""
OFTEN_CLIPPED = 0.01
"""Fraction of clipped gradients from which on bound and exact law are only a guide."""
MOSTLY_CLIPPED = 0.5
"""Fraction of clipped gradients from which on bound and exact law say nothing."""
CLOSE = 0.1
"""W2² over the posterior's total variance below which samples are close."""
FAR = 1.0
"""W2² over the posterior's total variance from which on samples are far."""
ALIKE = 0.25
"""Relative difference of standard deviations, and shift of means in standard
deviations, up to which samples resemble the posterior."""
UNLIKE = 1.0
"""The same, from which on samples do not resemble the posterior."""
SURE_Z = 4.0
"""|z| from which on a mean is off for sure."""


DISTANCE_QUESTION = "How far from the true posterior?"
"""What `distance` answers."""


class MeasuredDistance(NamedTuple):
    """W2² from chains, averaged over the kept rounds, or from the exact law."""

    mean: float
    error: float
    """Standard error of the mean."""
    floor: float
    """What perfect samples of as many chains would show."""
    floor_sd: float
    """Standard deviation of one round's estimate from perfect samples."""

    @property
    def excess(self) -> float:
        """Return how far the mean lies above the floor, at least zero.

        This is the estimate of W2²: independent chains are a finite sample, which shows
        a distance to the posterior even if each of them is a perfect draw.
        """
        return max(0.0, self.mean - self.floor)


class Verdict(NamedTuple):
    """A mark, and the reason in a sentence."""

    mark: Mark
    reason: Markup
    """The question, in bold, and the answer to it."""


def _verdict(mark: Mark, question: str, answer: str | Markup) -> Verdict:
    """Return a verdict; an answer that is no HTML is escaped."""
    return Verdict(mark, Markup("<b>{}</b> {}").format(question, answer))


def all_verdicts(run: Run) -> list[Verdict]:
    """Judge convergence, distance, likeness, clipping and privacy of a run.

    What the samples show overrules what is computed from the plan: where they do not
    resemble the posterior, neither the distance nor the agreement of chains is good.

    Args:
        run: the run folder.

    Returns:
        The verdicts, the worst first; without those that nothing is known for.
    """
    likeness = resembles(run)
    overrulable = [distance(run), converged(run)]
    if likeness is not None and likeness.mark == "bad":
        overrulable = [_overruled(verdict) for verdict in overrulable]
    optional = (*overrulable, likeness, clipped(run), privacy(run))
    verdicts = [verdict for verdict in optional if verdict is not None]
    order = list(MARKS)
    return sorted(verdicts, key=lambda verdict: order.index(verdict.mark))


def _overruled(verdict: Verdict) -> Verdict:
    """Return a good verdict as a doubtful one, because samples contradict it."""
    if verdict.mark != "good":
        return verdict
    doubt = Markup("{} But the samples do not resemble the posterior.")
    return Verdict("note-mark", doubt.format(verdict.reason))


def converged(run: Run) -> Verdict:
    """Judge whether the chains agree with each other.

    Good are an R-hat up to 1.01 with at least 400 effective samples of the worst
    parameter; bad are an R-hat above 1.2, and parameters that never moved in some
    chain. One chain cannot tell.

    Args:
        run: the run folder.

    Returns:
        The verdict with R-hat and the effective sample size.
    """
    question = "Do the chains agree with each other?"
    summary = run.summary
    if summary is None or (summary.rhat_max is None and summary.ess_min is None):
        answer = "Not known: there are no diagnostics, or too few draws for them."
        return _verdict("unknown", question, answer)
    if summary.frozen:
        answer = (
            f"No: {format_number(len(summary.frozen))} of the parameters never moved "
            f"in some chain; the first is θ[{format_number(summary.frozen[0])}]."
        )
        return _verdict("bad", question, answer)
    ess = data_number(summary.ess_min, "summary.ess_min", style="whole")
    if summary.rhat_max is None:
        alone = Markup(
            "Not known: there is only one chain. Effective samples of its worst "
            "parameter: {}."
        )
        return _verdict("unknown", question, alone.format(ess))
    numbers = Markup(
        "The largest R-hat is {rhat} (usual limit {limit}, above {concern} is a "
        "concern); the worst parameter has {ess} effective samples (usual are {usual})."
    ).format(
        rhat=data_number(summary.rhat_max, "summary.rhat_max", digits=4),
        limit=format_number(RHAT_LIMIT),
        concern=format_number(RHAT_CONCERN),
        ess=ess,
        usual=format_number(ENOUGH_ESS),
    )
    if summary.rhat_max > RHAT_CONCERN:
        bad = Markup("No: they still differ, or have moved too little to tell. {}")
        return _verdict("bad", question, bad.format(numbers))
    if summary.rhat_max <= RHAT_LIMIT and (summary.ess_min or 0) >= ENOUGH_ESS:
        return _verdict("good", question, Markup("Yes. {}").format(numbers))
    nearly = Markup("Nearly: enough for rough estimates, not for fine detail. {}")
    return _verdict("note-mark", question, nearly.format(numbers))


def worst_exact(plan: PlanFile) -> float | None:
    """Return the largest W2² of the kept rounds, by the exact law without clipping.

    Args:
        plan: plan.json.

    Returns:
        W2² in the squared unit of the parameters; None where no exact law is known, or
        where it has overflowed in a kept round.
    """
    all_rounds = plan.exact_w2_sq or []
    kept_rounds = all_rounds[plan.constants.burn_in :]
    finite = [w2_sq for w2_sq in kept_rounds if w2_sq is not None]
    if not finite or len(finite) < len(kept_rounds):
        return None
    return max(finite)


def distance(run: Run) -> Verdict:
    """Judge how far samples are from the posterior, by W2².

    The exact law decides where at most 1 % of the kept gradients are clipped, else the
    mean over the kept rounds of what the chains show, less what perfect chains would
    show. Close is below a tenth of the posterior's total variance, far above all of it
    by two standard errors. An estimate that perfect samples would show too says
    nothing.

    Args:
        run: the run folder.

    Returns:
        The verdict with W2² and the numbers beside it.
    """
    exact = worst_exact(run.plan)
    from_chains = _measured(run)
    uncounted = clipping_unknown(run)
    law_counts = exact is not None and not often_clipped(run)
    if law_counts and exact is not None and (from_chains is None or not uncounted):
        by_law = MeasuredDistance(exact, 0.0, 0.0, 0.0)
        source = "by the exact law, which ignores clipping"
        return _judge_distance(
            run, by_law, source, uncounted=from_chains is None and uncounted
        )
    if from_chains is not None:
        chains = format_number(run.scenario.sampler.chains)
        source = (
            f"± {format_number(from_chains.error, 2)}, from {chains} chains, less "
            f"{format_number(from_chains.floor, 2)} that perfect ones would show"
        )
        return _judge_distance(run, from_chains, source, uncounted=False)
    if run.plan.own_data:
        answer = (
            "Not known: the server never sees the devices' own data, so nothing here "
            "can be compared with their posterior. The scenario's data only stood in "
            "for them when the rounds were planned."
        )
    else:
        answer = (
            "Not known: no exact law holds here, and no chains were compared with one."
        )
    return _verdict("unknown", DISTANCE_QUESTION, answer)


def _judge_distance(
    run: Run, measured: MeasuredDistance, source: str, *, uncounted: bool
) -> Verdict:
    """Compare W2² with the posterior's total variance.

    Args:
        run: the run folder.
        measured: W2².
        source: what it is from, in words.
        uncounted: whether gradients may have been clipped and nobody has counted.
    """
    variance = _total_variance(run)
    ratio = measured.excess / variance
    numbers = _distance_words(run, measured.excess, variance, source)
    if uncounted:
        answer = f"{numbers}. Devices do not report how often they clipped."
        return _verdict("unknown", DISTANCE_QUESTION, answer)
    if np.isnan(ratio):
        return _verdict("unknown", DISTANCE_QUESTION, f"{numbers}.")
    if _is_lost_in_floor(measured, variance):
        answer = (
            f"Not known: {format_number(run.scenario.sampler.chains)} chains are too "
            f"few to tell. They show {format_number(measured.mean)}; as many perfect "
            f"ones would show {format_number(measured.floor)} ± "
            f"{format_number(2 * measured.floor_sd, 2)}."
        )
        return _verdict("unknown", DISTANCE_QUESTION, answer)
    if ratio < CLOSE:
        return _verdict("good", DISTANCE_QUESTION, f"Close. {numbers}.")
    if ratio < FAR:
        return _verdict("note-mark", DISTANCE_QUESTION, f"Roughly there. {numbers}.")
    if (measured.excess - 2 * measured.error) / variance > FAR:
        answer = f"Far: these samples do not represent it. {numbers}."
        return _verdict("bad", DISTANCE_QUESTION, answer)
    return _verdict("note-mark", DISTANCE_QUESTION, f"Probably far. {numbers}.")


def _total_variance(run: Run) -> float:
    """Return the sum of the posterior's variances; nan where it has no exact law."""
    posterior: object = run.posterior
    if isinstance(posterior, HasLaw):
        return float(np.trace(posterior.exact.covariance))
    return float("nan")


def _is_lost_in_floor(measured: MeasuredDistance, variance: float) -> bool:
    """Return whether perfect samples would look as far, and that is not close."""
    doubt = 2 * measured.floor_sd
    is_within_floor = measured.excess <= doubt
    return is_within_floor and measured.floor + doubt > CLOSE * variance


def _distance_words(run: Run, w2_sq: float, variance: float, source: str) -> str:
    """Return W2² with its source, beside the posterior's variance and the start."""
    words = f"W2² is {format_number(w2_sq)} {source}"
    ratio = w2_sq / variance
    if np.isfinite(ratio):
        words += (
            f", {format_number(ratio)} times the posterior's total variance "
            f"({format_number(variance)})"
        )
    start = run.plan.constants.initial_w2_sq
    if start and run.plan.coordinates != "whitened":
        words += f"; it was {format_number(start)} at the start"
    return words


def _measured(run: Run) -> MeasuredDistance | None:
    """Return W2² from chains over the kept rounds; None where there is no law."""
    posterior: object = run.posterior
    estimate = None if run.summary is None else run.summary.w2_sq
    if estimate is None or estimate.worst is None or not isinstance(posterior, HasLaw):
        return None
    per_round = [w2_sq for w2_sq in estimate.per_round if w2_sq is not None]
    mean = float(np.mean(per_round))
    # The error is known of the worst round; that of others is as large relatively.
    relative_error = 0.0
    if estimate.worst:
        relative_error = (estimate.worst_se or 0.0) / estimate.worst
    chains = run.scenario.sampler.chains
    # The floor of a single round: with one draw per chain the step size is irrelevant.
    floor, floor_error = floor_w2_sq(posterior.exact, 1.0, chains, 1)
    return MeasuredDistance(
        mean, relative_error * mean, floor, floor_error * REPLICAS**0.5
    )


@lru_cache(maxsize=1)
def comparison(run: Run) -> Comparison | None:
    """Compare the samples of a run with the law that they should have.

    The law is the exact posterior, or its Laplace approximation where it has no closed
    form; without either, means and deviations of the samples stand alone. The result
    of the last run is kept, as several parts of a page need it.

    Args:
        run: the run folder.

    Returns:
        Means and deviations of all parameters; None without samples.
    """
    if run.draws is None:
        return None
    law = None if run.posterior is None else law_of(run.posterior)
    return compare(run.draws.theta, law)


def resembles(run: Run) -> Verdict | None:
    """Judge means and standard deviations of the samples beside the law.

    Standard deviations may differ by a quarter, and by what chance explains: three
    standard errors of a deviation, by the effective sample size. Means count only where
    |z| exceeds 4; they may then be off by a quarter of a standard deviation. Samples do
    not resemble the posterior above a factor of two, beyond the same chance, or above a
    shift of one.

    Args:
        run: the run folder.

    Returns:
        The verdict; None where no law is known, and where a parameter never moved.
    """
    compared = comparison(run)
    if compared is None or compared.law is None or run.draws is None:
        return None
    if not np.all(compared.deviation > 0):
        return None
    ratio = compared.deviation / compared.expected
    largest_factor = float(np.maximum(ratio, 1 / ratio).max())
    shift = np.abs(compared.shift) / compared.expected
    z = np.abs(compared.z)
    largest_sure_shift = float(shift[z > SURE_Z].max(initial=0.0))
    chance = _chance_of_deviations(run, run.draws.theta)
    mark = _likeness_mark(
        factor=largest_factor, shift=largest_sure_shift, chance=chance
    )
    short = {"bad": "No.", "note-mark": "Roughly.", "good": "Yes."}[mark]
    is_exact = isinstance(run.posterior, HasLaw)
    law = "posterior" if is_exact else "Laplace approximation"
    largest_z = None if np.isnan(z).all() else float(np.nanmax(z))
    lowest = format_number(float(ratio.min()))
    highest = format_number(float(ratio.max()))
    off = format_number(float(shift.max()), 2)
    answer = (
        f"{short} Standard deviations: {lowest} to {highest} times the {law}'s. Means: "
        f"off by up to {off} of them, |z| = {format_number(largest_z, 2)}."
    )
    return _verdict(mark, "Do samples resemble the posterior?", answer)


def _chance_of_deviations(run: Run, theta: NDArray[np.float64]) -> float:
    """Return three standard errors of a standard deviation, relative to it.

    Where the effective sample size is not known, chains count as independent samples.
    """
    ess = None if run.summary is None else run.summary.ess_min
    independent_samples = ess or theta.shape[0]
    return float(3 / np.sqrt(2 * independent_samples))


def _likeness_mark(*, factor: float, shift: float, chance: float) -> Mark:
    """Judge the largest factor between deviations and the largest certain shift.

    Args:
        factor: between a parameter's standard deviations, at least 1.
        shift: of a mean that is off for sure, in standard deviations.
        chance: by which deviations may differ beyond the limits, relatively.
    """
    if factor > (1 + UNLIKE) * (1 + chance) or shift > UNLIKE:
        return "bad"
    if factor > (1 + ALIKE) * (1 + chance) or shift > ALIKE:
        return "note-mark"
    return "good"


def clipped(run: Run) -> Verdict | None:
    """Judge how many gradients of devices and of single examples were clipped.

    Up to 1 % of the kept gradients is hardly any; from a half on, what is computed
    without clipping says nothing about the run. The larger of both rates decides.

    Args:
        run: the run folder.

    Returns:
        The verdict with the rates; None without a summary.
    """
    summary = run.summary
    if summary is None:
        return None
    question = "Were gradients clipped?"
    if run.plan.privacy.spent is None:
        return _verdict("good", question, "Never: this scheme does not clip.")
    if clipping_unknown(run):
        answer = "Not known: the devices of a federation do not report it."
        return _verdict("unknown", question, answer)
    rate = summary.clip_rate
    numbers = Markup("{} of gradients in kept rounds, {} before").format(
        data_number(rate.samples, "summary.clip_rate.samples", style="percent"),
        data_number(rate.burn_in, "summary.clip_rate.burn_in", style="percent"),
    )
    example_rate = summary.example_clip_rate
    if example_rate is not None:
        key = "summary.example_clip_rate"
        percent = data_number(example_rate, key, style="percent")
        numbers += Markup(", and {} of single examples").format(percent)
    worst = max(rate.samples or 0.0, example_rate or 0.0)
    if worst >= MOSTLY_CLIPPED:
        mostly = Markup(
            "Mostly: {}. What is computed without clipping says nothing about this run."
        )
        return _verdict("bad", question, mostly.format(numbers))
    if worst > OFTEN_CLIPPED:
        partly = Markup("Some: {}. What is computed without clipping is only a guide.")
        return _verdict("note-mark", question, partly.format(numbers))
    return _verdict("good", question, Markup("Hardly: {}.").format(numbers))


def privacy(run: Run) -> Verdict:
    """Judge whether the promise was kept.

    It was if no device spends more than its budget, no ε exceeds what was promised to
    its device, and the ledger holds no more than the budgets. Differences within
    `ROUNDING` do not count.

    Args:
        run: the run folder.

    Returns:
        The verdict, with the device that spends the largest part of its budget.
    """
    question = "Was the promise kept?"
    spending = run.plan.privacy
    if run.scenario.privacy.epsilon is None:
        return _verdict("unknown", question, "None was made.")
    if spending.spent is None:
        answer = "No: this scheme does not clip, so no finite ε would be true."
        return _verdict("bad", question, answer)
    fractions = spending.shares or [0.0]
    worst = int(np.argmax(fractions))
    if run.releases == run.scenario.sampler.chains == 1:
        covered = "the only chain."
    elif run.releases == 1:
        covered = (
            "one chain; publishing several chains of the same real devices would "
            "add up."
        )
    else:
        covered = f"all {format_number(run.releases)} chains together."
    violations = _violations(run, spending)
    numbers = (
        f"device {format_number(worst)}, which spends the largest part of its budget, "
        f"spends {format_percent(fractions[worst])} of it"
        f"{''.join(f'; {violation}' for violation in violations)}. "
        f"ε ({spending.adjacency}) is that of {covered}"
    )
    if violations:
        return _verdict("bad", question, f"No: {numbers}")
    return _verdict("good", question, f"Yes: {numbers}")


def _violations(run: Run, spending: Spending) -> list[str]:
    """Return what says that more was spent than was promised, in words."""
    violations = []
    if max(spending.shares or [0.0]) > 1 + ROUNDING:
        violations.append("that is more than all of it")
    promised = np.broadcast_to(
        np.asarray(run.scenario.privacy.epsilon, dtype=float), len(spending.budgets)
    )
    # An unknown ε is None, which becomes nan and is not within any promise.
    spent = np.array(spending.epsilon_each or promised, dtype=float)
    is_above = ~(spent <= promised * (1 + ROUNDING))
    if is_above.any():
        device = int(np.argmax(is_above))
        epsilon = format_number(float(spent[device]), 4)
        promise = format_number(float(promised[device]))
        violations.append(
            f"ε ({spending.adjacency}) of device {device} is {epsilon}, "
            f"promised was {promise}"
        )
    ledger = run.ledger
    if ledger is not None:
        budgets = build_privacy(run.scenario).budget(ledger.devices)
        fraction = float(np.max(ledger.spent / budgets))
        if fraction > 1 + ROUNDING:
            violations.append(
                "by the ledger a device has spent "
                f"{format_percent(fraction)} of its budget"
            )
    return violations


def often_clipped(run: Run) -> bool:
    """Decide whether clipping makes bound and exact law a guide at most.

    Args:
        run: the run folder.

    Returns:
        Whether more than 1 % of the kept gradients of devices, or of those of single
        examples, were clipped. Rates that are not known count as zero; see
        `clipping_unknown`.
    """
    if run.summary is None:
        return False
    rates = (run.summary.clip_rate.samples, run.summary.example_clip_rate)
    return any((rate or 0.0) > OFTEN_CLIPPED for rate in rates)


def clipping_unknown(run: Run) -> bool:
    """Decide whether gradients may have been clipped and nobody has counted.

    Args:
        run: the run folder.

    Returns:
        True for a finished run of a scheme that clips, whose summary has no clip rate:
        devices of a federation do not report it.
    """
    clips = run.plan.privacy.spent is not None
    return clips and run.summary is not None and run.summary.clip_rate.samples is None
