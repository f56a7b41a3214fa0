"""Verdicts on a run: the first sentence of a table whose condition holds, with the numbers it follows from."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from wflmc.apps.report.blocks import Html, join, number, percent, text, words
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
from wflmc.runs.documents import PlanFile
from wflmc.runs.folder import Run
from wflmc.scenario.build import build_privacy

ENOUGH_ESS = 400
"""Effective samples that means, deviations and R-hat themselves are usually asked to rest on."""
ROUNDING = 1e-6
"""Relative, of sums of losses and of ε computed from them."""
OFTEN, MOSTLY = 0.01, 0.5
"""Shares of clipped gradients from which on bound and exact law are a guide, and say nothing."""
CLOSE, FAR = 0.1, 1.0
"""W2² over the posterior's total variance."""
ALIKE, UNLIKE, SURE = 0.25, 1.0, 4.0
"""By how much standard deviations may differ, and how many of them means may be off, for samples to resemble the
posterior, and from which on they do not; and |z| from which on a mean is off for sure."""
WORDS = words("verdict_words.toml")
MARKS = {"bad": "✗", "note-mark": "!", "unknown": "–", "good": "✓"}
"""The worst first."""


class MeasuredDistance(NamedTuple):
    """W2² from chains, averaged over the kept rounds, and what perfect samples of as many chains would show."""

    mean: float
    error: float
    """Standard error of the mean."""
    floor: float
    floor_sd: float
    """Standard deviation of one round's estimate from perfect samples."""


class Verdict(NamedTuple):
    """good, note-mark, bad or unknown, and the reason."""

    mark: str
    reason: Html


def decide(
    run: Run, name: str, cases: Mapping[str, Any], numbers: str = "", **parts: object
) -> Verdict:
    """Return the mark and the sentence of the first case that holds.

    Args:
        run: the run that is judged.
        name: of the verdict in `verdict_words.toml`.
        cases: whether each of its cases holds, but for the last one.
        numbers: what its sentences share, where that is not always the same.
        parts: what sentences are filled in with.
    """
    said = WORDS[name]
    mark, sentence = said[
        next((case for case, holds in cases.items() if holds), "else")
    ]
    sentence = sentence.replace("{numbers}", numbers or said.get("numbers", ""))
    return Verdict(
        mark,
        text(
            f"<b>{said['question']}</b> {sentence}",
            plan=run.plan,
            summary=run.summary,
            **parts,
        ),
    )


def all_verdicts(run: Run) -> list[Verdict]:
    """Return all verdicts, the worst first; what the samples show overrules what says otherwise."""
    seen = resembles(run)
    first = [distance(run), converged(run)]
    if seen is not None and seen.mark == "bad":
        but = Html(" But the samples do not resemble the posterior.")
        first = [
            Verdict("note-mark", join([v.reason, but])) if v.mark == "good" else v
            for v in first
        ]
    every = [v for v in (*first, seen, clipped(run), privacy(run)) if v is not None]
    return sorted(every, key=lambda verdict: list(MARKS).index(verdict.mark))


def converged(run: Run) -> Verdict:
    """Judge R-hat and effective sample sizes; one chain cannot tell."""
    summary = run.summary
    rhat, ess, frozen = (
        (None, None, [])
        if summary is None
        else (summary.rhat_max, summary.ess_min, summary.frozen)
    )
    cases = {
        "nothing": rhat is None and ess is None,
        "frozen": frozen,
        "alone": rhat is None,
    }
    cases["differ"] = (rhat or 0) > RHAT_CONCERN
    cases["agree"] = (rhat or 0) <= RHAT_LIMIT and (ess or 0) >= ENOUGH_ESS
    limits: dict[str, Any] = {
        "limit": RHAT_LIMIT,
        "concern": RHAT_CONCERN,
        "usual": ENOUGH_ESS,
    }
    return decide(
        run,
        "agreement",
        cases,
        frozen=len(frozen),
        first=next(iter(frozen), 0),
        **limits,
    )


def worst_exact(plan: PlanFile) -> float | None:
    """Return W2² of the worst kept round by the exact law; None where it is not known or has overflowed."""
    kept = (plan.exact_w2_sq or [])[plan.constants.burn_in :]
    known = [w2_sq for w2_sq in kept if w2_sq is not None]
    return max(known) if known and len(known) == len(kept) else None


def distance(run: Run) -> Verdict:
    """Judge W2²: by the exact law where hardly anything is clipped, else from chains, less their floor."""
    constants, exact, found = run.plan.constants, worst_exact(run.plan), _measured(run)
    variance = (
        float(np.trace(run.posterior.exact.covariance))
        if isinstance(run.posterior, HasLaw)
        else np.nan
    )
    uncounted, by, said = (
        found is None and clipping_unknown(run),
        "by_chains",
        WORDS["distance"],
    )
    if (
        exact is not None
        and not often_clipped(run)
        and (found is None or not clipping_unknown(run))
    ):
        found, by = MeasuredDistance(exact, 0.0, 0.0, 0.0), "by_law"
    if found is None:
        return decide(run, "distance", {"own_data": run.plan.own_data, "nothing": True})
    excess, doubt = max(0.0, found.mean - found.floor), 2 * found.floor_sd
    ratio = excess / variance
    numbers = said[by] + said["relative"] * bool(np.isfinite(ratio))
    numbers += said["started"] * bool(
        constants.initial_w2_sq and run.plan.coordinates != "whitened"
    )
    cases = {"uncounted": uncounted, "alone": np.isnan(ratio)}
    cases["unseen"] = excess <= doubt and found.floor + doubt > CLOSE * variance
    cases |= {
        "close": ratio < CLOSE,
        "roughly": ratio < FAR,
        "far": (excess - 2 * found.error) / variance > FAR,
    }
    parts = {
        "excess": excess,
        "found": found,
        "doubt": doubt,
        "ratio": ratio,
        "variance": variance,
    }
    parts |= {"start": constants.initial_w2_sq, "chains": run.scenario.sampler.chains}
    return decide(run, "distance", cases, numbers, **parts)


