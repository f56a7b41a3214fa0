"""The pages of the documentation, the code blocks in them, and how each kind of block is tried."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from wflmc.cli.app import app
from wflmc.scenario import load_scenario

from .cli_tools import strict
from .conftest import FULL

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]

ONLY_FULL = {
    "wflmc audit": "a million transcripts, some 20 s",
    "load_mnist": "MNIST and 600 rounds, a minute",
    "examples/mnist.toml": "MNIST and 600 rounds, a minute",
    "examples/whitened.toml": "MNIST and 600 rounds, a minute",
    "--engine dask": "a cluster; tests/test_sweep.py starts one",
    "wflmc federate examples/federation.toml": "a minute; tests/test_federate.py does it with fewer rounds",
    "for seed in range(20)": "forty plans, ten seconds",
    "wflmc run examples/fading.toml --set link.snr_db=30": "two runs of 100 chains, to be read off a table",
}
"""What is in lines that only WFLMC_FULL=1 runs, and why. A page may say it before a block: <!-- full: why -->."""
NEVER = {
    "wflmc reproduce": "minutes to an hour; `make reproduce` and tests/test_cli_reproduce.py do it",
    "wflmc data": "asks the network",
}
"""Commands that are only parsed."""

FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+) *(?P<language>[\w-]*)(?P<rest>.*)$")
COMMAND = re.compile(r"^(\$ )?(\.venv/bin/)?(wflmc|make|pip|python|cd)\b")
NUMBER = re.compile(r"(?<![\w.])[-−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)")
LANGUAGES = {
    "python": "python", "toml": "toml", "json": "json", "output": "output", "text": "text",
    "bash": "shell", "sh": "shell", "shell": "shell", "console": "shell",
}  # fmt: skip


@dataclass
class Block:
    """A code block: where it begins, what it is, and what is in it."""

    page: str
    line: int
    language: str
    text: str
    title: str = ""
    reason: str = ""
    """Why only the full tests run it, where the page says so."""

    @property
    def kind(self) -> str:
        """python, shell, toml, json, output, text; or unknown, which is an error."""
        if self.language:
            return LANGUAGES.get(self.language, "unknown")
        first = self.text.strip().splitlines()[0]
        return "shell" if COMMAND.match(first) else "toml" if re.match(r"\[\w+\]", first) else "unknown"

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language or 'no language'})"


def blocks_of(page: Path) -> list[Block]:
    """All code blocks of a page, fenced and indented, in order."""
    lines, found, at, above, reason = page.read_text(encoding="utf-8").splitlines(), [], 0, "", ""
    while at < len(lines):
        begin, fence = at, FENCE.match(lines[at])
        if fence:
            close = fence["indent"] + fence["ticks"]
            at = next(i for i in range(begin + 1, len(lines)) if lines[i].rstrip() == close)
            title = re.search(r'title="([^"]+)"', fence["rest"])
            text = textwrap.dedent("\n".join(lines[begin + 1 : at]))
            found.append(Block(page.name, begin + 1, fence["language"], text, title[1] if title else "", reason))
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip()) and not _in_list(above):
            while at + 1 < len(lines) and (lines[at + 1].startswith("    ") or not lines[at + 1].strip()):
                at += 1
            found.append(Block(page.name, begin + 1, "", textwrap.dedent("\n".join(lines[begin : at + 1])), "", reason))
        elif lines[at].strip():
            said = re.fullmatch(r"<!-- full: (.+) -->", lines[at].strip())
            reason = said[1] if said else ""
            above = above if lines[at].startswith(" ") else lines[at]
        at += 1
    return found


def _in_list(above: str) -> bool:
    return re.match(r"([-*]|\d+\.) ", above) is not None


@dataclass
class Reader:
    """Someone who follows one page from top to bottom in an empty folder with the examples in it."""

    call: Callable[..., tuple[int, str, str]]
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    printed: str | None = None
    """What the last command or Python block printed; None where it was not run."""

    def follow(self, block: Block) -> None:
        """Do what a block says, or compare it with what was printed."""
        if block.title:
            Path(block.title).write_text(block.text, encoding="utf-8")
        getattr(self, block.kind)(block)

    def unknown(self, block: Block) -> None:
        raise AssertionError(f"{block}: no rule covers this block; say what it is, such as ```text for a formula")

    def text(self, block: Block) -> None:
        hidden = [line for line in block.text.splitlines() if COMMAND.match(line)]
        assert not hidden, f"{block}: commands belong in ```bash, where they are run: {hidden}"

    def toml(self, block: Block) -> None:
        path = Path(block.title or "fragment.toml")
        path.write_text(block.text, encoding="utf-8")
        load_scenario(path)

    def json(self, block: Block) -> None:
        strict(block.text)

    def output(self, block: Block) -> None:
        if self.printed is not None:
            compare(block, block.text.splitlines(), self.printed)

    def python(self, block: Block) -> None:
        if _waits(block, block.text):
            self.printed = None
            return
        self.printed = ""
        for statement in ast.parse(block.text).body:
            stream, code = io.StringIO(), ast.Module([statement], [])
            with contextlib.redirect_stdout(stream):
                exec(compile(code, str(block), "exec"), self.names)
            self.printed += stream.getvalue()
            last = block.text.splitlines()[(statement.end_lineno or 1) - 1]
            promised = re.search(r"#([-\d.e+, ]+)$", last)
            if stream.getvalue() and promised:
                compare(block, promised[1].replace(",", " ").split(), stream.getvalue())

    def shell(self, block: Block) -> None:
        shown: list[str] = []
        self.printed = ""
        for line in block.text.replace("\\\n", " ").splitlines():
            if COMMAND.match(line):
                self._finish(block, shown)
                shown = []
                self._command(block, line)
            elif line.strip() and not line.startswith("#"):
                shown.append(line)
        self._finish(block, shown)

    def _finish(self, block: Block, shown: list[str]) -> None:
        if shown and self.printed is not None:
            compare(block, shown, self.printed)

    def _command(self, block: Block, line: str) -> None:
        words = shlex.split(re.sub(r"^(\$ )?(\.venv/bin/)?", "", line), comments=True)
        program, arguments = words[0], words[1:]
        if program == "wflmc":
            self._wflmc(block, line, arguments)
        elif program == "make":
            targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
            assert set(arguments) <= set(targets), f"{block}: {line}"
        elif program == "pip":
            extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
            wanted = [
                name for word in arguments for name in re.findall(r"\w+", (re.findall(r"\[(.+)\]", word) or [""])[0])
            ]
            assert set(wanted) <= set(extras), f"{block}: {line}"
        elif program == "cd":
            os.chdir(arguments[0])
        elif arguments[0] == "-m":
            place = ROOT / arguments[1].replace(".", "/")
            assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), f"{block}: {line}"
        elif not _waits(block, line):
            with contextlib.redirect_stdout(io.StringIO()) as stream:
                runpy.run_path(arguments[0], run_name="__main__")
            self._print(stream.getvalue())

    def _print(self, text: str) -> None:
        """A block has printed what all its commands have; what was not run is not known."""
        self.printed = None if self.printed is None else self.printed + text

    def _wflmc(self, block: Block, line: str, arguments: list[str]) -> None:
        """Parse it in any case; run it unless a table says why not."""
        if arguments[0] in COMMANDS:
            COMMANDS[arguments[0]].make_context(arguments[0], list(arguments[1:]))
        if any(words in line for words in NEVER) or _waits(block, line):
            self.printed = None
            return
        code, printed, errors = self.call(*arguments)
        assert code == 0, f"{block}: {line}\n{errors}"
        self._print(printed + errors)
        promised = NUMBER.search(line.rpartition("#")[2]) if "--solve-for" in line and "#" in line else None
        if promised:
            compare(block, [f"= {promised[0]} is the smallest found"], printed)


def _waits(block: Block, text: str) -> bool:
    return not FULL and bool(block.reason or any(words in text for words in ONLY_FULL))


def compare(block: Block, shown: list[str], printed: str) -> None:
    """Every shown line must have been printed: the same words, and the same numbers to the digits shown."""
    now = " ".join(printed.split())
    for line in shown:
        wanted = " ".join(line.strip().removesuffix("...").removesuffix("…").split())
        if not wanted:
            continue
        pattern, last = "", 0
        for number in NUMBER.finditer(wanted):
            pattern += re.escape(wanted[last : number.start()]) + rf"({NUMBER.pattern})"
            last = number.end()
        numbers = NUMBER.findall(wanted)
        pattern = rf"(?<!\S){pattern}{re.escape(wanted[last:])}(?!\w)"
        candidates = [match.groups() for match in re.finditer(pattern, now)]
        assert candidates, f"{block}: {wanted!r} is not what is printed now:\n{printed}"
        same = [all(map(_agree, numbers, groups)) for groups in candidates]
        assert any(same), f"{block}: {wanted!r}, but now {candidates}"


def _agree(shown: str, printed: str) -> bool:
    """To one unit of the last digit shown; below 1e-9 all is rounding."""
    a, b = (float(text.replace("−", "-")) for text in (shown, printed))
    digits, _, exponent = shown.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    exact = "." not in digits and not exponent
    return abs(a - b) < 1e-9 or (not exact and abs(a - b) <= 1.001 * unit) or (exact and abs(a - b) < 0.501)


@contextlib.contextmanager
def reading_room(folder: Path) -> Any:
    """An empty folder with the examples in it, which is where one is while inside."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    before, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
