"""The clip of one example where none is given: by the budget, and the same whatever the examples are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc.planning.defaults import BURN_IN_MEMORIES, CLIP_SAMPLES_MEMORIES

from ..error_tools import codes_of

N = 400
M = 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, M)) * np.array([1.0, 20.0, 0.1])
Y = X @ np.array([1.0, 0.1, -3.0]) + RNG.normal(size=N)
TYPICAL = (M / N) ** 0.5
LINK = wflmc.Link(wflmc.channel.static(), snr_db=60)


def log_likelihood(theta, example):
    x, y = example
    return -0.5 * (y - x @ theta) ** 2


def log_prior(theta):
    return -0.5 * jnp.sum((theta / 10) ** 2)


def posterior_of(y=Y, **options):
    options = {
        "initial": np.zeros(M),
        "devices": 4,
        "partition": "blocks",
        "preconditioner": "laplace",
    } | options
    return wflmc.posterior_from(log_likelihood, log_prior, (X, y), **options)


def promise(epsilon=8.0, **options):
    return wflmc.Privacy(epsilon, 1e-5, clip=2.0, unit="record", **options)


@pytest.fixture(scope="module")
def posterior():
    return posterior_of()


@pytest.fixture(scope="module")
def unpreconditioned():
    return posterior_of(preconditioner="none", mu=1.0, L=4e5)


def test_typical_norms_are_those_of_examples_that_follow_the_model(posterior):
    draws = posterior.parameters(np.random.default_rng(1).normal(size=(4, M)))
    rms = np.sqrt(np.mean(posterior.example_norms(draws) ** 2))
    assert posterior.typical_example_norm() == TYPICAL
    np.testing.assert_allclose(rms, TYPICAL, rtol=0.1)
    np.testing.assert_allclose(
        posterior.typical_example_norm(posterior), TYPICAL, rtol=0.1
    )


def test_a_plan_chooses_a_clip_that_was_left_out_and_says_so(posterior):
    plan = wflmc.plan(posterior, LINK, promise())
    clip = plan.example_clip
    assert np.all((clip >= 2 * TYPICAL) & (clip <= 5 * TYPICAL))
    assert plan.privacy.example_clip == clip[0]
    assert "example-clip-chosen" in codes_of(plan)
    explicit = wflmc.plan(posterior, LINK, promise(example_clip=float(clip[0])))
    np.testing.assert_array_equal(explicit.gain, plan.gain)
    assert "example-clip-chosen" not in codes_of(explicit)


@pytest.mark.parametrize(
    ("options", "multiple"),
    [
        ({"epsilon": 100.0}, 5.0),
        ({"epsilon": 0.1}, 2.0),
        ({"epsilon": 0.1, "adjacency": "add-remove"}, 2.0),
    ],
)
def test_the_clip_is_within_multiples_of_typical_norms(posterior, options, multiple):
    plan = wflmc.plan(
        posterior, LINK, promise(**options), step_size=0.1, burn_in=2, samples=2
    )
    np.testing.assert_allclose(plan.example_clip, multiple * TYPICAL)


def test_the_clip_follows_the_budget_between_them(posterior):
    clips = [
        wflmc.plan(posterior, LINK, promise(epsilon, adjacency=adjacency)).example_clip[
            0
        ]
        for epsilon, adjacency in (
            (10.0, "replace"),
            (12.0, "replace"),
            (10.0, "add-remove"),
        )
    ]
    assert clips[0] < clips[1] < clips[2]
    np.testing.assert_allclose(clips[2], min(2 * clips[0], 5 * TYPICAL))


def test_the_clip_leaves_budget_for_some_draws(posterior):
    plan = wflmc.plan(posterior, LINK, promise(12.0))
    assert 2 * TYPICAL < plan.example_clip[0] < 5 * TYPICAL
    forgotten = len(plan.rounds) * plan.step_size[0] * plan.mu
    memories = BURN_IN_MEMORIES + CLIP_SAMPLES_MEMORIES
    np.testing.assert_allclose(forgotten, memories, rtol=0.05)


def test_no_example_changes_the_clip(posterior):
    changed = Y.copy()
    changed[0] = 1e6
    other = posterior_of(changed, preconditioner=posterior)
    assert other.digest != posterior.digest
    plans = [
        wflmc.plan(neighbour, LINK, promise(12.0)) for neighbour in (posterior, other)
    ]
    np.testing.assert_array_equal(plans[0].example_clip, plans[1].example_clip)


@pytest.mark.parametrize("epsilon", [0.1, 12.0, 100.0])
def test_no_example_changes_the_clip_by_way_of_the_coordinates(posterior, epsilon):
    features = X.copy()
    features[0] = 1e3
    changed = Y.copy()
    changed[0] = 1e6
    options = {
        "initial": np.zeros(M),
        "devices": 4,
        "partition": "blocks",
        "preconditioner": "laplace",
    }
    other = wflmc.posterior_from(
        log_likelihood, log_prior, (features, changed), **options
    )
    assert not np.array_equal(other.coordinates.centre, posterior.coordinates.centre)
    short = {"step_size": 0.1, "burn_in": 2, "samples": 2}
    plans = [
        wflmc.plan(neighbour, LINK, promise(epsilon), **short)
        for neighbour in (posterior, other)
    ]
    np.testing.assert_array_equal(plans[0].example_clip, plans[1].example_clip)


def test_public_examples_that_gave_the_coordinates_count(posterior):
    public_count = 100
    public = wflmc.posterior_from(
        log_likelihood,
        log_prior,
        (X[:public_count], Y[:public_count]),
        initial=np.zeros(M),
        devices=1,
        preconditioner="laplace",
    )
    private = posterior_of(
        preconditioner=public, mu=float(N / public_count), L=float(N / public_count)
    )
    rms = np.sqrt(np.mean(private.example_norms(posterior.coordinates.centre) ** 2))
    np.testing.assert_allclose(private.typical_example_norm(), rms, rtol=0.2)


def test_a_device_alone_has_the_typical_norm_of_all(posterior):
    assert posterior.device(1).typical_example_norm() == TYPICAL


def test_examples_of_mini_batches_count_more_than_once(posterior):
    batched = posterior_of(preconditioner=posterior, batch=20)
    np.testing.assert_allclose(
        batched.typical_example_norm(), np.full(4, TYPICAL * 100 / 20)
    )


def test_public_data_tell_typical_norms_in_other_coordinates(
    posterior, unpreconditioned
):
    public = posterior_of(
        X @ np.array([1.0, 0.1, -3.0]) + np.random.default_rng(2).normal(size=N)
    )
    truth = np.sqrt(
        np.mean(unpreconditioned.example_norms(posterior.coordinates.centre) ** 2)
    )
    np.testing.assert_allclose(
        unpreconditioned.typical_example_norm(public), truth, rtol=0.1
    )


def test_no_clip_is_chosen_where_no_typical_norm_is_known(unpreconditioned):
    for other in (
        unpreconditioned,
        wflmc.gaussian_regression(jax.random.key(0), devices=4, examples=40),
    ):
        with pytest.raises(wflmc.InputError) as caught:
            wflmc.plan(other, LINK, promise())
        assert caught.value.key == "example_clip"


def test_nothing_is_computed_of_a_clip_that_is_not_known_yet():
    for compute in (promise().example_clips, promise().sensitivity):
        with pytest.raises(wflmc.InputError) as caught:
            compute(4)
        assert caught.value.key == "example_clip"
    with pytest.raises(wflmc.InputError) as caught:
        wflmc.Privacy(8.0, 1e-5, example_clip=1.0)
    assert caught.value.key == "example_clip"
