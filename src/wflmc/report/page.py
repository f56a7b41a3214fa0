"""One HTML file that needs nothing else: style, scripts and figures are in it, and it asks the network for nothing."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from wflmc.version import __version__

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""What a browser may load for the page: nothing that is not in it."""


class Section(NamedTuple):
    """A part of a page, with a link to it in the page's contents."""

    name: str
    """Of the anchor."""
    title: str
    html: str


def asset(name: str) -> str:
    """The text of a file that comes with the package."""
    return resources.files("wflmc.report").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def plotly() -> str:
    """The drawing library, as JavaScript."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def as_script(value: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def figure(name: str, traces: Sequence[dict[str, Any]], layout: dict[str, Any], caption: str) -> str:
    """A place where the page draws traces with Plotly, and what they show in words."""
    said = html.escape(caption, quote=True)
    drawn = as_script({"data": list(traces), "layout": layout})
    return (
        f'<figure><div class="plot" id="{name}" role="img" aria-label="{said}"></div>'
        f'<script type="application/json" class="drawing" data-for="{name}">{drawn}</script>'
        f"<figcaption>{said}</figcaption></figure>"
    )


def page(title: str, lead: str, sections: Sequence[Section], scripts: Sequence[str] = ()) -> str:
    """The whole file; scripts run after Plotly and after all sections are there."""
    links = "".join(f'<a href="#{part.name}">{html.escape(part.title)}</a>' for part in sections)
    body = "".join(
        f'<section id="{part.name}"><h2>{html.escape(part.title)}</h2>{part.html}</section>' for part in sections
    )
    code = "".join(f"<script>{script}</script>" for script in (plotly(), asset("page.js"), *scripts))
    contents = f'<nav aria-label="contents">{links}</nav>' if len(sections) > 1 else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{html.escape(title)}</title><style>{asset("page.css")}</style></head>'
        f"<body><header><h1>{html.escape(title)}</h1><p>{html.escape(lead)}</p>{contents}</header>"
        f"<main>{body}</main><footer>wflmc {__version__}</footer>{code}</body></html>\n"
    )
