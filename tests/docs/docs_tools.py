"""Find the code blocks of the documentation's pages, run each kind of block, and compare shown with printed output."""

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

import pytest
import typer

from wflmc.cli.app import app
from wflmc.data.sets import VARIABLE
from wflmc.scenario import load_scenario

from ..cli_tools import strict
from ..conftest import FULL

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]

ONLY_FULL = {
    "wflmc audit": "a million transcripts, some 20 s",
    'data.load("mnist")': "MNIST and 600 rounds, a minute",
    "examples/mnist.toml": "MNIST and 600 rounds, a minute",
    "examples/whitened.toml": "MNIST and 600 rounds, a minute",
    "--engine dask": "a cluster; tests/studies/test_sweep.py starts one",
    "wflmc federate examples/federation.toml": "a minute; tests/cli/test_federate.py does it with fewer rounds",
    "for seed in range(20)": "forty plans, ten seconds",
    "sampler.burn_in=auto": "pilot chains; tests/cli/test_plan.py has some",
    "subprocess.run(command": "a process of its own; the same command without --json runs in this one",
    "own, predictive=draw": "a custom model; own_model.md and tests/sampling/test_trace.py sample others",
    "wflmc plan cell.toml --solve-for": "three searches; tests/cli/test_solve.py has their kinds",
    "--solve-for sampler.burn_in --target 0.15": "a search; tests/cli/test_solve.py has its kind",
    "--set sampler.burn_in=26": "a run of 100 chains; other pages have some",
    "sampler.step_schedule=planned": "a search; tests/planning/test_steps.py has smaller ones",
    "for factor in (0.1, 0.2, 0.4, 0.8, 1.6)": "five plans; other pages and tests/planning have some",
    'dynamics="kinetic", friction=': "tests/sampling/test_kinetic.py has such plans",
    "def chain(key)": "the first block of kernel.md steps the kernel",
    "def unsettled(carry)": "the first block of kernel.md steps the kernel",
    "wflmc.from_equinox(network": "tests/adapters/test_modules.py has such networks",
    "density += events *": "a quadrature; the block before it samples the same model",
    "jax.process_index()": "several hosts; tests/sampling/test_chunks.py has several accelerators",
    "wflmc run clinic.toml": "tests/runs/test_publish.py runs and publishes such a scenario",
    "wflmc publish clinic --out": "tests/runs/test_publish.py runs and publishes such a scenario",
    "wflmc run examples/fading.toml --set link.snr_db=30": "two runs of 100 chains, to be read off a table",
}
"""Parts of lines that only WFLMC_FULL=1 runs, with the reason. Or a page puts <!-- full: why --> before a block."""
NEVER = {
    "wflmc reproduce": "minutes to an hour; `make reproduce` and tests/cli/test_reproduce.py do it",
    "wflmc data": "asks the network",
}
"""Commands that are only parsed."""

TOLERANCE = 0.001
"""Largest relative difference from shown numbers: enough for float64 on any machine."""
STANDARD_ERRORS = 3
"""Largest difference from a number shown with its standard error, 0.12 ± 0.03, in standard errors."""

COMMENT = re.compile(r"<!-- (full|sampled): (.+) -->")
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+) *(?P<language>[\w-]*)(?P<rest>.*)$")
COMMAND = re.compile(r"^(\$ )?(\.venv/bin/)?(wflmc|make|pip|python|cd)\b")
NUMBER = re.compile(r"(?<![\w.])[-−]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?!\w)")
LANGUAGES = {
    "python": "python", "toml": "toml", "json": "json", "output": "output", "text": "text",
    "bash": "shell", "sh": "shell", "shell": "shell", "console": "shell",
}  # fmt: skip


