"""What a transcript of MNIST says beyond its chain, at (1, 1e-5) for an image: python
-m benchmarks.noise_aware_mnist.

12,000 images on 30 devices, 30 components, adjacency `replace`, the setting "ours, an
image (1, 1e-5)" of `wflmc reproduce beyond` at 20 dB. Images are clipped at 1.5, most
of the hard ones, so that the zero of the clipped gradients is not the posterior's mode
and a local quadratic of them does not help. Instead the parameters are fitted to the
transcript: under parameters θ the clipped gradient at θ[s] has a known expectation over
labels, for which features suffice, here those of 24,000 other training images without
their labels. `RIDGE` and `SHARPNESS` were chosen on 8,000 further training images, not
on the test set.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import minimize

import wflmc
from wflmc.apps.studies.beyond import LONG
from wflmc.apps.studies.paper.fig8 import Mnist
from wflmc.data.sets import load, mnist_features, principal_directions
from wflmc.evaluation import predictive_scores
from wflmc.posterior import SoftmaxPosterior
from wflmc.support.keys import host_generator

GROUPS, RIDGE, SHARPNESS, STEPS = 6, 16.0, 1.5, 80
"""Groups of rounds that are merged; by how much the noise is enlarged against the
prior; the factor on the fit; and iterations of L-BFGS."""
HELD_OUT, STAND_IN = 8_000, 24_000
RUNS: dict[str, dict[str, Any]] = {
    "600": {},
    "120": {"burn_in": 40, "samples": 80, "step_factor": 1.0},
    "60": {"burn_in": 20, "samples": 40, "step_factor": 2.0},
    "30": {"burn_in": 10, "samples": 20, "step_factor": 2.0},
}
"""What differs, by the number of rounds."""

Array = NDArray[Any]


class Data:
    """The study's images, and others of the training set: some held out, some as a
    public stand-in without labels.
    """

    def __init__(self) -> None:
        images, key = load("mnist"), jax.random.key(0)
        self.features = mnist_features(images, host_generator(key, "data"))
        again = host_generator(key, "data")
        by_label = [np.flatnonzero(images.train_labels == label) for label in range(10)]
        chosen = np.stack(
            [again.choice(members, 1200, replace=False) for members in by_label], axis=1
        ).ravel()
        others = np.random.default_rng(1).permutation(
            np.setdiff1d(np.arange(60_000), chosen)
        )
        directions = principal_directions(images.train_images[chosen] / 255.0, 30)
        held, public = np.split(others[: HELD_OUT + STAND_IN], [HELD_OUT])
        self.held = (
            (images.train_images[held] / 255.0) @ directions,
            images.train_labels[held].astype(int),
        )
        self.public = (images.train_images[public] / 255.0) @ directions


def groups_of(transcript: Any, count: int) -> tuple[Array, Array, Array]:
    """Return positions, gradients and noise of merged rounds, [group, chain, …]."""
    weight = 1 / np.asarray(transcript.noise, float)[..., None]
    starts = np.linspace(0, len(weight), count, endpoint=False).astype(int)
    total = np.add.reduceat(weight, starts)
    position, gradient = (
        np.add.reduceat(weight * v, starts) / total
        for v in (transcript.position, transcript.gradient)
    )
    return position, gradient, 1 / total[..., 0]


def fitted(
    posterior: SoftmaxPosterior, trace: wflmc.Trace, public: Array, clip: float
) -> Array:
    """Return the parameters under which a transcript is most probable, with the prior,
    [chain, m].
    """
    space, share = posterior.coordinates, len(public)
    rows = jnp.asarray(
        np.column_stack([public, np.ones(share)]) @ space.matrix.T, jnp.float32
    )
    prior = jnp.asarray(np.kron(np.eye(10), space.precision), jnp.float32)
    size = float(posterior.sizes.sum()) / share

    def expected(rows: jax.Array, position: jax.Array, theta: jax.Array) -> jax.Array:
        """The clipped gradient at `position`, averaged over labels drawn with `theta`."""
        p, label = (
            jax.nn.softmax(rows @ each.reshape(10, -1).T) for each in (position, theta)
        )
        length = jnp.sqrt(jnp.maximum((p**2).sum(1, keepdims=True) - 2 * p + 1, 1e-12))
        kept = label * jnp.minimum(
            1, clip / (length * jnp.linalg.norm(rows, axis=1, keepdims=True))
        )
        return size * ((kept.sum(1, keepdims=True) * p - kept).T @ rows).ravel()

    @jax.jit
    @jax.value_and_grad
    def cost(
        theta: jax.Array,
        rows: jax.Array,
        position: jax.Array,
        gradient: jax.Array,
        noise: jax.Array,
    ) -> jax.Array:
        def one(part: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            place, received, v = part
            return jnp.sum(
                (received - place @ prior - expected(rows, place, theta)) ** 2
            ) / (2 * RIDGE * v)

        return (
            jax.lax.map(one, (position, gradient, noise)).sum()
            + theta @ prior @ theta / 2
        )

    found = []
    position, gradient, noise = groups_of(trace.transcript, GROUPS)
    for chain in range(position.shape[1]):
        given = [
            jnp.asarray(values[:, chain], jnp.float32)
            for values in (position, gradient, noise)
        ]

        def value(theta: Array, given: list[jax.Array] = given) -> tuple[float, Array]:
            level, slope = cost(jnp.asarray(theta, jnp.float32), rows, *given)
            return float(level), np.asarray(slope, float)

        found.append(
            minimize(
                value,
                position[-1, chain],
                jac=True,
                method="L-BFGS-B",
                options={"maxiter": STEPS},
            ).x
        )
    return SHARPNESS * np.asarray(posterior.parameters(np.stack(found)))


def main() -> None:
    """Print the scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", type=int, default=5)
    parser.add_argument("--rounds", nargs="*", default=["600"], choices=[*RUNS])
    options, data = parser.parse_args(), Data()
    table = Table(
        title=f"MNIST at (1, 1e-5) for an image (replace), 20 dB, {options.experiments} experiments"
    )
    for name in (
        "rounds",
        "from",
        "held-out NLL",
        "test accuracy",
        "test NLL",
        "s.e.",
        "test ECE",
    ):
        table.add_column(name, justify="right")
    for rounds in options.rounds:
        setting = replace(
            Mnist(data.features),
            **{**LONG, "epsilon": 1.0, "delta": 1e-5, **RUNS[rounds]},
        )
        posterior = setting.posterior()
        plans = setting.plans(
            posterior, "optimized", setting.links(range(options.experiments))
        )
        trace = wflmc.sample(jax.random.key(0), posterior, plans, transcript=True)
        fit = fitted(
            posterior, trace, data.public, float(setting.example_clip or np.inf)
        )[:, None].astype(np.float32)
        for name, theta in (("chain", trace.theta), ("transcript", fit)):
            held = predictive_scores(posterior, theta, *data.held).nll.mean()
            test = predictive_scores(
                posterior, theta, data.features.X_test, data.features.y_test
            )
            error = (
                test.nll.std(ddof=1) / len(test.nll) ** 0.5
                if len(test.nll) > 1
                else np.nan
            )
            cells = (test.accuracy.mean(), test.nll.mean(), error, test.ece.mean())
            table.add_row(
                rounds, name, f"{held:.4f}", *(f"{cell:.4f}" for cell in cells)
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
