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

from benchmarks import (
    advice,
    few_chains,
    growth,
    mnist,
    numpyro_posteriors,
    one_chain,
    own_models,
    planning,
    sampling,
    scale,
)

WIDE_TABLE = 180
"""Columns of the table with most of them."""


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes only, for a look in a minute"
    )
    parser.add_argument("--save", metavar="FILE", help="keep the tables in this file")
    parser.add_argument("--plot", metavar="FILE", help="draw the ratios into this file")
    options = parser.parse_args()
    quick = options.quick
    console = Console(width=120, record=True)
    names = ("jax", "numpy", "scipy", "cvxpy", "clarabel", "blackjax", "jax-privacy")
    console.print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    console.print(", ".join(f"{name} {version(name)}" for name in names))
    console.print(one_chain.few_chains((1, 4) if quick else one_chain.CHAINS))
    cases_measured = ["gaussian"] if quick else []  # all of them
    console.print(
        few_chains.few_chains(cases_measured, few_chains.CHAINS, repeats=3),
        width=WIDE_TABLE,
    )
    console.print(numpyro_posteriors.against_nuts())
    times, about = mnist.measured_apart()
    console.print(mnist.table(times, about))
    console.print(own_models.own_models())
    console.print(sampling.against_parts())
    console.print(sampling.against_loops())
    if not quick:
        console.print(scale.sizes())
        console.print(growth.exponents())
    compared, ratios = planning.against_cvxpy(
        [(100, 30, 15)] if quick else [(100, 30, 25), (1000, 300, 3)]
    )
    console.print(compared)
    console.print(advice.against_loops((100,) if quick else (100, 1000)))
    console.print(planning.growth(1000 if quick else 10_000))
    if not quick:  # last: its gigabytes would be the peak of all that follows
        console.print(sampling.against_products())
    if options.plot:
        mnist.draw(times, about, ratios, options.plot)
    if options.save:
        console.save_text(options.save)


if __name__ == "__main__":
    main()
