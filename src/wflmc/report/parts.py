"""Pieces that pages of runs and studies are built from: text that is safe in HTML, numbers that can be read back."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from wflmc.report import page
from wflmc.scenario.files import plain

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
NOT_WANTED = ("sendcharttocloud", "select", "lasso")
"""Buttons of a figure: the first would upload it."""
NO_BUTTONS = (*NOT_WANTED, "toimage", "zoom", "pan", "zoomin", "zoomout", "autoscale", "resetscale")
"""Those that would cover a small one."""
MOST_POINTS = 1500
"""Of one curve: more are neither seen nor worth their bytes."""


class Html(str):
    """Text that is HTML already; any other text is escaped where it is put on a page."""

    __slots__ = ()


def safe(content: object) -> str:
    """Content as it may stand on a page."""
    return content if isinstance(content, Html) else html.escape(str(content))


def text(template: str, **parts: object) -> Html:
    """A sentence with its parts filled in, each of them made safe."""
    return Html(template.format(**{name: safe(part) for name, part in parts.items()}))


def paragraph(template: str, **parts: object) -> Html:
    """The same as a paragraph."""
    return Html(f"<p>{text(template, **parts)}</p>")


def missing(template: str, **parts: object) -> Html:
    """What is said in place of a part that is not there."""
    return Html(f'<p class="missing">{text(template, **parts)}</p>')


def join(pieces: Iterable[object]) -> Html:
    """Pieces one after the other."""
    return Html("".join(safe(piece) for piece in pieces))


def number(value: float | None, digits: int = 3) -> str:
    """A number for people; a dash where there is none."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.{digits}g}" if not 1000 <= abs(value) < 1e6 else f"{value:,.0f}"


def value(key: str, found: float | None, digits: int = 3, shown: str | None = None) -> Html:
    """A number of a file, rounded for people, whole in `data-value`; `key` says where in the file it stands."""
    whole = "" if found is None else repr(found)
    name, seen = html.escape(key, quote=True), number(found, digits) if shown is None else shown
    return Html(f'<span data-key="{name}" data-value="{whole}">{html.escape(seen)}</span>')


def share(key: str, found: float | None) -> Html:
    """The same for a share, shown in percent."""
    return value(key, found, shown="–" if found is None else percent(found))


def percent(part: float) -> str:
    """A share in percent; never 0 % or 100 % of what is not."""
    if 0 < part < 0.01:
        return f"{100 * part:.2g} %"
    return f"{100 * part:.3g} %" if part < 0.1 or 0.99 < part < 1 else f"{100 * part:.0f} %"


def table(rows: Sequence[Sequence[object]], head: Sequence[object] | None = None) -> Html:
    """Cells that are text or HTML; the first of each row is its name."""

    def row(cells: Sequence[object], rest: str) -> str:
        names = ["th", *[rest] * (len(cells) - 1)]
        return "<tr>" + "".join(f"<{n}>{safe(c)}</{n}>" for n, c in zip(names, cells, strict=True)) + "</tr>"

    top = "" if head is None else f"<thead>{row(head, 'th')}</thead>"
    return Html(f'<div class="scroll"><table>{top}<tbody>{"".join(row(r, "td") for r in rows)}</tbody></table></div>')


def fold(title: str, content: object) -> Html:
    """Content that is shown when asked for."""
    return Html(f"<details><summary>{safe(title)}</summary>{safe(content)}</details>")


def grid(figures: Sequence[object], kind: str = "grid") -> Html:
    """Figures side by side where there is room: `grid`, or smaller ones as `tiles`."""
    return Html(f'<div class="{kind}">{join(figures)}</div>')


def facts(found: Sequence[tuple[str, object, object]]) -> Html:
    """A row of boxes: what it is, the number, and a word on it."""
    return Html(
        '<div class="facts">'
        + "".join(
            f'<div><span class="what">{safe(what)}</span><strong>{safe(one)}</strong>'
            f'<span class="more">{safe(more)}</span></div>'
            for what, one, more in found
        )
        + "</div>"
    )


def figure(name: str, traces: Sequence[dict[str, Any]], layout: dict[str, Any], caption: str) -> Html:
    """A Plotly figure, drawn into `figure-NAME`; what is not finite is left out of it."""
    whole = {"modebar": {"remove": list(NOT_WANTED)}, **layout}
    return Html(page.figure(f"figure-{name}", plain(list(traces)), plain(whole), caption))


def axis(title: str, **others: Any) -> dict[str, Any]:
    """An axis with its label."""
    look = {"title": {"text": title, "standoff": 8}, "automargin": True, "gridcolor": "#e6e9ee", "zeroline": False}
    return {**look, "exponentformat": "power", "separatethousands": True, **others}


def log_axis(title: str, values: Iterable[float | None], **others: Any) -> dict[str, Any]:
    """A logarithmic axis for such values, with two labels or more: powers of ten, or what lies between them too."""
    ends = [math.log10(found) for found in values if found is not None and found > 0] or [0.0]
    low, high = min(ends), max(ends)
    pad = max(0.06 * (high - low), 0.15)
    low, high = low - pad, high + pad
    ticks: dict[str, Any] = {"tickmode": "linear", "tick0": 0, "dtick": max(1, math.ceil((high - low) / 6))}
    if high - low < 2:
        found = _between(low, high)
        ticks = {"tickmode": "array", "tickvals": found, "ticktext": [_tick(one) for one in found]}
    look = {"type": "log", "range": [low, high], "tickfont": {"size": 11}}
    return axis(title, **{**look, **ticks, **others})


def _between(low: float, high: float) -> list[float]:
    """Round numbers between two powers of ten: 1, 2, 5, 10, …, or even steps where these are too far apart."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    found = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    inside = [one for one in found if low <= math.log10(one) <= high]
    if len(inside) > 2:
        return inside
    bottom, top = 10**low, 10**high
    rough = math.floor(math.log10((top - bottom) / 3))
    step = max(digit * 10.0**rough for digit in (1, 2, 5) if digit * 10.0**rough <= (top - bottom) / 3)
    return [float(f"{i * step:.12g}") for i in range(math.ceil(bottom / step), math.floor(top / step) + 1)]


def _tick(found: float) -> str:
    """A short number; tiny and huge ones with a power of ten."""
    if 1e-4 <= found < 1e5:
        return f"{found:,.4g}" if found < 1000 else f"{found:,.0f}"
    digits, power = f"{found:.3e}".split("e")
    return f"{float(digits):g}×10<sup>{int(power)}</sup>".replace("-", "−")


LEGEND_BELOW = {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top", "traceorder": "normal"}


def picked(count: int, most: int = MOST_POINTS) -> list[int]:
    """Indices of a curve with `count` points that are drawn: all, or a useful number with both ends."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
