"""Noise-aware intervals of NumPyro models: python -m benchmarks.noise_aware_numpyro
[coverage clip start own].

A regression y ~ Normal(a + b x, sigma) of 1000 records on 20 devices, under (ε, 1e-5)
for a record (adjacency `replace`), Rayleigh fading of power 1 at 40 dB. Plans are those
of `wflmc.plan` with its defaults, one chain for each data set. All data sets have the
same true parameters. Chains move in the coordinates that `from_numpyro` finds by pilot
chains on a data set of its own, which stands for public data (`own`: on every data set
itself).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import wflmc
from wflmc.evaluation.conditioning import central_interval
from wflmc.posterior import CustomPosterior

Array = NDArray[np.float64]

RECORDS, DEVICES, DATA_SETS, OWN_DATA_SETS = 1000, 20, 400, 60
EPSILONS, LEVELS = (2.0, 4.0, 8.0), (0.9, 0.5)
TRUTH = {"a": 1.0, "b": 2.0, "sigma": 0.5}
CLIP = 0.3
"""c of the promise, in the pilot's coordinates: some five times the root mean square of
a record's gradient there.
"""
CLIPS = (0.3, 0.2, 0.15, 0.1)
LINK = wflmc.Link(wflmc.channel.rayleigh(power=1.0), snr_db=40)
WEIGHTS = np.array([0.5, 1.5, -1.0])
"""Of the logistic regression of `start`."""


def regression(x: Any, y: Any) -> None:
    """Run the NumPyro model of a regression with an unknown scale."""
    a = numpyro.sample("a", dist.Normal(0, 5))
    b = numpyro.sample("b", dist.Normal(0, 5))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    with numpyro.plate("records", len(x)):
        numpyro.sample("y", dist.Normal(a + b * x, sigma), obs=y)


def simulate_regression(rng: np.random.Generator) -> dict[str, Array]:
    """Return one data set of the regression."""
    x = rng.standard_normal(RECORDS)
    return {
        "x": x,
        "y": TRUTH["a"]
        + TRUTH["b"] * x
        + TRUTH["sigma"] * rng.standard_normal(RECORDS),
    }


def public_posterior() -> CustomPosterior:
    """Return the posterior of public data, whose coordinates and constants all others
    take.
    """
    return wflmc.from_numpyro(
        regression, simulate_regression(np.random.default_rng(0)), devices=DEVICES
    )


def with_records(
    posterior: CustomPosterior, records: dict[str, Array]
) -> CustomPosterior:
    """Return the same model and coordinates with other records: as
    `preconditioner=posterior`, but nothing traced.
    """
    held = {name: values.reshape(DEVICES, -1) for name, values in records.items()}
    return replace(posterior, data={**posterior.data, **held})


def private_plan(
    posterior: CustomPosterior, epsilon: float, clip: float = CLIP
) -> wflmc.Plan:
    """Return the default plan at ε for a record."""
    privacy = wflmc.Privacy(
        epsilon=epsilon, delta=1e-5, clip=2.0, unit="record", example_clip=clip
    )
    return wflmc.plan(posterior, LINK, privacy)


class Outcome(NamedTuple):
    """What the intervals of one data set hold, and how wide they are."""

    held: Array
    """By noise-aware intervals, 0 or 1, [level, parameter]."""
    chain_held: Array
    """By the chain's own intervals, [level, parameter]."""
    width: Array
    """Of the 90 % intervals, [parameter]."""
    clipped: float
    """The share of records whose gradient is clipped at the last draw."""


def holds(intervals: Iterable[tuple[Array, Array]], truth: Array) -> Array:
    """Return 1 where an interval holds the truth, else 0, [parameter]."""
    pairs = zip(intervals, truth, strict=True)
    return np.array([float(low[0] < value < high[0]) for (low, high), value in pairs])


