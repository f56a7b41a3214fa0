"""The page of a run.

It gives the answer first, then the scenario, the plan, the chains, the posterior,
scores and privacy. The templates `run_*.html` have its sentences and decide which of
them are shown.
"""

import math
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from wflmc.apps.diagnosis.advice import read_advice
from wflmc.apps.diagnosis.values import CAUSES_SHOWN
from wflmc.apps.report import explorer, run_figures
from wflmc.apps.report.plotly_figures import draw
from wflmc.apps.report.templates import PageSection, render, render_page
from wflmc.apps.report.verdicts import MARKS, all_verdicts, comparison, worst_exact
from wflmc.evaluation import diagnose
from wflmc.evaluation.wasserstein import Comparison
from wflmc.planning import policy_named
from wflmc.posterior import HasLaw
from wflmc.privacy.promise import HIDDEN
from wflmc.runs.documents import SIMULATED, SummaryFile
from wflmc.runs.folder import Draws, Run, read_run
from wflmc.scenario.coverage import OWNER_ONLY
from wflmc.scenario.gains import split_variable
from wflmc.support.notices import NoticeCode

MAX_PARAMETERS_DRAWN = 5
"""Parameters whose marginals are drawn, where there are more than twice as many."""
MAX_PARAMETERS_LISTED = 12
"""Rows of the table of parameters."""
MAX_CLASSES_LISTED = 10
"""Classes of a model that are named."""
MIN_DRAWS_FOR_TRACES = 4
"""Kept draws of a chain from which on traces and autocorrelation are drawn."""
BOUND_LABELS = {"exact": "planned W2²", "transcript": "noise of all, V"}
"""What the objective of a plan is called, where it is no bound."""
DATA_NAMES = {"synthetic": "synthetic data", "mnist": "MNIST"}
"""What data sets are called that are no files."""
ACCOUNTANT_WORDS = {
    "exact": "exact composition of the rounds",
    "paper": "the paper's sufficient condition, a larger ε",
}
"""What accountants compute; all others are those of dp-accounting."""


class ParameterRow(NamedTuple):
    """A parameter in the table of means and standard deviations."""

    position: int
    """In θ, from 0."""
    name: str
    law_mean: float | None
    """Of the posterior; None where it is not known."""
    mean: float
    """Of the samples."""
    mean_error: float | None
    """Standard error of the samples' mean."""
    z: float | None
    """Difference of the means in standard errors."""
    law_deviation: float | None
    deviation: float
    rhat: float | None
    ess: float | None


class ScoreRow(NamedTuple):
    """A score on the test set."""

    key: str
    """In summary.json."""
    name: str
    meaning: str


SCORES = (
    ScoreRow("accuracy", "accuracy", "share of test examples with the right label"),
    ScoreRow(
        "ece",
        "ECE",
        "mean gap between confidence and accuracy over 20 bins; 0 is ideal",
    ),
    ScoreRow("rmse", "RMSE", "root mean squared error; the model's own noise is 1"),
    ScoreRow(
        "nll",
        "NLL",
        "mean of −log p(observed outcome), in nats; punishes sure mistakes",
    ),
    ScoreRow(
        "brier",
        "Brier score",
        "squared error of the probabilities, 0 to 2; 0 is ideal",
    ),
)
"""The scores of a run, in the order of the page."""


def render_run(folder: Path) -> str:
    """Render the page of a finished or stopped run.

    Every part is shown as far as its files are there; for those that are missing the
    page says so. Nothing in the folder is changed.

    Args:
        folder: of the run, as `wflmc run` or `wflmc federate` has written it.

    Returns:
        One HTML file.

    Raises:
        InputError: a file is damaged, or is that of another run.
    """
    run = read_run(folder)
    sections = [
        PageSection(name, title, section(run))
        for name, (title, section) in SECTIONS.items()
    ]
    explorer_section, scripts = _explorer(run)
    sections.append(explorer_section)
    title = f"Run {folder.resolve().name}"
    return render_page(title, _lead(run), sections, scripts)


def _lead(run: Run) -> str:
    """Return the sentences below the title."""
    summary = run.summary
    is_federation = summary is not None and summary.federation is not None
    command = "federate" if is_federation else "run"
    lead = (
        f"{OWNER_ONLY} Results of wflmc {command} in this folder. Figures can be "
        "zoomed, and legends clicked."
    )
    if summary is not None:
        timed = "rounds" if is_federation else "run"
        lead += f" The {timed} took {summary.seconds:.3g} seconds."
    return f"{lead} wflmc {run.plan.version} planned it."


