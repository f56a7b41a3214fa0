"""Verdicts on a run, each with the numbers it follows from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wflmc.evaluation.burn_in import RHAT_LIMIT
from wflmc.evaluation.summary import RHAT_CONCERN
from wflmc.report.parts import Html, number, percent, share, text
from wflmc.runs.documents import ClipRate
from wflmc.runs.folder import Run
from wflmc.scenario.build import build_privacy

ENOUGH_ESS = 400
"""Effective samples that means, deviations and R-hat themselves are usually asked to rest on."""
ROUNDING = 1e-6
"""Relative, of sums of losses and of ε worked out from them."""
OFTEN, MOSTLY = 0.01, 0.5
"""Shares of clipped gradients from which on bound and exact law are a guide, and say nothing."""
MARKS = {"good": "✓", "note-mark": "!", "bad": "✗", "unknown": "–"}
SEVERITY = ("bad", "note-mark", "unknown", "good")


class Verdict(NamedTuple):
    """good, note-mark, bad or unknown, and the reason."""

    mark: str
    reason: Html


def converged(run: Run) -> Verdict:
    """By R-hat and effective sample sizes; one chain cannot tell."""
    summary = run.summary
    question = "<b>Do the chains agree with each other?</b> "
    if summary is None or (summary.rhat_max is None and summary.ess_min is None):
        few = run.draws is not None and run.draws.theta.shape[1] < 4
        why = "fewer than four draws per chain are kept" if few else "no diagnostics were made"
        return Verdict("unknown", text(question + "Not known: {why}.", why=why))
    rhat, ess = summary.rhat_max, summary.ess_min
    if summary.frozen:
        said = question + "No: {frozen} of the parameters never moved in at least one chain, parameter {first} first."
        return Verdict("bad", text(said, frozen=number(len(summary.frozen)), first=str(summary.frozen[0])))
    if rhat is None:
        said = question + "Not known: one chain cannot tell. Its worst parameter has {ess} effective samples."
        return Verdict("unknown", text(said, ess=whole(ess)))
    bad = rhat > RHAT_CONCERN
    fine = rhat <= RHAT_LIMIT and ess is not None and ess >= ENOUGH_ESS
    words = {
        True: "No: they still differ, or have not moved far enough to tell.",
        False: "Yes." if fine else "Nearly: enough for a look, not for fine detail.",
    }
    return Verdict(
        "bad" if bad else "good" if fine else "note-mark",
        text(
            question + "{words} The largest R-hat is {rhat} (1 is ideal, {limit} the usual limit, above {concern} is a "
            "concern), and the worst parameter has {ess} effective samples (at least {enough} are usual).",
            words=words[bad],
            rhat=number(rhat, 4),
            limit=RHAT_LIMIT,
            concern=RHAT_CONCERN,
            ess=whole(ess),
            enough=ENOUGH_ESS,
        ),
    )


def clipped(run: Run) -> Verdict | None:
    """Of devices and of single examples."""
    if run.summary is None:
        return None
    question = "<b>Were gradients clipped?</b> "
    if run.plan is not None and run.plan.privacy.spent is None:
        return Verdict("good", text(question + "Never: this scheme does not clip."))
    rate, one = run.summary.clip_rate, run.summary.example_clip_rate
    if clipping_unknown(run):
        said = "Not known: devices of a federation do not tell. Bound and exact law hold while nothing is clipped."
        return Verdict("unknown", text(question + said))
    late = rate.samples or 0.0
    word = "Mostly" if late >= MOSTLY else "Often" if late > OFTEN else "Hardly" if late else "Not those of devices"
    if not late and one is None:
        word = "No"
    examples = ""
    if one is not None:
        examples = text(
            " Of single examples {one} are clipped{so}.",
            one=share("summary.example_clip_rate", one),
            so=", which then weigh less" if one > OFTEN else "",
        )
    worst = max(late, one or 0.0)
    return Verdict(
        "bad" if worst >= MOSTLY else "note-mark" if worst > OFTEN else "good",
        text(
            question + "{word}: {late} in the kept rounds{early}.{examples}{so}",
            word=word,
            late=share("summary.clip_rate.samples", rate.samples),
            early=_early(rate),
            examples=examples,
            so=_clipped_so(run, worst),
        ),
    )


def _early(rate: ClipRate) -> Html:
    if rate.burn_in is None:
        return Html("")
    return text(", {early} during burn-in", early=share("summary.clip_rate.burn_in", rate.burn_in))


def _clipped_so(run: Run, worst: float) -> str:
    """What it means for the numbers that hold without clipping, where there are any."""
    plan = run.plan
    if plan is None or worst <= OFTEN or (plan.bound is None and plan.exact_w2_sq is None):
        return ""
    known = {"bound": plan.bound is not None, "exact law": plan.exact_w2_sq is not None}
    names = [name for name, there in known.items() if there]
    what = " and ".join(names)
    holds = "hold" if len(names) > 1 else "holds"
    so = "they say nothing of this run" if worst >= MOSTLY else "take them as a guide"
    so = so if len(names) > 1 else so.replace("they say", "it says").replace("them", "it")
    return f" {what[:1].upper()}{what[1:]} {holds} without clipping: {so}."


def noisy(run: Run) -> Verdict | None:
    """Whether there is more noise than sampling needs; what the samples show of it decides where it can be seen."""
    if run.rebuilt is None:
        return None
    plan = run.rebuilt.plan
    kept = slice(plan.burn_in, None)
    times = run.noise[kept] / plan.langevin_noise[kept]
    count, rounds = int(np.sum(times > 1 + 1e-6)), int(times.size)
    if not count:
        reason = "No: in no kept round is the channel's noise more than sampling needs, and the server tops it up."
        if run.ideal:
            reason = "No: the link is ideal, and the server adds just the noise that sampling needs."
        return Verdict("good", text("<b>Too much noise?</b> {reason}", reason=reason))
    return Verdict(
        "note-mark" if times.max() < 10 else "bad",
        text(
            "<b>Too much noise?</b> In {count} of {rounds} kept rounds there is more noise than sampling needs, "
            "{worst} times as much at worst: samples spread wider than the posterior.",
            count=count,
            rounds=rounds,
            worst=number(float(times.max())),
        ),
    )


def privacy(run: Run) -> Verdict | None:
    """Whether budgets, ε and the ledger are within what was promised."""
    if run.plan is None:
        return None
    question, spending = "<b>Was the promise kept?</b> ", run.plan.privacy
    if run.scenario is not None and run.scenario.privacy.epsilon is None:
        return Verdict("unknown", text(question + "None was made."))
    if spending.spent is None:
        return Verdict("bad", text(question + "No: this scheme does not clip, so no finite ε would be true."))
    shares = spending.shares or [0.0]
    worst = int(np.argmax(shares))
    over = _overspent(run, max(shares))
    return Verdict(
        "bad" if over else "good",
        text(
            question + "{words}: the device that spends most of its budget, device {worst}, spends {part} of it{over}. "
            "ε ({adjacency}) is that of one chain; publishing several chains of the same real devices would add up.",
            words="No" if over else "Yes",
            worst=worst,
            part=percent(shares[worst]),
            over="".join(f"; {one}" for one in over),
            adjacency=spending.adjacency,
        ),
    )


def _overspent(run: Run, share_planned: float) -> list[str]:
    """What says that more was spent than was promised: budgets, ε of every device, and the ledger."""
    assert run.plan is not None
    assert run.scenario is not None
    found = ["that is more than all of it"] if share_planned > 1 + ROUNDING else []
    each = run.plan.privacy.epsilon_each or []
    promised = np.broadcast_to(np.asarray(run.scenario.privacy.epsilon, dtype=float), (run.plan.constants.devices,))
    above = [k for k, spent in enumerate(each) if spent is None or spent > promised[k] * (1 + ROUNDING)]
    if above:
        k = above[0]
        found.append(f"ε of device {k} is {number(each[k], 4)}, promised was {number(float(promised[k]))}")
    spent = None if run.summary is None else run.summary.epsilon_spent
    if spent is not None and not above and spent > promised.max() * (1 + ROUNDING):
        found.append(f"summary.json has ε = {number(spent, 4)}, promised was {number(float(promised.max()))}")
    if run.ledger is not None:
        part = float(np.max(run.ledger.spent / build_privacy(run.scenario).budget(run.ledger.devices)))
        if part > 1 + ROUNDING:
            found.append(f"by the ledger a device has spent {percent(part)} of its budget")
    return found


def predictions(run: Run) -> Verdict | None:
    """Accuracy and calibration on the test set."""
    if run.summary is None or run.summary.accuracy is None or run.summary.ece is None:
        return None
    fine = run.summary.ece < 0.05
    return Verdict(
        "good" if fine else "note-mark",
        text(
            "<b>Are the predictions to be believed?</b> {accuracy} of test examples are labelled correctly, and stated "
            "confidences are off by {ece} on average{so}.",
            accuracy=percent(run.summary.accuracy),
            ece=percent(run.summary.ece),
            so=": well calibrated" if fine else "",
        ),
    )


def often_clipped(run: Run) -> bool:
    """Whether the kept rounds are other than the bound and the exact law take them for."""
    rates = () if run.summary is None else (run.summary.clip_rate.samples, run.summary.example_clip_rate)
    return any((rate or 0.0) > OFTEN for rate in rates)


def clipping_unknown(run: Run) -> bool:
    """Whether gradients may have been clipped and nobody has counted."""
    clips = run.plan is not None and run.plan.privacy.spent is not None
    return clips and run.summary is not None and run.summary.clip_rate.samples is None


def whole(found: float | None) -> str:
    """A number of samples, rounded."""
    return "–" if found is None else f"{found:,.0f}"
