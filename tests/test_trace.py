"""Traces for ArviZ: groups, attributes, and outcomes drawn from the model, against the law that they must have."""

from __future__ import annotations

import json

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

import wflmc
from wflmc import channel
from wflmc.errors import InputError

KEY = jax.random.key(0)


def groups_of(found):
    """Before ArviZ 1 and from then on."""
    return set(found.children) if isinstance(found, xr.DataTree) else set(found.groups())


def traced(posterior, chains=4, **keywords):
    link = wflmc.Link(channel.static(1e-2), snr_db=30)
    step = 0.4 / (posterior.mu + posterior.L)
    plan = wflmc.plan(posterior, link, wflmc.Privacy(50, 0.1, 300), step_size=step, burn_in=6, samples=5)
    return wflmc.sample(jax.random.key(1), posterior, plan, chains, **keywords)


@pytest.fixture(scope="module")
def uneven():
    """Linear regression with devices of unlike size, and the data in the order they were given."""
    generator = np.random.default_rng(0)
    X = generator.standard_normal((43, 3))
    y = X @ [1.0, -0.5, 0.2] + 0.3 + generator.standard_normal(43)
    return wflmc.gaussian_regression(KEY, 5, X=X, y=y, intercept=True, partition="blocks"), X, y


@pytest.fixture(scope="module")
def labelled():
    generator = np.random.default_rng(1)
    X = generator.standard_normal((40, 2))
    y = np.argmax(X @ generator.standard_normal((2, 3)) + generator.gumbel(size=(40, 3)), axis=1)
    return wflmc.softmax_regression(KEY, 4, X=X, y=y, partition="blocks"), X, y


def test_the_groups_of_a_plain_trace_hold_no_data(uneven):
    found = traced(uneven[0]).to_arviz()
    assert groups_of(found) == {"posterior", "sample_stats"}
    assert set(found.sample_stats) == {"gain", "active_devices", "excess_noise", "clip_rate", "loss"}