@dataclass
class Block:
    """A code block: its page and line, its language and its text."""

    page: str
    line: int
    language: str
    text: str
    title: str = ""
    comments: dict[str, str] = field(default_factory=dict)
    """HTML comments before the block: why only the full tests run it (full), and which lines are random (sampled)."""

    @property
    def kind(self) -> str:
        """Return python, shell, toml, json, output or text; or unknown, which is an error."""
        if self.language:
            return LANGUAGES.get(self.language, "unknown")
        first = self.text.strip().splitlines()[0]
        return (
            "shell"
            if COMMAND.match(first)
            else "toml"
            if re.match(r"\[\w+\]", first)
            else "unknown"
        )

    @property
    def needs_mnist(self) -> bool:
        """Return whether the block can only run with MNIST at hand."""
        return any(
            words in self.text
            for words, reason in ONLY_FULL.items()
            if "MNIST" in reason
        )

    def tolerance(self, line: str) -> float:
        """Return the relative tolerance of a line's numbers: 5 % by <!-- sampled: R-hat max 5 % -->."""
        for words, percent in re.findall(
            r"([^,]*?) *([\d.]+) %", self.comments.get("sampled", "")
        ):
            if line.startswith(words.strip()):
                return float(percent) / 100
        return TOLERANCE

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language or 'no language'})"


def blocks_of(page: Path) -> list[Block]:
    """Return all code blocks of a page, fenced and indented, in order."""
    lines, found, at, above = page.read_text(encoding="utf-8").splitlines(), [], 0, ""
    comments: dict[str, str] = {}
    while at < len(lines):
        begin, fence = at, FENCE.match(lines[at])
        if fence:
            close = fence["indent"] + fence["ticks"]
            at = next(
                i for i in range(begin + 1, len(lines)) if lines[i].rstrip() == close
            )
            title = re.search(r'title="([^"]+)"', fence["rest"])
            text = textwrap.dedent("\n".join(lines[begin + 1 : at]))
            found.append(
                Block(
                    page.name,
                    begin + 1,
                    fence["language"],
                    text,
                    title[1] if title else "",
                    comments,
                )
            )
        elif (
            lines[at].startswith("    ")
            and (at == 0 or not lines[at - 1].strip())
            and not _in_list(above)
        ):
            while at + 1 < len(lines) and (
                lines[at + 1].startswith("    ") or not lines[at + 1].strip()
            ):
                at += 1
            text = textwrap.dedent("\n".join(lines[begin : at + 1]))
            found.append(Block(page.name, begin + 1, "", text, "", comments))
        elif lines[at].strip():
            comment = COMMENT.fullmatch(lines[at].strip())
            comments = {**comments, comment[1]: comment[2]} if comment else {}
            above = above if lines[at].startswith(" ") else lines[at]
        at += 1
    return found


def _in_list(above: str) -> bool:
    return re.match(r"([-*]|\d+\.) ", above) is not None


@dataclass
class Reader:
    """Follow one page from top to bottom in an empty folder that contains the examples."""

    call: Callable[..., tuple[int, str, str]]
    mnist: Path | None = None
    """The folder of MNIST, which only the blocks that need it are told of."""
    left_out: list[str] = field(default_factory=list)
    """Blocks that were not run because there is no MNIST."""
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    printed: str | None = None
    """Output of the last command or Python block; None if it was not run."""

    def follow(self, block: Block) -> None:
        """Run a block, or compare it with what was printed."""
        if block.title:
            Path(block.title).write_text(block.text, encoding="utf-8")
        if not (FULL and block.needs_mnist):
            getattr(self, block.kind)(block)
        elif self.mnist is None:
            self.left_out.append(str(block))
            self.printed = None
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv(VARIABLE, str(self.mnist))
                getattr(self, block.kind)(block)

    def unknown(self, block: Block) -> None:
        raise AssertionError(
            f"{block}: the kind of this block is unknown; label it, such as ```text for a formula"
        )

    def text(self, block: Block) -> None:
        hidden = [line for line in block.text.splitlines() if COMMAND.match(line)]
        assert not hidden, (
            f"{block}: commands belong in ```bash, where they are run: {hidden}"
        )

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
        statements = ast.parse(block.text).body
        if _waits(block, block.text):
            self.printed = None
            return
        self.printed = ""
        for statement in statements:
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
            extras = re.findall(
                r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M
            )
            wanted = [
                name
                for word in arguments
                for name in re.findall(
                    r"\w+", (re.findall(r"\[(.+)\]", word) or [""])[0]
                )
            ]
            assert set(wanted) <= set(extras), f"{block}: {line}"
        elif program == "cd":
            os.chdir(arguments[0])
        elif arguments[0] == "-m":
            place = ROOT / arguments[1].replace(".", "/")
            assert (
                place.with_suffix(".py").exists() or (place / "__main__.py").exists()
            ), f"{block}: {line}"
        elif not _waits(block, line):
            with contextlib.redirect_stdout(io.StringIO()) as stream:
                runpy.run_path(arguments[0], run_name="__main__")
            self._print(stream.getvalue())

    def _print(self, text: str) -> None:
        """Append to what the block has printed; None if one of its commands was not run."""
        self.printed = None if self.printed is None else self.printed + text

    def _wflmc(self, block: Block, line: str, arguments: list[str]) -> None:
        """Parse the command in any case; run it unless a table says why not."""
        if arguments[0] in COMMANDS:
            COMMANDS[arguments[0]].make_context(arguments[0], list(arguments[1:]))
        if any(words in line for words in NEVER) or _waits(block, line):
            self.printed = None
            return
        code, printed, errors = self.call(*arguments)
        assert code == 0, f"{block}: {line}\n{errors}"
        self._print(printed + errors)
        promised = (
            NUMBER.search(line.rpartition("#")[2])
            if "--solve-for" in line and "#" in line
            else None
        )
        if promised:
            compare(block, [f"= {promised[0]} is the smallest found"], printed)