def _measured(run: Run) -> MeasuredDistance | None:
    """Return the average of W2² over the kept rounds with its standard error, and its floor, where chains tell."""
    posterior: object = run.posterior
    estimate = None if run.summary is None else run.summary.w2_sq
    if estimate is None or estimate.worst is None or not isinstance(posterior, HasLaw):
        return None
    mean = float(np.mean([value for value in estimate.per_round if value is not None]))
    floor, error = floor_w2_sq(posterior.exact, 1.0, run.scenario.sampler.chains, 1)
    relative = (estimate.worst_se or 0.0) / estimate.worst if estimate.worst else 0.0
    return MeasuredDistance(mean, relative * mean, floor, error * REPLICAS**0.5)


@lru_cache(maxsize=1)
def comparison(run: Run) -> Comparison | None:
    """Return samples beside the law they should have, as far as it is known; None without samples."""
    law = None if run.posterior is None else law_of(run.posterior)
    return None if run.draws is None else compare(run.draws.theta, law)


def resembles(run: Run) -> Verdict | None:
    """Judge means and standard deviations beside the law, where it is known."""
    compared = comparison(run)
    if (
        compared is None
        or compared.law is None
        or run.draws is None
        or not np.all(compared.deviation > 0)
    ):
        return None
    ess = None if run.summary is None else run.summary.ess_min
    doubt = 3 / np.sqrt(
        2 * (ess or run.draws.theta.shape[0])
    )  # relative, of a standard deviation
    ratio, off, z = (
        compared.deviation / compared.expected,
        np.abs(compared.shift) / compared.expected,
        abs(compared.z),
    )
    factor, shifted = (
        float(np.maximum(ratio, 1 / ratio).max()),
        float(off[z > SURE].max(initial=0.0)),
    )
    limits, largest = (
        {"unlike": UNLIKE, "roughly": ALIKE},
        None if np.isnan(z).all() else np.nanmax(z),
    )
    cases = {
        name: factor > (1 + limit) * (1 + doubt) or shifted > limit
        for name, limit in limits.items()
    }
    law = "posterior" if isinstance(run.posterior, HasLaw) else "Laplace approximation"
    parts: dict[str, Any] = {
        "low": ratio.min(),
        "high": ratio.max(),
        "off": off.max(),
        "z": largest,
    }
    return decide(run, "likeness", cases, law=law, **parts)


def clipped(run: Run) -> Verdict | None:
    """Judge how many gradients of devices and of single examples were clipped."""
    if run.summary is None:
        return None
    examples = run.summary.example_clip_rate
    worst = max(run.summary.clip_rate.samples or 0.0, examples or 0.0)
    numbers = WORDS["clipping"]["devices"] + WORDS["clipping"]["examples"] * (
        examples is not None
    )
    cases = {"never": run.plan.privacy.spent is None, "untold": clipping_unknown(run)}
    return decide(
        run,
        "clipping",
        {**cases, "mostly": worst >= MOSTLY, "some": worst > OFTEN},
        numbers,
    )


def privacy(run: Run) -> Verdict:
    """Judge whether budgets, ε and the ledger are within what was promised."""
    spending, shares = run.plan.privacy, run.plan.privacy.shares or [0.0]
    nothing = run.scenario.privacy.epsilon is None
    over = "" if nothing or spending.spent is None else _overspent(run)
    cases = {"nothing": nothing, "unclipped": spending.spent is None, "broken": over}
    worst, how = int(np.argmax(shares)), spending.adjacency
    whose = text(
        WORDS["promise"]["one_chain" if run.releases == 1 else "all_chains"],
        releases=run.releases,
    )
    return decide(
        run,
        "promise",
        cases,
        worst=worst,
        part=max(shares),
        over=over,
        adjacency=how,
        whose=whose,
    )


def _overspent(run: Run) -> str:
    """Return what says that more was spent than was promised: budgets, ε of every device, and the ledger."""
    spending = run.plan.privacy
    promised = np.broadcast_to(
        np.asarray(run.scenario.privacy.epsilon, dtype=float), len(spending.budgets)
    )
    spent = np.array(spending.epsilon_each or promised, dtype=float)  # None: nan
    above = ~(spent <= promised * (1 + ROUNDING))
    k = int(np.argmax(above))
    ledger, part = run.ledger, 0.0
    if ledger is not None:
        part = float(
            np.max(ledger.spent / build_privacy(run.scenario).budget(ledger.devices))
        )
    device = f"ε ({spending.adjacency}) of device {k}"
    cases = [
        (max(spending.shares or [0.0]) > 1 + ROUNDING, "that is more than all of it"),
        (
            above.any(),
            f"{device} is {number(spent[k], 4)}, promised was {number(promised[k])}",
        ),
        (
            part > 1 + ROUNDING,
            f"by the ledger a device has spent {percent(part)} of its budget",
        ),
    ]
    return "".join(f"; {sentence}" for holds, sentence in cases if holds)


def often_clipped(run: Run) -> bool:
    """Return whether clipping makes bound and exact law a guide at most."""
    rates = (
        ()
        if run.summary is None
        else (run.summary.clip_rate.samples, run.summary.example_clip_rate)
    )
    return any((rate or 0.0) > OFTEN for rate in rates)


def clipping_unknown(run: Run) -> bool:
    """Return whether gradients may have been clipped and nobody has counted."""
    clips = run.plan.privacy.spent is not None
    return clips and run.summary is not None and run.summary.clip_rate.samples is None
