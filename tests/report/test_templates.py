"""Templates of pages: what stands in braces is escaped, and numbers can be read back."""

from __future__ import annotations

import jinja2
import pytest

from wflmc.apps.report.numbers import (
    format_number,
    format_percent,
    format_range,
    format_whole,
)
from wflmc.apps.report.templates import (
    PageSection,
    data_number,
    render,
    render_page,
)

from .report_tools import Page


def test_numbers_can_be_read_back_to_the_last_bit():
    page = Page(data_number(0.1 + 0.2, "summary.<nll>"))
    assert page.values == {"summary.<nll>": 0.1 + 0.2}
    assert page.text == "0.3"
    assert Page(data_number(None, "summary.nll")).values == {"summary.nll": None}
    assert Page(data_number(0.5, "summary.ece", style="percent")).text == "50 %"


def test_text_is_escaped():
    sections = [
        PageSection("one", "<i>", render("run_missing.html", stopped=False, file="<b>"))
    ]
    page = render_page("<script>", "a & b", sections)
    assert "<b>" not in page
    assert "<i>" not in page
    assert "<title>&lt;script&gt;</title>" in page
    assert "a & b" in Page(page).text


def test_a_missing_name_is_an_error():
    with pytest.raises(jinja2.UndefinedError):
        render("run_missing.html", stopped=False)


def test_drawings_cannot_end_their_script():
    drawing = {"data": [{"name": "</script><img>"}], "layout": {}}
    figure = render("figure.html", name="figure-x", caption="", drawing=drawing)
    assert figure.count("</script>") == 1
    assert Page(figure).drawings["x"] == (drawing["data"], drawing["layout"])


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (3, "3"), (12345, "12,345"), (0.012345, "0.0123"), (2345.6, "2,346")],
)
def test_rounded_numbers(value, shown):
    assert format_number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (99.4, "99"),
        (123.4, "123"),
        (-123.4, "-123"),
        (999.9, "1,000"),
        (1e6, "1e+06"),
        (float("inf"), "inf"),
    ],
)
def test_numbers_below_a_million_have_no_power_of_ten(value, shown):
    assert format_number(value, digits=2) == shown


def test_whole_numbers_percentages_and_ranges():
    assert format_whole(1234.6) == "1,235"
    assert [format_percent(part) for part in (0.0, 0.001, 0.05, 0.5, 0.995, 1.0)] == [
        "0 %",
        "0.1 %",
        "5 %",
        "50 %",
        "99.5 %",
        "100 %",
    ]
    assert format_range([8.0, 30.0, 15.0]) == "8 to 30"
    assert format_range([8.0, 8.00001]) == "8"
    assert {format_whole(None), format_percent(None), format_range(None)} == {"–"}
