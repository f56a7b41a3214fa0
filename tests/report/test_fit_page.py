"""The page of a fit, from fit.json alone."""

from __future__ import annotations

import pytest

from wflmc.apps.report.fit_page import render_fit
from wflmc.runs.documents import FitFile

from .report_tools import Page

SCORES = {"accuracy": 0.8, "ece": 0.04, "nll": 0.5}
FIT = {
    "task": "classification",
    "target": "state",
    "rows": 300,
    "test_rows": 0,
    "features": 3,
    "devices": 2,
    "classes": ["ill", "well"],
    "epsilon_spent": 2.5,
    "epsilon_by_part": {"sampling": 2.5},
    "privacy": {
        "epsilon": 2.5,
        "delta": 1e-5,
        "unit": "record",
        "adjacency": "replace",
        "accountant": "exact",
        "promised": 3.0,
        "loss": {"sampling": 0.1},
        "left": 0.5,
    },
    "settings": {"clip": 1.5, "burn_in": 20},
    "candidates": [{"clip": 1.5, "burn_in": 20} | SCORES],
    "worth": {"as it is": SCORES},
    "not_covered": [],
    "warnings": [],
    "seconds": 1.0,
    "version": "0.1.0",
}
"""A fit without held-out rows."""
BY_CLASS = [
    {
        "label": label,
        "share": share,
        "predicted_share": 0.5,
        "ece": 0.04,
        "ece_floor": 0.03,
    }
    for label, share in (("ill", 0.2), ("well", 0.8))
]


@pytest.fixture
def scored() -> FitFile:
    """The same fit with 400 held-out rows."""
    by_device = [
        {"device": 1, "rows": 250, "accuracy": 0.82},
        {"device": 0, "rows": 150, "accuracy": 0.77},
    ]
    scores = SCORES | {"ece_floor": 0.03, "by_class": BY_CLASS, "by_device": by_device}
    return FitFile.model_validate(FIT | scores | {"test_rows": 400})


def test_without_held_out_rows_quality_is_not_known():
    text = Page(render_fit(FitFile.model_validate(FIT), "mine")).text
    assert "No rows were held out" in text
    assert "Held-out rows" not in text


def test_without_held_out_rows_no_class_is_biased():
    fit = FitFile.model_validate(FIT | {"by_class": BY_CLASS})
    assert fit.biased_classes == []


def test_classes_whose_probabilities_are_off_are_named(scored):
    assert [scores.label for scores in scored.biased_classes] == ["ill", "well"]
    assert "ill, well are not calibrated" in Page(render_fit(scored, "mine")).text


def test_devices_and_rows_are_whole_numbers(scored):
    html = render_fit(scored, "mine")
    assert "<th>1</th><td>250</td>" in html
    (bars, _), _ = Page(html).drawings["devices"]
    assert bars["x"] == ["1", "0"]
