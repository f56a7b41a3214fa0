"""`make bench`: every figure is a ratio, both sides measured in turns in this run."""

from __future__ import annotations

import argparse
import os

# One thread: OpenBLAS threads spin on small matrices, for both sides of the comparison.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import platform
from importlib.metadata import version

from rich.console import Console

from benchmarks import planning, sampling


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes only, for a look in a minute")
    quick = parser.parse_args().quick
    console = Console(width=120)
    names = ("jax", "numpy", "scipy", "cvxpy", "clarabel")
    console.print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    console.print(", ".join(f"{name} {version(name)}" for name in names))
    console.print(planning.against_cvxpy([(100, 30, 15)] if quick else [(100, 30, 25), (1000, 300, 3)]))
    console.print(planning.growth(1000 if quick else 10_000))
    console.print(sampling.against_loops())


if __name__ == "__main__":
    main()