def _waits(block: Block, text: str) -> bool:
    return not FULL and bool(
        block.comments.get("full") or any(words in text for words in ONLY_FULL)
    )


def compare(block: Block, shown: list[str], printed: str) -> None:
    """Assert that every shown line was printed: the same words, and numbers within the tolerance."""
    now = _words(printed)
    for line in shown:
        wanted = _words(line).removesuffix("...").removesuffix("…").strip()
        if not wanted:
            continue
        words = [re.escape(part) for part in NUMBER.sub("\0", wanted).split("\0")]
        pattern = rf"(?<!\S){f'({NUMBER.pattern})'.join(words)}(?!\w)"
        candidates = [match.groups() for match in re.finditer(pattern, now)]
        assert candidates, f"{block}: {wanted!r} is not what is printed now:\n{printed}"
        allowed = _allowed(wanted, block.tolerance(wanted))
        same = [
            all(
                low <= _value(text)[0] <= high
                for text, (low, high) in zip(groups, allowed, strict=True)
            )
            for groups in candidates
        ]
        assert any(same), (
            f"{block}: {wanted!r}, but now {candidates}, where {allowed} is allowed"
        )


def _words(text: str) -> str:
    """Return a text without box drawing and with single spaces."""
    return " ".join(re.sub("[\u2500-\u257f]", " ", text).split())


def _value(number: str) -> tuple[float, float]:
    """Return the value of a number as written, and the unit of its last digit."""
    digits, _, exponent = number.replace("−", "-").partition("e")
    return float(number.replace("−", "-")), 10.0 ** (
        int(exponent or 0) - len(digits.partition(".")[2])
    )


def _allowed(line: str, tolerance: float) -> list[tuple[float, float]]:
    """Return the smallest and the largest allowed value of each number of a shown line.

    Allowed are the tolerance and half a unit of the last digit to both sides; standard errors if one is shown;
    and for a number after "within" everything up to it.
    """
    numbers = list(NUMBER.finditer(line))
    found = []
    for number, after in zip(numbers, [*numbers[1:], None], strict=False):
        value, unit = _value(number[0])
        slack = tolerance * abs(value) + 0.501 * unit
        before = line[: number.start()].rstrip()
        if after and line[number.end() : after.start()].strip() == "±":
            slack = max(slack, STANDARD_ERRORS * _value(after[0])[0])
        elif before.endswith("±"):
            slack = max(slack, value)  # a standard error is itself an estimate
        found.append(
            (0.0 if before.endswith("within") else value - slack, value + slack)
        )
    return found


@contextlib.contextmanager
def in_empty_folder(folder: Path) -> Any:
    """Work in an empty folder that contains the examples."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    before, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
