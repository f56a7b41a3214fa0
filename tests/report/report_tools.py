"""Pages as tests see them: their values, drawings and text, and what a browser makes of
them.
"""

from __future__ import annotations

import json
import re
import subprocess
from html.parser import HTMLParser

from .browser import browser


class Page(HTMLParser):
    """The values, the drawings and the text of a page.

    Attributes:
        values: numbers by their `data-key`; None where the page shows none.
        drawings: Plotly traces and layout by the name of the figure.
        attributes: names of all HTML attributes.
    """

    def __init__(self, page):
        super().__init__()
        self.values = {}
        self.drawings = {}
        self.attributes = set()
        self._texts = []
        self._into = None
        self.feed(page)

    @property
    def text(self):
        """All text, with any white space as one blank, as a browser shows it."""
        return " ".join("".join(self._texts).split())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.attributes |= set(values)
        if {"data-key", "data-value"} <= set(values):
            self.values[values["data-key"]] = (
                float(values["data-value"]) if values["data-value"] else None
            )
        self._into = values.get("data-for", "") if tag in ("script", "style") else None

    def handle_data(self, data):
        if self._into is None:
            self._texts.append(data)
        elif self._into:
            drawn = json.loads(data)
            self.drawings[self._into.removeprefix("figure-")] = (
                drawn["data"],
                drawn["layout"],
            )

    def handle_endtag(self, tag):
        self._into = None

    def curve(self, figure, name):
        """Return the only trace of a figure with this name."""
        (matching,) = (
            trace for trace in self.drawings[figure][0] if trace.get("name") == name
        )
        return matching


def in_browser(page, folder):
    """Return the document after its scripts have run, the lines of the console, and the
    addresses requested.
    """
    program = browser()
    file = folder / "page.html"
    log = folder / "net.json"
    file.write_text(page, encoding="utf-8")
    done = subprocess.run(
        [program, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=5000",
         "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}", file.as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    # Chromium has requests of its own when it starts; those of the page are filed under its address.
    lines = [
        line
        for line in log.read_text().splitlines()
        if '"network_isolation_key":"file://' in line
    ]
    addresses = [
        address
        for line in lines
        for address in re.findall(r'"url":"((?!file:|data:|blob:)[^"]*)"', line)
    ]
    return (
        done.stdout,
        [line for line in done.stderr.splitlines() if "CONSOLE" in line],
        addresses,
    )


def check_in_browser(page, folder):
    """Check that every figure is drawn, nothing is complained about, and nothing but
    the file is requested.
    """
    document, console, addresses = in_browser(page, folder)
    expected = page.count('<div class="plot"')
    assert document.count('class="plot js-plotly-plot"') == expected > 0
    assert document.count('<svg class="main-svg"') >= expected
    assert 'data-title="Zoom"' in document
    assert 'data-title="Share chart' not in document  # which would upload it
    assert console == []
    assert addresses == []
    return document
