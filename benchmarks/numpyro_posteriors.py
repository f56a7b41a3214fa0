"""Seconds to make a posterior of a NumPyro model, beside a first NUTS run of that
model.

    python -m benchmarks.numpyro_posteriors [MODEL …]

Both are measured from a cold start: each model has a process of its own, in which
nothing has been compiled yet, and the data are synthetic. NUTS draws 200 samples after
as many for warm-up, by one chain. A ratio below 1 means that the posterior is ready
before such a run is.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from rich.table import Table

import wflmc

EXAMPLES = 600
DEVICES = 10
GROUPS = 8
DRAWS = 200
"""Samples of NUTS, and of its warm-up."""

Data = dict[str, np.ndarray]


class Case(NamedTuple):
    """A NumPyro model and its synthetic data."""

    model: Callable[..., None]
    data: Data


def coefficients(features: np.ndarray, scale: float) -> jax.Array:
    """Sample a coefficient per column from N(0, scale²)."""
    prior = dist.Normal(0.0, scale).expand([features.shape[1]]).to_event(1)
    return numpyro.sample("coefficients", prior)


def linear(x: np.ndarray, y: np.ndarray) -> None:
    """Model a linear regression with unknown noise."""
    mean = x @ coefficients(x, 1.0)
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("examples", len(y)):
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y)


def logistic(x: np.ndarray, y: np.ndarray) -> None:
    """Model a logistic regression."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 2.0))
    logits = intercept + x @ coefficients(x, 1.0)
    with numpyro.plate("examples", len(y)):
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def counts(x: np.ndarray, y: np.ndarray) -> None:
    """Model a Poisson regression."""
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 1.0))
    rate = jnp.exp(intercept + x @ coefficients(x, 0.5))
    with numpyro.plate("examples", len(y)):
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def hierarchical(group: np.ndarray, y: np.ndarray) -> None:
    """Model groups whose means have a common mean and spread, written by offsets."""
    center = numpyro.sample("center", dist.Normal(0.0, 1.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    standard = dist.Normal(0.0, 1.0).expand([GROUPS]).to_event(1)
    offsets = numpyro.sample("offsets", standard)
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    means = center + spread * offsets
    with numpyro.plate("examples", len(y)):
        numpyro.sample("y", dist.Normal(means[group], sigma), obs=y)


def cases() -> dict[str, Case]:
    """Return the models with data drawn from known parameters."""
    rng = np.random.default_rng(0)
    narrow = rng.normal(size=(EXAMPLES, 2))
    wide = rng.normal(size=(EXAMPLES, 20))
    group = rng.integers(0, GROUPS, EXAMPLES)
    noise = rng.normal(size=EXAMPLES)
    success_probability = 1 / (1 + np.exp(-wide[:, 0]))
    success = (rng.random(EXAMPLES) < success_probability).astype(float)
    count = rng.poisson(np.exp(0.3 * narrow[:, 0])).astype(float)
    group_means = rng.normal(size=GROUPS)
    return {
        "linear, 3 parameters": Case(
            linear,
            {"x": narrow, "y": narrow @ [1.0, -1.0] + noise},
        ),
        "linear, 21 parameters": Case(linear, {"x": wide, "y": wide[:, 0] + noise}),
        "logistic, 21 parameters": Case(logistic, {"x": wide, "y": success}),
        "Poisson, 3 parameters": Case(counts, {"x": narrow, "y": count}),
        "hierarchical, 11 parameters": Case(
            hierarchical,
            {"group": group, "y": group_means[group] + noise},
        ),
    }


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes, by the clock."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(case: Case) -> tuple[float, float]:
    """Return seconds of `from_numpyro` and of a NUTS run, in this process."""
    ours = seconds_of(
        lambda: wflmc.from_numpyro(case.model, case.data, devices=DEVICES)
    )
    nuts = MCMC(
        NUTS(case.model),
        num_warmup=DRAWS,
        num_samples=DRAWS,
        progress_bar=False,
    )
    rival = seconds_of(lambda: nuts.run(jax.random.key(0), **case.data))
    return ours, rival


def measure_cold(name: str) -> tuple[float, float]:
    """Return what `measure` does, in a process that has compiled nothing."""
    command = [sys.executable, "-m", "benchmarks.numpyro_posteriors", "--cold", name]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    ours, rival = result.stdout.split()[-2:]
    return float(ours), float(rival)


def against_nuts(names: list[str] | None = None) -> Table:
    """Return seconds of both and their ratio, for every model or those named."""
    table = Table(title="A posterior of a NumPyro model, and a first NUTS run of it")
    for column in ("model", "from_numpyro", f"NUTS, {DRAWS} + {DRAWS}", "ratio"):
        table.add_column(column, justify="right")
    for name in names or list(cases()):
        ours, rival = measure_cold(name)
        table.add_row(name, f"{ours:.2f} s", f"{rival:.2f} s", f"{ours / rival:.2f}")
    return table


def main() -> None:
    """Print the table, or two numbers for one model in this process."""
    from rich import print as show

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="all of them if none is named")
    parser.add_argument("--cold", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cold:
        print(*measure(cases()[options.cold]))
    else:
        show(against_nuts(options.models))


if __name__ == "__main__":
    main()
