"""The page of a fit: how good its predictions are, for whom, and what each part of ε has bought."""

from collections.abc import Mapping

from wflmc.apps.report.blocks import (
    Html,
    PageSection,
    boxes,
    fold,
    join,
    page,
    paragraph,
    table,
    text,
    words,
)
from wflmc.apps.report.figure import BLUE, Axis, Bars, Figure, Line, Panel
from wflmc.apps.report.plotly_figures import draw
from wflmc.apps.report.run_figures import reliability_figure
from wflmc.runs.documents import FitFile

WORDS = words("fit_words.toml")
WORSE_THAN_FLOOR = 0.02
"""Calibration error above its floor from which on probabilities are not to be taken at their word."""


def render_fit(fit: FitFile, name: str) -> str:
    """Return the page of a fit; `name` is that of its folder."""
    what = (
        f"{len(fit.classes)} classes of {fit.target}"
        if fit.classes
        else f"the number {fit.target}"
    )
    lead = f"A private model of {what}, from {fit.rows:,} rows of {fit.devices:,} devices with {fit.features} features."
    lead += " This page is for the owner of the data: scores look at rows that epsilon does not hide."
    sections = [
        PageSection("answer", "How good is it?", join([_boxes(fit), _verdict(fit)])),
        *(
            [PageSection("scores", "Held-out rows", _pictures(fit))]
            if fit.test_rows
            else []
        ),
        PageSection("privacy", "What ε bought", _privacy(fit)),
        PageSection(
            "settings", "Settings, and what more would be worth", _settings(fit)
        ),
    ]
    return page(f"Fit {name}", lead, sections)


def _boxes(fit: FitFile) -> Html:
    """Return the numbers at the top."""
    scores = ("accuracy", "ece", "nll") if fit.accuracy is not None else ()
    errors = ("rmse", "r2", "coverage_90") if fit.rmse is not None else ()
    return boxes(
        [WORDS["boxes"][name] for name in (*scores, *errors, "epsilon_spent")], fit=fit
    )


def _verdict(fit: FitFile) -> Html:
    """Say in words whether probabilities or intervals can be relied on."""
    if fit.ece is not None:
        return join([_calibration_verdict(fit), _classes(fit)])
    if fit.coverage_90 is not None:
        return paragraph(
            "Of intervals made for 90 %, {x:percent} hold the target.",
            x=fit.coverage_90,
        )
    return paragraph(
        "No rows were held out: nothing is known of the quality of predictions."
    )


def _calibration_verdict(fit: FitFile) -> Html:
    """Say whether probabilities can be taken at their word: all together, and those of every class."""
    overall = "the calibration error is {fit.ece:2}, its floor {fit.ece_floor:2}"
    if fit.ece is None or fit.ece_floor is None:
        return Html("")
    if fit.ece > fit.ece_floor + WORSE_THAN_FLOOR:
        return paragraph(f"Probabilities are not calibrated: {overall}.", fit=fit)
    if fit.biased_classes:
        labels = ", ".join(str(scores.label) for scores in fit.biased_classes)
        verdict = (
            "Probabilities of {labels} cannot be taken at their word: their mean is "
            "too far from the share of rows "
        )
        return paragraph(
            verdict + f"with that label. Over all classes, {overall}.",
            labels=labels,
            fit=fit,
        )
    shares = "the mean probability of every class is near its share of the rows"
    return paragraph(
        f"Probabilities can be taken at their word: {overall}, and {shares}.", fit=fit
    )


def _classes(fit: FitFile) -> Html:
    """Return the table of what was predicted and observed of every class."""
    rows = [
        [
            str(scores.label),
            text("{x:percent}", x=scores.share),
            text("{x:percent}", x=scores.predicted_share),
            text("{x:2}", x=scores.ece),
            text("{x:2}", x=scores.ece_floor),
        ]
        for scores in fit.by_class
    ]
    return table(
        rows,
        [
            "class",
            "share of rows",
            "mean probability",
            "calibration error",
            "its floor",
        ],
    )


def _pictures(fit: FitFile) -> Html:
    parts: list[Html] = []
    if fit.reliability is not None:
        parts.append(draw("reliability", reliability_figure(fit.reliability)))
    score = "accuracy" if fit.classes else "rmse"
    names = [str(row["device"]) for row in fit.by_device]
    bars = Bars(names, [row[score] for row in fit.by_device], score, BLUE)
    line = Line(
        names, [getattr(fit, score)] * len(names), "all held-out rows", dash="--"
    )
    caption = f"The {score} on the held-out rows of every device, those with most rows first. Few rows make it noisy."
    across = Axis("device", kind="category")
    parts.append(
        draw(
            "devices",
            Figure(
                [Panel([bars, line], Axis(score, zero=True))], across, caption=caption
            ),
        )
    )
    rows = [
        [str(row["device"]), str(row["rows"]), text("{x:3}", x=row[score])]
        for row in fit.by_device
    ]
    return join([*parts, fold("All devices", table(rows, ["device", "rows", score]))])


def _privacy(fit: FitFile) -> Html:
    rows = [
        [part, text("{x:3}", x=value), WORDS["parts"].get(part, "")]
        for part, value in fit.epsilon_by_part.items()
    ]
    left = f"{fit.privacy.left:.2g}" if fit.privacy.left > 1e-6 else "Nothing"
    hides = paragraph(WORDS["hides"], **{**fit.privacy.model_dump(), "left": left})
    uncovered = [[item.name, item.text] for item in fit.not_covered]
    bought = table(rows, ["part", "ε", "what it bought"])
    return join([bought, hides, paragraph("What ε does not cover:"), table(uncovered)])


def _shown(value: float | bool, digits: int) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else f"{value:.{digits}g}"


def _settings(fit: FitFile) -> Html:
    scores = ["nll", "accuracy", "ece"] if fit.classes else ["relative_mse"]

    def row(name: object, scores_by_name: Mapping[str, float]) -> list[object]:
        return [name, *(text("{x:3}", x=scores_by_name[score]) for score in scores)]

    classes = ["−log p(label)", "accuracy", "calibration error"]
    head = ["", *(classes if fit.classes else ["squared error over variance"])]
    chosen = [[name, _shown(value, 4)] for name, value in fit.settings.items()]
    tried = [
        row(", ".join(f"{key} {_shown(one[key], 3)}" for key in fit.settings), one)
        for one in fit.candidates
    ]
    more = table([row(name, one) for name, one in fit.worth.items()], head)
    best = [fold("The best candidates", table(tried, head))] if tried else []
    worth = paragraph("What more of something would reach on a stand-in:")
    return join([paragraph(WORDS["stand_in"]), table(chosen), *best, worth, more])