def evaluate_data_set(
    posterior: CustomPosterior, plan: wflmc.Plan, number: int
) -> Outcome:
    """Run one chain on a posterior, and look at the intervals of its sites."""
    trace = wflmc.sample(
        jax.random.key(number), posterior, plan, chains=1, transcript=True
    )
    result = wflmc.noise_aware(trace, posterior)
    truth = np.array([*TRUTH.values()])
    aware = [
        [result.interval_by_site(level)[name] for name in TRUTH] for level in LEVELS
    ]
    values = posterior.unflatten(trace.theta)
    chain = [
        [central_interval(values[name], level) for name in TRUTH] for level in LEVELS
    ]
    norms = posterior.example_norms(trace.theta[:, -1])
    return Outcome(
        held=np.stack([holds(intervals, truth) for intervals in aware]),
        chain_held=np.stack([holds(intervals, truth) for intervals in chain]),
        width=np.array([float((high - low)[0]) for low, high in aware[0]]),
        clipped=float(np.mean(norms > plan.example_clip[0])),
    )


def posterior_widths(posterior: CustomPosterior) -> Array:
    """Return the widths of the 90 % intervals of the public data's own posterior,
    without any noise, [parameter].
    """
    rng = np.random.default_rng(0)
    phi = rng.standard_normal((1, 20_000, posterior.dim))
    values = posterior.unflatten(posterior.parameters(phi))
    ends = [central_interval(values[name], LEVELS[0]) for name in TRUTH]
    return np.array([float((high - low)[0]) for low, high in ends])


def new_table(title: str, first: str) -> Table:
    """Return a table for `add_outcomes`."""
    table = Table(title=title)
    names = (
        "rounds",
        "chain 90 %",
        "50 %",
        "noise-aware 90 %",
        "s.e.",
        "50 %",
        "s.e.",
        *TRUTH,
        "width",
        "clipped",
    )
    for name in (first, *names):
        table.add_column(name, justify="right")
    return table


def add_outcomes(
    table: Table, name: str, plan: wflmc.Plan, outcomes: list[Outcome], widths: Array
) -> None:
    """Add the means over data sets as a row; standard errors are over data sets."""
    held = np.stack([outcome.held for outcome in outcomes])
    chain = np.stack([outcome.chain_held for outcome in outcomes])
    error = held.mean(2).std(0) / len(outcomes) ** 0.5
    mean = 100 * held.mean((0, 2))
    width = np.mean([outcome.width / widths for outcome in outcomes])
    table.add_row(
        name,
        f"{plan.burn_in} + {len(plan.gain) - plan.burn_in}",
        *(f"{share:.1f}" for share in 100 * chain.mean((0, 2))),
        *(
            cell
            for level in range(2)
            for cell in (f"{mean[level]:.1f}", f"{100 * error[level]:.1f}")
        ),
        *(f"{share:.1f}" for share in 100 * held[:, 0].mean(0)),
        f"{width:.2f}",
        f"{100 * np.mean([outcome.clipped for outcome in outcomes]):.2f} %",
    )


def run_data_sets(posterior: CustomPosterior, plan: wflmc.Plan) -> list[Outcome]:
    """Return the outcomes of all data sets, with the coordinates of public data."""
    outcomes = []
    for number in range(DATA_SETS):
        records = simulate_regression(np.random.default_rng((1, number)))
        outcomes.append(
            evaluate_data_set(with_records(posterior, records), plan, number)
        )
    return outcomes


def coverage() -> Table:
    """Return what intervals hold at every ε."""
    table = new_table(
        f"Intervals by site over {DATA_SETS} data sets, per cent; widths over the posterior's",
        "ε",
    )
    posterior = public_posterior()
    for epsilon in EPSILONS:
        plan = private_plan(posterior, epsilon)
        add_outcomes(
            table,
            f"{epsilon:g}",
            plan,
            run_data_sets(posterior, plan),
            posterior_widths(posterior),
        )
    return table


def clip() -> Table:
    """Return the same at ε = 4 for other clips of a record's gradient."""
    table = new_table(
        f"ε = 4, by the clip of a record, over {DATA_SETS} data sets", "c"
    )
    posterior = public_posterior()
    for limit in CLIPS:
        plan = private_plan(posterior, 4.0, limit)
        add_outcomes(
            table,
            f"{limit:g}",
            plan,
            run_data_sets(posterior, plan),
            posterior_widths(posterior),
        )
    return table


