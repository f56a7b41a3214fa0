"""The page of a run: the answer first, then the scenario, the plan, the chains, the posterior, scores and privacy."""

from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any

import numpy as np

from wflmc.apps.diagnosis.advice import read_advice
from wflmc.apps.diagnosis.values import CAUSES_SHOWN
from wflmc.apps.report import blocks, explorer, run_figures
from wflmc.apps.report.blocks import (
    Html,
    PageSection,
    data,
    fold,
    grid,
    join,
    missing,
    paragraph,
    table,
    text,
)
from wflmc.apps.report.plotly_figures import draw
from wflmc.apps.report.verdicts import MARKS, all_verdicts, comparison, worst_exact
from wflmc.evaluation import diagnose
from wflmc.evaluation.wasserstein import Comparison
from wflmc.planning import policy_named
from wflmc.posterior import HasLaw
from wflmc.privacy.promise import HIDDEN
from wflmc.runs.documents import SIMULATED, PlanFile, SummaryFile
from wflmc.runs.folder import Draws, Run, read_run
from wflmc.scenario.coverage import OWNER_ONLY
from wflmc.scenario.gains import split_variable
from wflmc.support.notices import NoticeCode

DRAWN, LISTED = 5, 12
"""Parameters whose marginals are drawn, and that are listed."""
WORDS = blocks.words("run_words.toml")


def render_run(folder: Path) -> str:
    """Return the page of the run in a folder."""
    run = read_run(folder)
    summary, draws = run.summary, run.draws
    why = "the run is not finished" if run.stopped else "{file} is missing"
    no_draws, no_summary = (
        missing(f"There is nothing to show: {why}.", file=f)
        for f in ("trace.nc", "summary.json")
    )
    explorer_section, scripts = _explorer(run)
    sections = [
        PageSection("answer", "In short", answer_section(run)),
        PageSection("setting", "The scenario", _scenario(run)),
        PageSection("plan", "The plan", _plan(run, run.plan)),
        PageSection(
            "chains", "The chains", no_draws if draws is None else _chains(run, draws)
        ),
        PageSection(
            "samples",
            "Samples and posterior",
            no_draws if draws is None else _samples(run, draws),
        ),
        PageSection(
            "scores",
            "Predictions",
            no_summary if summary is None else _scores(summary, run.plan.own_data),
        ),
        PageSection("spent", "Privacy", _privacy(run, run.plan)),
        explorer_section,
    ]
    command = "run" if summary is None or summary.federation is None else "federate"
    lead = f"{OWNER_ONLY} Results of wflmc {command} in this folder. Figures can be zoomed, and legends clicked."
    if summary is not None:
        timed = "run" if summary.federation is None else "rounds"
        lead += f" The {timed} took {summary.seconds:.3g} seconds."
    lead += f" wflmc {run.plan.version} planned it."
    return blocks.page(f"Run {folder.resolve().name}", lead, sections, scripts)


def sentences(section: str, cases: Mapping[str, Any], **parts: object) -> Html:
    """Return a paragraph with the sentences of a section in `run_words.toml` whose cases hold."""
    return paragraph(
        " ".join(WORDS[section][case] for case, holds in cases.items() if holds),
        **parts,
    )


def answer_section(run: Run) -> Html:
    """Return sentences, boxes, verdicts, the diagnosis and warnings."""
    notices = run.plan.notices if run.summary is None else run.summary.notices
    warnings = [
        notice.text for notice in notices if notice.code != NoticeCode.SIMULATED
    ]
    item = '<li class="{v.mark}"><b class="mark">{symbol}</b>{v.reason}</li>'
    judged = join(
        text(item, v=verdict, symbol=MARKS[verdict.mark])
        for verdict in all_verdicts(run)
    )
    parts = [
        _state(run),
        _boxes(run),
        Html(f'<h3>Can it be trusted?</h3><ul class="verdicts">{judged}</ul>'),
    ]
    advice = read_advice(run.folder)
    if advice is not None:
        causes = advice.diagnosis[:CAUSES_SHOWN]
        shown = join(text("<li>{cause}</li>", cause=cause["text"]) for cause in causes)
        note = "From the plan and the chains; test scores are not used, so that settings are not chosen by them."
        if run.plan.own_data:
            note = "From the chains and the plan, whose constants need not be those of the devices' data."
        parts += [
            Html(f"<h3>What would help?</h3><ol>{shown or 'Nothing stands out.'}</ol>"),
            paragraph(note),
        ]
    if warnings:
        parts.append(
            Html(f"<h3>{len(warnings)} warning{'s' * (len(warnings) > 1)}</h3>")
        )
        parts += [
            text('<p class="note">{warning}</p>', warning=warning)
            for warning in warnings
        ]
    return join(parts)


