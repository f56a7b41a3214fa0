"""A canary among the images of the league: how much the sums of whole rounds tell of one image.

The attacker knows all other images, the plan and every position of the chain, has made the canary itself (as long as
features can be, with a label that the model finds least likely), and hears every round. Noise is Gaussian, so the best
test is known: what it gains follows from the change that the canary makes in the sums that are really sent, float32
and all. The attacker gets at most ε; for a canary that is clipped in every round, nearly all of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wflmc.apps.studies import league
from wflmc.apps.studies.league import CHOSEN, DEVICES, league_plan, link_of
from wflmc.data.sets import Features, find

from ..conftest import FULL

DESCENT_ROUNDS = 60
"""Rounds without noise that lead to one of the positions that are tried."""


def synthetic(examples, dim):
    """Rows as the league has them: ten classes, at most of length 1, and a constant."""
    generator = np.random.default_rng(0)
    labels = np.arange(examples) % 10
    rows = generator.normal(size=(10, dim))[labels] + 2 * generator.normal(
        size=(examples, dim)
    )
    rows /= np.maximum(
        np.linalg.norm(rows, axis=1), np.median(np.linalg.norm(rows, axis=1))
    )[:, None]
    return Features(
        np.column_stack([rows, np.full(examples, league.CONSTANT)]).astype(np.float32),
        labels,
    )


def gained(features, settings, epsilon):
    """ε that the attacker proves if all rounds tell as much as the worst of some positions, and that change's share."""
    canary = 17
    features.X[canary, :-1] = 0
    features.X[canary, 0] = 1  # along no other image, and as long as features can be
    posterior = league.league_posterior(features)
    row = np.flatnonzero((posterior.features[..., 0] == 1).ravel())[0]
    plan = league_plan(posterior, settings, epsilon, "add-remove", link_of(0))
    clip, example_clip = (jnp.asarray(values) for values in plan.clips_at)
    sums = jax.jit(
        lambda model, position: model.unrounded_sum(
            position, jnp.ones(DEVICES), clip, example_clip=example_clip
        )[0]
    )
    spread = np.random.default_rng(1).normal(size=(3, posterior.dim)) * np.array(
        [[0.0], [0.3], [3.0]]
    )

    def sum_at(ready, position):
        return sums(ready, jnp.asarray(position, jnp.float32)).double

    def descended(ready):
        """A position as of the last rounds, where devices are hardly clipped."""
        position = np.zeros(posterior.dim)
        for step_size in plan.dynamics.stretching_step(plan.step_size)[:DESCENT_ROUNDS]:
            position = position - step_size * np.asarray(sum_at(ready, position))
        return position

    ready = posterior.on_accelerator(1, 2**31, by_example=True)
    positions = [*spread, descended(ready)]
    present = np.array([sum_at(ready, position) for position in positions])
    posterior.features.reshape(-1, posterior.features.shape[-1])[row] = (
        0  # an empty one in its place
    )
    ready = posterior.on_accelerator(1, 2**31, by_example=True)
    absent = np.array([sum_at(ready, position) for position in positions])
    largest = np.linalg.norm(present - absent, axis=1).max()
    # What one image may change.
    change = 2 * float(plan.privacy.sensitivity(DEVICES)[0])
    assert largest <= change
    loss = (
        plan.loss[:, row // posterior.features.shape[1]].sum() * (largest / change) ** 2
    )
    return float(plan.privacy.epsilon_spent(np.full(DEVICES, loss))), largest / change


@pytest.mark.parametrize("kind", ["overdamped", "kinetic"])
def test_a_canary_image_costs_no_more_than_is_promised(kind):
    settings = league.LeagueSettings(
        dynamics=kind,
        step=100.0,
        example_clip=0.3,
        device_clip=400.0,
        rounds=30,
        kept_rounds=10,
        burn_in_temperature=0.05,
    )
    proven_epsilon, sensitivity_ratio = gained(synthetic(3000, 40), settings, 1.0)
    assert proven_epsilon <= 1.0
    # The attack is as strong as one can be: clips act a little below the promise.
    assert 0.97 < sensitivity_ratio <= 1


@pytest.mark.skipif(not FULL, reason="make test-full: 60,000 images of 3,969 features")
def test_a_canary_among_all_images_of_mnist():
    if any(find(name)[1] for name in league.OTHER_DATA_SET):
        pytest.skip(
            "MNIST and Fashion-MNIST: `wflmc data mnist` and `wflmc data fashion-mnist` fetch them"
        )
    settings = CHOSEN["training", "mnist", 3.0]
    proven_epsilon, sensitivity_ratio = gained(
        league.league_features("mnist"), settings, 3.0
    )
    print(
        f"the attacker proves ε ≥ {proven_epsilon:.4g} of 3 (add-remove), "
        f"{sensitivity_ratio:.4f} of the sensitivity"
    )
    assert proven_epsilon <= 3.0
