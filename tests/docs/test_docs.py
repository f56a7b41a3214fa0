"""Test the documentation: every block runs, every link, key and path exists, and the site builds and works offline."""

from __future__ import annotations

import html.parser
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import wflmc
from wflmc.scenario import Scenario

from ..conftest import NO_MNIST, find_mnist_folder
from .docs_tools import (
    COMMANDS,
    PAGES,
    ROOT,
    TOLERANCE,
    Block,
    Reader,
    blocks_of,
    compare,
    in_empty_folder,
)

DOCS = ROOT / "docs"
NAMES = [page.name for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_block_runs_and_prints_what_is_shown(page, call, tmp_path):
    reader = Reader(call, find_mnist_folder())
    with in_empty_folder(tmp_path):
        for block in blocks_of(page):
            reader.follow(block)
    if reader.left_out:
        pytest.skip(f"{NO_MNIST}; all else ran but {', '.join(reader.left_out)}")


def _prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(
        r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M
    )


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as Python-Markdown makes them."""
    headings = re.findall(r"^#+ (.+)$", _prose(page), re.M)
    plain = [
        re.sub(r"[^\w\s-]", "", heading.encode("ascii", "ignore").decode())
        .strip()
        .lower()
        for heading in headings
    ]
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_exist(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if re.match(r"https?://|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        place = page.parent / file if file else page
        assert place.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in _anchors(place), f"{page.name}: {target}"


def _spans() -> list[tuple[str, str]]:
    return [
        (page.name, " ".join(text.split()))
        for page in PAGES
        for text in re.findall(r"`([^`]+)`", _prose(page))
    ]


def test_commands_in_the_text_exist_with_their_options():
    for page, text in _spans():
        words = text.removeprefix(".venv/bin/").split()
        if (
            words[0] != "wflmc"
            or len(words) < 2
            or not re.fullmatch("[a-z]+", words[1])
        ):
            continue
        assert words[1] in COMMANDS, f"{page}: {text}"
        known = {
            name
            for p in COMMANDS[words[1]].params
            for name in [*p.opts, *p.secondary_opts]
        } | {"--help"}
        assert {word for word in words if word.startswith("--")} <= known, (
            f"{page}: {text}"
        )


def test_keys_in_the_text_exist():
    python = {
        "posterior": [
            wflmc.posterior.GaussianPosterior,
            wflmc.posterior.CustomPosterior,
            wflmc.posterior.SoftmaxPosterior,
        ],
        "link": [wflmc.Link],
        "privacy": [wflmc.Privacy, wflmc.privacy],
    }
    checked = 0
    for page, text in _spans():
        found = re.match(r"(posterior|link|privacy|sampler|policy)\.(\w+)", text)
        if found:
            section, name = found.groups()
            keys = Scenario.model_fields[section].annotation.model_fields
            known = name in keys or any(
                hasattr(owner, name) for owner in python.get(section, [])
            )
            known = known or any(
                name in getattr(owner, "__annotations__", {})
                for owner in python.get(section, [])
            )
            assert known, f"{page}: {text}"
            checked += 1
    assert checked > 40


def _is_default(stated: str, known: object) -> bool:
    if isinstance(known, int | float) and not isinstance(known, bool):
        return float(stated) == known
    return stated.lower() == str(known).lower() or (
        stated in ("", "none") and not known
    )


def test_every_key_of_a_scenario_is_documented_with_its_default():
    text = (DOCS / "reference/scenario.md").read_text(encoding="utf-8")
    for section, about in Scenario.model_fields.items():
        part, fields = (
            text.partition(f"## [{section}]")[2].partition("\n## ")[0],
            about.annotation.model_fields,
        )
        assert all(f"`{key}`" in part for key in fields), section
        for keys, default in re.findall(r"^\| (`[^|]+) \| ([^|]*?) ?\|", part, re.M):
            stated = re.findall(r'[^`",; ]+', default) or [""]
            for place, key in enumerate(re.findall(r"`(\w+)`", keys)):
                given = stated[
                    min(place, len(stated) - 1)
                ]  # one number may stand for all keys of a row
                assert _is_default(given, fields[key].default), (
                    f"{section}.{key}: {given}"
                )


def test_the_table_of_the_gallery_is_current(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from docs.draw.gallery import POLICIES, table

    shown = re.findall(
        r"^\| `.+$", (DOCS / "reference/gallery.md").read_text(encoding="utf-8"), re.M
    )
    assert len(shown) == len(POLICIES)
    compare(Block("gallery.md", 0, "table", ""), shown, table(POLICIES))


PAGE = """
<!-- full: long -->
<!-- sampled: R-hat max 5 %, ESS min 25 % -->

```output
R-hat max  1.18
```

No comment holds for what comes after other text.

```output
R-hat max  1.18
```
"""


def test_comments_apply_to_the_next_block_only(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    marked, plain = blocks_of(tmp_path / "page.md")
    assert marked.comments == {"full": "long", "sampled": "R-hat max 5 %, ESS min 25 %"}
    assert [
        marked.tolerance(line) for line in ("R-hat max 1.18", "ESS min 400", "loss 7")
    ] == [0.05, 0.25, 0.001]
    assert plain.comments == {}


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        (
            "loss 7.04 (budget 7.0), of 50 ...",
            "loss   7.0418\n (budget 7.0418), of 50 in all",
        ),
        ("gain 0.00094575 … 0.0092177", "gain 0.00094580 … 0.0092170"),  # 0.1 %
        (
            "bound 0.12, within 1e-9 of the best",
            "bound 0.1236, within 5e-12 of the best",
        ),
        (
            "W2² 0.00097 ± 0.0002 (from chains)",
            "W2² 0.00136 ± 0.0003 (from chains)",
        ),  # two standard errors
        ("privacy 2.06 loss", "│ privacy │ 2.06 loss │\n└──────┴─────┘"),
        ("R-hat max 1.18", "R-hat max 1.2314"),
        ("ESS min 436 bulk, 844 tail", "ESS min 361 bulk, 1023 tail"),
    ],
)
def test_right_output_passes(shown, printed):
    compare(
        Block(
            "here", 1, "output", "", comments={"sampled": "R-hat max 5 %, ESS min 25 %"}
        ),
        [shown],
        printed,
    )


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("lost 7.04", "loss 7.0418"),
        ("loss 7.07", "loss 7.0418"),
        ("loss 7.0418", "loss 7.0525"),
        ("rounds 51", "rounds 50"),
        (
            "bound 0.12, within 1e-9 of the best",
            "bound 0.1236, within 2e-9 of the best",
        ),
        (
            "bound 0.12, within 1e-9 of the best",
            "bound 0.1236, within 5e-12 of the worst",
        ),
        ("delta 6e-28", "delta 8e-28"),
        ("W2² 0.00097 ± 0.0002", "W2² 0.00177 ± 0.0002"),  # four standard errors
        ("W2² 0.00097 ± 0.0002", "W2² 0.00097 ± 0.0006"),
        ("R-hat max 1.18", "R-hat max 1.26"),
        ("ESS min 436 bulk, 844 tail", "ESS min 436 bulk, 84 tail"),
        (
            "ESS of one chain 3.45",
            "ESS of one chain 3.65",
        ),  # not among the sampled ones
    ],
)
def test_wrong_output_fails(shown, printed):
    with pytest.raises(AssertionError):
        compare(
            Block(
                "here",
                1,
                "output",
                "",
                comments={"sampled": "R-hat max 5 %, ESS min 25 %"},
            ),
            [shown],
            printed,
        )


def test_sampled_numbers_are_shown_with_their_error_or_a_tolerance():
    sampled = re.compile(
        r"(R-hat|ESS min|gradients clipped|examples clipped|accuracy|No attack) .*\d|.*from chains"
    )
    shown = [
        (block, line.strip())
        for page in PAGES
        for block in blocks_of(page)
        for line in block.text.splitlines()
    ]
    found = [
        (block, line)
        for block, line in shown
        if sampled.match(line) and "exact" not in line
    ]
    assert len(found) > 8
    for block, line in found:
        assert "±" in line or block.tolerance(line) > TOLERANCE, f"{block}: {line}"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Return the folder of the built site."""
    for name in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(folder),
    ]
    environment = {
        **os.environ,
        "WFLMC_NOTEBOOKS": "0",
    }  # `make test-full` runs them, in test_notebooks.py
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


