"""The page of a fit: how good its predictions are, for whom, and what each part of ε has bought."""

from typing import Any

from wflmc.report.blocks import Html, Section, boxes, fold, join, page, paragraph, table, text
from wflmc.report.figure import BLUE, Axis, Bars, Figure, Line, Panel
from wflmc.report.plotly_figures import draw
from wflmc.report.run_figures import reliability_figure
from wflmc.runs.documents import FitFile

PARTS = {
    "scaling": "where the values of each column lie, so that no column drowns the others",
    "earlier fits": "what the ledger held before this fit",
    "whitening": "which features go together, so that the chain moves at one pace in all directions",
    "tuning": "choosing among candidate settings by their scores on the data",
    "sampling": "the draws that predictions are averaged over",
    "noise scale": "the spread of targets about their mean, which makes intervals as wide as they must be",
}
"""What a part of ε buys."""
WORSE_THAN_FLOOR = 0.02
"""Calibration error above its floor from which on probabilities are not to be taken at their word."""


def render_fit(fit: FitFile, name: str) -> str:
    """Return the page of a fit; `name` is that of its folder."""
    what = f"{len(fit.classes)} classes of {fit.target}" if fit.classes else f"the number {fit.target}"
    lead = f"A private model of {what}, from {fit.rows:,} rows of {fit.devices:,} devices with {fit.features} features."
    lead += " This page is for the owner of the data: scores look at rows that epsilon does not hide."
    sections = [
        Section("answer", "How good is it?", join([boxes(_numbers(fit)), _verdict(fit)])),
        *([Section("scores", "Held-out rows", _pictures(fit))] if fit.test_rows else []),
        Section("privacy", "What ε bought", _privacy(fit)),
        Section("settings", "Settings, and what more would be worth", _settings(fit)),
    ]
    return page(f"Fit {name}", lead, sections)


def _numbers(fit: FitFile) -> list[tuple[str, object, object]]:
    """Return the boxes at the top."""
    shown: list[tuple[str, object, object]] = []
    held_out = f"of {fit.test_rows:,} held-out rows"
    if fit.accuracy is not None:
        floor = text("a perfectly calibrated model has {floor:2}", floor=fit.ece_floor)
        shown += [
            ("accuracy", text("{x:percent}", x=fit.accuracy), held_out),
            ("calibration error", text("{x:2}", x=fit.ece), floor),
        ]
        shown += [("−log p(label)", text("{x:3}", x=fit.nll), "on average; 0 is perfect")]
    if fit.rmse is not None:
        shown += [("root mean square error", text("{x:3}", x=fit.rmse), held_out)]
        shown += [("explained variance", text("{x:percent}", x=fit.r2), "R²")]
        shown += [("90 % intervals cover", text("{x:percent}", x=fit.coverage_90), held_out)]
    of = text("of {promised} at δ = {delta}", **{name: fit.privacy[name] for name in ("promised", "delta")})
    return [*shown, ("ε spent", text("{x:3}", x=fit.epsilon_spent), of)]


def _verdict(fit: FitFile) -> Html:
    """Say in words whether probabilities or intervals can be relied on."""
    if fit.ece is not None and fit.ece_floor is not None:
        well = fit.ece <= fit.ece_floor + WORSE_THAN_FLOOR
        words = "Probabilities can be taken at their word" if well else "Probabilities are not calibrated"
        return paragraph(
            "{words}: the calibration error is {ece:2}, its floor {floor:2}.",
            words=words,
            ece=fit.ece,
            floor=fit.ece_floor,
        )
    if fit.coverage_90 is not None:
        return paragraph("Of intervals made for 90 %, {x:percent} hold the target.", x=fit.coverage_90)
    return paragraph("No rows were held out: nothing is known of the quality of predictions.")


def _pictures(fit: FitFile) -> Html:
    parts: list[Any] = []
    if fit.reliability is not None:
        parts.append(draw("reliability", reliability_figure(fit.reliability)))
    score = "accuracy" if fit.classes else "rmse"
    names, values = ([str(row[key]) for row in fit.by_device] for key in ("device", "rows"))
    bars = Bars(names, [row[score] for row in fit.by_device], score, BLUE)
    mean = fit.accuracy if fit.classes else fit.rmse
    line = Line(names, [mean] * len(names), "all held-out rows", dash="--")
    caption = f"The {score} on the held-out rows of every device, those with most rows first. Few rows make it noisy."
    across = Axis("device", kind="category")
    parts.append(draw("devices", Figure([Panel([bars, line], Axis(score, zero=True))], across, caption=caption)))
    rows = [
        [name, count, text("{x:3}", x=row[score])]
        for name, count, row in zip(names, values, fit.by_device, strict=True)
    ]
    return join([*parts, fold("All devices", table(rows, ["device", "rows", score]))])


def _privacy(fit: FitFile) -> Html:
    rows = [[part, text("{x:3}", x=value), PARTS.get(part, "")] for part, value in fit.epsilon_by_part.items()]
    promise = fit.privacy
    hides = paragraph(
        "Hidden is any one {unit} (adjacency = {adjacency}), by the {accountant} accountant. {left} of ε is left. "
        "Another fit of the same rows spends again. Parts of ε are in proportion to their losses, which add up.",
        left=f"{promise['left']:.2g}" if promise["left"] > 1e-6 else "Nothing",
        **{name: promise[name] for name in ("unit", "adjacency", "accountant")},
    )
    uncovered = [[item.name, item.text] for item in fit.not_covered]
    return join(
        [table(rows, ["part", "ε", "what it bought"]), hides, paragraph("What ε does not cover:"), table(uncovered)]
    )


def _shown(value: float | bool, digits: int) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else f"{value:.{digits}g}"


def _settings(fit: FitFile) -> Html:
    scores = ["nll", "accuracy"] if fit.classes else ["relative_mse"]

    def row(name: object, one: dict[str, Any]) -> list[object]:
        return [name, *(text("{x:3}", x=one[score]) for score in scores)]

    head = ["", *(["−log p(label)", "accuracy"] if fit.classes else ["squared error over variance"])]
    chosen = [[name, _shown(value, 4)] for name, value in fit.settings.items()]
    tried = [row(", ".join(f"{key} {_shown(one[key], 3)}" for key in fit.settings), one) for one in fit.candidates]
    about = paragraph(
        "Settings were chosen on a public stand-in: synthetic data of as many rows, features, classes and devices. It "
        "is harder or easier than the table, and differences on it say more than its numbers."
    )
    more = table([row(name, one) for name, one in fit.worth.items()], head)
    best = [fold("The best candidates", table(tried, head))] if tried else []
    return join([about, table(chosen), *best, paragraph("What more of something would reach on a stand-in:"), more])