def test_observed_data_are_the_data_and_who_holds_them(uneven, labelled):
    for posterior, _, y in (uneven, labelled):
        observed = traced(posterior).to_arviz(posterior).observed_data
        np.testing.assert_array_equal(observed["y"], y)  # blocks leave the order as it was
        np.testing.assert_array_equal(observed["device"], np.arange(len(y)) * posterior.devices // len(y))
        assert observed["y"].dims == observed["device"].dims == ("observation",)
        assert observed.attrs["inference_library"] == "wflmc"


@pytest.mark.parametrize("whitened", [False, True])
def test_outcomes_of_a_regression_have_the_law_of_the_model(uneven, whitened):
    posterior, X, _ = uneven
    model = posterior.whitened() if whitened else posterior
    theta = np.array([0.8, -0.4, 0.1, 0.5])
    mean = X @ theta[:3] + theta[3]
    for rows in (None, X):
        drawn = model.simulate(np.random.default_rng(2), np.tile(theta, (4000, 1)), rows)
        assert drawn.shape == (4000, 43)
        np.testing.assert_allclose(drawn.mean(0), mean, atol=4.5 / 4000**0.5)
        np.testing.assert_allclose(drawn.var(0), 1, atol=4.5 * (2 / 4000) ** 0.5)


@pytest.mark.parametrize("whitened", [False, True])
def test_labels_are_drawn_as_often_as_predicted(labelled, whitened):
    posterior, X, _ = labelled
    model = posterior.whitened() if whitened else posterior
    theta = np.random.default_rng(3).standard_normal(6)
    p = posterior.predict(theta[None, None], X)[0]
    for rows in (None, X):
        drawn = model.simulate(np.random.default_rng(4), np.tile(theta, (4000, 1)), rows)
        often = (drawn[..., None] == np.arange(3)).mean(0)
        assert np.all(np.abs(often - p) <= 4.5 * np.sqrt(p * (1 - p) / 4000) + 1e-3)


def test_predictive_groups(uneven, labelled):
    for posterior, X, y in (uneven, labelled):
        trace = traced(posterior, keep_burn_in=True)
        found = trace.to_arviz(posterior, predictive=True, features=X[:7].tolist())
        asked = {"observed_data", "posterior_predictive", "predictions", "warmup_posterior", "warmup_sample_stats"}
        assert groups_of(found) == {"posterior", "sample_stats", *asked}
        assert found.posterior_predictive["y"].shape == (4, 5, len(y))
        assert found.posterior_predictive["y"].dims == ("chain", "draw", "observation")
        np.testing.assert_array_equal(found.posterior_predictive["device"], found.observed_data["device"])
        assert found.predictions["y"].shape == (4, 5, 7)
        again = trace.to_arviz(posterior, predictive=True)
        np.testing.assert_array_equal(again.posterior_predictive["y"], found.posterior_predictive["y"])


def test_arviz_compares_what_was_observed_with_what_is_predicted(uneven):
    import matplotlib

    matplotlib.use("Agg")
    found = traced(uneven[0]).to_arviz(uneven[0], predictive=True)
    if isinstance(found, xr.DataTree):
        assert arviz.plot_ppc_dist(found, num_samples=5) is not None
    else:
        assert arviz.plot_ppc(found, num_pp_samples=5) is not None


def test_a_tree_from_arviz_1_on(uneven, monkeypatch):
    monkeypatch.setattr(arviz, "__version__", "1.0.0")
    found = traced(uneven[0]).to_arviz(uneven[0], predictive=True)
    assert isinstance(found, xr.DataTree)
    assert set(found.children) == {"posterior", "sample_stats", "observed_data", "posterior_predictive"}
    assert found["observed_data"]["y"].size == 43


def test_a_file_says_where_it_comes_from_and_holds_no_data(uneven, tmp_path):
    traced(uneven[0]).save(tmp_path / "trace.nc", {"scenario": "[link]", "seed": 3})
    found = arviz.from_netcdf(tmp_path / "trace.nc")
    assert groups_of(found) == {"posterior", "sample_stats"}
    wanted = {"scenario": "[link]", "seed": 3, "inference_library_version": wflmc.__version__}
    assert wanted.items() <= found.posterior.attrs.items()


@pytest.mark.parametrize("keywords", [{"predictive": True}, {"features": np.ones((2, 3))}])
def test_predictions_need_the_model(uneven, labelled, keywords):
    trace = traced(uneven[0])
    with pytest.raises(InputError, match="posterior = None"):
        trace.to_arviz(**keywords)
    for other in (labelled[0], [uneven[0]]):
        with pytest.raises(InputError, match="the model of these samples"):
            trace.to_arviz(other, **keywords)


def test_features_are_those_of_the_data(uneven):
    trace = traced(uneven[0])
    for bad in (np.ones((2, 4)), np.ones(3), 1.0, np.full((2, 3), np.nan)):
        with pytest.raises(InputError, match="features"):
            trace.to_arviz(uneven[0], features=bad)


def test_burn_in_comes_on_request(uneven):
    plain, both = traced(uneven[0]), traced(uneven[0], keep_burn_in=True)
    found = both.to_arviz()
    assert groups_of(found) == {"posterior", "sample_stats", "warmup_posterior", "warmup_sample_stats"}
    assert found.warmup_posterior["theta"].shape == (4, 6, 4)
    np.testing.assert_array_equal(found.posterior["theta"], plain.theta)
    early = found.warmup_sample_stats
    assert set(early) == set(found.sample_stats)
    np.testing.assert_array_equal(early["gain"], np.tile(both.plan.gain[:6], (4, 1)))
    np.testing.assert_allclose(early["clip_rate"].mean("chain"), plain.burn_in_clip_rate, rtol=1e-6)
    spent = early["loss"].sum("draw") + found.sample_stats["loss"].sum("draw")
    np.testing.assert_allclose(spent, both.plan.spent.max(), rtol=1e-12)


def test_groups_say_what_made_them(uneven):
    trace = traced(uneven[0])
    about = trace.to_arviz(attributes={"scenario": "mine"}).posterior.attrs
    assert about["scenario"] == "mine"
    assert about["key"] == jax.random.key_data(jax.random.key(1)).tolist()
    facts = json.loads(about["plan"])
    assert facts["burn_in"] == 6
    assert facts["clip"] == 300
    assert facts["step_size"] == trace.plan.step_size[0]


@pytest.fixture(scope="module")
def counts():
    """Events by Poisson's law on devices of unlike size, with parameters of several shapes."""
    generator = np.random.default_rng(5)
    data = {"dose": generator.normal(size=(31, 2)), "events": generator.poisson(3.0, size=31)}
    owner = np.sort(np.arange(31) % 4)

    def log_likelihood(parameters, example):
        rate = parameters["level"] + parameters["slope"] @ example["dose"]
        return example["events"] * rate - jnp.exp(rate)

    def log_prior(parameters):
        return -0.5 * (parameters["level"] ** 2 + parameters["slope"] @ parameters["slope"])

    initial = {"level": 1.0, "slope": jnp.zeros(2)}
    return wflmc.posterior(log_likelihood, log_prior, data, initial=initial, devices=owner), data, owner


def test_own_parameters_have_their_names(counts):
    posterior, data, owner = counts
    trace = traced(posterior, keep_burn_in=True)
    found = trace.to_arviz(posterior)
    for group in (found.posterior, found.warmup_posterior):
        assert {name: group[name].dims[2:] for name in group} == {"level": (), "slope": ("slope_dim_0",)}
    np.testing.assert_array_equal(found.posterior["level"], trace.theta[..., 0])
    np.testing.assert_array_equal(found.posterior["slope"], trace.theta[..., 1:])
    np.testing.assert_array_equal(found.observed_data["events"], data["events"])
    np.testing.assert_array_equal(found.observed_data["dose"], data["dose"])
    np.testing.assert_array_equal(found.observed_data["device"], owner)


def test_own_outcomes_have_the_law_they_are_drawn_by(counts):
    posterior, data, _ = counts
    trace = traced(posterior, chains=300)

    def draw(key, parameters, example):
        rate = jnp.exp(parameters["level"] + parameters["slope"] @ example["dose"])
        return {"events": jax.random.poisson(key, rate)}

    inputs = {"dose": data["dose"][[0, 0, 1]] / 2}
    found = trace.to_arviz(posterior, predictive=draw, features=inputs)
    assert found.posterior_predictive["events"].shape == (300, 5, 31)
    assert found.predictions["events"].shape == (300, 5, 3)
    rate = np.exp(trace.theta[..., :1] + trace.theta[..., 1:] @ inputs["dose"].T)
    apart = (found.predictions["events"].values - rate).reshape(-1, 3)  # given θ, draws are independent
    assert np.all(np.abs(apart.mean(0)) <= 4.5 * np.sqrt(rate.reshape(-1, 3).mean(0) / 1500))
    flat = found.predictions["events"].values.reshape(-1, 3)
    assert np.mean(flat[:, 0] != flat[:, 1]) > 0.5  # two of a kind, each with draws of its own


def test_own_outcomes_need_a_function(counts, uneven):
    with pytest.raises(InputError, match="function of"):
        traced(counts[0]).to_arviz(counts[0], predictive=True)
    with pytest.raises(InputError, match="draws by itself"):
        traced(uneven[0]).to_arviz(uneven[0], predictive=lambda key, parameters, example: 0.0)
