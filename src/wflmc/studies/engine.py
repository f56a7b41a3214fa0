"""Running a study: its points one after the other, each kept as soon as it is done.

A point's result is kept in a file named by its content: the study's settings, a digest of its data, and the versions of
this software and of the libraries that compute. An interrupted study goes on where it stopped, one that was done is
read back, and whatever changes a result changes the name.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib
import numpy as np
import scipy

from wflmc.studies.rows import Row
from wflmc.version import __version__

Tables = dict[str, list[Row]]
"""Rows by the name of the table they belong to."""
Progress = Callable[[float], None]
"""Called with how much of the work is done."""
ROOT = Path(__file__).parent.parent
JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
)
NOT_RESULTS = ("cli", "report", "scenario")
"""Parts of the package that do not change what a study computes."""


class Point(NamedTuple):
    """One x value and the schemes measured there; without an x, schemes whose result is the same at every x."""

    x: float | None
    schemes: tuple[str, ...]


class Study(NamedTuple):
    """A figure as work to do."""

    name: str
    points: tuple[Point, ...]
    order: tuple[str, ...]
    """Schemes in the order of the tables."""
    identity: dict[str, Any]
    """All settings and data that decide the results, as plain values."""
    measure: Callable[[Point, Progress], Tables]


def run_study(study: Study, folder: Path | None, progress: Progress, say: Callable[[str], None]) -> Tables:
    """All tables of a study, in order of x and scheme.

    Args:
        progress: called with the number of points done, and parts of them.
        folder: where results of points are kept; None keeps none.
        say: told of kept results that turn out to be damaged.
    """
    found: list[tuple[Point, Tables]] = []
    for index, point in enumerate(study.points):
        key = _key(study, point)
        tables = None if folder is None else _load(_path(folder, key), key, say)
        if tables is None:
            tables = study.measure(point, part_of(progress, index, 1))
            if folder is not None:
                _save(_path(folder, key), key, tables, say)
        found.append((point, tables))
        progress(index + 1)
    return _assemble(study, found)


def part_of(progress: Progress, start: float, size: float) -> Progress:
    """Progress of a part of the work that begins at `start` and is `size` of the whole."""
    return lambda share: progress(start + size * share)


def _assemble(study: Study, found: list[tuple[Point, Tables]]) -> Tables:
    """One list of rows per table; what holds at every x is repeated at every x."""
    xs = [point.x for point, _ in found if point.x is not None]
    result: Tables = {}
    for point, tables in found:
        for name, rows in tables.items():
            at = [row._replace(x=x) for x in xs for row in rows] if point.x is None else rows
            result.setdefault(name, []).extend(at)
    rank = {scheme: index for index, scheme in enumerate(study.order)}
    return {name: sorted(rows, key=lambda row: (row.x, rank.get(row.scheme, 0))) for name, rows in result.items()}


def digest(*trees: Any) -> str:
    """SHA-256 of the numbers in some trees of arrays."""
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(trees):
        array = np.ascontiguousarray(leaf)
        total.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return total.hexdigest()


@cache
def _software() -> dict[str, str]:
    """What computes: versions, a digest of this package's sources, and the kind of processor."""
    total = hashlib.sha256()
    for path in sorted(ROOT.rglob("*.py")):
        if path.relative_to(ROOT).parts[0] not in NOT_RESULTS:
            total.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    libraries = {lib.__name__: lib.__version__ for lib in (jax, jaxlib, np, scipy)}
    settings = {name: str(getattr(jax.config, name)) for name in JAX_SETTINGS}
    backend = {"kind": jax.default_backend(), "count": str(jax.device_count())}
    return {"wflmc": __version__, "sources": total.hexdigest(), **backend, **libraries, **settings}


def _key(study: Study, point: Point) -> str:
    content = {"study": study.name, "point": point, "identity": study.identity, "software": _software()}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _path(folder: Path, key: str) -> Path:
    return folder / key[:2] / f"{key}.json"


def _load(path: Path, key: str, say: Callable[[str], None]) -> Tables | None:
    """The tables kept in a file, or None where there is none or it is damaged."""
    try:
        content = json.loads(path.read_bytes())
        tables = content["tables"]
        if content["check"] != _check(key, tables):
            raise ValueError("check sum")
        return {name: [Row(*row) for row in rows] for name, rows in tables.items()}
    except FileNotFoundError:
        return None
    except OSError as error:
        say(f"{path} cannot be read ({error.strerror}); its point is computed again.")
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        say(f"{path} is damaged; its point is computed again.")
        return None


def _save(path: Path, key: str, tables: Tables, say: Callable[[str], None]) -> None:
    """Write whole or not at all, so that neither an interrupt nor another run leaves half a file."""
    plain = {name: [list(row) for row in rows] for name, rows in tables.items()}
    part = path.with_suffix(f".{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(f"{path.stem}.*.part"):  # of a run that was killed while it wrote
            if time.time() - old.stat().st_mtime > 3600:
                old.unlink(missing_ok=True)
        part.write_text(json.dumps({"check": _check(key, plain), "tables": plain}), encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        say(f"{path} cannot be written ({error.strerror}): this point would have to be computed again.")


def _check(key: str, tables: dict[str, Any]) -> str:
    return hashlib.sha256((key + json.dumps(tables, sort_keys=True)).encode()).hexdigest()
