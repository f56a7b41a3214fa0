"""The answer first: what came of a run, in a few sentences, and verdicts that follow from its numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wflmc.evaluation.burn_in import RHAT_LIMIT
from wflmc.evaluation.summary import RHAT_CONCERN
from wflmc.report.parts import Html, facts, join, missing, number, paragraph, percent, share, text, value
from wflmc.report.run.documents import PlanFile, SummaryFile
from wflmc.report.run.files import Run
from wflmc.scenario.build import build_privacy

ENOUGH_ESS = 400
"""Effective samples that means, deviations and R-hat themselves are usually asked to rest on."""
ROUNDING = 1e-6
"""Relative, of sums of losses and of ε worked out from them."""
MARKS = {"good": "✓", "note-mark": "!", "bad": "✗", "unknown": "–"}


class Verdict(NamedTuple):
    """good, note-mark, bad or unknown, and the reason."""

    mark: str
    reason: Html


def answer_section(run: Run) -> Html:
    """Sentences, boxes, verdicts and warnings."""
    warnings = run.summary.warnings if run.summary is not None else run.plan.warnings if run.plan is not None else []
    verdicts = [one(run) for one in (_distance, _converged, _clipped, _noisy, _privacy, _predictions)]
    listed = join(
        Html(f'<li class="{v.mark}"><b class="mark">{MARKS[v.mark]}</b>{v.reason}</li>') for v in verdicts if v
    )
    noted = join(Html(f'<p class="note">{text("{warning}", warning=warning)}</p>') for warning in warnings)
    head = Html(f"<h3>{len(warnings)} warning{'s' * (len(warnings) > 1)}</h3>") if warnings else Html("")
    verdict_list = Html(f'<h3>Can it be trusted?</h3><ul class="verdicts">{listed}</ul>')
    return join([_state(run), _boxes(run), verdict_list, head, noted])


def posterior_size(run: Run) -> float | None:
    """The posterior's total variance, where its law is known."""
    posterior = None if run.rebuilt is None else run.rebuilt.inputs.posterior
    return (
        float(np.trace(posterior.exact.covariance)) if posterior is not None and hasattr(posterior, "exact") else None
    )


def _state(run: Run) -> Html:
    """What the folder is, in one sentence; what is missing from it."""
    found = []
    if run.plan is not None and run.scenario is not None:
        c = run.plan.constants
        found.append(
            paragraph(
                "{devices} devices drew samples of {dim} parameters together, in {rounds} rounds over the air, without "
                "showing anyone their data. Each of {chains} chains repeats the whole experiment and keeps {kept} "
                "sample{s}.",
                devices=value("plan.constants.devices", c.devices),
                dim=value("plan.constants.dim", c.dim),
                rounds=value("plan.constants.rounds", c.rounds),
                chains=number(run.scenario.sampler.chains),
                kept=value("plan.constants.samples", c.samples),
                s="s" * (c.samples > 1),
            )
        )
    if run.stopped:
        done = "" if run.ledger is None else f" {len(run.ledger.entries)} rounds are in its ledger."
        found.append(
            missing(
                "This run was stopped before its end.{done} <code>wflmc run --resume {folder}</code> goes on with it.",
                done=done,
                folder=run.folder,
            )
        )
    elif run.summary is None:
        found.append(missing("summary.json is missing: what came of the run is not known."))
    return join(found)


def _boxes(run: Run) -> Html:
    summary, plan = run.summary, run.plan
    boxes: list[tuple[str, object, object]] = []
    if summary is not None and summary.w2_sq is not None:
        error = value("summary.w2_sq.worst_se", summary.w2_sq.worst_se, 1)
        boxes.append(
            (
                "distance to the posterior, W2²",
                value("summary.w2_sq.worst", summary.w2_sq.worst),
                text("± {error}, worst kept round, from chains", error=error),
            )
        )
    exact = _worst_exact(summary, plan)
    if exact is not None:
        boxes.append(("W2² by the exact law", value("worst exact", exact), "if no gradient were clipped"))
    if plan is not None and plan.objective is not None and plan.bound is not None:
        what = "bound on W2²" if plan.scenario.get("policy", {}).get("objective") != "exact" else "planned W2²"
        useless = plan.objective > (plan.constants.initial_w2_sq or float("inf"))
        said = "above the start: it says nothing here" if useless else "promised before anything was sent"
        boxes.append((what, value("plan.objective", plan.objective), said))
    boxes += _privacy_box(summary, plan)
    if summary is not None and summary.accuracy is not None:
        boxes.append(("accuracy on the test set", share("summary.accuracy", summary.accuracy), "mean over chains"))
        boxes.append(("calibration error (ECE)", value("summary.ece", summary.ece), "confidence against accuracy"))
    if summary is not None:
        boxes.append(
            ("largest R-hat", value("summary.rhat_max", summary.rhat_max, 4), "1 when chains agree with each other")
        )
        boxes.append(
            (
                "effective samples",
                value("summary.ess_min", summary.ess_min, shown=_whole(summary.ess_min)),
                "of the worst parameter, all chains together",
            )
        )
    return facts(boxes)


def _often_clipped(summary: SummaryFile | None) -> bool:
    """Whether the kept rounds are other than the bound and the exact law take them for."""
    rates = () if summary is None else (summary.clip_rate.samples, summary.example_clip_rate)
    return any((rate or 0.0) > 0.01 for rate in rates)


def _part(ratio: float) -> str:
    return f"{percent(ratio)} of" if ratio < 2 else f"{number(ratio)} times"


