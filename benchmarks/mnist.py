"""The sampler in the paper's MNIST setting, against the floor of its arithmetic and
against other ways to do it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from typing import Any

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

import wflmc
from benchmarks.timing import side_by_side
from wflmc import channel
from wflmc.data import sets as data
from wflmc.posterior.softmax import synthetic_labels
from wflmc.support.errors import InputError

CHAINS, ROUNDS, BLOCK = 150, 20, 400


def setting() -> tuple[Any, str]:
    """12,000 examples of 10 classes and 30 features on 30 devices: MNIST where it is at
    hand, else of its size.
    """
    try:
        features = data.mnist_features(data.load("mnist"), np.random.default_rng(0))
        X, y, name = features.X, features.y, "MNIST"
    except InputError:
        (X, y), name = (
            synthetic_labels(jax.random.key(0), 12_000, 30),
            "synthetic data of MNIST's size",
        )
    return wflmc.softmax_regression(
        jax.random.key(0), 30, X=X, y=y, partition="blocks"
    ), name


def rows_of(posterior: Any) -> tuple[jax.Array, jax.Array]:
    """All features in blocks of rows, [blocks, 400, d], and the sum of the features of
    each class, [d, C].
    """
    X = posterior.features.reshape(-1, posterior.features.shape[-1])
    linear = X.T @ np.eye(posterior.classes)[posterior.labels.ravel()]
    return jnp.asarray(X.reshape(-1, BLOCK, X.shape[1]), jnp.float32), jnp.asarray(
        linear, jnp.float32
    )


@partial(jax.jit, static_argnames="classes")
def floor(rows: jax.Array, theta: jax.Array, classes: int) -> jax.Array:
    """The two matrix products and the exponentials of a round, and nothing else, for
    ROUNDS rounds.
    """
    columns = (
        theta.reshape(len(theta), classes, -1)
        .transpose(2, 1, 0)
        .reshape(rows.shape[-1], -1)
    )

    def one_round(columns: jax.Array, _: None) -> tuple[jax.Array, None]:
        def add(total: jax.Array, u: jax.Array) -> tuple[jax.Array, None]:
            return total + u.T @ jnp.exp(u @ columns), None

        total, _ = jax.lax.scan(add, jnp.zeros_like(columns), rows)
        return columns - 1e-12 * total, None  # so that no round can be left out

    return jax.lax.scan(one_round, columns, None, length=ROUNDS)[0]


@partial(jax.jit, static_argnames="classes")
def plain_langevin(
    key: jax.Array,
    rows: jax.Array,
    linear: jax.Array,
    theta: jax.Array,
    step: float,
    classes: int,
) -> jax.Array:
    """Langevin Monte Carlo on pooled data: no devices, no clipping, no channel, no
    plan.
    """

    def one_round(theta: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        columns = theta.reshape(len(theta), classes, -1).transpose(2, 1, 0)

        def add(total: jax.Array, u: jax.Array) -> tuple[jax.Array, None]:
            logits = (u @ columns.reshape(u.shape[1], -1)).reshape(
                -1, *columns.shape[1:]
            )
            raised = jnp.exp(logits - logits.max(1, keepdims=True))
            p = raised / raised.sum(1, keepdims=True)
            return total + (u.T @ p.reshape(p.shape[0], -1)).reshape(
                columns.shape
            ), None

        total, _ = jax.lax.scan(add, columns - linear[..., None], rows)
        gradient = total.transpose(2, 1, 0).reshape(theta.shape)
        noise = jax.random.normal(jax.random.fold_in(key, index), theta.shape)
        return theta - step * gradient + jnp.sqrt(2 * step) * noise, None

    return jax.lax.scan(one_round, theta, jnp.arange(ROUNDS))[0]


@jax.jit
def blackjax_langevin(
    key: jax.Array, X: jax.Array, y: jax.Array, theta: jax.Array, step: float
) -> jax.Array:
    """BlackJAX's overdamped Langevin kernel with the whole data set as its batch,
    chains by vmap.
    """

    def logdensity(theta: jax.Array, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        features, labels = batch
        logits = features @ theta.reshape(-1, features.shape[1]).T
        return (
            jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).sum()
            - 0.5 * theta @ theta
        )

    sampler = blackjax.sgld(jax.grad(logdensity))

    def one_round(theta: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        keys = jax.random.split(jax.random.fold_in(key, index), len(theta))
        return jax.vmap(lambda k, t: sampler.step(k, t, (X, y), step))(
            keys, theta
        ), None

    return jax.lax.scan(one_round, theta, jnp.arange(ROUNDS))[0]


def numpy_chain(
    posterior: Any, plan: Any, generator: np.random.Generator, rounds: int
) -> np.ndarray:
    """One chain as a first program would write it: a loop over rounds, and one over
    devices.
    """
    classes, devices = posterior.classes, posterior.devices
    labels = np.eye(classes)[posterior.labels]
    theta = generator.standard_normal((classes, posterior.features.shape[-1]))
    for s in range(rounds):
        received = generator.standard_normal(theta.shape)
        for k in range(devices):
            if plan.weight[s, k] > 0:
                logits = posterior.features[k] @ theta.T
                p = np.exp(logits - logits.max(1, keepdims=True))
                p /= p.sum(1, keepdims=True)
                gradient = (p - labels[k]).T @ posterior.features[k] + theta / devices
                received += (
                    plan.gain[s]
                    * gradient
                    * min(1.0, plan.clip[k] / np.linalg.norm(gradient))
                )
        theta = theta - plan.step_size[s] * plan.scale[s] / plan.gain[s] * received
    return theta


NAMES = (
    "floor: two matrix products and the exponentials",
    "wflmc.sample, whole call",
    "plain Langevin on pooled data, same layout",
    "BlackJAX overdamped Langevin, pooled data, vmap",
    "NumPy loop",
)


def measure() -> tuple[np.ndarray, str]:
    """Milliseconds per chain and round of each of NAMES, all in turns, and what the
    data are.
    """
    posterior, name = setting()
    classes, step = posterior.classes, 2 / (posterior.mu + posterior.L)
    plan = wflmc.plan(
        posterior, wflmc.Link(channel.rayleigh(1e-4), snr_db=20), wflmc.Privacy(50, 0.1, 300),
        step_size=step, burn_in=ROUNDS - 1, samples=1, policy=wflmc.Policy(objective="average"), initial_w2_sq=0.0,
    )  # fmt: skip
    rows, linear = rows_of(posterior)
    theta = jnp.asarray(
        np.random.default_rng(0).standard_normal((CHAINS, posterior.dim)), jnp.float32
    )
    X = rows.reshape(-1, rows.shape[-1])
    y = jnp.asarray(posterior.labels.reshape(-1))
    generator, few, short = np.random.default_rng(0), 2, 5
    times = side_by_side(
        lambda: floor(rows, 0.05 * theta, classes).block_until_ready(),
        lambda: wflmc.sample(jax.random.key(0), posterior, plan, CHAINS),
        lambda: plain_langevin(
            jax.random.key(0), rows, linear, theta, step, classes
        ).block_until_ready(),
        lambda: blackjax_langevin(
            jax.random.key(0), X, y, theta, step
        ).block_until_ready(),
        lambda: [numpy_chain(posterior, plan, generator, short) for _ in range(few)],
        repeats=15,
    )
    work = np.array([CHAINS * ROUNDS] * 4 + [few * short])
    each = 1e3 * np.array(times) / work
    return each, name


def measured_apart() -> tuple[np.ndarray, str]:
    """`measure` in a process of its own, with all threads: planning is timed on one."""
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    environment = {
        name: value for name, value in os.environ.items() if name not in threads
    }
    command = [sys.executable, "-m", "benchmarks.mnist"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    )
    each, name = json.loads(done.stdout)
    return np.array(each), name


def table(each: np.ndarray, name: str) -> Table:
    """Times as ratios to the floor and to ours."""
    found = Table(
        title=f"One chain and round, {name}: 12,000 examples, 30 devices, {CHAINS} chains at a time"
    )
    for column in ("what", "ms", "over the floor", "over ours"):
        found.add_column(column, justify="right")
    for label, value in zip(NAMES, each, strict=True):
        found.add_row(
            label, f"{value:.3f}", f"{value / each[0]:.2f}", f"{value / each[1]:.2f}"
        )
    return found


def draw(
    each: np.ndarray, name: str, planning: dict[str, list[float]], path: str
) -> None:
    """Sampling as multiples of the floor, and planning as multiples of ours, with the
    range over its settings.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(len(NAMES), len(planning) + 1))
    ratios = each / each[0]
    colors = ["0.6", "#D55E00", "#0072B2", "#009E73", "#CC79A7"]
    above.barh(NAMES[::-1], ratios[::-1], color=colors[::-1], edgecolor="black")
    for place, ratio in enumerate(ratios[::-1]):
        above.text(ratio * 1.03, place, f"{ratio:.2f}", va="center", fontsize=9)
    above.set(
        xscale="log",
        xlim=(0.8, 1.6 * ratios.max()),
        xlabel="time per chain and round over the floor's",
    )
    figure.suptitle(
        f"Sampling ({name}, 30 devices, {CHAINS} chains at a time) and planning",
        fontsize=10,
    )
    medians = np.array([1.0, *(np.median(values) for values in planning.values())])
    reach = np.array(
        [
            [0.0, 0.0],
            *(
                [np.median(v) - min(v), max(v) - np.median(v)]
                for v in planning.values()
            ),
        ]
    ).T
    labels = ["wflmc, to a certified gap of 1e-9", *planning]
    below.barh(
        labels[::-1],
        medians[::-1],
        xerr=reach[:, ::-1],
        color=["0.8"] * len(planning) + ["#D55E00"],
        edgecolor="black",
    )
    below.set(
        xscale="log",
        xlim=(0.8, 2 * (medians + reach[1]).max()),
        xlabel="time over ours (median and range)",
    )
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    found, what = measure()
    print(json.dumps([found.tolist(), what]))
