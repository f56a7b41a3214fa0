"""Softmax rounds of 1, 4, 26 and 150 chains, against the arithmetic in them and others.

    python -m benchmarks.one_chain [CHAINS …]

The reference is what remains of a round when all that is not arithmetic is free:
logits[chain, class, row], softmax over classes, one product back, on pooled data in
blocks of rows, the best of several sizes. No devices, no clipping, no noise. BlackJAX's
kernel has pooled data as well. JAX-Privacy clips records of pooled data, for one chain;
its best microbatch counts. All are called in turns, and the shortest call counts.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import blackjax
import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
from rich.table import Table

import wflmc
from benchmarks.mnist import setting
from wflmc import channel
from wflmc.posterior import SoftmaxPosterior

CHAINS = (1, 4, 26, 150)
BLOCKS_OF_ROWS = (400, 1200, 6000, 12_000)
MICROBATCHES = (50, 200, 1000)
EXAMPLE_CLIP = 3.0
SECONDS_IN_TURNS = 12.0
"""How long all calls for one number of chains are repeated."""

Call = Callable[[], object]


class Problem(NamedTuple):
    """The posterior, its pooled data, and how long its chains are."""

    posterior: SoftmaxPosterior
    data_name: str
    features: jax.Array
    """u[N, d]."""
    labels: jax.Array
    """[N]."""
    chains: int

    @property
    def rounds(self) -> int:
        """Rounds of one call: fewer with many chains."""
        return 200 if self.chains < 10 else 20

    @property
    def theta(self) -> jax.Array:
        """Where chains start, [chain, C, d]."""
        classes = self.posterior.classes
        shape = (self.chains, classes, self.features.shape[1])
        draws = np.random.default_rng(0).standard_normal(shape)
        return jnp.asarray(0.01 * draws, jnp.float32)


def load(chains: int) -> Problem:
    """Return MNIST where it is at hand, else synthetic data of its size."""
    posterior, name = setting()
    rows = posterior.features.reshape(-1, posterior.features.shape[-1])
    return Problem(
        posterior=posterior,
        data_name=name,
        features=jnp.asarray(rows, jnp.float32),
        labels=jnp.asarray(posterior.labels.ravel(), jnp.int32),
        chains=chains,
    )


def ours(problem: Problem, example_clip: float | None) -> Call:
    """Return a whole call of `wflmc.sample`."""
    posterior = problem.posterior
    privacy = wflmc.Privacy(epsilon=50, delta=0.1, clip=300)
    if example_clip is not None:
        privacy = wflmc.Privacy(
            epsilon=50,
            delta=0.1,
            clip=300,
            example_clip=example_clip,
            unit="record",
        )
    plan = wflmc.plan(
        posterior,
        wflmc.Link(channel.rayleigh(1e-4), snr_db=20),
        privacy,
        step_size=0.4 / (posterior.mu + posterior.L),
        burn_in=problem.rounds - 1,
        samples=1,
        policy=wflmc.Policy(objective="average"),
        initial_w2_sq=0.0,
    )
    key = jax.random.key(0)
    return partial(wflmc.sample, key, posterior, plan, problem.chains)


def reference(problem: Problem, block: int) -> Call:
    """Return the arithmetic of as many rounds, in blocks of rows."""
    theta = problem.theta
    chains, classes, dim = theta.shape
    blocks = problem.features.reshape(-1, block, dim)

    @jax.jit
    def run(theta: jax.Array, blocks: jax.Array) -> jax.Array:
        def add(total: jax.Array, rows: jax.Array) -> tuple[jax.Array, None]:
            flat = total[1].reshape(-1, dim) @ rows.T
            logits = flat.reshape(chains, classes, block)
            raised = jnp.exp(logits - logits.max(1, keepdims=True))
            p = raised / raised.sum(1, keepdims=True)
            gradient = (p.reshape(-1, block) @ rows).reshape(theta.shape)
            return (total[0] + gradient, total[1]), None

        def one_round(theta: jax.Array, _: None) -> tuple[jax.Array, None]:
            (total, _), _ = jax.lax.scan(add, (jnp.zeros_like(theta), theta), blocks)
            return theta - 1e-9 * total, None  # so that no round can be left out

        return jax.lax.scan(one_round, theta, None, length=problem.rounds)[0]

    return lambda: run(theta, blocks).block_until_ready()


def blackjax_rounds(problem: Problem) -> Call:
    """Return as many steps of BlackJAX's SGLD kernel with all data as its batch."""
    theta = problem.theta.reshape(problem.chains, -1)
    batch = (problem.features, problem.labels)

    def log_density(theta: jax.Array, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        features, labels = batch
        logits = features @ theta.reshape(-1, features.shape[1]).T
        log_p = jax.nn.log_softmax(logits)
        likelihood = jnp.take_along_axis(log_p, labels[:, None], 1).sum()
        return likelihood - 0.5 * theta @ theta

    sampler = blackjax.sgld(jax.grad(log_density))

    @jax.jit
    def run(theta: jax.Array, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        def one_round(theta: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
            round_key = jax.random.fold_in(jax.random.key(0), index)
            keys = jax.random.split(round_key, len(theta))
            step = jax.vmap(lambda key, start: sampler.step(key, start, batch, 1e-6))
            return step(keys, theta), None

        return jax.lax.scan(one_round, theta, jnp.arange(problem.rounds))[0]

    return lambda: run(theta, batch).block_until_ready()


def jax_privacy_rounds(problem: Problem, microbatch: int) -> Call:
    """Return as many clipped gradients of JAX-Privacy, for one chain."""
    theta = problem.theta[0]
    batch = (problem.features, problem.labels)

    def loss(theta: jax.Array, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        features, labels = batch
        log_p = jax.nn.log_softmax(features @ theta.T)
        return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], 1))

    clipped = jax_privacy.clipped_grad(
        loss,
        l2_clip_norm=EXAMPLE_CLIP,
        microbatch_size=microbatch,
    )

    @jax.jit
    def run(theta: jax.Array, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        def one_round(theta: jax.Array, _: None) -> tuple[jax.Array, None]:
            return theta - 1e-9 * clipped(theta, batch), None

        return jax.lax.scan(one_round, theta, None, length=problem.rounds)[0]

    return lambda: run(theta, batch).block_until_ready()


def calls(problem: Problem) -> dict[str, Call]:
    """Return what is measured, by name; names that begin alike are tries of one thing."""
    timed = {f"reference {size}": reference(problem, size) for size in BLOCKS_OF_ROWS}
    timed["device clip"] = ours(problem, None)
    timed["record clip"] = ours(problem, EXAMPLE_CLIP)
    timed["BlackJAX"] = blackjax_rounds(problem)
    if problem.chains == 1:
        for size in MICROBATCHES:
            timed[f"JAX-Privacy {size}"] = jax_privacy_rounds(problem, size)
    return timed


def shortest(timed: dict[str, Call]) -> dict[str, float]:
    """Return the seconds of the shortest call of each, all of them called in turns."""
    for call in timed.values():
        call()
    seconds = dict.fromkeys(timed, np.inf)
    end = time.perf_counter() + SECONDS_IN_TURNS
    while time.perf_counter() < end:
        for name, call in timed.items():
            began = time.perf_counter()
            call()
            seconds[name] = min(seconds[name], time.perf_counter() - began)
    return seconds


def best_try(seconds: dict[str, float], name: str) -> float | None:
    """Return the shortest of the tries of one thing; None where there are none."""
    return min(
        (value for key, value in seconds.items() if key.startswith(name)), default=None
    )


def few_chains(numbers: tuple[int, ...] = CHAINS) -> Table:
    """Return microseconds per chain and round, and ratios to the reference."""
    names = ("reference", "device clip", "record clip", "BlackJAX", "JAX-Privacy")
    table = Table()
    table.add_column("chains", justify="right")
    for name in names:
        table.add_column(name, justify="right")
    for chains in numbers:
        problem = load(chains)
        table.title = f"Softmax, {problem.data_name}: µs per chain and round"
        seconds = shortest(calls(problem))
        floor = best_try(seconds, "reference")
        assert floor is not None
        cells = []
        for name in names:
            value = best_try(seconds, name)
            if value is None:
                cells.append("")
                continue
            microseconds = 1e6 * value / (problem.rounds * chains)
            cells.append(f"{microseconds:.0f} ({value / floor:.2f} ×)")
        table.add_row(str(chains), *cells)
    return table


def main() -> None:
    """Print the table."""
    from rich import print as show

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chains", nargs="*", type=int)
    options = parser.parse_args()
    show(few_chains(tuple(options.chains) or CHAINS))


if __name__ == "__main__":
    main()