def answer_section(run: Run) -> Markup:
    """Render what the folder is, the main numbers, verdicts, diagnosis and warnings.

    The diagnosis is that of `advice.json`, where `wflmc advise` has written one for
    this plan. That devices were simulated is said among the first sentences instead of
    the warnings.

    Args:
        run: the run folder.

    Returns:
        The section without its heading.
    """
    summary = run.summary
    federation = None if summary is None else summary.federation
    notices = run.plan.notices if summary is None else summary.notices
    warnings = [
        notice.text for notice in notices if notice.code != NoticeCode.SIMULATED
    ]
    objective = run.scenario.policy.objective
    bound_label = BOUND_LABELS.get(objective, "bound on W2²")
    has_bound = run.plan.objective is not None and run.plan.bound is not None
    is_of_stand_in = run.plan.own_data and objective == "exact"
    advice = read_advice(run.folder)
    causes = None if advice is None else advice.diagnosis[:CAUSES_SHOWN]
    return render(
        "run_answer.html",
        run=run,
        federation=federation,
        simulated_notice=SIMULATED.text,
        exact_w2_sq=worst_exact(run.plan),
        bound_label=bound_label,
        shows_bound=has_bound and not is_of_stand_in,
        verdicts=all_verdicts(run),
        mark_symbols=MARKS,
        causes=causes,
        warnings=warnings,
    )


def scenario_section(run: Run) -> Markup:
    """Render the scenario in sentences, with the file folded below.

    Sentences state the values that were in effect: the step sizes of the plan, and an
    ideal link where the policy has no channel.

    Args:
        run: the run folder; without scenario.toml the scenario is that of plan.json.

    Returns:
        The section without its heading: a table with a row for data, model, channel,
        promise, sampler, and participation and power.
    """
    scenario = run.scenario
    constants = run.plan.constants
    data = scenario.posterior.data
    data_name = DATA_NAMES.get(data, PurePath(data).name)
    device_sizes = [] if run.posterior is None else run.posterior.sizes.tolist()
    class_names = [str(name) for name in run.plan.classes or []]
    # The default link has no impairments, and so nothing to say of an ideal one.
    link = type(scenario.link)() if run.ideal else scenario.link
    gains_file = split_variable(scenario.link.gains).path
    privacy = scenario.privacy
    dynamics_parameters = [
        f"the {name} {value:.3g}" for name, value in constants.motion.parameters.items()
    ]
    return render(
        "run_scenario.html",
        run=run,
        link=link,
        broadcast_is_noisy=math.isfinite(link.downlink_snr_db),
        gains_file=PurePath(gains_file).name,
        device_sizes=device_sizes,
        data_name=data_name,
        class_names=class_names,
        max_classes=MAX_CLASSES_LISTED,
        hidden=HIDDEN[privacy.unit, privacy.adjacency],
        power_policy=policy_named(scenario.policy.power),
        dynamics_parameters=dynamics_parameters,
        all_transmit=min(run.plan.active_devices) == constants.devices,
    )


def _plan(run: Run) -> Markup:
    """Render the plan over the rounds with its limits, then the distance over them."""
    figure = None
    if run.saved_plan is not None:
        figure = draw("plan", run_figures.plan_figure(run.saved_plan))
    distance = run_figures.distance_figure(run)
    return render(
        "run_plan.html",
        run=run,
        plan=run.plan,
        figure=figure,
        distance=None if distance is None else draw("distance", distance),
    )


def _missing_file(run: Run, file: str) -> Markup:
    """Render why there is nothing to show of a file."""
    return render("run_missing.html", stopped=run.stopped, file=file)


def _chains(run: Run) -> Markup:
    """Render traces and autocorrelation."""
    draws = run.draws
    if draws is None:
        return _missing_file(run, "trace.nc")
    kept_draws = draws.theta.shape[1]
    figures = []
    if kept_draws >= MIN_DRAWS_FOR_TRACES:
        traces = run_figures.traces_figure(run, draws)
        autocorrelation = run_figures.autocorrelation_figure(run, draws)
        figures = [draw("traces", traces), draw("autocorrelation", autocorrelation)]
    return render("run_chains.html", kept_draws=kept_draws, figures=figures)


