"""Refuse code that is harder to read than what has landed.

    python -m scripts.ratchet [ROOT] [--limits FILE] [--update]

The figures of `scripts/house.py` are compared with those in `scripts/house.json`. The
check fails where a figure of the whole package is worse, and names the places: for
counts (assignments of unrelated values, uses of `Any`, everyday names) it prints
`file:line` of every occurrence in the files that have more of them than before.

After an improvement, `--update` writes the better figures, so that nothing is lost
again. It never writes a worse one: whoever has to accept that edits the file by hand,
where a review sees it.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from scripts.house import (
    Figures,
    FileMeasurement,
    Occurrence,
    compute_figures,
    measure_tree,
)

ROOT = Path("src/wflmc")
"""The measured package."""
LIMITS = Path(__file__).with_name("house.json")
"""The committed figures."""
UPDATE_COMMAND = "python -m scripts.ratchet --update"
"""The command that lowers the bar."""
HIGHER_IS_BETTER = frozenset({"args_percent", "docstring_words"})
"""Figures that must not fall; all others must not rise."""
DESCRIPTIONS = {
    "nodes_median": "syntax nodes per statement, median",
    "nodes_90": "syntax nodes per statement, 90 % quantile",
    "pairs": "assignments of unrelated values (a, b = x, y)",
    "any_uses": "uses of typing.Any",
    "everyday": "names that are everyday words",
    "args_percent": "percentage of public functions with Args in the docstring",
    "docstring_words": "words per docstring, median",
}
"""What each figure measures."""
COUNTED = ("pairs", "any_uses", "everyday")
"""Figures that are counts of places in files; the fields of `FileMeasurement`."""

CountsByFile: TypeAlias = dict[str, dict[str, int]]
"""For each figure of `COUNTED`: the number of occurrences by file."""


@dataclass(frozen=True)
class Limits:
    """The figures that must not get worse.

    Args:
        figures: of the whole package.
        counts: the occurrences in every file, to tell which ones are new.
    """

    figures: Figures
    counts: CountsByFile

    @classmethod
    def of(cls, files: list[FileMeasurement]) -> "Limits":
        """Return the limits that measured files just meet."""
        counts = {
            figure: {
                file.path: len(getattr(file, figure))
                for file in files
                if getattr(file, figure)
            }
            for figure in COUNTED
        }
        return cls(figures=compute_figures(files), counts=counts)

    @classmethod
    def read(cls, path: Path) -> "Limits":
        """Read limits from a JSON file."""
        content = json.loads(path.read_text(encoding="utf-8"))
        return cls(figures=Figures(**content["figures"]), counts=content["counts"])

    def write(self, path: Path) -> None:
        """Write limits to a JSON file, one number per line."""
        content = {"figures": self.figures._asdict(), "counts": self.counts}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def is_worse(figure: str, value: float, limit: float) -> bool:
    """Return whether a figure is worse than its limit.

    Args:
        figure: a field of `Figures`.
        value: the measured figure.
        limit: the committed figure.

    Returns:
        Whether it is on the wrong side of the limit; an equal figure is not.
    """
    if figure in HIGHER_IS_BETTER:
        return value < limit
    return value > limit


def worse_figures(figures: Figures, limits: Figures) -> list[str]:
    """Return the names of the figures that are worse than their limits.

    Args:
        figures: as measured.
        limits: as committed.

    Returns:
        The fields of `Figures`, in their order.
    """
    limit_of = limits._asdict()
    return [
        name
        for name, value in figures._asdict().items()
        if is_worse(name, value, limit_of[name])
    ]


def new_places(
    figure: str, files: Iterable[FileMeasurement], counts: CountsByFile, root: Path
) -> Iterator[str]:
    """Yield the places of a count in the files that have more of them than before.

    Args:
        figure: one of `COUNTED`.
        files: the measurements.
        counts: the committed occurrences by file.
        root: the measured package, which begins every place.

    Yields:
        Lines such as `src/wflmc/plan.py:12: a, b = x, y`.
    """
    for file in files:
        occurrences: list[Occurrence] = getattr(file, figure)
        if len(occurrences) > counts[figure].get(file.path, 0):
            in_order = sorted(occurrences, key=lambda occurrence: occurrence.line)
            for name, line in in_order:
                yield f"{root / file.path}:{line}: {name}"


def print_failure(
    figure: str, files: list[FileMeasurement], limits: Limits, root: Path
) -> None:
    """Print a figure that is worse than its limit, and where.

    Args:
        figure: a field of `Figures`.
        files: the measurements.
        limits: as committed.
        root: the measured package.
    """
    value = getattr(compute_figures(files), figure)
    limit = getattr(limits.figures, figure)
    print(f"{DESCRIPTIONS[figure]}: {value:g}, was {limit:g}")
    if figure in COUNTED:
        for place in new_places(figure, files, limits.counts, root):
            print(f"  {place}")


def check(root: Path, limits_path: Path, update: bool) -> bool:
    """Compare the figures of a package with the committed ones, and print the outcome.

    Args:
        root: the folder of the package.
        limits_path: the JSON file with the committed figures.
        update: whether to write better figures to that file.

    Returns:
        Whether no figure is worse.
    """
    files = measure_tree(root)
    measured = Limits.of(files)
    limits = Limits.read(limits_path)
    worse = worse_figures(measured.figures, limits.figures)
    for figure in worse:
        print_failure(figure, files, limits, root)
    if worse:
        print(f"Harder to read than {limits_path} records; see scripts/house.py.")
    elif update:
        measured.write(limits_path)
        print(f"{limits_path} records the figures of {root}.")
    elif measured.figures != limits.figures:
        print(f"Easier to read than before. Record it: {UPDATE_COMMAND}")
    return not worse


def main() -> None:
    """Run the check for the command line; exit with 1 where a figure is worse."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("root", nargs="?", default=ROOT, type=Path)
    parser.add_argument("--limits", default=LIMITS, type=Path, help="committed figures")
    parser.add_argument("--update", action="store_true", help="write better figures")
    options = parser.parse_args()
    passed = check(options.root, options.limits, options.update)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
