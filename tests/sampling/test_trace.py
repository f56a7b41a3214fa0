"""Traces for ArviZ: groups, attributes, outcomes drawn from the model, log-likelihoods, and what ArviZ makes of it."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from scipy import stats

import wflmc
from wflmc import channel
from wflmc.posterior.custom import model
from wflmc.sampling import outcomes

from ..error_tools import raises_input_error

KEY = jax.random.key(0)


def groups_of(groups):
    """Before ArviZ 1 and from then on."""
    return (
        set(groups.children)
        if isinstance(groups, xr.DataTree)
        else set(groups.groups())
    )


@cache
def traced(posterior, chains=4, **keywords):
    """Few rounds of a few chains; one run for all tests that ask for the same."""
    link = wflmc.Link(channel.static(1e-2), snr_db=30)
    step = 0.4 / (posterior.mu + posterior.L)
    plan = wflmc.plan(
        posterior,
        link,
        wflmc.Privacy(50, 0.1, 300),
        step_size=step,
        burn_in=6,
        samples=5,
    )
    return wflmc.sample(jax.random.key(1), posterior, plan, chains, **keywords)


@pytest.fixture(scope="module")
def uneven():
    """Linear regression with devices of unlike size, and the data in the order they were given."""
    generator = np.random.default_rng(0)
    X = generator.standard_normal((43, 3))
    y = X @ [1.0, -0.5, 0.2] + 0.3 + generator.standard_normal(43)
    return (
        wflmc.gaussian_regression(KEY, 5, X=X, y=y, intercept=True, partition="blocks"),
        X,
        y,
    )


@pytest.fixture(scope="module")
def labelled():
    generator = np.random.default_rng(1)
    X = generator.standard_normal((40, 2))
    y = np.argmax(
        X @ generator.standard_normal((2, 3)) + generator.gumbel(size=(40, 3)), axis=1
    )
    return wflmc.softmax_regression(KEY, 4, X=X, y=y, partition="blocks"), X, y


def test_the_groups_of_a_plain_trace_hold_no_data(uneven):
    groups = traced(uneven[0]).to_arviz()
    assert groups_of(groups) == {"posterior", "sample_stats"}
    assert set(groups.sample_stats) == {
        "gain",
        "active_devices",
        "excess_noise",
        "clip_rate",
        "loss",
    }


def test_observed_data_are_the_data_and_who_holds_them(uneven, labelled):
    for posterior, _, y in (uneven, labelled):
        groups = traced(posterior).to_arviz(posterior)
        assert groups_of(groups) == {
            "posterior",
            "sample_stats",
            "observed_data",
            "constant_data",
        }
        observed = groups.observed_data
        # Blocks leave the order as it was.
        np.testing.assert_array_equal(observed["y"], y)
        np.testing.assert_array_equal(
            observed["device"], np.arange(len(y)) * posterior.devices // len(y)
        )
        assert observed["y"].dims == observed["device"].dims == ("observation",)
        assert observed.attrs["inference_library"] == "wflmc"


@pytest.mark.parametrize("whitened", [False, True])
def test_covariates_are_constant_data_and_outcomes_alone_are_observed(
    uneven, labelled, whitened
):
    for posterior, X, _ in (uneven, labelled):
        model = posterior.whitened() if whitened else posterior
        groups = traced(posterior).to_arviz(
            model, predictive=True, features=X[:7].tolist()
        )
        assert (
            list(groups.observed_data.data_vars)
            == list(groups.posterior_predictive.data_vars)
            == ["y"]
        )
        for group, rows in (
            (groups.constant_data, X),
            (groups.predictions_constant_data, X[:7]),
        ):
            assert list(group.data_vars) == ["X"]
            np.testing.assert_allclose(group["X"], rows, rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(
            groups.constant_data["device"], groups.observed_data["device"]
        )


@pytest.mark.parametrize("whitened", [False, True])
def test_outcomes_of_a_regression_have_the_law_of_the_model(uneven, whitened):
    posterior, X, _ = uneven
    model = posterior.whitened() if whitened else posterior
    theta = np.array([0.8, -0.4, 0.1, 0.5])
    mean = X @ theta[:3] + theta[3]
    for rows in (None, X):
        drawn = model.simulate(
            np.random.default_rng(2), np.tile(theta, (4000, 1)), rows
        )
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
        drawn = model.simulate(
            np.random.default_rng(4), np.tile(theta, (4000, 1)), rows
        )
        often = (drawn[..., None] == np.arange(3)).mean(0)
        assert np.all(np.abs(often - p) <= 4.5 * np.sqrt(p * (1 - p) / 4000) + 1e-3)


def test_predictive_groups(uneven, labelled):
    for posterior, X, y in (uneven, labelled):
        trace = traced(posterior, keep_burn_in=True)
        groups = trace.to_arviz(posterior, predictive=True, features=X[:7].tolist())
        group_names = {
            "observed_data",
            "posterior_predictive",
            "predictions",
            "warmup_posterior",
            "warmup_sample_stats",
        }
        assert groups_of(groups) == {
            "posterior",
            "sample_stats",
            "constant_data",
            "predictions_constant_data",
            *group_names,
        }
        assert groups.posterior_predictive["y"].shape == (4, 5, len(y))
        assert groups.posterior_predictive["y"].dims == ("chain", "draw", "observation")
        np.testing.assert_array_equal(
            groups.posterior_predictive["device"], groups.observed_data["device"]
        )
        assert groups.predictions["y"].shape == (4, 5, 7)
        again = trace.to_arviz(posterior, predictive=True)
        np.testing.assert_array_equal(
            again.posterior_predictive["y"], groups.posterior_predictive["y"]
        )


@pytest.mark.parametrize("model", ["uneven", "counts"])
def test_arviz_compares_what_was_observed_with_what_is_predicted(model, request):
    import matplotlib

    matplotlib.use("Agg")
    posterior = request.getfixturevalue(model)[0]
    groups = traced(posterior).to_arviz(
        posterior, predictive=True if model == "uneven" else draw_events
    )
    if isinstance(groups, xr.DataTree):
        assert arviz.plot_ppc_dist(groups, num_samples=5) is not None
        assert arviz.plot_ppc_tstat(groups) is not None
    else:
        assert arviz.plot_ppc(groups, num_pp_samples=5) is not None
        assert arviz.plot_bpv(groups) is not None
    matplotlib.pyplot.close("all")


def test_a_tree_from_arviz_1_on(uneven, monkeypatch):
    monkeypatch.setattr(arviz, "__version__", "1.0.0")
    groups = traced(uneven[0]).to_arviz(uneven[0], predictive=True)
    assert isinstance(groups, xr.DataTree)
    group_names = {"observed_data", "constant_data", "posterior_predictive"}
    assert set(groups.children) == {"posterior", "sample_stats", *group_names}
    assert groups["observed_data"]["y"].size == 43


def test_a_file_says_where_it_comes_from_and_holds_no_data(uneven, tmp_path):
    traced(uneven[0]).save(tmp_path / "trace.nc", {"scenario": "[link]", "seed": 3})
    groups = arviz.from_netcdf(tmp_path / "trace.nc")
    assert groups_of(groups) == {"posterior", "sample_stats"}
    expected = {
        "scenario": "[link]",
        "seed": 3,
        "inference_library_version": wflmc.__version__,
    }
    assert expected.items() <= groups.posterior.attrs.items()


@pytest.mark.parametrize(
    "keywords",
    [{"predictive": True}, {"log_likelihood": True}, {"features": np.ones((2, 3))}],
)
def test_predictions_need_the_model(uneven, labelled, keywords):
    trace = traced(uneven[0])
    with raises_input_error("posterior", value=None):
        trace.to_arviz(**keywords)
    for other in (labelled[0], [uneven[0]]):
        with raises_input_error("posterior", value=type(other).__name__):
            trace.to_arviz(other, **keywords)


def test_features_are_those_of_the_data(uneven):
    trace = traced(uneven[0])
    for bad in (np.ones((2, 4)), np.ones(3), 1.0, np.full((2, 3), np.nan)):
        with raises_input_error("features"):
            trace.to_arviz(uneven[0], features=bad)


def test_burn_in_comes_on_request(uneven):
    plain = traced(uneven[0])
    both = traced(uneven[0], keep_burn_in=True)
    groups = both.to_arviz()
    assert groups_of(groups) == {
        "posterior",
        "sample_stats",
        "warmup_posterior",
        "warmup_sample_stats",
    }
    assert groups.warmup_posterior["theta"].shape == (4, 6, 4)
    np.testing.assert_allclose(
        groups.posterior["theta"], plain.theta, rtol=1e-4, atol=1e-5
    )
    early = groups.warmup_sample_stats
    assert set(early) == set(groups.sample_stats)
    np.testing.assert_array_equal(early["gain"], np.tile(both.plan.gain[:6], (4, 1)))
    np.testing.assert_allclose(
        early["clip_rate"].mean("chain"), plain.burn_in_clip_rate, rtol=1e-6
    )
    spent = early["loss"].sum("draw") + groups.sample_stats["loss"].sum("draw")
    np.testing.assert_allclose(spent, both.plan.spent.max(), rtol=1e-12)


def test_groups_say_what_made_them(uneven):
    trace = traced(uneven[0])
    attributes = trace.to_arviz(attributes={"scenario": "mine"}).posterior.attrs
    assert attributes["scenario"] == "mine"
    assert attributes["key"] == jax.random.key_data(jax.random.key(1)).tolist()
    facts = json.loads(attributes["plan"])
    assert facts["burn_in"] == 6
    assert facts["clip"] == 300
    assert facts["step_size"] == trace.plan.step_size[0]


@pytest.fixture(scope="module")
def counts():
    """Events by Poisson's law on devices of unlike size, with parameters of several shapes."""
    generator = np.random.default_rng(5)
    data = {
        "dose": generator.normal(size=(31, 2)),
        "events": generator.poisson(3.0, size=31),
    }
    owner = np.sort(np.arange(31) % 4)

    def log_likelihood(parameters, example):
        rate = parameters["level"] + parameters["slope"] @ example["dose"]
        return example["events"] * rate - jnp.exp(rate)

    def log_prior(parameters):
        return -0.5 * (
            parameters["level"] ** 2 + parameters["slope"] @ parameters["slope"]
        )

    initial = {"level": 1.0, "slope": jnp.zeros(2)}
    return (
        wflmc.posterior_from(
            log_likelihood, log_prior, data, initial=initial, devices=owner
        ),
        data,
        owner,
    )