def _whole(found: float | None) -> str:
    return "–" if found is None else f"{found:,.0f}"


def _privacy_box(summary: SummaryFile | None, plan: PlanFile | None) -> list[tuple[str, object, object]]:
    if plan is None:
        return []
    spent = plan.privacy.epsilon_spent if summary is None else summary.epsilon_spent
    key = "plan.privacy.epsilon_spent" if summary is None else "summary.epsilon_spent"
    promised = plan.scenario.get("privacy", {}).get("epsilon")
    if spent is None:
        why = "nothing is clipped" if plan.privacy.spent is None else "nothing is promised"
        return [("privacy spent, ε", "–", f"{why}: no ε can be stated")]
    each = promised if isinstance(promised, list) else [promised]
    of = number(float(max(each))) if promised is not None and len(set(each)) == 1 else "what each device is promised"
    return [("privacy spent, ε", value(key, spent, 4), f"of {of}, for the worst device, per chain")]


def _worst_exact(summary: SummaryFile | None, plan: PlanFile | None) -> float | None:
    """Of the kept rounds; None where it is not known or has overflowed."""
    law = plan.exact_w2_sq if plan is not None else None
    if plan is None or law is None:
        return None
    kept = law[plan.constants.burn_in :]
    finite = [found for found in kept if found is not None]
    return max(finite) if len(finite) == len(kept) else None


def _distance(run: Run) -> Verdict:
    summary, plan = run.summary, run.plan
    measured = summary.w2_sq.worst if summary is not None and summary.w2_sq is not None else None
    exact = _worst_exact(summary, plan)
    # The estimate has a floor that the number of chains sets: where nothing is clipped the law itself is better.
    by_law = exact is not None and (measured is None or not _often_clipped(summary))
    worst = exact if by_law else measured
    size = posterior_size(run)
    if worst is None or plan is None:
        softmax = run.scenario is not None and run.scenario.posterior.model == "softmax"
        why = "this model's posterior has no closed form" if softmax else "no distance was measured"
        return Verdict("unknown", text("<b>How far from the true posterior?</b> Not known: {why}.", why=why))
    start = plan.constants.initial_w2_sq
    begun = "" if not start else f", down from {number(start)} at the start"
    ratio = None if size is None else worst / size
    mark = "unknown" if ratio is None else "good" if ratio < 0.1 else "note-mark" if ratio < 1 else "bad"
    word = {"good": "Close.", "note-mark": "Roughly there.", "bad": "Far: these are not samples of it.", "unknown": ""}
    return Verdict(
        mark,
        text(
            "<b>How far from the true posterior?</b> {word} W2² is {worst}{how}{ratio}{begun}.",
            word=word[mark],
            worst=number(worst),
            how=" by the exact law, as gradients are hardly clipped" if by_law else ", measured from the chains",
            begun=begun,
            ratio=""
            if ratio is None
            else f", which is {_part(ratio)} the posterior's own variance ({number(size)} over all parameters)",
        ),
    )


def _converged(run: Run) -> Verdict:
    summary = run.summary
    question = "<b>Did the chains converge?</b> "
    if summary is None or (summary.rhat_max is None and summary.ess_min is None):
        few = run.draws is not None and run.draws.theta.shape[1] < 4
        why = "fewer than four draws per chain are kept" if few else "no diagnostics were made"
        return Verdict("unknown", text(question + "Not known: {why}.", why=why))
    rhat, ess = summary.rhat_max, summary.ess_min
    bad = rhat is not None and rhat > RHAT_CONCERN
    fine = (rhat is None or rhat <= RHAT_LIMIT) and ess is not None and ess >= ENOUGH_ESS
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
            ess=_whole(ess),
            enough=ENOUGH_ESS,
        ),
    )


def _clipped(run: Run) -> Verdict | None:
    if run.summary is None:
        return None
    rate = run.summary.clip_rate
    if run.plan is not None and run.plan.privacy.spent is None:
        return Verdict("good", text("<b>Were gradients clipped?</b> Never: this scheme does not clip."))
    often = _often_clipped(run.summary)
    one = run.summary.example_clip_rate
    examples = (
        "" if one is None else text(" Of single examples, {one} are.", one=share("summary.example_clip_rate", one))
    )
    return Verdict(
        "note-mark" if often else "good",
        text(
            "<b>Were gradients clipped?</b> {word}: {late} in the kept rounds, {early} during burn-in.{examples} {so}",
            word="Often" if often else "Hardly" if rate.samples else "No",
            late=share("summary.clip_rate.samples", rate.samples),
            early=share("summary.clip_rate.burn_in", rate.burn_in),
            examples=examples,
            so="Bound and exact law hold without clipping, so take them as a guide." if often else "",
        ),
    )


def _noisy(run: Run) -> Verdict | None:
    if run.rebuilt is None:
        return None
    plan = run.rebuilt.plan
    kept = slice(plan.burn_in, None)
    times = plan.noise_variance[kept] / plan.langevin_noise[kept]
    count, rounds = int(np.sum(times > 1 + 1e-6)), int(times.size)
    if not count:
        reason = "No: in every kept round the channel's noise is what sampling needs anyway, topped up by the server."
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


def _privacy(run: Run) -> Verdict | None:
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
            "ε is that of one chain; publishing several chains of the same real devices would add up.",
            words="No" if over else "Yes",
            worst=worst,
            part=percent(shares[worst]),
            over="".join(f"; {one}" for one in over),
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


def _predictions(run: Run) -> Verdict | None:
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