def _state(run: Run) -> Html:
    """Return what the folder is, and what is missing from it."""
    federation, ledger = (
        None if run.summary is None else run.summary.federation,
        run.ledger,
    )
    where = (
        "at_devices"
        if federation is not None and federation.noise == "devices"
        else "at_server"
    )
    cases = {
        "sampled": True,
        "simulated": federation is None,
        "federation": federation,
        where: federation,
    }
    absences = 0 if federation is None else federation.absences
    cases |= {"own_data": run.plan.own_data, "absences": absences > 0}
    cases |= {
        "stopped": run.stopped,
        "unknown": run.summary is None and not run.stopped,
    }
    sent, asked = (
        (0, 0) if federation is None else (sum(federation.sent), sum(federation.asked))
    )
    parts: dict[str, Any] = {
        "plan": run.plan,
        "run": run,
        "sent": sent,
        "asked": asked,
        "simulated": Html(SIMULATED.text),
    }
    parts |= {
        "kind": "simulated devices" if federation is None else "devices",
        "chains": run.scenario.sampler.chains,
    }
    parts |= {
        "how": "over an ideal link" if run.ideal else "over the air",
        "federation": federation,
    }
    return sentences(
        "state", cases, **parts, recorded=0 if ledger is None else len(ledger.entries)
    )


def _boxes(run: Run) -> Html:
    """Return the numbers to look at first: what it is, the number, and a word on it."""
    plan, summary, exact = run.plan, run.summary, worst_exact(run.plan)
    estimate = None if summary is None else summary.w2_sq
    names = {"exact": "planned W2²", "transcript": "noise of all, V"}
    label = names.get(run.scenario.policy.objective, "bound on W2²")
    aware = (
        summary is not None
        and summary.coverage is not None
        and summary.coverage.noise_aware_90 is not None
    )
    cases: dict[str, Any] = {"estimate": estimate, "law": exact is not None}
    by_stand_in = plan.own_data and run.scenario.policy.objective == "exact"
    cases["bound"] = None not in (plan.objective, plan.bound) and not by_stand_in
    cases |= {"planned": summary is None, "spent": summary, "aware": aware}
    cases |= dict.fromkeys(
        ("accuracy", "calibration"),
        summary is not None and summary.accuracy is not None,
    )
    cases |= dict.fromkeys(("agreement", "size"), summary)
    return blocks.boxes(
        (WORDS["boxes"][case] for case, holds in cases.items() if holds),
        plan=plan,
        summary=summary,
        exact=exact,
        label=label,
        promised=run.scenario.privacy.epsilon,
        assuming=", for a posterior with the plan's constants" if plan.own_data else "",
        per="per chain" if run.releases == 1 else f"all {run.releases} chains together",
    )


def _scenario(run: Run) -> Html:
    """Return the scenario in words, with the file folded below."""
    rows = table([*scenario_rows(run)])
    if run.scenario_text is None:
        return join(
            [rows, missing("scenario.toml is missing; this is what plan.json says.")]
        )
    again = "<p>Saved as <code>scenario.toml</code>, <code>wflmc run scenario.toml --out DIR</code> repeats it.</p>"
    if run.plan.own_data:
        again = "<p>Another run of this scenario would sample the posterior of the stand-in, not of these data.</p>"
    elif run.scenario.sampler.seed == "secret":
        again = "<p>The noise of this run was secret: another run of this scenario differs, and costs again.</p>"
    return join(
        [
            rows,
            fold(
                "The scenario file, to copy",
                text(again + "<pre>{toml}</pre>", toml=run.scenario_text),
            ),
        ]
    )


def scenario_rows(run: Run) -> Iterator[tuple[str, Html]]:
    """Yield the scenario of a run in the sentences of `scenario_words.toml`, each row with what it is about."""
    parts = _parts(run)
    for about, keys in blocks.words("scenario_words.toml").items():
        said = [
            words.get(str(attrgetter(key)(parts)), words.get("*", ""))
            for key, words in keys.items()
        ]
        yield about, text(" ".join(filter(None, said)), **vars(parts))


