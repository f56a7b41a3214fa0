"""Averages that are kept instead of draws are those of the draws, also of a run that was stopped and resumed."""

from __future__ import annotations

import arviz
import jax
import numpy as np
import pytest

import wflmc
from wflmc import channel
from wflmc.sampling import Execution, chunks

from ..error_tools import raises_input_error

KEY = jax.random.key(3)


@pytest.fixture(scope="module")
def chain():
    posterior = wflmc.softmax_regression(
        jax.random.key(0), 3, examples=60, dim=4, classes=3
    ).whitened()
    link = wflmc.Link(channel.static(1.0), snr_db=30)
    promise = wflmc.Privacy(clip=20.0)
    plan = wflmc.plan(
        posterior, link, promise, step_size=0.3 / posterior.L, burn_in=3, samples=9
    )
    return (
        posterior,
        plan,
        np.random.default_rng(1).normal(size=(30, 4)).astype(np.float32),
    )


@pytest.fixture(autouse=True)
def _several_blocks(monkeypatch):
    monkeypatch.setattr(chunks, "BLOCK_WORK", 1e5)


def test_averages_are_those_of_the_draws(chain):
    posterior, plan, rows = chain
    drawn = wflmc.sample(KEY, posterior, plan, chains=4)
    draws = drawn.theta
    trace = wflmc.sample(KEY, posterior, plan, chains=4, predictions=rows)
    averages = trace.predictions
    np.testing.assert_allclose(
        averages.probability, posterior.predict(draws, rows), atol=2e-6
    )
    np.testing.assert_allclose(averages.mean, draws.mean(1), atol=1e-5)
    np.testing.assert_allclose(averages.variance, draws.var(1, ddof=1), rtol=1e-3)
    logits = draws.reshape(4, 9, 3, 4) @ rows[:20].T
    np.testing.assert_allclose(
        averages.logits,
        (logits - logits.mean(2, keepdims=True)).reshape(4, 9, -1),
        atol=1e-4,
    )
    np.testing.assert_allclose(trace.theta[:, 0], averages.mean)
    labels = np.arange(30) % 3
    evaluation = wflmc.evaluate(trace, posterior, (rows, labels))
    direct = wflmc.evaluate(drawn, posterior, (rows, labels))
    assert evaluation.mean_scores == pytest.approx(direct.mean_scores, abs=1e-5)
    assert evaluation.rhat_max == pytest.approx(
        wflmc.evaluation.diagnose(averages.logits).rhat_max
    )


def test_a_run_that_was_stopped_ends_with_the_same_averages(chain, tmp_path):
    posterior, plan, rows = chain
    whole = wflmc.sample(KEY, posterior, plan, chains=4, predictions=rows).predictions

    class StopError(Exception):
        pass

    def stop(done, _):
        if done > 6:
            raise StopError

    stopped = Execution(checkpoint=tmp_path, progress=stop)
    with pytest.raises(StopError):
        wflmc.sample(
            KEY, posterior, plan, chains=4, predictions=rows, execution=stopped
        )
    assert not (tmp_path / "theta.npy").exists()
    going_on = Execution(checkpoint=tmp_path)
    resumed = wflmc.sample(
        KEY, posterior, plan, chains=4, predictions=rows, execution=going_on
    ).predictions
    for expected, actual in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(expected, actual)
    with raises_input_error("checkpoint"):
        wflmc.sample(
            KEY,
            posterior,
            plan,
            chains=4,
            predictions=rows[:5],
            execution=Execution(checkpoint=tmp_path),
        )


def test_averages_open_in_arviz(chain, tmp_path):
    posterior, plan, rows = chain
    trace = wflmc.sample(KEY, posterior, plan, chains=4, predictions=rows)
    trace.save(tmp_path / "trace.nc")
    opened = arviz.from_netcdf(tmp_path / "trace.nc")
    assert opened["predictions"]["probability"].shape == (4, 30, 3)
    np.testing.assert_array_equal(
        opened["posterior"]["variance"].values, trace.predictions.variance
    )
    assert "theta" not in opened["posterior"]


def test_what_keeps_no_averages(chain):
    posterior, plan, rows = chain
    with raises_input_error("predictions", "keep_burn_in"):
        wflmc.sample(
            KEY, posterior, plan, chains=2, predictions=rows, keep_burn_in=True
        )
    with raises_input_error("features", "(30, 2)"):
        wflmc.sample(KEY, posterior, plan, chains=2, predictions=rows[:, :2])
    gaussian = wflmc.gaussian_regression(jax.random.key(0), devices=3, examples=30)
    plan = wflmc.plan(
        gaussian,
        wflmc.Link(channel.static()),
        wflmc.Privacy(),
        step_size=1e-3,
        burn_in=0,
        samples=3,
    )
    with raises_input_error("predictions", "classes"):
        wflmc.sample(KEY, gaussian, plan, chains=2, predictions=np.ones((3, 5)))
