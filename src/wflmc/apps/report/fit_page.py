"""The page of a fit: how good its predictions are, for whom, and what ε has bought.

The templates `fit_*.html` have its sentences.
"""

from typing import NamedTuple

from markupsafe import Markup

from wflmc.apps.report.figure import BLUE, Axis, Bars, Figure, Line, Panel
from wflmc.apps.report.plotly_figures import draw
from wflmc.apps.report.run_figures import reliability_figure
from wflmc.apps.report.templates import PageSection, render, render_page
from wflmc.runs.documents import FitFile

TOLERATED_ECE_EXCESS = 0.02
"""Calibration error above its floor from which on probabilities are not calibrated."""
MIN_EPSILON_LEFT = 1e-6
"""What is left of ε below this is rounding."""
PARTS_OF_EPSILON = {
    "scaling": (
        "where the values of each column lie, so that no column drowns the others"
    ),
    "earlier fits": "what the ledger held before this fit",
    "class counts": (
        "how frequent each class is, so that settings suit a rare one and the chain "
        "begins at these odds"
    ),
    "whitening": (
        "which features go together, so that the chain moves at one pace in all "
        "directions"
    ),
    "tuning": "choosing among candidate settings by their scores on the data",
    "sampling": "the draws that predictions are averaged over",
    "noise scale": (
        "the spread of targets about their mean, which makes intervals as wide as they "
        "must be"
    ),
}
"""What a part of ε buys, by its name in fit.json."""
CLASS_SCORES = {
    "nll": "−log p(label)",
    "accuracy": "accuracy",
    "ece": "calibration error",
}
"""Scores of a classifier on a stand-in, by their key in fit.json."""
NUMBER_SCORES = {"relative_mse": "squared error over variance"}
"""Scores of a regression on a stand-in, by their key in fit.json."""


class CandidateRow(NamedTuple):
    """Settings, or a change, with the scores that they reach on a stand-in."""

    name: str
    scores: list[float]


def render_fit(fit: FitFile, name: str) -> str:
    """Render the page of a private model of a table.

    It shows scores on held-out rows, what each part of ε has bought, and what more data
    or a weaker promise would be worth. It is for the owner of the data.

    Args:
        fit: the content of fit.json.
        name: of its folder, or of the estimator.

    Returns:
        One HTML file. Without held-out rows it says that the quality of predictions is
        not known.
    """
    target = f"the number {fit.target}"
    if fit.classes:
        target = f"{len(fit.classes)} classes of {fit.target}"
    devices = "1 device" if fit.devices == 1 else f"{fit.devices:,} devices"
    lead = (
        f"A private model of {target}, from {fit.rows:,} rows of {devices} "
        f"with {fit.features} features. This page is for the owner of the "
        "data: scores are computed from rows that epsilon does not protect."
    )
    sections = [PageSection("answer", "How good is it?", _answer(fit))]
    if fit.test_rows:
        sections.append(PageSection("scores", "Held-out rows", _held_out_rows(fit)))
    privacy = PageSection("privacy", "What ε bought", _privacy(fit))
    settings_title = "Settings, and what would improve the scores"
    settings = PageSection("settings", settings_title, _settings(fit))
    return render_page(f"Fit {name}", lead, [*sections, privacy, settings])


def _answer(fit: FitFile) -> Markup:
    """Render the main numbers, and whether predictions can be relied on."""
    is_calibrated = None
    if fit.ece is not None and fit.ece_floor is not None:
        is_calibrated = fit.ece <= fit.ece_floor + TOLERATED_ECE_EXCESS
    return render("fit_answer.html", fit=fit, is_calibrated=is_calibrated)


def _held_out_rows(fit: FitFile) -> Markup:
    """Render reliability and the scores of every device."""
    figures = []
    if fit.reliability is not None:
        figures.append(draw("reliability", reliability_figure(fit.reliability)))
    score = "accuracy" if fit.classes else "rmse"
    figures.append(draw("devices", _devices_figure(fit, score)))
    return render(
        "fit_scores.html", figures=figures, score=score, devices=fit.by_device
    )


def _devices_figure(fit: FitFile, score: str) -> Figure:
    """Return a score of every device beside that of all rows."""
    names = [str(device["device"]) for device in fit.by_device]
    values = [device[score] for device in fit.by_device]
    overall = [getattr(fit, score)] * len(names)
    bars = Bars(names, values, score, BLUE)
    line = Line(names, overall, "all held-out rows", dash="--")
    caption = (
        f"The {score} on the held-out rows of every device, devices with most rows "
        "first. It is noisy where there are few rows."
    )
    panel = Panel([bars, line], Axis(score, zero=True))
    return Figure([panel], Axis("device", kind="category"), caption=caption)


def _privacy(fit: FitFile) -> Markup:
    """Render what each part of ε has bought, and what ε does not cover."""
    left = fit.privacy.left
    return render(
        "fit_privacy.html",
        fit=fit,
        meanings=PARTS_OF_EPSILON,
        epsilon_left=f"{left:.2g}" if left > MIN_EPSILON_LEFT else "Nothing",
    )


def _settings(fit: FitFile) -> Markup:
    """Render the settings, the best candidates, and what would improve the scores."""
    score_names = CLASS_SCORES if fit.classes else NUMBER_SCORES
    settings = {name: _setting_text(value, 4) for name, value in fit.settings.items()}
    candidates = []
    for candidate in fit.candidates:
        values = [f"{key} {_setting_text(candidate[key], 3)}" for key in fit.settings]
        scores = [candidate[score] for score in score_names]
        candidates.append(CandidateRow(", ".join(values), scores))
    changes = []
    for name, worth in fit.worth.items():
        scores = [worth[score] for score in score_names]
        changes.append(CandidateRow(name, scores))
    return render(
        "fit_settings.html",
        public=fit.public,
        settings=settings,
        score_names=list(score_names.values()),
        candidates=candidates,
        changes=changes,
    )


def _setting_text(value: float | bool, digits: int) -> str:
    """Return a setting for readers: yes, no, or a rounded number."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.{digits}g}"
