"""The answer first: what came of a run, in a few sentences, and verdicts that follow from its numbers."""

from __future__ import annotations

from wflmc.evaluation.causes import SHOWN
from wflmc.report.parts import Html, facts, join, missing, number, paragraph, share, text, value
from wflmc.report.run.distance import distance, worst_exact
from wflmc.report.run.posterior import resembles
from wflmc.report.run.verdicts import MARKS, SEVERITY, Verdict, clipped, converged, predictions, privacy, whole
from wflmc.runs.documents import SIMULATED, Federation, PlanFile, SummaryFile
from wflmc.runs.folder import Run


def answer_section(run: Run) -> Html:
    """Sentences, boxes, verdicts, the diagnosis and warnings."""
    warnings = run.summary.warnings if run.summary is not None else run.plan.warnings if run.plan is not None else []
    warnings = [warning for warning in warnings if not warning.startswith(SIMULATED.partition(".")[0])]
    listed = join(Html(f'<li class="{v.mark}"><b class="mark">{MARKS[v.mark]}</b>{v.reason}</li>') for v in ranked(run))
    noted = join(Html(f'<p class="note">{text("{warning}", warning=warning)}</p>') for warning in warnings)
    head = Html(f"<h3>{len(warnings)} warning{'s' * (len(warnings) > 1)}</h3>") if warnings else Html("")
    verdict_list = Html(f'<h3>Can it be trusted?</h3><ul class="verdicts">{listed}</ul>')
    return join([_state(run), _boxes(run), verdict_list, _diagnosis(run), head, noted])


def ranked(run: Run) -> list[Verdict]:
    """All verdicts, the worst first; what the page sees of the samples overrules what would say otherwise."""
    seen = resembles(run)
    first = [distance(run), converged(run)]
    if seen is not None and seen.mark == "bad":
        but = Html(" But the samples do not resemble the posterior.")
        first = [Verdict("note-mark", join([v.reason, but])) if v.mark == "good" else v for v in first]
    found = [v for v in (*first, seen, clipped(run), privacy(run), predictions(run)) if v is not None]
    return sorted(found, key=lambda verdict: SEVERITY.index(verdict.mark))


def _diagnosis(run: Run) -> Html:
    """What keeps samples from the posterior, and what would help."""
    causes = None if run.summary is None else run.summary.diagnosis
    if causes is None:
        return Html("")
    listed = join(Html(f"<li>{text('{cause}', cause=cause.text)}</li>") for cause in causes[:SHOWN])
    said = Html(f"<ol>{listed}</ol>") if causes else paragraph("Nothing stands out.")
    how = "By the plan and the chains; test scores are not looked at, so that settings are not chosen by them."
    return join([Html("<h3>What would help?</h3>"), said, paragraph("{how}", how=how)])


def _state(run: Run) -> Html:
    """What the folder is, in one sentence; what is missing from it."""
    found = []
    if run.plan is not None and run.scenario is not None:
        c, chains = run.plan.constants, run.scenario.sampler.chains
        simulated = run.summary is None or run.summary.federation is None
        found.append(
            paragraph(
                "{devices} {kind}devices drew samples of {dim} parameters together, in {rounds} rounds {how}. {chains} "
                "{kept} sample{s}.{simulated}",
                kind="simulated " if simulated else "",
                simulated=f" {SIMULATED}" if simulated else "",
                how="over an ideal link" if run.ideal else "over the air",
                devices=value("plan.constants.devices", c.devices),
                dim=value("plan.constants.dim", c.dim),
                rounds=value("plan.constants.rounds", c.rounds),
                chains="One chain keeps"
                if chains == 1
                else f"Each of {number(chains)} chains repeats the whole experiment and keeps",
                kept=value("plan.constants.samples", c.samples),
                s="s" * (c.samples > 1),
            )
        )
    if run.summary is not None and run.summary.federation is not None:
        found.append(_federation(run.summary.federation))
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


def _federation(what: Federation) -> Html:
    """Who sent, who added the noise, and whom ε then holds against."""
    by = "The emulated channel added the noise, at the server: its process read every message without it."
    if what.noise == "devices":
        by = "Every device added its share of the noise itself, and the server read every message with it."
    return paragraph(
        "They were a federation on Flower: {sent} of {asked} messages that were asked for came. {by}",
        sent=number(sum(what.sent)),
        asked=number(sum(what.asked)),
        by=by,
    )


def _boxes(run: Run) -> Html:
    summary, plan = run.summary, run.plan
    boxes: list[tuple[str, object, object]] = []
    if summary is not None and summary.w2_sq is not None:
        error = value("summary.w2_sq.worst_se", summary.w2_sq.worst_se, 2)
        boxes.append(
            (
                "distance to the posterior, W2²",
                value("summary.w2_sq.worst", summary.w2_sq.worst),
                text("± {error}, worst kept round, from chains{floor}", error=error, floor=_floor(summary)),
            )
        )
    exact = None if plan is None else worst_exact(plan)
    if exact is not None:
        never = plan is not None and plan.privacy.spent is None
        if_clipped = "no gradient is clipped" if never else "if no gradient were clipped"
        boxes.append(("W2² by the exact law", value("worst exact", exact), if_clipped))
    boxes += _bound_box(summary, plan)
    boxes += _privacy_box(summary, plan)
    if summary is not None and summary.accuracy is not None:
        boxes.append(("accuracy on the test set", share("summary.accuracy", summary.accuracy), "mean over chains"))
        boxes.append(("calibration error (ECE)", value("summary.ece", summary.ece), "confidence against accuracy"))
    if summary is not None:
        agree = "1 when chains agree with each other" if summary.rhat_max is not None else "not known"
        boxes.append(("largest R-hat", value("summary.rhat_max", summary.rhat_max, 4), agree))
        boxes.append(
            (
                "effective samples",
                value("summary.ess_min", summary.ess_min, shown=whole(summary.ess_min)),
                "of the worst parameter, all chains together",
            )
        )
    return facts(boxes)


def _floor(summary: SummaryFile) -> Html:
    """What perfect samples would show; nothing where the run did not say."""
    if summary.w2_sq is None or summary.w2_sq.floor is None:
        return text("")
    return text("; as many perfect chains show {floor}", floor=value("summary.w2_sq.floor", summary.w2_sq.floor, 2))


def _bound_box(summary: SummaryFile | None, plan: PlanFile | None) -> list[tuple[str, object, object]]:
    """What the plan says of W2², and whether the chains have left it behind."""
    if plan is None or plan.objective is None or plan.bound is None:
        return []
    exact = plan.scenario.get("policy", {}).get("objective") == "exact"
    said = "computed before anything was sent"
    if plan.privacy.spent is not None:
        said += "; holds while nothing is clipped"
    if not exact and plan.objective > (plan.constants.initial_w2_sq or float("inf")):
        said = "above the start: it says nothing here"
    if above_bound(summary):
        said = "✗ the chains are above it: it holds only while nothing is clipped"
    return [("planned W2²" if exact else "bound on W2²", value("plan.objective", plan.objective), said)]


def above_bound(summary: SummaryFile | None) -> bool:
    """Whether the run itself found its chains above the bound, in the coordinates that they move in."""
    return summary is not None and any("above the plan's bound" in warning for warning in summary.warnings)


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
    said = f"of {of} ({plan.privacy.adjacency}), for the worst device, per chain"
    return [("privacy spent, ε", value(key, spent, 4), said)]