def _parts(run: Run) -> SimpleNamespace:
    """Return the sections of a scenario, and what sentences say beyond their values."""
    scenario, plan, posterior = run.scenario, run.plan, run.posterior
    link, policy, privacy = scenario.link, scenario.policy, scenario.privacy
    names = list(map(str, plan.classes or []))
    listed = f"{', '.join(names[:10])}{', …' * (len(names) > 10)}"
    held = [] if posterior is None else posterior.sizes.tolist()
    everyone = min(plan.active_devices) == plan.constants.devices
    return SimpleNamespace(
        **{**dict(scenario), "link": type(link)() if run.ideal else link},
        own_data=plan.own_data,
        examples=None if plan.own_data else sum(held),
        partition=None if plan.own_data else scenario.posterior.partition,
        curvature="is taken to lie" if plan.own_data else "lies",
        held=held,
        source=WORDS["data"].get(
            scenario.posterior.data, PurePath(scenario.posterior.data).name
        ),
        classes=f" into {len(names)} classes ({listed})" if names else "",
        constants=plan.constants,
        channel="ideal" if run.ideal else link.fading,
        gains=PurePath(split_variable(link.gains).path).name,
        hidden=HIDDEN[privacy.unit, privacy.adjacency],
        clipping=privacy.unit if policy_named(policy.power).clips else "none",
        ignored=privacy.epsilon is not None and not policy_named(policy.power).private,
        step_size=plan.step_size,
        parameters=", ".join(
            f"the {key} {value:.3g}"
            for key, value in plan.constants.motion.parameters.items()
        ),
        participation="ideal" if run.ideal else "all" if everyone else policy.schedule,
        power=f"optimized {policy.objective}"
        if policy.power == "optimized"
        else policy.power,
    )


def _plan(run: Run, plan: PlanFile) -> Html:
    """Return the plan over the rounds with the limits behind it, then the distance over the rounds."""
    limits = ", ".join(
        f"{name} {blocks.percent(share)}"
        for name, share in plan.regime_share.items()
        if share
    )
    distance = run_figures.distance_figure(run)
    cases = {"ideal": run.ideal, "limits": not run.ideal, "gap": plan.gap is not None}
    cases |= {"lost": run.saved_plan is None, "nothing": distance is None}
    parts = [sentences("plan", cases, plan=plan, run=run, limits=limits)]
    if run.saved_plan is not None:
        parts.append(draw("plan", run_figures.plan_figure(run.saved_plan)))
    if distance is not None:
        title = (
            "Bound on the distance to the posterior"
            if plan.own_data
            else "Distance to the posterior"
        )
        parts += [Html(f"<h3>{title}</h3>"), draw("distance", distance)]
    return join(parts)


def _chains(run: Run, draws: Draws) -> Html:
    """Return traces and autocorrelation."""
    kept = draws.theta.shape[1]
    if kept < 4:
        return missing(
            "Kept draws per chain: {kept}, too few to follow a chain.", kept=kept
        )
    figures = {
        "traces": run_figures.traces_figure,
        "autocorrelation": run_figures.autocorrelation_figure,
    }
    return grid(draw(name, figure(run, draws)) for name, figure in figures.items())


def _samples(run: Run, draws: Draws) -> Html:
    """Return marginals and a table, with the law where there is one."""
    compared = comparison(run)
    assert compared is not None
    law, exact = compared.law, isinstance(run.posterior, HasLaw)
    own_data = run.plan.own_data
    cases: dict[str, object] = {
        "own_data": own_data,
        "lost": run.inputs is None and not own_data,
    }
    cases["nothing"] = run.inputs and law is None and not own_data
    cases |= {
        "exact": law and exact,
        "laplace": law and not exact,
        "thinned": draws.every > 1,
    }
    order = list(range(compared.mean.size))
    if len(order) > LISTED and np.isfinite(compared.z).any():
        order = np.argsort(-np.nan_to_num(np.abs(compared.z), nan=-1)).tolist()
    drawn = sorted(order[:DRAWN] if len(order) > 2 * DRAWN else order)
    tiles = (
        draw(f"marginal{k}", run_figures.marginal_figure(run, draws, compared, k))
        for k in drawn
    )
    words = sentences("samples", cases, run=run, every=draws.every)
    return join([words, grid(tiles, "tiles"), _parameters(run, draws, compared, order)])