class _Requests(html.parser.HTMLParser):
    """Collect what a browser would load for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag == "link" and given.get("rel") not in ("prev", "next", "canonical"):
            self.found.append(given.get("href") or "")
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed"):
            self.found.append(given.get("src") or "")


def test_the_site_makes_no_network_requests(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES) - 2
    for page in pages:
        requests = _Requests()
        requests.feed(page.read_text(encoding="utf-8"))
        outside = [url for url in requests.found if re.match(r"(https?:)?//", url)]
        assert not outside, f"{page.name}: {outside}"
    for sheet in site.rglob("*.css"):
        assert not re.search(
            r"(url\(|@import)\s*['\"]?(https?:)?//", sheet.read_text(encoding="utf-8")
        ), sheet.name


def test_the_site_has_every_command_and_the_main_functions(site):
    commands = (site / "reference/commands.html").read_text(encoding="utf-8")
    for name, command in COMMANDS.items():
        assert f">wflmc {name}<" in commands
        assert all(
            p.opts[-1] in commands
            for p in command.params
            if p.param_type_name == "option"
        )
    functions = (site / "reference/python.html").read_text(encoding="utf-8")
    for name in (
        "plan",
        "sample",
        "evaluate",
        "posterior_from",
        "Link",
        "Privacy",
        "Plan",
        "Trace",
        "sampling.kernel",
    ):
        assert re.search(rf">\s*wflmc\.{name}\s*<", functions), name


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_named_in_the_text_exist(page):
    named = re.findall(
        r"`((?:src|tests|docs|examples|benchmarks|scripts)/[\w./-]+)`", _prose(page)
    )
    assert not [path for path in named if not (ROOT / path).exists()]


def test_every_path_of_the_architecture_exists():
    spans = re.findall(r"`([^`\s]+)`", _prose(DOCS / "reference/architecture.md"))
    paths = [
        span
        for span in spans
        if re.fullmatch(r"[\w./-]+(/|\.py|\.md|\.toml)", span) and span != "x.toml"
    ]
    assert len(paths) > 60
    assert not [
        path
        for path in paths
        if not any((place / path).exists() for place in (ROOT / "src/wflmc", ROOT))
    ]


def test_pages_that_the_source_names_exist():
    folders = ("src", "tests", "benchmarks", "examples", "scripts", "docs")
    files = [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".toml", ".md", ".html", ".js")
    ]
    named = [
        (path.relative_to(ROOT), page)
        for path in [*files, ROOT / "Makefile", *ROOT.glob("*.md")]
        for page in re.findall(
            r"\bdocs/[a-z0-9_/]+\.(?:md|png)\b", path.read_text(encoding="utf-8")
        )
    ]
    assert len(named) > 30
    missing = [f"{path}: {page}" for path, page in named if not (ROOT / page).exists()]
    assert not missing
