"""One private chain of images on one accelerator, beside two reads of the features.

    python -m benchmarks.gpu_one_chain [ROWS [FEATURES]]

A round has two products with the features, so that it cannot take less than reading them
twice where they do not fit into a cache. Two reads are measured in two ways: as sums of
all features, and as the two products of a power iteration, one after the other in a
loop. Only jax, numpy and scipy are needed. The time of a round is the difference of two
calls with different numbers of rounds, which leaves out what calls have in common.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import wflmc
from wflmc.posterior import SoftmaxPosterior

ROWS = 60_000
FEATURES = 3969
CLASSES = 10
DEVICES = 30
ROUNDS = (40, 240)
"""Of the two calls whose times are compared."""
REPEATS = 5
CLIPS = {"device clip": None, "record clip": 0.2}
"""c of every row, by name."""


def shortest(call: Callable[[], object]) -> float:
    """Return the seconds of the shortest of several calls, after one that compiles."""
    call()
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def make_posterior(rows: int, features: int) -> SoftmaxPosterior:
    """Return a softmax model of rows of length 1, in float32."""
    generator = np.random.default_rng(0)
    X = generator.standard_normal((rows, features), dtype=np.float32)
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    y = np.arange(rows) % CLASSES
    key = jax.random.key(0)
    return wflmc.softmax_regression(key, DEVICES, X=X, y=y, classes=CLASSES)


def seconds_of_round(posterior: SoftmaxPosterior, example_clip: float | None) -> float:
    """Return the seconds of a round of one chain."""
    unit = "device" if example_clip is None else "record"
    privacy = wflmc.Privacy(3.0, 1e-5, clip=50.0, unit=unit, example_clip=example_clip)
    seconds = []
    for rounds in ROUNDS:
        plan = wflmc.plan(
            posterior,
            privacy=privacy,
            step_size=1e-4,
            burn_in=rounds - 1,
            samples=1,
            initial_w2_sq=1.0,
        )
        call = partial(wflmc.sample, jax.random.key(1), posterior, plan, chains=1)
        seconds.append(shortest(call))
    return (seconds[1] - seconds[0]) / (ROUNDS[1] - ROUNDS[0])


def seconds_of_two_reads(posterior: SoftmaxPosterior) -> float:
    """Return the seconds of reading all features twice, by sums of them."""
    features = jnp.asarray(posterior.features)
    total = jax.jit(jnp.sum)
    return 2 * shortest(lambda: total(features).block_until_ready())


def seconds_of_power_iteration(posterior: SoftmaxPosterior) -> float:
    """Return the seconds of v ← XᵀXv/‖XᵀXv‖ with all features X[N, d], in a loop."""
    features = jnp.asarray(posterior.features)
    rows = features.reshape(-1, features.shape[-1])

    @jax.jit
    def iterate(vector: jax.Array, iterations: int) -> jax.Array:
        def product(_: int, vector: jax.Array) -> jax.Array:
            image = rows.T @ (rows @ vector)
            return image / jnp.linalg.norm(image)

        return jax.lax.fori_loop(0, iterations, product, vector)

    def wait_for(iterations: int) -> object:
        return iterate(jnp.ones(rows.shape[1]), iterations).block_until_ready()

    seconds = [shortest(partial(wait_for, count)) for count in ROUNDS]
    return (seconds[1] - seconds[0]) / (ROUNDS[1] - ROUNDS[0])


def main(arguments: list[str]) -> None:
    """Print the time of a round for each clip, and its ratios to two reads."""
    sizes = [int(word) for word in arguments]
    rows = sizes[0] if sizes else ROWS
    features = sizes[1] if len(sizes) > 1 else FEATURES
    posterior = make_posterior(rows, features)
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}: {rows} rows × {features} features")
    reads = seconds_of_two_reads(posterior)
    print(f"two sums of the features: {1e6 * reads:.0f} µs")
    products = seconds_of_power_iteration(posterior)
    print(f"two products of a power iteration: {1e6 * products:.0f} µs")
    for name, example_clip in CLIPS.items():
        seconds = seconds_of_round(posterior, example_clip)
        ratios = f"{seconds / reads:.2f} and {seconds / products:.2f} ×"
        print(f"{name}: {1e6 * seconds:.0f} µs a round, {ratios}")


if __name__ == "__main__":
    main(sys.argv[1:])
