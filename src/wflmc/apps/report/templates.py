"""Pages from Jinja2 templates: each is one HTML file that needs no network.

Whatever stands in a template's braces is escaped, unless it is `Markup` already. A name
that a template uses and that it was not given is an error (`StrictUndefined`). Numbers
of a run's files go through the filter `data`, so that a program can read them back from
the page.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from wflmc.apps.report.numbers import (
    format_number,
    format_percent,
    format_range,
    format_whole,
)
from wflmc.version import __version__

PACKAGE = "wflmc.apps.report"
"""The package that templates, style sheets and scripts come with."""
FORMATS: dict[str, Callable[[float | None], str]] = {
    "whole": format_whole,
    "percent": format_percent,
}
"""How a number is shown where it is not rounded to some digits, by name."""


class PageSection(NamedTuple):
    """A part of a page, with a link to it in the page's contents."""

    name: str
    """Of the anchor."""
    title: str
    html: Markup


def data_number(
    value: float | None, key: str, digits: int = 3, style: str = ""
) -> Markup:
    """Show a number for people, with the unrounded double beside it for programs.

    Templates use it as the filter `data`. The result is a ``<span>`` whose attribute
    `data-value` has all digits of the number, and is empty where there is none, and
    whose `data-key` says where it comes from.

    Args:
        value: the number; None is shown as a dash.
        key: such as `summary.rhat_max`: the file of a run folder, and the path within.
        digits: significant digits that are shown.
        style: ``whole`` or ``percent`` instead of digits.

    Returns:
        The element.
    """
    text = FORMATS[style](value) if style else format_number(value, digits)
    exact = "" if value is None else repr(value)
    span = Markup('<span data-key="{}" data-value="{}">{}</span>')
    return span.format(key, exact, text)


@cache
def _environment() -> Environment:
    """Return the templates of this package with their filters."""
    environment = Environment(
        loader=PackageLoader(PACKAGE, "templates"),
        autoescape=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "number": format_number,
        "whole": format_whole,
        "percent": format_percent,
        "range": format_range,
        "data": data_number,
    }
    # Keys of a drawing keep their order, and a NaN that JSON cannot hold is refused.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return environment


def render(template: str, /, **context: object) -> Markup:
    """Fill in a template of this package.

    Args:
        template: the name of a file in `templates/`, such as `run_plan.html`.
        context: the values that its names stand for. Text is escaped where it is put
            in; `Markup` is not.

    Returns:
        HTML that other templates take as it is.

    Raises:
        jinja2.UndefinedError: the template uses a name that is not in `context`.
    """
    return Markup(_environment().get_template(template).render(context))


def render_page(
    title: str,
    lead: str,
    sections: Sequence[PageSection],
    scripts: Sequence[Markup] = (),
) -> str:
    """Put sections together to a whole page, which opens without a network.

    Style sheet, scripts and Plotly are part of the file, and its content security
    policy forbids everything from elsewhere. Contents with links to the sections are
    shown where there are several.

    Args:
        title: of the window and of the first heading.
        lead: one or more sentences below the title, as plain text.
        sections: from top to bottom.
        scripts: JavaScript that runs after Plotly and after all sections are there.

    Returns:
        The HTML file.
    """
    return render(
        "page.html",
        title=title,
        lead=lead,
        sections=sections,
        style=read_asset("page.css"),
        scripts=[plotly_javascript(), read_asset("page.js"), *scripts],
        version=__version__,
    )


def read_asset(name: str) -> Markup:
    """Read a style sheet or a script that comes with the package.

    Args:
        name: of the file in `assets/`.

    Returns:
        Its text, which is put on pages as it is.
    """
    path = resources.files(PACKAGE) / "assets" / name
    return Markup(path.read_text(encoding="utf-8"))


@cache
def plotly_javascript() -> Markup:
    """Return the drawing library, as minified JavaScript.

    It comes with the Python package `plotly`, whose version therefore decides how
    figures look. Every page contains it, about 5 MB; it is read once per process.
    """
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs())
