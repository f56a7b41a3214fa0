"""A page opened in headless Chromium: what it answers to a script, complains of, and
asks the network for.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
QUIET = (
    "background-networking",
    "component-update",
    "default-apps",
    "domain-reliability",
    "extensions",
    "gpu",
    "sync",
)

# Frames are drawn when the test says so: nothing then depends on how busy the machine is.
WATCH = """<script>
window.complaints = [];
window.pending = [];
window.requestAnimationFrame = (draw) => pending.push(draw);
addEventListener("error", (event) => complaints.push(String(event.message)));
addEventListener("unhandledrejection", (event) => complaints.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => complaints.push(`refused: ${event.blockedURI}`));
for (const name of ["error", "warn"]) console[name] = (...said) => complaints.push(said.map(String).join(" "));
function drawFrames() { while (pending.length) pending.shift()(); }
</script>"""

ASK = """<script>
{
  drawFrames();
  let answer = null;
  try { answer = (() => { %s })(); } catch (error) { complaints.push(String(error.stack)); }
  const place = document.createElement("script");
  place.type = "application/json";
  place.id = "answer";
  place.textContent = JSON.stringify({ answer, complaints }).replaceAll("<", "\\\\u003c");
  document.body.append(place);
}
</script>"""


class Visit(NamedTuple):
    """The result of opening a page."""

    answer: Any
    complaints: list[str]
    """Errors and warnings of scripts and of the content policy."""
    requests: set[str]
    """Addresses that the page requested beyond its own file."""


def browser() -> str:
    """Return the path of the browser; the test is skipped where there is none."""
    program = next((path for name in NAMES if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip(
            "no Chromium on this machine to open pages with: make browser installs it"
        )
    return program


def visit(page: Path, script: str = "return null", fragment: str = "") -> Visit:
    """Open a copy of the page and run a script at its end.

    Args:
        page: the file.
        script: the body of a function; what it returns is the answer.
        fragment: of the address, with its #.
    """
    program = browser()
    text = page.read_text(encoding="utf-8")
    copy, log = page.with_name("visit.html"), page.with_name("net.json")
    head, body = text.split("<head>", 1)
    main, end = body.rsplit("</body>", 1)
    copy.write_text(
        f"{head}<head>{WATCH}{main}{ASK % script}</body>{end}", encoding="utf-8"
    )
    command = [
        program, "--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in QUIET),
        f"--user-data-dir={page.parent / 'profile'}", f"--log-net-log={log}", "--window-size=1280,4000",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", f"{copy.as_uri()}{fragment}",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False
    )
    match = re.search(
        r'<script type="application/json" id="answer">(.*?)</script>',
        done.stdout,
        flags=re.S,
    )
    assert match, f"the page did not answer: {done.stderr[-2000:]}"
    said = json.loads(match[1])
    return Visit(said["answer"], said["complaints"], _requests(log))


def _requests(log: Path) -> set[str]:
    """Return the addresses a document requested; requests of the browser itself have no
    origin.
    """
    events = json.loads(log.read_text(encoding="utf-8"))["events"]
    requests = [
        event["params"] for event in events if "initiator" in event.get("params", {})
    ]
    return {
        params["url"] for params in requests if params["initiator"] != "not an origin"
    }