def draw_events(key, parameters, example):
    """No Poisson law, which takes seconds to compile: one with the same mean, the rate, and its square as variance."""
    rate = jnp.exp(parameters["level"] + parameters["slope"] @ example["dose"])
    return {"events": rate * jax.random.exponential(key)}


def test_own_parameters_have_their_names(counts):
    posterior, data, owner = counts
    trace = traced(posterior, keep_burn_in=True)
    groups = trace.to_arviz(posterior)
    for group in (groups.posterior, groups.warmup_posterior):
        assert {name: group[name].dims[2:] for name in group} == {
            "level": (),
            "slope": ("slope_dim_0",),
        }
    np.testing.assert_array_equal(groups.posterior["level"], trace.theta[..., 0])
    np.testing.assert_array_equal(groups.posterior["slope"], trace.theta[..., 1:])
    for name in ("events", "dose"):  # nothing tells which of them are outcomes
        np.testing.assert_array_equal(groups.observed_data[name], data[name])
    np.testing.assert_array_equal(groups.observed_data["device"], owner)
    with_outcome = trace.to_arviz(posterior, outcome="events")
    assert list(with_outcome.observed_data.data_vars) == ["events"]
    assert list(with_outcome.constant_data.data_vars) == ["dose"]
    np.testing.assert_array_equal(with_outcome.constant_data["dose"], data["dose"])


