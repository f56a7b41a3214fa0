"""Run the notebooks and render them as pages, as a hook of mkdocs.

A notebook in docs/tutorials/notebooks is a script with cells, as editors and Jupytext
know them: `# %%` begins a cell of code, `# %% [markdown]` one of text. Every cell of
code is shown with what it prints, the value of its last expression and its figures.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parents[1]
NOTEBOOKS = DOCS / "tutorials" / "notebooks"
CELL = re.compile(r"^# %%(.*)$", re.M)
"""The line that begins a cell, with its kind."""


class Cell(NamedTuple):
    """A cell of a notebook."""

    is_markdown: bool
    text: str


class CellOutput(NamedTuple):
    """What a cell of code shows when it has run."""

    printed: str = ""
    """Text on stdout, and the value of the last expression."""
    pictures: tuple[str, ...] = ()
    """Figures as PNG in base64."""


def on_files(files: Any, config: Any) -> Any:
    """Add the page of every notebook; with WFLMC_NOTEBOOKS=0 none of them is run."""
    from mkdocs.structure.files import File

    run = os.environ.get("WFLMC_NOTEBOOKS") != "0"
    for path in sorted(NOTEBOOKS.glob("*.py")):
        page = path.relative_to(DOCS).with_suffix(".md")
        content = render(path, run)
        files.append(File.generated(config, page.as_posix(), content=content))
    return files


def render(path: Path, run: bool = True) -> str:
    """Return a notebook as Markdown with its output."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    sections = []
    for cell in _cells(path.read_text(encoding="utf-8")):
        if cell.is_markdown:
            sections.append(_uncommented(cell.text))
        else:
            output = _execute(cell.text, namespace) if run else CellOutput()
            sections += _shown(cell, output)
    sections.append(
        f"*This page is `docs/tutorials/notebooks/{path.name}`, which `make docs` "
        "runs; [Jupytext](https://jupytext.readthedocs.io) opens it as a notebook.*"
    )
    return "\n\n".join(sections) + "\n"


def _cells(source: str) -> Iterator[Cell]:
    """Yield the cells of a notebook in order."""
    _, *parts = CELL.split(source)
    kinds = parts[::2]
    texts = parts[1::2]
    for kind, text in zip(kinds, texts, strict=True):
        yield Cell("markdown" in kind, text.strip())


def _uncommented(text: str) -> str:
    """Return the text of a Markdown cell without the comment signs of its lines."""
    lines = [line.removeprefix("#").removeprefix(" ") for line in text.splitlines()]
    return "\n".join(lines)


def _shown(cell: Cell, output: CellOutput) -> list[str]:
    """Return a cell of code and its output as Markdown."""
    sections = [f"```python\n{cell.text}\n```"]
    if output.printed.strip():
        sections.append(f"```text\n{output.printed.rstrip()}\n```")
    for picture in output.pictures:
        sections.append(f"![figure](data:image/png;base64,{picture})")
    return sections


def _execute(source: str, namespace: dict[str, Any]) -> CellOutput:
    """Run a cell in the namespace of its notebook."""
    import matplotlib

    matplotlib.use("Agg")
    tree = ast.parse(source)
    last_expression = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last_expression = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(tree, "<cell>", "exec"), namespace)
        if last_expression is not None:
            value = eval(compile(last_expression, "<cell>", "eval"), namespace)
            if value is not None:
                print(value)
    return CellOutput(stdout.getvalue(), tuple(_drain_figures()))


def _drain_figures() -> Iterator[str]:
    """Yield all open figures as PNG in base64, then close them."""
    import matplotlib.pyplot as plt

    for number in plt.get_fignums():
        file = io.BytesIO()
        plt.figure(number).savefig(file, dpi=90, bbox_inches="tight")
        yield base64.b64encode(file.getvalue()).decode()
    plt.close("all")
