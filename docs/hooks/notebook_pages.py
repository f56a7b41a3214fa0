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
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
NOTEBOOKS = DOCS / "tutorials" / "notebooks"
CELL = re.compile(r"^# %%(.*)$", re.M)


def on_files(files: Any, config: Any) -> Any:
    """Add the page of every notebook; WFLMC_NOTEBOOKS=0 shows their code without running it."""
    from mkdocs.structure.files import File

    run = os.environ.get("WFLMC_NOTEBOOKS") != "0"
    for path in sorted(NOTEBOOKS.glob("*.py")):
        files.append(
            File.generated(
                config,
                path.relative_to(DOCS).with_suffix(".md").as_posix(),
                content=render(path, run),
            )
        )
    return files


def render(path: Path, run: bool = True) -> str:
    """Return a notebook as Markdown with its output."""
    _, *parts = CELL.split(path.read_text(encoding="utf-8"))
    space: dict[str, Any] = {"__name__": "__main__"}
    pages = []
    for kind, text in zip(parts[::2], parts[1::2], strict=True):
        if "markdown" in kind:
            pages.append(
                "\n".join(
                    line.removeprefix("#").removeprefix(" ")
                    for line in text.strip().splitlines()
                )
            )
            continue
        printed, pictures = _execute(text, space) if run else ("", [])
        pages.append(f"```python\n{text.strip()}\n```")
        pages += [f"```text\n{printed.rstrip()}\n```"] if printed.strip() else []
        pages += [f"![figure](data:image/png;base64,{picture})" for picture in pictures]
    opens = "[Jupytext](https://jupytext.readthedocs.io) opens it as a notebook"
    pages.append(
        f"*This page is `docs/tutorials/notebooks/{path.name}`, "
        f"which `make docs` runs; {opens}.*"
    )
    return "\n\n".join(pages) + "\n"


def _execute(text: str, space: dict[str, Any]) -> tuple[str, list[str]]:
    """Run a cell; return what it prints, with the value of its last expression, and its figures as PNG in base64."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tree, out, last = ast.parse(text), io.StringIO(), None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(tree, "<cell>", "exec"), space)
        value = None if last is None else eval(compile(last, "<cell>", "eval"), space)
        if value is not None:
            print(value)
    pictures = []
    for number in plt.get_fignums():
        file = io.BytesIO()
        plt.figure(number).savefig(file, dpi=90, bbox_inches="tight")
        pictures.append(base64.b64encode(file.getvalue()).decode())
    plt.close("all")
    return out.getvalue(), pictures