def test_own_outcomes_have_the_law_they_are_drawn_by(counts):
    posterior, data, _ = counts
    trace = traced(posterior)
    inputs = {"dose": np.repeat(data["dose"][:2] / 2, 150, axis=0)}
    groups = trace.to_arviz(posterior, predictive=draw_events, features=inputs)
    assert groups.posterior_predictive["events"].shape == (4, 5, 31)
    assert groups.predictions["events"].shape == (4, 5, 300)
    assert list(groups.observed_data.data_vars) == ["events"]
    np.testing.assert_array_equal(groups.constant_data["dose"], data["dose"])
    np.testing.assert_array_equal(
        groups.predictions_constant_data["dose"], inputs["dose"]
    )
    for group, dose, alike in (
        (groups.posterior_predictive, data["dose"], 31),
        (groups.predictions, inputs["dose"], 150),
    ):
        rate = np.exp(trace.theta[..., :1] + trace.theta[..., 1:] @ dose.T)
        # Given θ, draws are independent, with mean 0 and variance 1.
        deviations = group["events"].values / rate - 1
        assert np.all(
            np.abs(deviations.reshape(20, -1, alike).mean((0, 2)))
            <= 4.5 / (20 * alike) ** 0.5
        )
        # Two equal rows have draws of their own.
        assert np.mean(np.diff(deviations) != 0) > 0.99


