"""Inputs that look like a mistake: gains in dB, features as they came, and a δ above one over what is hidden."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

import wflmc
from tests.plan_tools import grouped
from wflmc import channel
from wflmc.apps.baselines import gradient_descent

from ..cli_tools import with_set, write_gains
from ..error_tools import codes_of, missing_facts, raises_input_error, text_of

KEY = jax.random.key(0)
GENERATOR = np.random.default_rng(0)
LINK = wflmc.Link(channel.static(1.0))
SMALL = wflmc.gaussian_regression(KEY, 4, examples=40, dim=3)


def notices_of(posterior=SMALL, link=LINK, privacy=None, **keywords):
    step = 0.4 / (posterior.mu + posterior.L)
    promise = wflmc.Privacy(8, 0.01, 30) if privacy is None else privacy
    return wflmc.plan(
        posterior,
        link,
        promise,
        **grouped(step_size=step, burn_in=2, samples=2, **keywords),
    ).notices


def texts_of_code(code, **keywords):
    """Return the texts of the notices of a plan that have a code."""
    return [notice.text for notice in notices_of(**keywords) if notice.code == code]


IN_DB = {
    "path gains": -60 - 20 * GENERATOR.random((4, 4)),
    "small gains": -3 * GENERATOR.random((4, 4)) - 0.1,
    "path losses": 60 + 20 * GENERATOR.random((4, 4)),
    "of either sign": np.linspace(-15, 5, 16).reshape(4, 4),
}
AMPLITUDES = {
    "rayleigh": channel.rayleigh(1.0).draw(GENERATOR, 4, 4),
    "path loss": 1e-5 * channel.rayleigh(1.0).draw(GENERATOR, 4, 4),
    "magnitudes": np.abs(channel.rayleigh(3.0).draw(GENERATOR, 4, 4)),
    "real, of either sign": GENERATOR.standard_normal((4, 4)),
    "shadowing of 8 dB": 10 ** (8 * GENERATOR.standard_normal((400, 4)) / 20),
    "strong, with a phase": 50 * channel.rayleigh(1.0).draw(GENERATOR, 4, 4),
}


@pytest.mark.parametrize("table", IN_DB.values(), ids=IN_DB)
def test_gains_in_db(table):
    (text,) = texts_of_code(
        "gains-in-decibels", link=wflmc.Link(channel.from_array(table))
    )
    assert "10**(dB/20)" in text
    # This power policy does not use the link.
    assert not texts_of_code(
        "gains-in-decibels",
        link=wflmc.Link(channel.from_array(table)),
        power="noiseless-dp",
    )
    converted = 10 ** (-np.abs(table) / 20)
    assert not texts_of_code(
        "gains-in-decibels", link=wflmc.Link(channel.from_array(converted))
    )


@pytest.mark.parametrize("table", AMPLITUDES.values(), ids=AMPLITUDES)
def test_amplitudes_are_nothing_to_speak_of(table):
    assert not texts_of_code(
        "gains-in-decibels", link=wflmc.Link(channel.from_array(table))
    )


def test_gains_in_db_from_a_file(plan_of, scenario, tmp_path):
    write_gains(tmp_path, np.full((60, 30), -80.0))
    sets = with_set(["link.fading=file", "link.gains=h.npy"])
    assert "gains-in-decibels" in codes_of(plan_of(scenario, *sets))


@pytest.mark.parametrize(
    ("privacy", "facts"),
    [
        (wflmc.Privacy(8, 0.3, 30), ("delta = 0.3", "1/4", "devices")),
        (wflmc.Privacy(8, [0.01, 0.01, 0.3, 0.01], 30), ("delta = 0.3", "1/4")),
        (
            wflmc.Privacy(8, 0.03, 30, unit="record", example_clip=3),
            ("delta = 0.03", "1/40"),
        ),
        (wflmc.Privacy(8, 0.2, 30), None),
        (wflmc.Privacy(8, 0.02, 30, unit="record", example_clip=3), None),
        (wflmc.Privacy(clip=30), None),
    ],
)
def test_large_deltas(privacy, facts):
    texts = texts_of_code("delta-too-large", privacy=privacy)
    assert len(texts) == (facts is not None)
    assert facts is None or not missing_facts(texts[0], facts)


def scaled(*scales, intercept=False, **keywords):
    X = np.random.default_rng(1).standard_normal((50, len(scales))) * scales
    return wflmc.softmax_regression(
        KEY, 2, X=X, y=np.arange(50) % 2, intercept=intercept, **keywords
    )


@pytest.mark.parametrize(
    ("scales", "facts"),
    [
        ((1, 1, 1), None),
        ((5, 1, 0.2), None),
        ((1, 0.01, 1), None),  # one small column does no harm
        ((1, 0, 1), None),
        ((1e-3, 1e-3), None),
        (
            (1, 1000, 1, 2),
            ("column 1", "1,000", "median"),
        ),
        (
            (1e-4, 1, 1e-4),
            ("column 1", "10,000", "median"),
        ),
        (
            (1000, 800),
            ("column 0", "1,000", "standardised"),
        ),
        (
            (1, 1, 50),
            ("column 2", "100", "standardised"),
        ),
    ],
)
def test_features_that_are_not_scaled(scales, facts):
    texts = texts_of_code("features-not-scaled", posterior=scaled(*scales))
    assert len(texts) == (facts is not None)
    assert facts is None or not missing_facts(texts[0], facts)


def test_whitening_is_scaling():
    """Unless noise has hidden the features from it, which then are as they were."""
    raw = scaled(1, 1000, 1, intercept=True)
    assert texts_of_code("features-not-scaled", posterior=raw)
    assert not texts_of_code("features-not-scaled", posterior=raw.whitened())
    (text,) = texts_of_code("features-not-scaled", posterior=raw.whitened(np.eye(4)))
    assert not missing_facts(text, ("whitening", "1,000", "standardised"))


def test_a_csv_says_which_column(plan_of, scenario, tmp_path):
    """By its name, where y is not the last column, and by no number of the data but a power of ten."""
    X = np.random.default_rng(1).standard_normal((50, 2)) * [1, 1234]
    lines = ["age,y,mean area", *(f"{a},{a},{b}" for a, b in X)]
    (tmp_path / "d.csv").write_text("\n".join(lines))
    document = plan_of(scenario, *with_set(["posterior.data=d.csv"]))
    text = text_of(document, "features-not-scaled")
    assert not missing_facts(text, ("column 1", "mean area"))
    assert set(re.findall(r"[\d,.]*\d", text)) == {"1", "0", "1,000"}


def test_descent_warns_as_well():
    gains = channel.from_array(np.full((4, 4), -80.0))
    descent = gradient_descent(
        SMALL, wflmc.Link(gains), wflmc.Privacy(8, 0.3, 30), step_size=1e-3, rounds=4
    )
    assert {"gains-in-decibels", "delta-too-large"} <= set(codes_of(descent))


def test_public_constants_keep_a_plan_from_telling_of_the_data(plan_of, tmp_path):
    """With a promise and all constants given, not even the scale of a column shows."""
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "d.npz",
        X=rng.standard_normal((60, 2)) * [1, 1e4],
        y=rng.standard_normal(60),
    )
    (tmp_path / "s.toml").write_text(
        '[posterior]\ndata = "d.npz"\ndevices = 4\nmu = 1.0\nL = 1e11\n[privacy]\nepsilon = 8.0\ndelta = 0.001\n'
    )
    open_plan = plan_of(tmp_path / "s.toml")
    assert "features-not-scaled" in codes_of(open_plan)
    public = ("--set", "posterior.initial_w2_sq=3.0")
    assert "features-not-scaled" not in codes_of(plan_of(tmp_path / "s.toml", *public))


def test_a_step_above_a_loose_bound_on_the_curvature_is_a_warning():
    """Böhning's bound holds everywhere; along a chain the curvature is smaller, and larger steps work."""
    posterior = wflmc.softmax_regression(KEY, 4, examples=40, dim=3, classes=3)
    options = {"burn_in": 20, "samples": 5, "sampler": wflmc.Sampler(init="zero")}
    for power in ("optimized", "equal"):
        policy = wflmc.Policy(power)
        plan = wflmc.plan(
            posterior,
            LINK,
            wflmc.Privacy(),
            step_size=3 / posterior.L,
            policy=policy,
            **options,
        )
        assert plan.bound is None
        assert np.isnan(plan.objective)
        assert "loose-curvature" in codes_of(plan)
    assert np.isfinite(wflmc.sample(KEY, posterior, plan, chains=2).theta).all()
    within = wflmc.plan(
        posterior, LINK, wflmc.Privacy(), step_size=1.9 / posterior.L, **options
    )
    assert within.bound is not None
    assert "loose-curvature" not in codes_of(within)
    # For a Gaussian the limit 2/L is exact.
    with raises_input_error("step_size", "2/L", section="sampler"):
        wflmc.plan(SMALL, LINK, wflmc.Privacy(), step_size=3 / SMALL.L, **options)
    # Beyond the prior's own curvature nothing is stable.
    with pytest.raises(wflmc.InputError, match="step_size"):
        wflmc.plan(
            posterior, LINK, wflmc.Privacy(), step_size=3 / posterior.mu, **options
        )
