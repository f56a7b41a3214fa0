"""Scores of linear regression on test data: against densities written out and the exact posterior predictive."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from scipy.stats import norm

import wflmc
from wflmc.evaluation import regression_scores

from ..cli_tools import strict, with_set
from ..error_tools import names_key, raises_input_error


@pytest.fixture(scope="module")
def data():
    """(X, y) to train on and (X, y) to test on."""
    generator = np.random.default_rng(0)
    X = generator.standard_normal((90, 3))
    y = X @ [1.0, -0.5, 0.2] + 0.3 + generator.standard_normal(90)
    return X[:60], y[:60], X[60:], y[60:]


@pytest.fixture(scope="module")
def posterior(data):
    return wflmc.gaussian_regression(
        jax.random.key(0), 4, X=data[0], y=data[1], intercept=True
    )


def test_by_densities_written_out(data, posterior, monkeypatch):
    X, y = data[2:]
    theta = np.random.default_rng(1).standard_normal((2, 5, 4))
    mean = theta @ np.column_stack([X, np.ones(len(X))]).T
    density = norm.pdf(y, loc=mean).mean(1)
    for chunk in (2**27, 1000):  # a few rows at a time
        monkeypatch.setattr("wflmc.evaluation.scores.CHUNK_BYTES", chunk)
        scores = regression_scores(posterior, theta, X, y)
        np.testing.assert_allclose(scores.nll, -np.log(density).mean(-1), rtol=1e-12)
        np.testing.assert_allclose(
            scores.rmse, np.sqrt(np.mean((mean.mean(1) - y) ** 2, axis=-1)), rtol=1e-12
        )
    # Draws are of the parameters, whatever the coordinates of the chain.
    elsewhere = regression_scores(posterior.whitened(), theta, X, y)
    np.testing.assert_array_equal(elsewhere.nll, scores.nll)


def test_draws_from_the_posterior_score_as_its_exact_predictive(data, posterior):
    X, y = data[2:]
    u = np.column_stack([X, np.ones(len(X))])
    law = posterior.exact
    chains = 20
    draws = 1000
    theta = np.random.default_rng(2).multivariate_normal(
        law.mean, law.covariance, (chains, draws)
    )
    scores = regression_scores(posterior, theta, X, y)
    wide = np.sqrt(1 + np.einsum("nd,de,ne->n", u, law.covariance, u))
    for values, expected in (
        (scores.nll, -norm.logpdf(y, u @ law.mean, wide).mean()),
        (scores.rmse, np.sqrt(np.mean((u @ law.mean - y) ** 2))),
    ):
        # Four standard errors, and the bias of a log.
        assert (
            abs(values.mean() - expected)
            < 4 * values.std() / chains**0.5 + expected / draws
        )


def test_evaluate(data, posterior):
    link = wflmc.Link(wflmc.channel.static(1.0))
    privacy = wflmc.Privacy(8, 0.01, 30)
    plan = wflmc.plan(posterior, link, privacy, step_size=1e-3, burn_in=3, samples=4)
    trace = wflmc.sample(jax.random.key(0), posterior, plan, 2)
    evaluation = wflmc.evaluate(trace, posterior, test=data[2:])
    assert evaluation.mean_scores["rmse"] == pytest.approx(
        float(evaluation.scores.rmse.mean())
    )
    assert (
        f"RMSE {evaluation.scores.rmse.mean():.4f}, NLL {evaluation.scores.nll.mean():.4f}"
        in str(evaluation)
    )
    X, y = data[2:]
    for test in (
        (X[:, :2], y),
        (X, y[:5]),
        (X * np.nan, y),
        (X, ["a"] * len(y)),
        (X[:0], y[:0]),
        X,
    ):
        with raises_input_error("test"):
            wflmc.evaluate(trace, posterior, test=test)


def test_a_scenario_with_a_test_set(call, scenario, tmp_path, data):
    """X_test and y_test of an .npz are no longer passed over."""
    X, y, X_test, y_test = data
    np.savez(tmp_path / "d.npz", X=X, y=y, X_test=X_test, y_test=y_test)
    sets = with_set(
        [
            "posterior.data=d.npz",
            "posterior.devices=4",
            "posterior.intercept=true",
            "sampler.samples=4",
        ]
    )
    code, out, err = call("run", scenario, *sets, "--out", tmp_path / "o", "--json")
    assert code == 0, err
    summary = strict(out)
    assert [summary[name] for name in ("accuracy", "ece", "brier", "reliability")] == [
        None
    ] * 4
    import xarray as xr

    theta = xr.open_datatree(tmp_path / "o" / "trace.nc")["posterior"][
        "theta"
    ].values.astype(float)
    mean = theta @ np.column_stack([X_test, np.ones(len(X_test))]).T
    assert summary["nll"] == pytest.approx(
        -np.log(norm.pdf(y_test, loc=mean).mean(1)).mean(), rel=1e-6
    )
    assert summary["rmse"] == pytest.approx(
        np.sqrt(np.mean((mean.mean(1) - y_test) ** 2, axis=-1)).mean(), rel=1e-6
    )
    assert call("report", tmp_path / "o")[0] == 0
    assert 'data-key="summary.rmse"' in (tmp_path / "o" / "report.html").read_text()
    np.savez(tmp_path / "d.npz", X=X, y=y, X_test=X_test[:, :2], y_test=y_test)
    code, _, err = call("plan", scenario, *sets)
    assert code == 2
    assert names_key(err, "posterior.features", "X_test", "(30, 2)")