def test_own_outcomes_need_a_function(counts, uneven):
    with raises_input_error("predictive", "key, parameters, example", value=True):
        traced(counts[0]).to_arviz(counts[0], predictive=True)
    with raises_input_error("predictive", "nothing"):
        traced(counts[0]).to_arviz(
            counts[0], predictive=lambda key, parameters, example: {}
        )
    with raises_input_error("predictive", "True or False"):
        traced(uneven[0]).to_arviz(
            uneven[0], predictive=lambda key, parameters, example: 0.0
        )


def test_own_outcomes_are_called_as_in_the_data(counts, labelled):
    posterior = counts[0]
    trace = traced(counts[0])

    def unnamed(key, parameters, example):
        return draw_events(key, parameters, example)["events"]

    groups = trace.to_arviz(
        posterior, predictive=unnamed, log_likelihood=True, outcome="events"
    )
    for group in (
        groups.observed_data,
        groups.posterior_predictive,
        groups.log_likelihood,
    ):
        assert list(group.data_vars) == ["events"]
    for bad in (
        {"predictive": unnamed},
        {"outcome": "doses"},
        {"predictive": draw_events, "outcome": "dose"},
    ):
        with raises_input_error("outcome", "events", value=bad.get("outcome")):
            trace.to_arviz(posterior, **bad)

    def log_likelihood(parameters, example):
        return -0.5 * (example[1] - parameters @ example[0]) ** 2

    _, X, y = labelled
    pair = wflmc.posterior_from(
        log_likelihood,
        lambda p: -0.5 * p @ p,
        (X, y),
        initial=np.zeros(2),
        devices=2,
        mu=1,
        L=90,
    )
    samples = replace(trace, theta=trace.theta[..., :2])
    groups = samples.to_arviz(
        pair, predictive=lambda key, p, e: p @ e[0], log_likelihood=True
    )
    for group in (
        groups.observed_data,
        groups.posterior_predictive,
        groups.log_likelihood,
    ):
        assert list(group.data_vars) == ["y"]
    assert list(groups.constant_data.data_vars) == ["X"]


@pytest.mark.parametrize("whitened", [False, True])
def test_log_likelihoods_are_those_of_the_model(uneven, labelled, whitened):
    posterior, X, y = uneven
    theta = np.random.default_rng(6).standard_normal((3, 4))
    groups = (posterior.whitened() if whitened else posterior).log_likelihood(theta)
    np.testing.assert_allclose(
        groups, stats.norm.logpdf(y, theta[:, :3] @ X.T + theta[:, 3:]), rtol=1e-9
    )
    posterior, X, y = labelled
    theta = np.random.default_rng(7).standard_normal((3, 6))
    groups = (posterior.whitened() if whitened else posterior).log_likelihood(theta)
    for draw, row in zip(theta.reshape(3, 3, 2), groups, strict=True):
        p = np.exp(X @ draw.T)
        np.testing.assert_allclose(
            row, np.log(p[np.arange(40), y] / p.sum(1)), rtol=1e-9
        )


def test_log_likelihoods_of_a_model_of_ones_own(counts, monkeypatch):
    posterior, data, _ = counts
    trace = traced(posterior)
    done = []
    rate = trace.theta[..., :1].astype(float) + trace.theta[..., 1:] @ data["dose"].T
    for at_a_time in (4, 100):  # draws; and four examples of the 31
        monkeypatch.setattr(outcomes, "CHUNK_BYTES", at_a_time * 8 * 31)
        monkeypatch.setattr(model, "WORKING_BYTES", 1000)
        groups = trace.to_arviz(
            posterior, log_likelihood=True, progress=lambda *so_far: done.append(so_far)
        )
        values = groups.log_likelihood["log_likelihood"]
        assert values.dims == ("chain", "draw", "observation")
        np.testing.assert_allclose(
            values, data["events"] * rate - np.exp(rate), rtol=1e-4, atol=1e-4
        )
    assert done == [(4, 20), (8, 20), (12, 20), (16, 20), (20, 20), (20, 20)]


def test_a_bar_shows_what_takes_long(uneven, monkeypatch, capsys):
    shown = []

    @contextmanager
    def bar(task, total):
        yield lambda done: shown.append((done, total))

    monkeypatch.setattr(outcomes, "progress_bar", bar)
    options = {"predictive": True, "log_likelihood": True, "features": np.ones((1, 3))}
    traced(uneven[0]).to_arviz(uneven[0], **options)
    assert shown[-1] == (60, 60)
    monkeypatch.undo()
    traced(uneven[0]).to_arviz(uneven[0], **options)
    assert capsys.readouterr() == ("", "")  # no terminal, no bar