def _parameters(run: Run, draws: Draws, compared: Comparison, order: list[int]) -> Html:
    """Return means and standard deviations beside the law, with diagnostics of the parameters listed first."""
    rows = []
    for k in order[:LISTED]:
        error = f" ± {compared.error[k]:.1g}" if np.isfinite(compared.error[k]) else ""
        law = (
            (None, None)
            if compared.law is None
            else (float(compared.law.mean[k]), float(compared.expected[k]))
        )
        means = (
            data(f"law.mean.{k}", law[0], 4),
            join([data(f"mean.{k}", float(compared.mean[k]), 4), error]),
        )
        z = f"{compared.z[k]:+.1f}" if np.isfinite(compared.z[k]) else "–"
        deviations = (
            data(f"law.sd.{k}", law[1]),
            data(f"sd.{k}", float(compared.deviation[k])),
        )
        each = diagnose(draws.theta[:, :, k : k + 1])
        checks = (
            text(form, each=each)
            for form in ("{each.rhat_max:4}", "{each.ess_min:whole}")
        )
        rows.append(
            (run_figures.parameter_name(run, k), *means, z, *deviations, *checks)
        )
    title = f"<h3>Means and standard deviations</h3><p>Listed: {len(rows)} of {len(order):,} parameters.</p>"
    return join([Html(title), grid([table(rows, WORDS["parameters"])], "numbers")])


def _scores(summary: SummaryFile, own_data: bool) -> Html:
    """Return the reliability diagram beside the scores, or why there are none."""
    known = [
        (key, *about)
        for key, about in WORDS["scores"].items()
        if getattr(summary, key) is not None
    ]
    if not known:
        return missing(WORDS["no_scores_own_data" if own_data else "no_scores"])
    rows = [
        (name, data(f"summary.{key}", getattr(summary, key)), meaning)
        for key, name, meaning in known
    ]
    parts: list[object] = [table(rows, ("score", "value", "meaning"))]
    if summary.reliability is not None:
        parts = [
            grid(
                [
                    draw(
                        "reliability",
                        run_figures.reliability_figure(summary.reliability),
                    ),
                    *parts,
                ]
            )
        ]
    note = "Each chain predicts with the mean over its kept draws; scores are then averaged over chains."
    return join([*parts, paragraph(note)])


def _privacy(run: Run, plan: PlanFile) -> Html:
    """Return losses per device, ε over rounds, ε by accountant, the state of the ledger, and what ε does not cover."""
    spending, how = plan.privacy, plan.privacy.adjacency
    if spending.spent is None:
        return missing(
            "This scheme does not clip gradients: no finite ε would be true, and no ledger is kept."
        )
    accountants = missing(
        "Nothing is promised, so there is no δ to state an ε at; losses are shown as they are."
    )
    if spending.epsilon_by is not None:
        shown = {
            name: data(f"plan.privacy.epsilon_by.{name}", each, 5)
            for name, each in spending.epsilon_by.items()
        }
        rows = [
            (name, each, WORDS["accountants"].get(name, "by dp-accounting"))
            for name, each in shown.items()
        ]
        head = text(
            "ε at δ = {delta:spread} ({how})", delta=run.scenario.privacy.delta, how=how
        )
        accountants = table(rows, ("accountant", head, "what it is"))
    figures = {
        "spent": run_figures.spent_figure(spending),
        "epsilon": run_figures.epsilon_figure(run),
    }
    ledger = missing(WORDS["no_ledger"])
    if run.ledger is not None:
        ledger = paragraph(WORDS["ledger"], rounds=len(run.ledger.entries))
    drawn = grid(
        draw(name, figure) for name, figure in figures.items() if figure is not None
    )
    whose = text(
        WORDS["one_chain" if run.releases == 1 else "all_chains"], releases=run.releases
    )
    hides = paragraph(
        WORDS["hides"], hidden=HIDDEN[spending.unit, how], how=how, whose=whose
    )
    parts = [hides, accountants, drawn, ledger]
    if plan.not_covered:
        rests = {
            True: "yes: wflmc publish refuses it unless told to accept it",
            False: "no: only this folder shows it",
        }
        items = [
            (item.name, item.text, rests[item.published]) for item in plan.not_covered
        ]
        parts += [
            Html("<h3>What ε does not cover</h3>"),
            table(items, ("what", "why", "in a published file")),
        ]
    return join(parts)


def _explorer(run: Run) -> tuple[PageSection, list[str]]:
    """Return Theorem 1 with sliders, from the setting nearest to the run's plan; or why there is none."""
    start = explorer.constants_of(run.plan)
    section = explorer.section(start)
    if run.ideal or run.scenario.sampler.dynamics == "kinetic":
        return section._replace(html=missing(WORDS["outside"], folder=run.folder)), []
    words = missing(WORDS["nearest"], adjacency=start["adjacency"])
    return section._replace(html=join([words, Html(section.html)])), explorer.scripts(
        start
    )
