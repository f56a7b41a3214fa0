"""Building blocks of pages, and the page: one HTML file that asks the network for nothing.

Text is escaped where it is put on a page, unless it is `Html`; numbers of files can be read back from `data-value`.
"""

import html
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from string import Formatter
from typing import Any, NamedTuple

import numpy as np

from wflmc.scenario.files import plain
from wflmc.version import __version__

PlotlyObject = dict[str, object]
"""A trace, a layout or a part of one, as Plotly names its attributes; arrays become lists on the page."""


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


class PageSection(NamedTuple):
    """A part of a page, with a link to it in the page's contents."""

    name: str
    """Of the anchor."""
    title: str
    html: str


def safe(content: object) -> str:
    """Return content as it may stand on a page."""
    return content if isinstance(content, Html) else html.escape(str(content))


class Filler(Formatter):
    """Fills templates: text is made safe, and numbers are rounded as `{x:2}` (digits), whole, percent or spread say.

    Numbers of documents, `{plan.objective}` and `{summary.ess_min:whole}`, can be read back from the page.
    """

    def get_field(
        self,
        field_name: str,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> tuple[object, int | str]:
        """Return a part of a document together with its name."""
        part, first = super().get_field(field_name, args, kwargs)
        return (
            (field_name, part) if field_name.startswith(("plan.", "summary.")) else part
        ), first

    def format_field(self, value: object, format_spec: str) -> str:
        """Return a part as it may stand on a page."""
        key, part = value if isinstance(value, tuple) else ("", value)
        if format_spec in FORMATS:
            shown = number(None) if part is None else FORMATS[format_spec](part)
        elif part is None or isinstance(part, float | int):
            shown = number(part, int(format_spec or 3))
        else:
            return safe(part)
        return data(key, part, shown=shown) if key else shown


def text(template: str, **parts: object) -> Html:
    """Return HTML with its parts filled in, as `Filler` says."""
    return Html(Filler().vformat(template, (), parts))


def paragraph(template: str, **parts: object) -> Html:
    """Return the same as a paragraph."""
    return Html(f"<p>{text(template, **parts)}</p>")


def missing(template: str, **parts: object) -> Html:
    """Return what is said in place of a part that is not there."""
    return Html(f'<p class="missing">{text(template, **parts)}</p>')


def join(pieces: Iterable[object]) -> Html:
    """Return pieces one after the other."""
    return Html("".join(map(safe, pieces)))


def number(value: float | None, digits: int = 3) -> str:
    """Return a number for people; a dash where there is none."""
    if value is None:
        return "–"
    return (
        f"{value:,.0f}"
        if isinstance(value, int) or 1000 <= abs(value) < 1e6
        else f"{value:.{digits}g}"
    )


def percent(part: float) -> str:
    """Return a share in percent; never 0 % or 100 % of what is not."""
    if 0 < part < 0.01:
        return f"{100 * part:.2g} %"
    return (
        f"{100 * part:.3g} %"
        if part < 0.1 or 0.99 < part < 1
        else f"{100 * part:.0f} %"
    )


def spread(values: float | Sequence[float]) -> str:
    """Return one number, or the smallest and the largest of several."""
    low, high = number(float(np.min(values)), 4), number(float(np.max(values)), 4)
    return low if low == high else f"{low} to {high}"


FORMATS: dict[str, Callable[[Any], str]] = {
    "whole": "{:,.0f}".format,
    "percent": percent,
    "spread": spread,
}


def data(
    key: str, given: float | None, digits: int = 3, shown: str | None = None
) -> Html:
    """Return a number rounded for people, whole in `data-value`; `key` says where in the files it stands."""
    rounded = number(given, digits) if shown is None else shown
    exact = "" if given is None else repr(given)
    return Html(
        f'<span data-key="{html.escape(key)}" data-value="{exact}">{html.escape(rounded)}</span>'
    )


def table(
    rows: Sequence[Sequence[object]], head: Sequence[object] | None = None
) -> Html:
    """Return a table of cells that are text or HTML; the first of each row is its name."""

    def row(cells: Sequence[object], tag: str) -> str:
        first, *others = map(safe, cells)
        return (
            f"<tr><th>{first}</th>"
            + "".join(f"<{tag}>{cell}</{tag}>" for cell in others)
            + "</tr>"
        )

    top = "" if head is None else f"<thead>{row(head, 'th')}</thead>"
    return Html(
        f'<div class="scroll"><table>{top}<tbody>{"".join(row(r, "td") for r in rows)}</tbody></table></div>'
    )


def fold(title: str, content: object) -> Html:
    """Return content that is shown when asked for."""
    return text(
        "<details><summary>{title}</summary>{content}</details>",
        title=title,
        content=content,
    )


def grid(parts: Iterable[object], kind: str = "grid") -> Html:
    """Return parts side by side where there is room: as `grid`, or smaller ones as `tiles`."""
    return Html(f'<div class="{kind}">{join(parts)}</div>')


def boxes(contents: Iterable[Sequence[str]], **parts: object) -> Html:
    """Return a row of boxes: what it is, the number, and a word on it, with their parts filled in."""
    box = '<div><span class="what">{what}</span><strong>{number}</strong><span class="more">{more}</span></div>'
    filled = ((text(template, **parts) for template in content) for content in contents)
    return grid(
        (text(box, what=what, number=each, more=more) for what, each, more in filled),
        "facts",
    )


def plot(
    name: str, traces: Sequence[PlotlyObject], layout: PlotlyObject, caption: str
) -> Html:
    """Return a place where the page draws traces with Plotly, and what they show in words."""
    drawing = as_script(plain({"data": list(traces), "layout": layout}))
    return text(asset("figure.html"), name=name, caption=caption, drawing=Html(drawing))


def as_script(content: object) -> str:
    """Return JSON that may stand inside a script element."""
    return json.dumps(content, allow_nan=False).replace("<", "\\u003c")


def asset(name: str) -> str:
    """Return the text of a file that comes with the package."""
    return (
        resources.files("wflmc.apps.report")
        .joinpath("assets", name)
        .read_text(encoding="utf-8")
    )


@cache
def words(name: str) -> dict[str, Any]:
    """Return what a TOML file that comes with the package says."""
    return tomllib.loads(asset(name))


@cache
def plotly() -> str:
    """Return the drawing library, as JavaScript."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def page(
    title: str, lead: str, sections: Sequence[PageSection], scripts: Sequence[str] = ()
) -> str:
    """Return the whole file; scripts run after Plotly and after all sections are there."""
    links = [
        text('<a href="#{name}">{title}</a>', name=part.name, title=part.title)
        for part in sections
    ]
    body = [
        Html(
            f'<section id="{part.name}"><h2>{safe(part.title)}</h2>{part.html}</section>'
        )
        for part in sections
    ]
    contents = (
        text('<nav aria-label="contents">{links}</nav>', links=join(links))
        if len(links) > 1
        else ""
    )
    code = join(
        Html(f"<script>{script}</script>")
        for script in (plotly(), asset("page.js"), *scripts)
    )
    parts = {
        "title": title,
        "lead": lead,
        "contents": contents,
        "body": join(body),
        "code": code,
    }
    return text(
        asset("page.html"), style=Html(asset("page.css")), version=__version__, **parts
    )