@pytest.mark.parametrize(
    ("draws", "chain", "draw"),
    [
        (None, range(4), range(5)),
        (20, range(4), range(5)),
        (19, range(4), [0, 2, 4]),
        (8, range(4), [1, 4]),
        (4, range(4), [4]),
        (3, [0, 2], [4]),
        (1, [0], [4]),
    ],
)
def test_outcomes_of_evenly_spaced_draws(uneven, draws, chain, draw):
    trace = traced(uneven[0])
    groups = trace.to_arviz(
        uneven[0], predictive=True, log_likelihood=True, draws=draws
    )
    for group in (groups.posterior_predictive, groups.log_likelihood):
        assert group.attrs["thinning"].startswith(
            f"{len(chain) * len(draw)} of 20 draws"
        )
        np.testing.assert_array_equal(group["chain"], chain)
        np.testing.assert_array_equal(group["draw"], draw)
    expected = (
        uneven[0]
        .log_likelihood(trace.theta[chain][:, draw].reshape(-1, 4))
        .reshape(len(chain), len(draw), -1)
    )
    np.testing.assert_allclose(groups.log_likelihood["y"], expected)
    assert groups.posterior["theta"].shape == (4, 5, 4)


def test_a_thousand_draws_unless_more_are_asked_for(uneven):
    groups = replace(traced(uneven[0]), theta=np.zeros((300, 5, 4))).to_arviz(
        uneven[0], predictive=True
    )
    assert groups.posterior_predictive["y"].shape == (300, 3, 43)
    for bad in (0, True, 1.5, "all"):
        with raises_input_error("draws", value=bad):
            traced(uneven[0]).to_arviz(uneven[0], predictive=True, draws=bad)


def test_groups_made_from_records_say_that_epsilon_does_not_cover_them(uneven):
    groups = traced(uneven[0]).to_arviz(
        uneven[0], predictive=True, log_likelihood=True, features=np.ones((2, 3))
    )
    private = {
        name
        for name in groups_of(groups)
        if "epsilon" in groups[name].attrs.get("privacy", "")
    }
    assert private == {
        "observed_data",
        "constant_data",
        "posterior_predictive",
        "log_likelihood",
    }


def test_loo_is_that_of_the_exact_posterior():
    """Leave-one-out by importance sampling, against predictions of the exact posterior without the observation."""
    posterior = wflmc.gaussian_regression(KEY, devices=4, examples=60, dim=2)
    # With this step the chain's variance is at most 2.6 % too large.
    step = 0.05 / posterior.L
    link = wflmc.Link(channel.static(1e-2), snr_db=30)
    plan = wflmc.plan(
        posterior,
        link,
        wflmc.Privacy(),
        step_size=step,
        burn_in=300,
        samples=8,
        policy=wflmc.Policy(power="noiseless"),
    )
    groups = wflmc.sample(jax.random.key(2), posterior, plan, 250).to_arviz(
        posterior, log_likelihood=True
    )
    log_likelihood = groups["log_likelihood"]
    assert log_likelihood["y"].shape == (250, 4, 60)
    groups["posterior"] = groups["posterior"].sel(
        chain=log_likelihood["chain"], draw=log_likelihood["draw"]
    )
    X, y = groups["constant_data"]["X"].values, groups["observed_data"]["y"].values
    exact = 0.0
    for i in range(len(y)):
        rest = np.arange(len(y)) != i
        covariance = np.linalg.inv(X[rest].T @ X[rest] + np.eye(2))
        mean = covariance @ X[rest].T @ y[rest]
        exact += stats.norm.logpdf(
            y[i], X[i] @ mean, (1 + X[i] @ covariance @ X[i]) ** 0.5
        )
    # Chains are independent, so that leaving out a fifth of them at a time tells the Monte Carlo error.
    parts = [
        elpd(groups.sel(chain=log_likelihood["chain"].values % 5 != left_out))
        for left_out in range(5)
    ]
    error = (0.8 * np.sum((parts - np.mean(parts)) ** 2)) ** 0.5
    assert error < 0.2
    assert abs(elpd(groups) - exact) <= 4.5 * error + 0.05
    # The fit to all data would not pass.
    assert posterior.log_likelihood(posterior.mean[None]).sum() > exact + 1


def elpd(data):
    """The expected log predictive density by leave-one-out, before ArviZ 1 and from then on."""
    groups = arviz.loo(data)
    return float(groups.elpd if isinstance(data, xr.DataTree) else groups.elpd_loo)