def own() -> Table:
    """Return the same with the defaults of `from_numpyro`: pilot chains on every data
    set itself.
    """
    table = new_table(
        f"Coordinates by pilot chains on each of {OWN_DATA_SETS} data sets itself", "ε"
    )
    outcomes: dict[float, list[Outcome]] = {epsilon: [] for epsilon in EPSILONS}
    for number in range(OWN_DATA_SETS):
        records = simulate_regression(np.random.default_rng((1, number)))
        posterior = wflmc.from_numpyro(regression, records, devices=DEVICES)
        for epsilon in EPSILONS:
            outcomes[epsilon].append(
                evaluate_data_set(posterior, private_plan(posterior, epsilon), number)
            )
    for epsilon in EPSILONS:
        widths = posterior_widths(posterior)
        add_outcomes(
            table,
            f"{epsilon:g}",
            private_plan(posterior, epsilon),
            outcomes[epsilon],
            widths,
        )
    return table


def simulate_labels(rng: np.random.Generator) -> tuple[Array, Array]:
    """Return features[n, 3] and labels[n] of the logistic regression."""
    features = np.column_stack(
        [np.ones(2 * RECORDS), rng.standard_normal((2 * RECORDS, 2))]
    )
    chance = 1 / (1 + np.exp(-features @ WEIGHTS))
    return features, (rng.random(2 * RECORDS) < chance).astype(float)


def log_likelihood(weights: Any, record: Any) -> Any:
    """Return log p(label|weights, features) of one record."""
    features, label = record
    return label * (features @ weights) - jnp.logaddexp(0.0, features @ weights)


def log_prior(weights: Any) -> Any:
    """Return log p(weights) of a normal prior with standard deviation 2, up to a
    constant.
    """
    return -jnp.sum(weights**2) / 8


def start() -> Table:
    """Return the same for a logistic regression whose chains start far from the
    posterior, in its plain parameters.
    """
    table = Table(
        title=f"A logistic regression of {2 * RECORDS} records, 15 + 15 rounds, over {DATA_SETS} data sets"
    )
    for name in ("start", "ε", "chain 90 %", "noise-aware 90 %", "s.e."):
        table.add_column(name, justify="right")
    for value in (0.0, -1.5):
        first = simulate_labels(np.random.default_rng(0))
        initial = jnp.full(3, value)
        posterior = wflmc.posterior_from(
            log_likelihood, log_prior, first, initial=initial, devices=DEVICES
        )
        for epsilon in EPSILONS:
            chain, held = logistic_coverage(posterior, epsilon)
            error = held.mean(1).std() / DATA_SETS**0.5
            shares = (chain.mean(), held.mean(), error)
            table.add_row(
                f"{value:g}",
                f"{epsilon:g}",
                *(f"{100 * share:.1f}" for share in shares),
            )
    return table


def logistic_coverage(
    posterior: CustomPosterior, epsilon: float
) -> tuple[Array, Array]:
    """Return what 90 % intervals of the chain and noise-aware ones hold, each [data
    set, parameter].
    """
    privacy = wflmc.Privacy(
        epsilon=epsilon, delta=1e-5, clip=400.0, unit="record", example_clip=3.0
    )
    step_size = 0.4 / (posterior.mu + posterior.L)
    plan = wflmc.plan(
        posterior, LINK, privacy, step_size=step_size, burn_in=15, samples=15
    )
    chain, held = [], []
    for number in range(DATA_SETS):
        features, labels = simulate_labels(np.random.default_rng((1, number)))
        records = features.reshape(DEVICES, -1, 3), labels.reshape(DEVICES, -1)
        data_set = replace(posterior, data=records)
        trace = wflmc.sample(
            jax.random.key(number), data_set, plan, chains=1, transcript=True
        )
        result = wflmc.noise_aware(trace, data_set, draws=1)
        intervals = central_interval(trace.theta, LEVELS[0]), result.interval(LEVELS[0])
        for hits, (lower, upper) in zip((chain, held), intervals, strict=True):
            hits.append(((lower < WEIGHTS) & (upper > WEIGHTS))[0])
    return np.array(chain, dtype=float), np.array(held, dtype=float)


STUDIES: dict[str, Callable[[], Table]] = {
    "coverage": coverage,
    "clip": clip,
    "start": start,
    "own": own,
}


def main() -> None:
    """Print the tables that are asked for; all but `own`, which takes a quarter of an
    hour, by default.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "studies", nargs="*", help=f"which tables: {', '.join(STUDIES)}"
    )
    options = parser.parse_args()
    for name in options.studies or [name for name in STUDIES if name != "own"]:
        Console(width=170).print(STUDIES[name]())


if __name__ == "__main__":
    main()
