"""Verdicts on a run: the first sentence of a table whose condition holds, with the numbers it follows from."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from wflmc.evaluation.burn_in import RHAT_LIMIT
from wflmc.evaluation.comparison import Comparison, MeasuredDistance, compare, law_of, measured_distance
from wflmc.evaluation.summary import RHAT_CONCERN
from wflmc.posterior.base import HasLaw
from wflmc.report.blocks import Html, join, number, percent, text
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
BY_LAW = "W2² is {w2_sq} by the exact law, which ignores clipping"
BY_CHAINS = (
    "W2² is {w2_sq} ± {found.error:2} on average over the kept rounds, measured from {chains} chains less "
    "{found.floor:2}, which perfect samples would show"
)
UNSEEN = (
    "Cannot be told from {chains} chains: they show {found.mean}, and perfect samples would show {found.floor} ± "
    "{doubt:2}. More chains see more."
)
MARKS = {"bad": "✗", "note-mark": "!", "unknown": "–", "good": "✓"}
"""The worst first."""


class Verdict(NamedTuple):
    """good, note-mark, bad or unknown, and the reason."""

    mark: str
    reason: Html


def decide(run: Run, question: str, *cases: tuple[Any, str, str], **parts: object) -> Verdict:
    """Return the mark and the sentence of the first case (holds, mark, sentence) that holds."""
    mark, sentence = next((mark, sentence) for holds, mark, sentence in cases if holds)
    return Verdict(mark, text(f"<b>{question}</b> {sentence}", plan=run.plan, summary=run.summary, **parts))


def all_verdicts(run: Run) -> list[Verdict]:
    """Return all verdicts, the worst first; what the samples show overrules what says otherwise."""
    seen = resembles(run)
    first = [distance(run), converged(run)]
    if seen is not None and seen.mark == "bad":
        but = Html(" But the samples do not resemble the posterior.")
        first = [Verdict("note-mark", join([v.reason, but])) if v.mark == "good" else v for v in first]
    every = [v for v in (*first, seen, clipped(run), privacy(run), predictions(run)) if v is not None]
    return sorted(every, key=lambda verdict: list(MARKS).index(verdict.mark))


def converged(run: Run) -> Verdict:
    """Judge R-hat and effective sample sizes; one chain cannot tell."""
    rhat, ess, frozen = None, None, []
    if run.summary is not None:
        rhat, ess, frozen = run.summary.rhat_max, run.summary.ess_min, run.summary.frozen
    few = run.draws is not None and run.draws.theta.shape[1] < 4
    numbers = (
        f" The largest R-hat is {{summary.rhat_max:4}} (1 is ideal, {RHAT_LIMIT} the usual limit, above "
        f"{RHAT_CONCERN} is a concern), and the worst parameter has {{summary.ess_min:whole}} effective samples (usual "
        f"are {ENOUGH_ESS} or more)."
    )
    alone = "Not known: one chain cannot tell. Its worst parameter has {summary.ess_min:whole} effective samples."
    return decide(
        run,
        "Do the chains agree with each other?",
        (rhat is None and ess is None and few, "unknown", "Not known: fewer than four draws per chain are kept."),
        (rhat is None and ess is None, "unknown", "Not known: no diagnostics were computed."),
        (frozen, "bad", "No: {frozen} of the parameters never moved in some chain, the first is θ[{first}]."),
        (rhat is None, "unknown", alone),
        ((rhat or 0) > RHAT_CONCERN, "bad", "No: they still differ, or have not moved far enough to tell." + numbers),
        ((rhat or 0) <= RHAT_LIMIT and (ess or 0) >= ENOUGH_ESS, "good", "Yes." + numbers),
        (True, "note-mark", "Nearly: enough for a look, not for fine detail." + numbers),
        **{"frozen": len(frozen), "first": frozen[0] if frozen else 0},
    )


def worst_exact(plan: PlanFile | None) -> float | None:
    """Return W2² of the worst kept round by the exact law; None where it is not known or has overflowed."""
    kept = [] if plan is None or plan.exact_w2_sq is None else plan.exact_w2_sq[plan.constants.burn_in :]
    known = [w2_sq for w2_sq in kept if w2_sq is not None]
    return max(known) if known and len(known) == len(kept) else None


def distance(run: Run) -> Verdict:
    """Judge W2²: by the exact law where hardly anything is clipped, else from chains, less their floor."""
    plan, exact, uncounted, measured = run.plan, worst_exact(run.plan), clipping_unknown(run), _measured(run)
    posterior = None if run.rebuilt is None else run.rebuilt.inputs.posterior
    variance = float(np.trace(posterior.exact.covariance)) if isinstance(posterior, HasLaw) else np.nan
    by_law = exact is not None and not often_clipped(run) and not (uncounted and measured is not None)
    nothing = not by_law and measured is None
    softmax = run.scenario is not None and run.scenario.posterior.model == "softmax"
    found = measured or MeasuredDistance(np.nan, np.nan, np.nan, np.nan)
    excess, doubt = max(0.0, found.mean - found.floor), 2 * found.floor_sd
    w2_sq = exact if exact is not None and by_law else excess
    ratio = w2_sq / variance
    unseen = not by_law and excess <= doubt and found.floor + doubt > CLOSE * variance
    sentence = BY_LAW if by_law else BY_CHAINS
    sentence += ", {times} the posterior's total variance ({variance})" if np.isfinite(ratio) else ""
    started = plan is not None and plan.constants.initial_w2_sq and plan.coordinates != "whitened"
    sentence += "; it was {start} at the start." if started else "."
    times = f"{percent(ratio)} of" if ratio < 2 else f"{number(ratio)} times"
    numbers: dict[str, Any] = {"w2_sq": w2_sq, "found": found, "doubt": doubt, "variance": variance, "times": times}
    numbers |= {"chains": run.scenario and run.scenario.sampler.chains, "start": plan and plan.constants.initial_w2_sq}
    return decide(
        run,
        "How far from the true posterior?",
        (nothing and softmax, "unknown", "Not known: this model's posterior has no closed form."),
        (nothing and often_clipped(run), "unknown", "Not known: one chain cannot measure it."),
        (nothing, "unknown", "Not known: no distance was measured."),
        (by_law and uncounted, "unknown", sentence + " Devices do not tell how much was clipped."),
        (np.isnan(ratio), "unknown", sentence),
        (unseen, "unknown", UNSEEN),
        (ratio < CLOSE, "good", "Close. " + sentence),
        (ratio < FAR, "note-mark", "Roughly there. " + sentence),
        (by_law or (excess - 2 * found.error) / variance > FAR, "bad", "Far: these are not samples of it. " + sentence),
        (True, "note-mark", "Probably far. " + sentence),
        **numbers,
    )


def _measured(run: Run) -> MeasuredDistance | None:
    estimate = None if run.summary is None else run.summary.w2_sq
    if estimate is None or estimate.worst is None or run.rebuilt is None or run.scenario is None:
        return None
    posterior = run.rebuilt.inputs.posterior
    assert isinstance(posterior, HasLaw)
    chains = run.scenario.sampler.chains
    return measured_distance(posterior.exact, estimate.per_round, estimate.worst, estimate.worst_se, chains)


@lru_cache(maxsize=1)
def comparison(run: Run) -> Comparison | None:
    """Return samples beside the law they should have, as far as it is known; None without samples."""
    law = None if run.rebuilt is None else law_of(run.rebuilt.inputs.posterior)
    return None if run.draws is None else compare(run.draws.theta, law)


def resembles(run: Run) -> Verdict | None:
    """Judge means and standard deviations beside the law; where none is known, whether noise is too strong."""
    compared, noise = comparison(run), noisy(run)
    if compared is None or compared.law is None or run.draws is None or not np.all(compared.deviation > 0):
        return noise
    ess = None if run.summary is None else run.summary.ess_min
    doubt = 3 / np.sqrt(2 * (ess or run.draws.theta.shape[0]))  # relative, of a standard deviation
    ratio, off = compared.deviation / compared.expected, np.abs(compared.shift) / compared.expected
    factor, sure = float(np.maximum(ratio, 1 / ratio).max()), np.abs(compared.z) > SURE
    shifted = float(off[sure].max(initial=0.0))
    z = np.abs(compared.z[np.isfinite(compared.z)])
    exact = run.rebuilt is not None and isinstance(run.rebuilt.inputs.posterior, HasLaw)
    sentence = (
        " Their standard deviations are {low} to {high} times those of the {law}, and their means are up to {off:2} "
    )
    sentence += "of them away, |z| = {z:2}." if z.size else "{off:2} of them away."
    law = "posterior" if exact else "Laplace approximation"
    numbers = {"low": ratio.min(), "high": ratio.max(), "law": law, "off": off.max(), "z": z.max(initial=0.0)}
    too_noisy = "" if noise is None or noise.mark == "good" else f" {noise.reason.partition('</b> ')[2]}"
    return decide(
        run,
        "Do samples resemble the posterior?",
        (factor > (1 + UNLIKE) * (1 + doubt) or shifted > UNLIKE, "bad", f"No.{sentence}{too_noisy}"),
        (factor > (1 + ALIKE) * (1 + doubt) or shifted > ALIKE, "note-mark", f"Roughly.{sentence}{too_noisy}"),
        (True, "good", f"Yes.{sentence}"),
        **numbers,
    )


def noisy(run: Run) -> Verdict | None:
    """Judge the noise of the kept rounds against what sampling needs."""
    if run.rebuilt is None:
        return None
    plan = run.rebuilt.plan
    times = (run.noise / plan.langevin_noise)[plan.burn_in :]
    excess = (
        "In {count} of {rounds} kept rounds there is more noise than sampling needs, {worst} times as much at worst: "
        "samples spread wider than the posterior."
    )
    return decide(
        run,
        "Too much noise?",
        (times.max() >= 10, "bad", excess),
        (times.max() > 1 + 1e-6, "note-mark", excess),
        (run.ideal, "good", "No: the link is ideal, and the server adds just the noise that sampling needs."),
        (True, "good", "No: the channel's noise never exceeds what sampling needs, and the server adds the rest."),
        **{"count": int(np.sum(times > 1 + 1e-6)), "rounds": times.size, "worst": times.max()},
    )


def clipped(run: Run) -> Verdict | None:
    """Judge how many gradients of devices and of single examples were clipped."""
    if run.summary is None:
        return None
    rate, examples = run.summary.clip_rate, run.summary.example_clip_rate
    worst = max(rate.samples or 0.0, examples or 0.0)
    counts = "{summary.clip_rate.samples:percent} of the devices' gradients in the kept rounds"
    counts += ", {summary.clip_rate.burn_in:percent} during burn-in" if rate.burn_in is not None else ""
    counts += ", and {summary.example_clip_rate:percent} of single examples" if examples is not None else ""
    return decide(
        run,
        "Were gradients clipped?",
        (run.plan is not None and run.plan.privacy.spent is None, "good", "Never: this scheme does not clip."),
        (clipping_unknown(run), "unknown", "Not known: devices of a federation do not tell."),
        (worst >= MOSTLY, "bad", f"Mostly: {counts}. What is computed without clipping says nothing about this run."),
        (worst > OFTEN, "note-mark", f"Some: {counts}. What is computed without clipping is only a guide."),
        (True, "good", f"Hardly: {counts}."),
    )


def privacy(run: Run) -> Verdict | None:
    """Judge whether budgets, ε and the ledger are within what was promised."""
    if run.plan is None:
        return None
    spending, shares = run.plan.privacy, run.plan.privacy.shares or [0.0]
    nothing = run.scenario is not None and run.scenario.privacy.epsilon is None
    over = "" if nothing or spending.spent is None else _overspent(run, run.plan)
    sentence = (
        "device {worst}, which spends the largest part of its budget, spends {part:percent} of it{over}. ε "
        "({adjacency}) is that of one chain; publishing several chains of the same real devices would add up."
    )
    return decide(
        run,
        "Was the promise kept?",
        (nothing, "unknown", "None was made."),
        (spending.spent is None, "bad", "No: this scheme does not clip, so no finite ε would be true."),
        (over, "bad", f"No: {sentence}"),
        (True, "good", f"Yes: {sentence}"),
        **{"worst": int(np.argmax(shares)), "part": max(shares), "over": over, "adjacency": spending.adjacency},
    )


def _overspent(run: Run, plan: PlanFile) -> str:
    """Return what says that more was spent than was promised: budgets, ε of every device, and the ledger."""
    assert run.scenario is not None
    promised = np.broadcast_to(np.asarray(run.scenario.privacy.epsilon, dtype=float), (plan.constants.devices,))
    spent = np.array(plan.privacy.epsilon_each or promised, dtype=float)  # None: nan
    above = ~(spent <= promised * (1 + ROUNDING))
    k = int(np.argmax(above))
    part = 0.0
    if run.ledger is not None:
        part = float(np.max(run.ledger.spent / build_privacy(run.scenario).budget(run.ledger.devices)))
    how = plan.privacy.adjacency
    cases = [
        (max(plan.privacy.shares or [0.0]) > 1 + ROUNDING, "that is more than all of it"),
        (above.any(), f"ε ({how}) of device {k} is {number(spent[k], 4)}, promised was {number(promised[k])}"),
        (part > 1 + ROUNDING, f"by the ledger a device has spent {percent(part)} of its budget"),
    ]
    return "".join(f"; {sentence}" for holds, sentence in cases if holds)


def predictions(run: Run) -> Verdict | None:
    """Judge accuracy and calibration on the test set."""
    if run.summary is None or run.summary.accuracy is None or run.summary.ece is None:
        return None
    sentence = (
        "{summary.accuracy:percent} of test labels are right; confidences are off by {summary.ece:percent} on average"
    )
    return decide(
        run,
        "Can the predictions be trusted?",
        (run.summary.ece < 0.05, "good", f"{sentence}: well calibrated."),
        (True, "note-mark", f"{sentence}."),
    )


def often_clipped(run: Run) -> bool:
    """Return whether clipping makes bound and exact law a guide at most."""
    rates = () if run.summary is None else (run.summary.clip_rate.samples, run.summary.example_clip_rate)
    return any((rate or 0.0) > OFTEN for rate in rates)


def clipping_unknown(run: Run) -> bool:
    """Return whether gradients may have been clipped and nobody has counted."""
    clips = run.plan is not None and run.plan.privacy.spent is not None
    return clips and run.summary is not None and run.summary.clip_rate.samples is None
