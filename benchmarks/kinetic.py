"""Rounds and privacy that overdamped and kinetic dynamics need, by their exact laws:
python -m benchmarks.kinetic.

A Gaussian posterior with curvatures from 1 to 1000; all devices send, and both dynamics
have the best step (and friction) of a grid.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import wflmc
from wflmc.dynamics import Dynamics, kinetic, overdamped
from wflmc.posterior import GaussianPosterior, w2_squared

Array = NDArray[np.float64]


class Choice(NamedTuple):
    """A step and its dynamics, with steps and friction over 1/L, 1/√L and √μ for
    tables.
    """

    step: float
    dynamics: Dynamics
    name: str


def setting(kappa: float = 1000.0) -> GaussianPosterior:
    """Five parameters with curvatures from 1 to κ in random directions, and a prior ten
    times as wide as the widest.
    """
    generator = np.random.default_rng(0)
    turn, _ = np.linalg.qr(generator.standard_normal((5, 5)))
    X = np.sqrt(np.geomspace(1, kappa, 5) - 0.01)[:, None] * turn
    y = X @ generator.standard_normal(5)
    return wflmc.gaussian_regression(
        jax.random.key(0), 5, X=X, y=y, prior_std=10.0, partition="blocks"
    )


def choices(posterior: GaussianPosterior, velocity: bool) -> Iterator[Choice]:
    """The grid."""
    if not velocity:
        for part in np.geomspace(0.03, 1.95, 16):
            yield Choice(part / posterior.L, overdamped(), f"η = {part:.2g}/L")
        return
    for part in (0.5, 1.0, 1.5, 1.95):
        for friction in (0.5, 1.0, 2.0, 4.0, 10.0, 30.0, 100.0):
            name = f"h = {part:.3g}/√L, γ = {friction:.2g}√μ"
            yield Choice(
                part / posterior.L**0.5, kinetic(friction * posterior.mu**0.5), name
            )


def distances(
    posterior: GaussianPosterior, choice: Choice, rounds: int, a: float = np.inf
) -> Array:
    """W2² after every round, with gains α² = a N0 in all of them; the server adds what
    the channel leaves out.
    """
    noise = max(
        choice.dynamics.langevin_noise(choice.step),
        choice.dynamics.kick(choice.step) ** 2 / a,
    )
    law = posterior.law(
        np.full(rounds, choice.step),
        np.ones((rounds, 5)),
        np.full(rounds, noise),
        dynamics=choice.dynamics,
    )
    return w2_squared(law, posterior.exact)


def rounds_needed(posterior: GaussianPosterior) -> Table:
    """Rounds to a distance at the Langevin caps, and the loss over ℓ² that they take."""
    table = Table(
        title="Rounds to a given W2², and the privacy loss they take at the caps, over ℓ²"
    )
    for name in (
        "W2²",
        "overdamped",
        "rounds",
        "loss/ℓ²",
        "kinetic",
        "rounds",
        "loss/ℓ²",
        "rounds saved",
    ):
        table.add_column(name, justify="right")
    runs = {
        velocity: {
            c: distances(posterior, c, 600 if velocity else 12_000)
            for c in choices(posterior, velocity)
        }
        for velocity in (False, True)
    }
    for target in (1e-1, 1e-2, 1e-3, 1e-4):
        cells, counts = [f"{target:g}"], []
        for found in runs.values():
            reached = {
                c: int(np.argmax(d <= target)) + 1
                for c, d in found.items()
                if d.min() <= target
            }
            best = min(reached, key=lambda c: reached[c])
            counts.append(reached[best])
            loss = reached[best] * best.dynamics.noise_step(best.step)
            cells += [best.name, str(reached[best]), f"{loss:.2f}"]
        table.add_row(*cells, f"{counts[0] / counts[1]:.0f}×")
    return table


def at_a_budget(posterior: GaussianPosterior) -> Table:
    """The best distance that a budget allows, with its loss in equal parts over the
    best number of rounds.
    """
    table = Table(
        title="The best W2² of a privacy budget R, and the fewest rounds within 5 % of it"
    )
    for name in ("R/ℓ²", "overdamped W2²", "rounds", "kinetic W2²", "rounds"):
        table.add_column(name, justify="right")
    for budget in (0.1, 0.5, 1.0, 3.0, 10.0):
        cells = [f"{budget:g}"]
        for velocity in (False, True):
            counts = np.unique(
                np.geomspace(4, 600 if velocity else 8000, 22).astype(int)
            )
            best = {
                int(n): min(
                    distances(posterior, c, n, budget / (2 * n))[-1]
                    for c in choices(posterior, velocity)
                )
                for n in counts
            }
            least = min(best.values())
            fewest = min(n for n, value in best.items() if value <= 1.05 * least)
            cells += [f"{least:.3g}" if least > 1e-12 else "< 1e-12", str(fewest)]
        table.add_row(*cells)
    return table


def draw(posterior: GaussianPosterior, path: str) -> None:
    """W2² over the rounds, at the steps that are best for 0.01."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    root, low = posterior.L**0.5, posterior.mu**0.5
    shown = [
        (Choice(1.4 / posterior.L, overdamped(), "overdamped, η = 1.4/L"), "#0072B2"),
        (Choice(0.4 / posterior.L, overdamped(), "overdamped, η = 0.4/L"), "#56B4E9"),
        (
            Choice(1 / root, kinetic(2 * low), "kinetic, h = 1/√L, friction 2√μ"),
            "#E69F00",
        ),
        (
            Choice(1.95 / root, kinetic(2 * low), "kinetic, h = 1.95/√L, friction 2√μ"),
            "#D55E00",
        ),
    ]
    for choice, color in shown:
        values = distances(
            posterior, choice, 400 if choice.dynamics.has_velocity else 5000
        )
        axes.loglog(
            np.arange(1, values.size + 1),
            np.maximum(values, 1e-12),
            color=color,
            label=choice.name,
        )
    axes.set(
        xlabel="round",
        ylabel="W2² (exact law)",
        ylim=(1e-8, None),
        title="Curvatures from 1 to 1000",
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower left")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--plot", metavar="FILE", help="draw W2² over the rounds into this file"
    )
    options = parser.parse_args()
    posterior, console = setting(), Console(width=140)
    console.print(rounds_needed(posterior))
    console.print(at_a_budget(posterior))
    if options.plot:
        draw(posterior, options.plot)


if __name__ == "__main__":
    main()
