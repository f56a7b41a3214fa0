"""The page of a run: the answer first, then the scenario, the plan, the chains, the posterior, scores and privacy."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from wflmc.evaluation import diagnose
from wflmc.evaluation.causes import SHOWN
from wflmc.evaluation.comparison import Comparison
from wflmc.posterior.base import HasLaw
from wflmc.privacy import HIDDEN
from wflmc.report import explorer
from wflmc.report.blocks import (
    Html,
    Section,
    boxes,
    fold,
    grid,
    join,
    missing,
    number,
    page,
    paragraph,
    percent,
    table,
    text,
    value,
    whole,
)
from wflmc.report.plan_figure import figure_of_plan
from wflmc.report.plotly_figures import draw
from wflmc.report.run_figures import (
    autocorrelation_figure,
    distance_figure,
    epsilon_figure,
    marginal_figure,
    parameter_name,
    spent_figure,
    traces_figure,
)
from wflmc.report.scenario_words import explorer_changes, outside_theorem, scenario_rows
from wflmc.report.study_figures import reliability_figure
from wflmc.report.verdicts import MARKS, all_verdicts, comparison, worst_exact
from wflmc.runs.documents import SIMULATED, PlanFile, SummaryFile
from wflmc.runs.folder import Draws, Run, read_run
from wflmc.scenario.coverage import OWNER_ONLY

LIMITS = {
    "lmc-limited": "the noise that Langevin sampling needs (lmc-limited)",
    "power-limited": "transmit power (power-limited)",
    "dp-limited": "privacy (dp-limited)",
}
FEWEST_DRAWS = 4
DRAWN, LISTED, FOLDED = 5, 12, 100
"""Parameters whose marginals are drawn, that are listed, and that are listed when asked for."""
SCORES = {
    "accuracy": ("accuracy", "share of test examples with the right label"),
    "ece": ("ECE", "mean gap between confidence and accuracy over 20 bins; 0 is ideal"),
    "rmse": ("RMSE", "root mean squared error; the model's own noise is 1"),
    "nll": ("NLL", "mean of −log p(observed outcome), in nats; punishes sure mistakes"),
    "brier": ("Brier score", "squared error of the probabilities, 0 to 2; 0 is ideal"),
}
ACCOUNTANTS = {"exact": "exact composition of the rounds", "paper": "the paper's sufficient condition, a larger ε"}


def render_run(folder: Path) -> str:
    """Return the page of the run in a folder."""
    run = read_run(folder)
    plan, summary, draws = run.plan, run.summary, run.draws
    no_plan = missing("There is nothing to show: plan.json is missing.")
    why = "the run is not finished" if run.stopped else "{file} is missing"
    no_draws, no_summary = (missing(f"There is nothing to show: {why}.", file=f) for f in ("trace.nc", "summary.json"))
    sections = [
        Section("answer", "In short", answer_section(run)),
        Section("setting", "The scenario", _scenario(run)),
        Section("plan", "The plan", no_plan if plan is None else _plan(run, plan)),
        Section("chains", "The chains", no_draws if draws is None else _chains(run, draws)),
        Section("samples", "Samples and posterior", no_draws if draws is None else _samples(run, draws)),
        Section("scores", "Predictions", no_summary if summary is None else _scores(summary)),
        Section("spent", "Privacy", no_plan if plan is None else _privacy(run, plan)),
    ]
    more, scripts = ([], []) if plan is None else _explorer(run, plan)
    command = "run" if summary is None or summary.federation is None else "federate"
    lead = f"{OWNER_ONLY} Results of wflmc {command} in this folder."
    lead += "" if summary is None else f" The run took {summary.seconds:.3g} seconds."
    lead += "" if plan is None else f" wflmc {plan.version} planned it."
    lead += " Figures can be zoomed, and legends clicked."
    return page(f"Run {folder.resolve().name}", lead, [*sections, *more], scripts)


def answer_section(run: Run) -> Html:
    """Return sentences, boxes, verdicts, the diagnosis and warnings."""
    warnings = run.summary.warnings if run.summary is not None else run.plan.warnings if run.plan is not None else []
    warnings = [warning for warning in warnings if not warning.startswith(SIMULATED.partition(".")[0])]
    listed = [
        Html(f'<li class="{v.mark}"><b class="mark">{MARKS[v.mark]}</b>{v.reason}</li>') for v in all_verdicts(run)
    ]
    parts = [_state(run), boxes(_boxes(run))]
    parts.append(Html(f'<h3>Can it be trusted?</h3><ul class="verdicts">{join(listed)}</ul>'))
    causes = None if run.summary is None else run.summary.diagnosis
    if causes is not None:
        shown = join(text("<li>{cause}</li>", cause=cause.text) for cause in causes[:SHOWN])
        parts.append(
            text(
                "<h3>What would help?</h3>{causes}<p>From the plan and the chains; test scores are not used, so that "
                "settings are not chosen by them.</p>",
                causes=Html(f"<ol>{shown}</ol>") if causes else "Nothing stands out.",
            )
        )
    if warnings:
        parts.append(Html(f"<h3>{len(warnings)} warning{'s' * (len(warnings) > 1)}</h3>"))
        parts += [text('<p class="note">{warning}</p>', warning=warning) for warning in warnings]
    return join(parts)


def _state(run: Run) -> Html:
    """Return what the folder is, and what is missing from it."""
    parts, federation = [], None if run.summary is None else run.summary.federation
    if run.plan is not None and run.scenario is not None:
        c, chains = run.plan.constants, run.scenario.sampler.chains
        parts.append(
            paragraph(
                "{devices} {kind}devices sampled {dim} parameters in {rounds} rounds {how}. {chains} {draws} "
                "draw{s}.{simulated}",
                kind="simulated " if federation is None else "",
                simulated=f" {SIMULATED}" if federation is None else "",
                how="over an ideal link" if run.ideal else "over the air",
                devices=value("plan.constants.devices", c.devices),
                dim=value("plan.constants.dim", c.dim),
                rounds=value("plan.constants.rounds", c.rounds),
                chains="One chain keeps" if chains == 1 else f"{chains:,} chains repeat the experiment; each keeps",
                draws=value("plan.constants.samples", c.samples),
                s="s" * (c.samples > 1),
            )
        )
    if federation is not None:
        by = "The emulated channel added the noise, at the server: its process read every message without it."
        if federation.noise == "devices":
            by = "Every device added its share of the noise itself, and the server read every message with it."
        received, expected = number(sum(federation.sent)), number(sum(federation.asked))
        sentence = "The devices were a federation on Flower: {received} of {expected} expected messages arrived. {by}"
        parts.append(paragraph(sentence, received=received, expected=expected, by=by))
    if run.stopped:
        recorded = 0 if run.ledger is None else len(run.ledger.entries)
        sentence = (
            "This run was stopped before its end. {rounds} rounds are in its ledger. <code>wflmc run --resume {folder}"
            "</code> continues it."
        )
        parts.append(missing(sentence, rounds=recorded, folder=run.folder))
    elif run.summary is None:
        parts.append(missing("summary.json is missing: the results of the run are not known."))
    return join(parts)


def _boxes(run: Run) -> list[tuple[str, object, object]]:
    """Return the numbers to look at first: what it is, the number, and a word on it."""
    plan, summary = run.plan, run.summary
    contents: list[tuple[str, object, object]] = []
    if summary is not None and summary.w2_sq is not None:
        w2_sq = summary.w2_sq
        floor = "" if w2_sq.floor is None else "; as many perfect chains show {floor}"
        note = text(
            "± {error}, worst kept round, from chains" + floor,
            error=value("summary.w2_sq.worst_se", w2_sq.worst_se, 2),
            floor=value("summary.w2_sq.floor", w2_sq.floor, 2),
        )
        contents.append(("distance to the posterior, W2²", value("summary.w2_sq.worst", w2_sq.worst), note))
    exact = worst_exact(plan)
    if exact is not None:
        contents.append(("W2² by the exact law", value("worst exact", exact), "worst kept round, without clipping"))
    if plan is not None:
        contents += [*_bound_box(plan, summary), _privacy_box(plan, summary)]
    if summary is not None and summary.accuracy is not None:
        accuracy = value("summary.accuracy", summary.accuracy, shown=percent(summary.accuracy))
        contents.append(("accuracy on the test set", accuracy, "mean over chains"))
        contents.append(("calibration error (ECE)", value("summary.ece", summary.ece), "confidence against accuracy"))
    if summary is not None:
        ess = value("summary.ess_min", summary.ess_min, shown=whole(summary.ess_min))
        contents.append(("largest R-hat", value("summary.rhat_max", summary.rhat_max, 4), "1 when chains agree"))
        contents.append(("effective sample size", ess, "of the worst parameter, all chains together"))
    return contents


def _bound_box(plan: PlanFile, summary: SummaryFile | None) -> list[tuple[str, object, object]]:
    """Return what the plan says of W2², and whether the chains contradict it."""
    if plan.objective is None or plan.bound is None:
        return []
    exact = plan.scenario.get("policy", {}).get("objective") == "exact"
    note = "computed before anything was transmitted; holds while nothing is clipped"
    if not exact and plan.objective > (plan.constants.initial_w2_sq or float("inf")):
        note = "above the start: it says nothing here"
    if summary is not None and any("above the plan's bound" in warning for warning in summary.warnings):
        note = "✗ the chains are above it: it holds only while nothing is clipped"
    return [("planned W2²" if exact else "bound on W2²", value("plan.objective", plan.objective), note)]


def _privacy_box(plan: PlanFile, summary: SummaryFile | None) -> tuple[str, object, object]:
    file, document = ("plan.privacy", plan.privacy) if summary is None else ("summary", summary)
    label, spent = "privacy spent, ε", document.epsilon_spent
    if spent is None:
        why = "nothing is clipped" if plan.privacy.spent is None else "nothing is promised"
        return label, "–", f"{why}: no ε can be stated"
    promised = np.unique(plan.scenario.get("privacy", {}).get("epsilon") or np.nan)
    of = (
        number(float(promised[0]))
        if promised.size == 1 and np.isfinite(promised[0])
        else "what each device is promised"
    )
    note = f"of {of} ({plan.privacy.adjacency}), for the worst device, per chain"
    return label, value(f"{file}.epsilon_spent", spent, 4), note


def _scenario(run: Run) -> Html:
    """Return the scenario in words, with the file folded below."""
    if run.scenario is None:
        return missing("Neither scenario.toml nor plan.json is in the folder, so the scenario is not known.")
    rows = table(scenario_rows(run.scenario, run))
    if run.scenario_text is None:
        return join([rows, missing("scenario.toml is missing; this is what plan.json says.")])
    again = "<p>Saved as <code>scenario.toml</code>, <code>wflmc run scenario.toml --out DIR</code> repeats it.</p>"
    if run.scenario.sampler.seed == "secret":
        again = "<p>The noise of this run was secret: another run of this scenario differs, and costs again.</p>"
    file = text(again + "<pre>{toml}</pre>", toml=run.scenario_text)
    return join([rows, fold("The scenario file, to copy", file)])


def _plan(run: Run, plan: PlanFile) -> Html:
    """Return the plan over the rounds with the limits behind it, then the distance over the rounds."""
    shares = [f"{LIMITS[name]} in {percent(part)} of the rounds" for name, part in plan.regime_share.items() if part]
    proof = "" if plan.gap is None else " The objective is within a relative {gap} of the proven optimum."
    limits = paragraph("What limits the gain: {held}." + proof, held=", ".join(shares), gap=f"{plan.gap or 0:.1g}")
    if run.ideal:
        limits = paragraph("The link is ideal: no channel limits what devices transmit.")
    rebuilt = None if run.rebuilt is None else run.rebuilt.plan
    parts = [limits]
    if rebuilt is None:
        parts.append(missing("Noise and limits of each round need the data again: {why}", why=run.not_rebuilt))
    parts.append(draw("plan", figure_of_plan(plan, plan.constants.devices, plan.constants.burn_in, rebuilt)))
    distance = distance_figure(run, plan)
    if distance is None:
        return join([*parts, missing("Neither a bound nor an exact law is known for this model and these dynamics.")])
    return join([*parts, Html("<h3>Distance to the posterior</h3>"), draw("distance", distance)])


def _chains(run: Run, draws: Draws) -> Html:
    """Return R-hat and effective sample sizes in words, traces, and autocorrelation."""
    summary, count = run.summary, draws.theta.shape[1]
    words = missing(
        "R-hat and effective sample sizes are not known: they need ArviZ, four draws or more, and for R-hat several "
        "chains."
    )
    if summary is not None and (summary.rhat_max is not None or summary.ess_min is not None):
        between = "R-hat compares the spread between chains with that within them: at most {rhat}. "
        if summary.rhat_max is None:
            between = "R-hat compares chains with each other, and there is one. "
        words = paragraph(
            between + "The worst parameter has an effective sample size of {bulk}, and of {tail} in its tails.",
            rhat=value("summary.rhat_max", summary.rhat_max, 4),
            bulk=value("summary.ess_min", summary.ess_min, shown=whole(summary.ess_min)),
            tail=value("summary.ess_tail_min", summary.ess_tail_min, shown=whole(summary.ess_tail_min)),
        )
    if count < FEWEST_DRAWS:
        few = missing("Each chain keeps {count} draw{s}: too few to follow a chain.", count=count, s="s" * (count > 1))
        return join([words, few])
    figures = {"traces": traces_figure(run, draws), "autocorrelation": autocorrelation_figure(run, draws)}
    return join([words, grid(draw(name, figure) for name, figure in figures.items())])


def _samples(run: Run, draws: Draws) -> Html:
    """Return marginals and a table, with the law where there is one."""
    compared = comparison(run)
    assert compared is not None
    parts = [_law_words(run, compared)]
    if draws.every > 1:
        parts.append(paragraph("Of this long trace every {every}th draw was read.", every=draws.every))
    if compared.law is not None:
        ratio = compared.deviation / compared.expected
        parts.append(
            paragraph(
                "The samples' means are at most {off} posterior standard deviations from the posterior's, and their "
                "standard deviations are {low} to {high} times the posterior's.",
                off=value("largest offset", float((np.abs(compared.shift) / compared.expected).max()), 2),
                low=number(float(ratio.min())),
                high=number(float(ratio.max())),
            )
        )
    order = list(range(compared.mean.size))
    if len(order) > LISTED and np.isfinite(compared.z).any():
        order = np.argsort(-np.nan_to_num(np.abs(compared.z), nan=-1)).tolist()
    drawn = sorted(order[:DRAWN] if len(order) > 2 * DRAWN else order)
    tiles = (draw(f"marginal{index}", marginal_figure(run, draws, compared, index)) for index in drawn)
    return join([*parts, grid(tiles, "tiles"), _parameters(run, draws, compared, order)])


def _law_words(run: Run, compared: Comparison) -> Html:
    """Return what the samples are compared with."""
    if run.rebuilt is None:
        return missing("The posterior is not known here, so samples are shown alone: {why}", why=run.not_rebuilt)
    if compared.law is None:
        return missing("No law to compare with: the posterior has no closed form, and too many parameters.")
    if isinstance(run.rebuilt.inputs.posterior, HasLaw):
        return paragraph("Lines are the exact posterior, which this model has in closed form.")
    return paragraph(
        "Lines are the Laplace approximation, a Gaussian at the posterior's mode. The posterior itself has no closed "
        "form and is slightly skewed, so small differences may be those of the approximation."
    )


def _parameters(run: Run, draws: Draws, compared: Comparison, order: list[int]) -> Html:
    """Return means and standard deviations beside the law, with diagnostics of the parameters listed first."""
    rows: list[list[object]] = []
    for rank, index in enumerate(order[: LISTED + FOLDED]):
        error, z = compared.error[index], compared.z[index]
        row: list[object] = [
            parameter_name(run, index),
            "–" if compared.law is None else value(f"law.mean.{index}", float(compared.law.mean[index]), 4),
            join(
                [
                    value(f"mean.{index}", float(compared.mean[index]), 4),
                    f" ± {error:.1g}" if np.isfinite(error) else "",
                ]
            ),
            f"{z:+.1f}" if np.isfinite(z) else "–",
            "–" if compared.law is None else value(f"law.sd.{index}", float(compared.expected[index])),
            value(f"sd.{index}", float(compared.deviation[index])),
        ]
        if rank < LISTED:
            each = diagnose(draws.theta[:, :, index : index + 1])
            row += [number(each.rhat_max, 4), whole(each.ess_min)]
        rows.append(row)
    head = ("parameter", "posterior mean", "samples' mean", "z", "posterior s.d.", "samples' s.d.", "R-hat", "ESS")
    parts: list[object] = [
        Html("<h3>Means and standard deviations</h3>"),
        grid([table(rows[:LISTED], head)], "numbers"),
    ]
    if rows[LISTED:]:
        title = f"The next {len(rows) - LISTED} of {len(order):,} parameters, largest |z| first"
        parts.append(fold(title, grid([table(rows[LISTED:], head[:-2])], "numbers")))
    return join(parts)


def _scores(summary: SummaryFile) -> Html:
    """Return the reliability diagram beside the scores."""
    given = {key: getattr(summary, key) for key in SCORES if getattr(summary, key) is not None}
    if not given:
        return missing("There are no scores: the data have no test set (arrays X_test and y_test).")
    rows = [(SCORES[key][0], value(f"summary.{key}", score), SCORES[key][1]) for key, score in given.items()]
    scores = text(
        "<div>{table}<p>Each chain predicts with the mean over its kept draws; scores are then averaged over "
        "chains.</p></div>",
        table=table(rows, ("score", "value", "meaning")),
    )
    if summary.reliability is None:
        return scores
    bins = summary.reliability
    return grid([draw("reliability", reliability_figure(bins.confidence, bins.observed, bins.share)), scores])


def _privacy(run: Run, plan: PlanFile) -> Html:
    """Return losses per device, ε over rounds, ε by accountant, the state of the ledger, and what ε does not cover."""
    spending = plan.privacy
    if spending.spent is None:
        return missing("This scheme does not clip gradients: no finite ε would be true, and no ledger is kept.")
    note = paragraph(
        "What is hidden: {hidden} (adjacency: {adjacency}). Each round in which a device transmits costs it a privacy "
        "loss, and losses add up to ε. All numbers are of <b>one chain</b>: chains repeat the experiment for "
        "evaluation, and publishing several of them from the same real devices would add their losses up.",
        hidden=HIDDEN[spending.unit, spending.adjacency],
        adjacency=spending.adjacency,
    )
    accountants = missing("Nothing is promised, so there is no δ to state an ε at; losses are shown as they are.")
    if spending.epsilon_by is not None:
        delta = None if run.scenario is None else run.scenario.privacy.delta
        head = (
            f"ε at δ = {number(delta)} ({spending.adjacency})"
            if isinstance(delta, float)
            else f"ε ({spending.adjacency})"
        )
        rows = [
            (name, value(f"plan.privacy.epsilon_by.{name}", epsilon, 5), ACCOUNTANTS.get(name, "by dp-accounting"))
            for name, epsilon in spending.epsilon_by.items()
        ]
        accountants = table(rows, ("accountant", head, "what it is"))
    epsilon = epsilon_figure(run)
    figures = [draw("spent", spent_figure(spending)), "" if epsilon is None else draw("epsilon", epsilon)]
    parts = [note, accountants, grid(figures), _ledger(run)]
    if plan.not_covered:
        rests = {True: "yes: wflmc publish refuses it unless told to accept it", False: "no: only this folder shows it"}
        items = [(item.name, item.text, rests[item.published]) for item in plan.not_covered]
        parts += [Html("<h3>What ε does not cover</h3>"), table(items, ("what", "why", "in a published file"))]
    return join(parts)


def _ledger(run: Run) -> Html:
    if run.ledger is None:
        return missing("There is no ledger in the folder: numbers are those of the plan.")
    rounds, summary = len(run.ledger.entries), run.summary
    federation = None if summary is None else summary.federation
    sentence = "The ledger has {rounds} round{s}, each written before {when}. Its hash chain is intact."
    if federation is not None and federation.absences:
        sentence += " Table and bars are of the plan, in which no device is absent."
    parts = [
        paragraph(
            sentence,
            rounds=number(rounds),
            s="s" * (rounds > 1),
            when="it was transmitted" if federation is None else "its sum was used",
        )
    ]
    later = 0 if summary is None or summary.ledger is None else rounds - summary.ledger.rounds
    if later > 0:
        parts.append(missing("{later} of them were written after this run had ended.", later=later))
    return join(parts)


def _explorer(run: Run, plan: PlanFile) -> tuple[list[Section], list[str]]:
    """Return Theorem 1 with sliders, from the setting nearest to the run's plan; or why there is none."""
    constants = plan.constants.model_dump(exclude_none=True)
    start = explorer.constants_of({"scenario": plan.scenario, "constants": {"initial_w2_sq": None, **constants}})
    section = explorer.section(start)
    reason = outside_theorem(run)
    if reason:
        sentence = (
            "The explorer computes Theorem 1, which is not about this run: {why}. <code>wflmc report {folder} "
            "--explore</code> makes one for the nearest setting of the theorem."
        )
        return [section._replace(html=missing(sentence, why=reason, folder=run.folder))], []
    changes = [] if run.scenario is None else explorer_changes(run.scenario, plan)
    words = paragraph("Theorem 1 with sliders, started at this very run.")
    if changes:
        sentence = "Not this run, but the nearest setting of Theorem 1, so numbers differ from those above: {changes}."
        words = missing(sentence, changes="; ".join(changes))
    return [section._replace(html=join([words, Html(section.html)]))], explorer.scripts(start)
