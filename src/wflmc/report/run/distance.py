"""How far the samples are from the posterior: by the exact law, or as far as chains can tell."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wflmc.evaluation.wasserstein import floor_w2_sq
from wflmc.posterior import GaussianPosterior
from wflmc.report.parts import number, percent, text
from wflmc.report.run.verdicts import Verdict, clipping_unknown, often_clipped
from wflmc.runs.documents import PlanFile
from wflmc.runs.folder import Run

CLOSE, FAR = 0.1, 1.0
"""W2² over the posterior's total variance."""
QUESTION = "<b>How far from the true posterior?</b> "
WORDS = {
    "good": "Close.",
    "note-mark": "Roughly there.",
    "bad": "Far: these are not samples of it.",
    "unknown": "",
}


class Measured(NamedTuple):
    """W2² from chains, averaged over the kept rounds, and what perfect samples of as many chains would show."""

    mean: float
    error: float
    """Standard error of the mean."""
    floor: float
    spread: float
    """Standard deviation of one round's estimate from perfect samples."""

    @property
    def excess(self) -> float:
        """Above the floor."""
        return max(0.0, self.mean - self.floor)


def distance(run: Run) -> Verdict:
    """By the exact law where hardly anything is clipped, else measured, less the floor of the estimate."""
    plan, found = run.plan, measured(run)
    exact = None if plan is None else worst_exact(plan)
    trusted = not often_clipped(run) and not (clipping_unknown(run) and found is not None)
    if plan is not None and exact is not None and trusted:
        return _by_law(run, plan, exact)
    if found is not None and plan is not None:
        return _by_chains(run, plan, found)
    return Verdict("unknown", text(QUESTION + "Not known: {why}.", why=_why_not(run)))


def worst_exact(plan: PlanFile) -> float | None:
    """Of the kept rounds; None where it is not known or has overflowed."""
    if plan.exact_w2_sq is None:
        return None
    kept = plan.exact_w2_sq[plan.constants.burn_in :]
    finite = [found for found in kept if found is not None]
    return max(finite) if len(finite) == len(kept) else None


def posterior_size(run: Run) -> float | None:
    """The posterior's total variance, where its law is known."""
    posterior = None if run.rebuilt is None else run.rebuilt.inputs.posterior
    return float(np.trace(posterior.exact.covariance)) if isinstance(posterior, GaussianPosterior) else None


def measured(run: Run) -> Measured | None:
    """What the chains show; None where they show nothing or the posterior is not known here."""
    estimate = None if run.summary is None else run.summary.w2_sq
    if estimate is None or estimate.worst is None or run.rebuilt is None or run.scenario is None:
        return None
    posterior, chains = run.rebuilt.inputs.posterior, run.scenario.sampler.chains
    assert isinstance(posterior, GaussianPosterior)
    mean = float(np.mean([found for found in estimate.per_round if found is not None]))
    replicas = 50
    floor, error = floor_w2_sq(posterior.exact, 1.0, chains, 1, replicas=replicas)
    relative = (estimate.worst_se or 0.0) / estimate.worst if estimate.worst else 0.0
    return Measured(mean, relative * mean, floor, error * replicas**0.5)


def _why_not(run: Run) -> str:
    if run.scenario is not None and run.scenario.posterior.model == "softmax":
        return "this model's posterior has no closed form"
    if run.summary is not None and run.summary.w2_sq is None and often_clipped(run):
        return "one chain cannot measure it, and the exact law leaves clipping out"
    return "no distance was measured"


def _by_law(run: Run, plan: PlanFile, worst: float) -> Verdict:
    size = posterior_size(run)
    ratio = None if size is None else worst / size
    mark = "unknown" if ratio is None else "good" if ratio < CLOSE else "note-mark" if ratio < FAR else "bad"
    clipping = "as gradients are not clipped" if plan.privacy.spent is None else "as gradients are hardly clipped"
    if clipping_unknown(run):
        mark, clipping = "unknown", "if no gradient was clipped, which devices do not tell"
    return Verdict(
        mark,
        text(
            QUESTION + "{word} W2² is {worst} by the exact law, {clipping}{part}{begun}.",
            word=WORDS[mark],
            worst=number(worst),
            clipping=clipping,
            part=_part(ratio, size),
            begun=_begun(plan, worst),
        ),
    )


def _by_chains(run: Run, plan: PlanFile, found: Measured) -> Verdict:
    size = posterior_size(run)
    assert size is not None
    excess, ratio, doubt = found.excess, found.excess / size, 2 * found.spread
    chains = number(run.scenario.sampler.chains) if run.scenario is not None else "so many"
    if excess <= doubt and found.floor + doubt > CLOSE * size:
        said = (
            "Cannot be told from {chains} chains: they show {mean}, and perfect samples would show {floor} too, give "
            "or take {doubt}. More chains see more."
        )
        parts = {"mean": number(found.mean), "floor": number(found.floor), "doubt": number(doubt, 2)}
        return Verdict("unknown", text(QUESTION + said, chains=chains, **parts))
    sure = (excess - 2 * found.error) / size > FAR
    mark = "good" if ratio < CLOSE else "bad" if sure else "note-mark"
    word = WORDS[mark] if sure or ratio < FAR else "Probably far."
    return Verdict(
        mark,
        text(
            QUESTION + "{word} W2² is {excess} ± {error} on average over the kept rounds, measured from {chains} "
            "chains (less {floor}, which perfect samples would show too){part}{begun}.",
            word=word,
            excess=number(excess),
            error=number(found.error, 2),
            chains=chains,
            floor=number(found.floor, 2),
            part=_part(ratio, size),
            begun=_begun(plan, excess),
        ),
    )


def _part(ratio: float | None, size: float | None) -> str:
    if ratio is None:
        return ""
    times = f"{percent(ratio)} of" if ratio < 2 else f"{number(ratio)} times"
    return f", which is {times} the posterior's own variance ({number(size)} over all parameters)"


def _begun(plan: PlanFile, now: float) -> str:
    """Where it began; whitened coordinates have another scale."""
    start = plan.constants.initial_w2_sq
    if not start or plan.coordinates == "whitened":
        return ""
    return f", {'down' if now < start else 'up'} from {number(start)} at the start"
