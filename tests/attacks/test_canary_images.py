"""A canary among the images of the league: how much the sums of whole rounds tell of one image.

The attacker knows all other images, the plan and every position of the chain, has made the canary itself (as long as
features can be, with a label that the model finds least likely), and hears every round. Noise is Gaussian, so the best
test is known: what it gains follows from the change that the canary makes in the sums that are really sent, float32
and all. The attacker gets at most ε; for a canary that is clipped in every round, nearly all of it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc.data import Features, find
from wflmc.studies import league
from wflmc.studies.league import CHOSEN, DEVICES, league_plan, link_of

from ..conftest import FULL


def synthetic(examples, dim):
    """Rows as the league has them: ten classes, at most of length 1, and a constant."""
    generator = np.random.default_rng(0)
    labels = np.arange(examples) % 10
    rows = generator.normal(size=(10, dim))[labels] + 2 * generator.normal(size=(examples, dim))
    rows /= np.maximum(np.linalg.norm(rows, axis=1), np.median(np.linalg.norm(rows, axis=1)))[:, None]
    return Features(np.column_stack([rows, np.full(examples, league.CONSTANT)]).astype(np.float32), labels)


def gained(features, settings, epsilon, rounds):
    """ε that the attacker proves from as many rounds as the plan has, if all tell as much as the worst of some."""
    canary = 17
    features.X[canary, :-1] = 0
    features.X[canary, 0] = 1  # along no other image, and as long as features can be
    posterior = league.league_posterior(features)
    row = np.flatnonzero((posterior.features == features.X[canary]).all(-1).ravel())[0]
    absent = posterior.features.copy()
    absent.reshape(-1, absent.shape[-1])[row] = 0
    without = dataclasses.replace(posterior, features=absent)
    plan = league_plan(posterior, settings, epsilon, "add-remove", link_of(0))
    kernel = wflmc.sampling.kernel(posterior, plan)
    clip, example_clip = (jnp.asarray(values) for values in plan.clips_at)
    pair = [each.on_accelerator(1, 2**31, by_example=True) for each in (posterior, without)]
    weight = jnp.ones(DEVICES)
    sums = jax.jit(lambda model, at: model.unrounded_sum(at, weight, clip, example_clip=example_clip)[0])
    state, changes = kernel.init(jax.random.key(1)), []
    step = jax.jit(kernel.step)
    for number in range(rounds):
        with_canary, alone = (sums(model, state.theta) for model in pair)
        changes.append(np.linalg.norm(with_canary.double - alone.double))
        state, _ = step(jax.random.key(100 + number), state)
    largest = max(changes)
    sensitivity = float(plan.privacy.sensitivity(DEVICES)[0]) * 2  # here half the largest change
    assert largest <= sensitivity
    device = row // posterior.features.shape[1]
    loss = plan.loss[:, device].sum() * (largest / sensitivity) ** 2
    return float(plan.privacy.epsilon_spent(np.full(DEVICES, loss))), largest / sensitivity


@pytest.mark.parametrize("kind", ["overdamped", "kinetic"])
def test_a_canary_image_costs_no_more_than_is_promised(kind, monkeypatch):
    monkeypatch.setattr(league, "ROUNDS", 30)
    monkeypatch.setattr(league, "KEPT", 10)
    settings = league.Settings(kind, 100, 0.3)
    found, share = gained(synthetic(3000, 40), settings, 1.0, rounds=4)
    assert found <= 1.0
    assert 0.97 < share <= 1  # the attack is as strong as one can be: clips act a little below the promise


@pytest.mark.skipif(not FULL, reason="make test-full: 60,000 images of 3,969 features")
def test_a_canary_among_all_images_of_mnist():
    if any(find(name)[1] for name in league.OTHER):
        pytest.skip("MNIST and Fashion-MNIST: `wflmc data mnist` and `wflmc data fashion-mnist` fetch them")
    found, share = gained(league.league_features("mnist"), CHOSEN["training", "mnist", 3.0], 3.0, rounds=8)
    print(f"the attacker proves ε ≥ {found:.4g} of 3 (add-remove), {share:.4f} of the sensitivity")
    assert found <= 3.0