def _samples(run: Run) -> Markup:
    """Render marginals and a table, with the law where there is one."""
    draws = run.draws
    if draws is None:
        return _missing_file(run, "trace.nc")
    compared = comparison(run)
    assert compared is not None
    order = _parameter_order(compared)
    drawn = order
    if len(order) > 2 * MAX_PARAMETERS_DRAWN:
        drawn = order[:MAX_PARAMETERS_DRAWN]
    marginals = []
    for index in sorted(drawn):
        figure = run_figures.marginal_figure(run, draws, compared, index)
        marginals.append(draw(f"marginal{index}", figure))
    rows = [
        _parameter_row(run, draws, compared, index)
        for index in order[:MAX_PARAMETERS_LISTED]
    ]
    return render(
        "run_samples.html",
        run=run,
        has_law=compared.law is not None,
        law_is_exact=isinstance(run.posterior, HasLaw),
        thinning=draws.every,
        marginals=marginals,
        rows=rows,
        parameters=len(order),
    )


def _parameter_order(compared: Comparison) -> list[int]:
    """Return the parameters as they are listed: of many, the largest |z| first."""
    parameters = compared.mean.size
    if parameters <= MAX_PARAMETERS_LISTED or not np.isfinite(compared.z).any():
        return list(range(parameters))
    # A parameter without a z comes last.
    magnitude = np.nan_to_num(np.abs(compared.z), nan=-1)
    return np.argsort(-magnitude).tolist()


def _parameter_row(
    run: Run, draws: Draws, compared: Comparison, position: int
) -> ParameterRow:
    """Return mean and standard deviation of a parameter beside its law."""
    law_mean = None
    law_deviation = None
    if compared.law is not None:
        law_mean = float(compared.law.mean[position])
        law_deviation = float(compared.expected[position])
    mean = float(compared.mean[position])
    mean_error = _finite(compared.error[position])
    deviation = float(compared.deviation[position])
    chains = draws.theta[:, :, position : position + 1]
    diagnostics = diagnose(chains)
    return ParameterRow(
        position=position,
        name=run_figures.parameter_name(run, position),
        law_mean=law_mean,
        mean=mean,
        mean_error=mean_error,
        z=_finite(compared.z[position]),
        law_deviation=law_deviation,
        deviation=deviation,
        rhat=diagnostics.rhat_max,
        ess=diagnostics.ess_min,
    )


def _finite(value: float) -> float | None:
    """Return a number; None where it is not finite."""
    return float(value) if np.isfinite(value) else None


def _scores(run: Run) -> Markup:
    """Render the reliability diagram beside the scores, or why there are none."""
    summary = run.summary
    if summary is None:
        return _missing_file(run, "summary.json")
    figure = None
    if summary.reliability is not None:
        diagram = run_figures.reliability_figure(summary.reliability)
        figure = draw("reliability", diagram)
    return render(
        "run_scores.html",
        scores=_measured_scores(summary),
        figure=figure,
        own_data=run.plan.own_data,
    )


def _measured_scores(summary: SummaryFile) -> list[tuple[ScoreRow, float]]:
    """Return the scores that the run has, with their values."""
    measured = []
    for score in SCORES:
        value = getattr(summary, score.key)
        if value is not None:
            measured.append((score, value))
    return measured


def _privacy(run: Run) -> Markup:
    """Render what is hidden, ε, losses, the ledger, and what ε does not cover."""
    spending = run.plan.privacy
    figures = []
    if spending.spent is not None:
        figures.append(draw("spent", run_figures.spent_figure(spending)))
        epsilon = run_figures.epsilon_figure(run)
        if epsilon is not None:
            figures.append(draw("epsilon", epsilon))
    return render(
        "run_privacy.html",
        run=run,
        plan=run.plan,
        hidden=HIDDEN[spending.unit, spending.adjacency],
        delta=run.scenario.privacy.delta,
        accountant_words=ACCOUNTANT_WORDS,
        figures=figures,
    )


def _explorer(run: Run) -> tuple[PageSection, list[Markup]]:
    """Return Theorem 1 with sliders, or why there is none, and its scripts.

    It starts at the setting nearest to the run's plan.
    """
    start = explorer.constants_of(run.plan)
    section = explorer.section(start)
    applies = not run.ideal and run.scenario.sampler.dynamics != "kinetic"
    html = render(
        "run_explorer.html",
        applies=applies,
        folder=run.folder,
        adjacency=start["adjacency"],
        explorer=section.html,
    )
    scripts = explorer.scripts(start) if applies else []
    return section._replace(html=html), scripts


SECTIONS = {
    "answer": ("In short", answer_section),
    "setting": ("The scenario", scenario_section),
    "plan": ("The plan", _plan),
    "chains": ("The chains", _chains),
    "samples": ("Samples and posterior", _samples),
    "scores": ("Predictions", _scores),
    "spent": ("Privacy", _privacy),
}
"""The sections of the page before the explorer, by the name of their anchor: the title,
and what renders them."""
