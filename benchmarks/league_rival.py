"""Train JAX-Privacy's DP-SGD on the data of `wflmc reproduce league`.

    python -m benchmarks.league_rival [DATA] ... [EPSILON] ...

A central server that sees every gradient, Poisson batches, momentum, adjacency
`add-remove`, δ = 1e-5. Where the study's prior has a mean that is fitted to public
images, training starts there. The batch, the number of epochs, the learning rate and
the clipping threshold are chosen by NLL on 5,000 training images, which ε does not
cover, as in the rows "chosen on training images" of the study. Some minutes on an
accelerator.
"""

import sys
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
from jax_privacy import accounting
from jax_privacy.batch_selection import CyclicPoissonSampling, pad_to_multiple_of

from benchmarks.league import held_out_split
from wflmc.apps.studies.league import (
    CHOSEN,
    DELTA,
    EPSILONS_WITH_ALL_ROWS,
    LEAGUE_DATA,
    league_features,
    public_fit,
)
from wflmc.data.sets import Features
from wflmc.evaluation.scores import SMALLEST_PROBABILITY, calibration

CLASSES = 10
MOMENTUM = 0.9
SEEDS = 3
"""Runs on all training images, and of a finalist."""
FINALISTS = 3
"""Recipes that are compared at the end by several runs each."""


class Recipe(NamedTuple):
    """Settings of a run of DP-SGD."""

    batch: int
    """Expected size."""
    epochs: int
    rate: float
    clip: float

    def steps(self, examples: int) -> int:
        """Return the number of updates."""
        return self.epochs * examples // self.batch

    def noise(self, examples: int, epsilon: float) -> float:
        """Return the noise multiplier that spends (ε, δ)."""
        accountant = accounting.DpsgdTrainingAccountant(
            dp_accountant_config=accounting.PldAccountantConfig(
                value_discretization_interval=1e-3
            )
        )
        how = {
            "batch_sizes": self.batch,
            "num_updates": self.steps(examples),
            "num_samples": examples,
        }
        return accounting.calibrate_noise_multiplier(
            target_epsilon=epsilon, target_delta=DELTA, accountant=accountant, **how
        )


RECIPES = [
    Recipe(batch, epochs, rate, clip)
    for batch in (4096, 16384)
    for epochs in (20, 60)
    for rate in (10.0, 30.0, 100.0, 300.0)
    for clip in (0.1, 0.5)
]


def _loss(weights: Any, batch: Any) -> Any:
    """Return the mean cross-entropy of a batch."""
    rows, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(
        rows @ weights, labels
    ).mean()


@cache
def _update(clip: float, batch: int) -> Any:
    """Return one update of weights and velocity, compiled once for all learning rates."""
    clipped = jax_privacy.clipped_grad(_loss, l2_clip_norm=clip, normalize_by=batch)

    @jax.jit
    def update(
        state: Any, rows: Any, labels: Any, places: Any, key: Any, std: Any, rate: Any
    ) -> Any:
        weights, velocity = state
        gradient = clipped(
            weights, (rows[places], labels[places]), is_padding_example=places < 0
        )
        velocity = (
            MOMENTUM * velocity + gradient + std * jax.random.normal(key, weights.shape)
        )
        return weights - rate * velocity, velocity

    return update


def train(
    rows: Any,
    labels: Any,
    recipe: Recipe,
    multiplier: float,
    *,
    seed: int,
    start: Any,
) -> Any:
    """Return the weights [d, C] after DP-SGD on rows[N, d] from weights `start`."""
    update = _update(recipe.clip, recipe.batch)
    std = multiplier * recipe.clip / recipe.batch
    state = (start, jnp.zeros_like(start))
    batches = CyclicPoissonSampling(
        sampling_prob=recipe.batch / len(rows), iterations=recipe.steps(len(rows))
    )
    for step, places in enumerate(batches.batch_iterator(len(rows), seed)):
        padded = pad_to_multiple_of(places, recipe.batch * 9 // 8)
        key = jax.random.fold_in(jax.random.key(seed), step)
        state = update(state, rows, labels, padded, key, std, recipe.rate)
    return state[0]


def scores(weights: Any, rows: Any, labels: Any) -> Any:
    """Return accuracy, ECE and NLL."""
    probability = np.asarray(jax.nn.softmax(rows @ weights))[None]
    return calibration(np.maximum(probability, SMALLEST_PROBABILITY), labels)


def compare(
    name: str, epsilon: float, features: Features, start: Any
) -> dict[str, Any]:
    """Choose a recipe on held-out training images, and return test scores of runs on
    all of them, with the choice.
    """
    train_places, held = held_out_split(features.y)
    rows = jnp.asarray(features.X)
    labels = jnp.asarray(features.y)
    learned_rows = rows[train_places]
    learned_labels = labels[train_places]
    multipliers: dict[tuple[int, int], float] = {}

    def held_out_nll(recipe: Recipe, seed: int) -> float:
        shape = (recipe.batch, recipe.epochs)
        if shape not in multipliers:
            multipliers[shape] = recipe.noise(len(train_places), epsilon)
        weights = train(
            learned_rows,
            learned_labels,
            recipe,
            multipliers[shape],
            seed=seed,
            start=start,
        )
        return float(scores(weights, rows[held], features.y[held]).nll[0])

    first = sorted((held_out_nll(recipe, 0), recipe) for recipe in RECIPES)
    finalists = [
        (float(np.mean([held_out_nll(recipe, seed) for seed in range(SEEDS)])), recipe)
        for _, recipe in first[:FINALISTS]
    ]
    nll, best = min(finalists)
    multiplier = best.noise(len(labels), epsilon)
    results = []
    for seed in range(SEEDS):
        weights = train(rows, labels, best, multiplier, seed=seed, start=start)
        test_rows = jnp.asarray(features.X_test)
        results.append(scores(weights, test_rows, features.y_test))
    means = {
        key: float(np.mean([getattr(result, key)[0] for result in results]))
        for key in ("accuracy", "ece", "nll")
    }
    return {
        "data": name,
        "epsilon": epsilon,
        "recipe": best._asdict(),
        "multiplier": multiplier,
        "held_out": nll,
    } | means


def start_of(name: str, epsilon: float, features: int) -> Any:
    """Return the weights [d, C] that training starts at, as the study's chains do."""
    settings = CHOSEN["training", name, epsilon]
    mean = public_fit(name, settings.prior_std)
    if mean is None:
        return jnp.zeros((features, CLASSES))
    return jnp.asarray(mean.reshape(CLASSES, features).T, dtype=jnp.float32)


def main(arguments: list[str]) -> None:
    """Print a line for each data set and ε."""
    names = [word for word in arguments if word in LEAGUE_DATA]
    epsilons = [float(word) for word in arguments if word not in LEAGUE_DATA]
    for name in names or list(LEAGUE_DATA):
        features = league_features(name)
        for epsilon in epsilons or EPSILONS_WITH_ALL_ROWS:
            start = start_of(name, epsilon, features.X.shape[1])
            print(compare(name, epsilon, features, start), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
