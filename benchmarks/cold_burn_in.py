"""Burn-in colder than the posterior, in the Gaussian study: exact laws beside chains.

    python -m benchmarks.cold_burn_in

The setting is that of figure 6 at 30 dB and ε = 50, where the Langevin cap binds and
budget is left, and the same without a promise. Power is equal in all rounds, up to
their caps. Nothing is timed.
"""

from typing import NamedTuple

import jax
import numpy as np
from rich.table import Table

import wflmc
from wflmc import channel
from wflmc.evaluation import estimate_w2_sq, exact_spread, exact_w2_sq
from wflmc.posterior import GaussianPosterior

TEMPERATURES = (1.0, 0.3, 0.05)
BURN_IN = 50
SAMPLES = 50
CHAINS = 4000
CLIP = 30.0


class Case(NamedTuple):
    """A promise, and what limits the power."""

    name: str
    privacy: wflmc.Privacy
    power: str


CASES = (
    Case("ε = 50", wflmc.Privacy(epsilon=50, delta=0.01, clip=CLIP), "equal"),
    Case("no promise", wflmc.Privacy(clip=CLIP), "no-dp"),
)


def plan_of(posterior: GaussianPosterior, case: Case, temperature: float) -> wflmc.Plan:
    """Return the plan of a case at a temperature of burn-in."""
    return wflmc.plan(
        posterior,
        wflmc.Link(channel.rayleigh(0.01), snr_db=30),
        case.privacy,
        step_size=0.4 / (posterior.mu + posterior.L),
        burn_in=BURN_IN,
        samples=SAMPLES,
        sampler=wflmc.Sampler(burn_in_temperature=temperature),
        policy=wflmc.Policy(power=case.power),
    )


def cold_table() -> Table:
    """Return W2² and spread of the kept rounds, by the exact law and from chains."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
    table = Table(title=f"{BURN_IN} + {SAMPLES} rounds, {CHAINS} chains")
    for column in (
        "case",
        "τ",
        "ε spent",
        "W2² of first, last (exact)",
        "(chains)",
        "variance ratio",
        "(chains)",
        "90 % intervals hold",
    ):
        table.add_column(column, justify="right")
    for case in CASES:
        for temperature in TEMPERATURES:
            plan = plan_of(posterior, case, temperature)
            table.add_row(case.name, f"{temperature:g}", *cells(posterior, plan))
    return table


def cells(posterior: GaussianPosterior, plan: wflmc.Plan) -> list[str]:
    """Return the cells of a plan's row."""
    distances = exact_w2_sq(posterior, plan)[[plan.burn_in, -1]]
    spread = exact_spread(posterior, plan)
    assert spread is not None
    trace = wflmc.sample(jax.random.key(1), posterior, plan, CHAINS)
    ends = np.asarray(trace.theta, dtype=float)[:, [0, -1]]
    measured = estimate_w2_sq(ends, posterior.exact).per_round
    precision = np.linalg.inv(posterior.exact.covariance)
    ratios = [
        np.trace(precision @ np.cov(ends[:, draw].T)) / posterior.dim
        for draw in range(2)
    ]
    epsilon = plan.epsilon_spent if plan.privacy.epsilon is not None else None
    return [
        "" if epsilon is None else f"{epsilon:.3g}",
        ", ".join(f"{distance:.2g}" for distance in distances),
        ", ".join(f"{distance:.2g}" for distance in measured),
        ", ".join(f"{ratio:.3f}" for ratio in spread.variance_ratio),
        ", ".join(f"{ratio:.3f}" for ratio in ratios),
        ", ".join(f"{coverage:.1%}" for coverage in spread.coverage_90),
    ]


def main() -> None:
    """Print the table."""
    from rich import print as show

    show(cold_table())


if __name__ == "__main__":
    main()
