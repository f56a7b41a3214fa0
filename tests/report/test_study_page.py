"""Pages of studies and sweeps: their numbers are those of the tables."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from wflmc.apps.report.figure import Figure, Line, Panel
from wflmc.apps.report.plotly_figures import draw
from wflmc.apps.report.study_page import regimes
from wflmc.apps.report.tables import write_csv
from wflmc.apps.studies.paper.fig2_to_fig5 import Setting, point
from wflmc.apps.studies.study import Claim, Row
from wflmc.cli.report import render_folder
from wflmc.planning.solvers.closed_form import DP, LMC, POWER

from ..error_tools import raises_input_error
from .report_tools import Page, check_in_browser


@pytest.fixture
def study(tmp_path, posterior):
    """Tables and claims as `wflmc reproduce` writes them."""
    setting = Setting(posterior)
    for name in ("fig2", "fig3a"):
        rows = [row for x in (10.0, 20.0, 30.0) for row in point(name, setting, x)]
        write_csv(tmp_path / f"{name}.csv", Row._fields, rows)
    schemes = ("optimized", "equal", "noiseless")
    for name, error in (
        ("fig6", 1e-4),
        ("fig6_exact", None),
        ("heterogeneity", 1e-3),
        ("beyond_ess", 0.5),
    ):
        rows = [
            Row(name, scheme, x, 0.01 / x, error)
            for x in (10.0, 20.0)
            for scheme in schemes
        ]
        write_csv(tmp_path / f"{name}.csv", Row._fields, rows)
    write_csv(
        tmp_path / "fig6_floor.csv",
        Row._fields,
        [Row("fig6", "floor", x, 1e-4) for x in (10.0, 20.0)],
    )
    write_csv(
        tmp_path / "beyond_ablation.csv",
        Row._fields,
        [Row("beyond", "ours", 20.0, 0.0123, 1e-3)],
    )
    claims = [
        Claim("fig3a", "power-limited up to (dB)", 16.6, 16.61948977, True),
        Claim(
            "fig3b",
            "at high SNR the regime is",
            "lmc-limited",
            "dp-limited",
            False,
            True,
            "<b>why</b>",
        ),
        Claim("fig6", "ratio", 2.4, None, False, data="mine.npz"),
    ]
    document = {"data": "mine.npz", "claims": [claim._asdict() for claim in claims]}
    (tmp_path / "claims.json").write_text(json.dumps(document))
    return tmp_path


def test_a_study(study):
    page = Page(render_folder(study))
    assert page.values["claims.0.ours"] == 16.61948977
    assert page.values["claims.2.ours"] is None
    for verdict in (
        "✓ holds",
        "! the paper contradicts itself",
        "✗ differs",
        "<b>why</b>",
    ):
        assert verdict in page.text
    curve = page.curve("fig6", "WFLMC, optimized power")
    assert curve["y"] == [0.01 / 10, 0.01 / 20]
    assert curve["error_y"]["array"] == [2e-4, 2e-4]
    assert page.drawings["fig6"][1]["yaxis"]["type"] == "log"
    assert page.drawings["heterogeneity"][1]["xaxis"]["type"] == "log"
    assert page.curve("fig6", "floor of the estimator (perfect samples)")["y"] == [
        1e-4,
        1e-4,
    ]
    assert page.values["beyond_ablation.ours.20"] == 0.0123
    assert page.values["beyond_ess.equal.10"] == 0.001
    assert page.values["beyond_ess.ours.20"] is None
    assert set(page.drawings) == {
        "fig2",
        "fig3a",
        "fig6",
        "fig6_exact",
        "heterogeneity",
    }
    assert (
        f"wflmc reproduce fig2 fig3a fig6 beyond heterogeneity --data FILE --out {study}"
        in page.text
    )


def test_a_study_that_is_not_finished(study):
    (study / "claims.json").unlink()
    assert "claims.json is missing" in Page(render_folder(study)).text


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("fig6.csv", "figure,scheme,x,y,y_se\nfig6,equal,ten,1,\n"),
        ("fig6.csv", "a,b\n1,2\n"),
        ("fig6.csv", "figure,scheme,x,y,y_se\nfig6,equal,1\n"),
        ("fig6.csv", ""),
        ("claims.json", "{"),
        ("claims.json", '{"data": "", "claims": [{"figure": 1}]}'),
    ],
)
def test_a_damaged_table_is_named(study, file, text):
    (study / file).write_text(text)
    with raises_input_error("report", study / file):
        render_folder(study)


ONE_KEY = "link.snr_db,w2_sq,w2_sq_se,rhat_max\n20,0.01,0.001,1.1\n10,0.02,0.002,\n"
TWO_KEYS = (
    "link.snr_db,policy.power,ece\n10,equal,0.1\n10,optimized,0.2\n20,equal,0.3\n"
)
THREE_KEYS = "link.snr_db,link.power,privacy.epsilon,ece\n1,2,3,0.001\n1,2,4,1\n"


def test_a_sweep(tmp_path):
    (tmp_path / "sweep.csv").write_text(ONE_KEY)
    page = Page(render_folder(tmp_path))
    assert list(page.drawings) == ["sweep-w2_sq", "sweep-rhat_max"]
    trace = page.curve("sweep-w2_sq", "w2_sq")
    assert (trace["x"], trace["y"], trace["error_y"]["array"]) == (
        [10, 20],
        [0.02, 0.01],
        [0.004, 0.002],
    )
    assert page.curve("sweep-rhat_max", "rhat_max")["y"] == [None, 1.1]
    (tmp_path / "sweep.csv").write_text(TWO_KEYS)
    (trace,), _ = Page(render_folder(tmp_path)).drawings["sweep-ece"]
    assert (trace["x"], trace["y"]) == ([10, 20], ["equal", "optimized"])
    assert trace["z"] == [[0.1, 0.3], [0.2, None]]
    (tmp_path / "sweep.csv").write_text(THREE_KEYS)
    traces, layout = Page(render_folder(tmp_path)).drawings["sweep-ece"]
    assert [trace["visible"] for trace in traces] == [True, False]
    assert [trace["customdata"] for trace in traces] == [[[0.001]], [[1.0]]]
    # Values that span decades are drawn by their logarithm.
    assert [trace["z"] for trace in traces] == [[[-3.0]], [[0.0]]]
    assert (
        traces[1]["zmin"],
        traces[1]["zmax"],
        traces[1]["colorbar"]["ticktext"][0],
    ) == (-3, 0, "0.001")
    (slider,) = layout["sliders"]
    assert [step["label"] for step in slider["steps"]] == [
        "privacy.epsilon=3",
        "privacy.epsilon=4",
    ]
    assert slider["steps"][1]["args"][0] == {"visible": [False, True]}
    (tmp_path / "sweep.csv").write_text(
        "privacy.delta,w2_sq,ece\n1e-9,1e-5,0.1\n1e-5,1,0.2\n"
    )
    drawings = Page(render_folder(tmp_path)).drawings
    kinds = [
        (layout["xaxis"]["type"], layout["yaxis"]["type"])
        for _, layout in drawings.values()
    ]
    assert kinds == [("log", "log"), ("log", "linear")]
    (tmp_path / "sweep.csv").write_text("a,b\n1,2\n")
    with raises_input_error("report", tmp_path / "sweep.csv"):
        render_folder(tmp_path)


def test_the_sweep_of_a_classifier_opens_on_how_well_it_predicts(tmp_path):
    (tmp_path / "sweep.csv").write_text(
        "link.snr_db,objective,accuracy,ece,nll\n10,1e9,0.8,0.1,0.5\n20,1e8,0.9,0.1,0.4\n"
    )
    page = Page(render_folder(tmp_path))
    assert page.curve("sweep-nll", "nll")["y"] == [0.5, 0.4]
    assert list(page.drawings) == [
        "sweep-nll",
        "sweep-accuracy",
        "sweep-objective",
        "sweep-ece",
    ]


def test_a_folder_of_something_else(tmp_path):
    with raises_input_error("folder", "wflmc run"):
        render_folder(tmp_path)
    with raises_input_error("folder", "wflmc run"):
        render_folder(tmp_path / "nothing")


def test_a_map_without_edges_is_empty():
    (panel,) = regimes([]).panels
    assert not panel.items


def test_error_bars_are_thinned_with_their_curve():
    points = list(range(5000))
    line = Line(points, np.ones(5000), error=np.array(points) / 5000)
    page = Page(draw("long", Figure([Panel([line])])))
    (trace,) = page.drawings["long"][0]
    assert len(trace["x"]) < len(points)
    drawn_errors = np.array(trace["x"]) / 5000
    assert np.allclose(trace["error_y"]["array"], 2 * drawn_errors)
    assert len(trace["error_y"]["arrayminus"]) == len(trace["x"])


def test_regimes_leave_no_gap():
    """The edge of power rises with the SNR until it meets that of privacy, between two rows."""
    rows = [Row("fig2", LMC, x, y) for x, y in ((0.0, 1.0), (10.0, 10.0), (20.0, 20.0))]
    rows += [
        Row("fig2", POWER, 0.0, 1.0),
        Row("fig2", POWER, 10.0, 10.0),
        Row("fig2", DP, 20.0, 20.0),
    ]
    page = Page(draw("fig2", regimes(rows)))
    below, power, privacy = (page.curve("fig2", name) for name in (LMC, POWER, DP))
    meet = 10 + 10 * math.log10(2)
    assert max(power["x"]) == pytest.approx(meet)
    assert min(privacy["x"]) == pytest.approx(meet)
    assert below["y"] == [1, 10, 20, 20]


def test_in_a_browser(study, tmp_path):
    check_in_browser(render_folder(study), tmp_path)
