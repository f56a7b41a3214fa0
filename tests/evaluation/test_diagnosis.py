"""The diagnosis: its forecast against exact laws and chains, and what following its advice brings."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest
from scipy.special import log_softmax, logsumexp

import wflmc
from tests.plan_tools import grouped
from wflmc import channel
from wflmc.apps.diagnosis import Cause, Measured, find_causes
from wflmc.apps.diagnosis.advice import PlanSource, diagnose_plan
from wflmc.apps.diagnosis.values import CAUSES_SHOWN, TOO_FEW_DRAWS
from wflmc.apps.report.text import diagnosis_lines
from wflmc.evaluation import Evaluation
from wflmc.evaluation.clipped_law import forecast, model_of
from wflmc.posterior import Gaussian, GaussianPosterior, w2_squared
from wflmc.posterior.softmax import synthetic_labels
from wflmc.runs.planning import make_plan
from wflmc.scenario import build, validate
from wflmc.scenario.coverage import data_notices
from wflmc.scenario.schema import with_values
from wflmc.support.notices import NoticeCode

from ..conftest import FULL
from ..error_tools import codes_of
from ..posterior.custom_tools import as_custom

GAUSSIAN = {
    "posterior": {"devices": 6, "examples": 240, "dim": 3},
    "link": {"snr_db": 40.0},
    "privacy": {"epsilon": 60.0, "delta": 0.01, "clip": 30.0},
    "sampler": {"burn_in": 30, "samples": 20},
}
SOFTMAX = {
    "posterior": {"model": "softmax", "devices": 5, "examples": 200, "dim": 2},
    "link": {"snr_db": 60.0},
    "privacy": {"epsilon": 200.0, "delta": 0.01, "clip": 20.0},
    "sampler": {"burn_in": 30, "samples": 15, "step_size": "1/(mu+L)"},
}
BAD = {
    "clip too small": (GAUSSIAN, {"privacy.clip": 2.0}),
    "clip too large": (GAUSSIAN, {"privacy.clip": 300.0}),
    "tiny epsilon": (GAUSSIAN, {"privacy.epsilon": 1.0}),
    "tiny SNR": (GAUSSIAN, {"link.snr_db": 0.0}),
    "short burn-in": (GAUSSIAN, {"sampler.burn_in": 3}),
    "small step": (GAUSSIAN, {"sampler.step_size": "0.04/(mu+L)"}),
    "large step": (GAUSSIAN, {"sampler.step_size": "1.9/(mu+L)", "privacy.epsilon": None, "privacy.delta": None}),
    "many rounds": (GAUSSIAN, {"sampler.burn_in": 150, "privacy.epsilon": 8.0}),
    "few devices": (GAUSSIAN, {"posterior.devices": 2, "privacy.clip": 60.0, "privacy.epsilon": 8.0}),
    "unlike devices": (GAUSSIAN, {"posterior.partition": "by-label", "privacy.clip": 12.0}),
    "equal power": (GAUSSIAN, {"policy.power": "equal", "privacy.epsilon": 4.0}),
    "kinetic": (
        GAUSSIAN,
        {"sampler.dynamics": "kinetic", "sampler.step_size": "1/L**0.5", "sampler.friction": "2*mu**0.5",
         "policy.power": "equal", "privacy.epsilon": 4.0},
    ),
    "softmax: clip too small": (SOFTMAX, {"privacy.clip": 1.0}),
    "softmax: clip too large": (SOFTMAX, {"privacy.clip": 1000.0}),
    "softmax: tiny epsilon": (SOFTMAX, {"privacy.epsilon": 2.0}),
    "softmax: tiny SNR": (SOFTMAX, {"link.snr_db": 0.0}),
    "softmax: short burn-in": (SOFTMAX, {"sampler.burn_in": 2, "sampler.samples": 8}),
    "softmax: small step": (SOFTMAX, {"sampler.step_size": "0.05/(mu+L)"}),
    "softmax: small clip of examples": (SOFTMAX, {"privacy.unit": "record", "privacy.example_clip": 0.1,
                                                  "privacy.epsilon": 2.0}),
    "softmax: narrow prior": (SOFTMAX, {"posterior.prior_std": 0.1, "privacy.epsilon": None, "privacy.delta": None}),
}  # fmt: skip
ONLY_IN_FULL = ("equal power", "kinetic", "softmax: tiny SNR", "softmax: small step")
OPPOSITE = {
    "clip too small": "privacy.clip down",
    "step size too small": "sampler.step_size down",
    "step size too large": "sampler.step_size up",
    "burn-in too short": "sampler.burn_in down",
}
TEST_SET = synthetic_labels(jax.random.key(0), 200, 2, stream="test")


def of(content, changes):
    """A scenario from its plain data with some keys changed."""
    merged = {section: dict(values) for section, values in content.items()}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        merged.setdefault(section, {})[name] = value
        if value is None:
            del merged[section][name]
    return validate(merged)


def gradients(posterior, theta, plan):
    """Every device's gradient at theta[chain, m], its examples clipped one by one where they are to be."""
    if isinstance(posterior, GaussianPosterior):
        assert not np.isfinite(plan.example_clip).any() or posterior.coordinates is None
        residual = (
            np.einsum("knm,cm->ckn", posterior.features, theta) - posterior.target
        )
        record_factors = residual[..., None]
        features = posterior.features
        prior_share = theta / (posterior.devices * posterior.prior_std**2)
    else:
        weights = theta.reshape(len(theta), posterior.classes, -1)
        logits = np.einsum("knd,cad->ckna", posterior.features, weights)
        record_factors = (
            np.exp(log_softmax(logits, -1))
            - np.eye(posterior.classes)[posterior.labels]
        )
        features = posterior.features
        prior_share = theta / (posterior.devices * posterior.prior_std**2)
    if np.isfinite(plan.example_clip).any():
        norm = np.linalg.norm(record_factors, axis=-1) * np.linalg.norm(
            features, axis=-1
        )
        record_factors = (
            record_factors
            * np.minimum(1, plan.example_clip[:, None] / np.maximum(norm, 1e-30))[
                ..., None
            ]
        )
    real = np.arange(features.shape[1]) < posterior.sizes[:, None]
    total = np.einsum("ckna,knd->ckad", record_factors * real[..., None], features)
    return total.reshape(len(theta), posterior.devices, -1) + prior_share[:, None]


def chains(posterior, plan, count=24, seed=0):
    """Kept draws [chain, draw, m] and the share of clipped gradients, by the protocol written out in NumPy."""
    rng = np.random.default_rng(seed)
    theta = (
        rng.standard_normal((count, posterior.dim))
        * posterior.prior_std
        * (plan.init == "prior")
    )
    velocity = rng.standard_normal(theta.shape)
    draws = []
    clip_rates = []
    for s in range(len(plan.rounds)):
        if plan.dynamics.has_velocity:
            theta = theta + plan.step_size[s] / 2 * velocity
        g = gradients(posterior, theta, plan)
        norm = np.linalg.norm(g, axis=-1)
        pull = np.einsum(
            "ck,ckm->cm",
            plan.weight[s] * np.minimum(1, plan.clip / np.maximum(norm, 1e-30)),
            g,
        )
        moved = -plan.kick[s] * pull + plan.noise_variance[
            s
        ] ** 0.5 * rng.standard_normal(theta.shape)
        if not plan.dynamics.has_velocity:
            theta = theta + moved
        else:
            velocity = (
                np.exp(-plan.dynamics.friction * plan.step_size[s]) * velocity + moved
            )
            theta = theta + plan.step_size[s] / 2 * velocity
        if s >= plan.burn_in:
            draws.append(theta)
            clip_rates.append(np.mean(norm > plan.clip))
    return np.stack(draws, 1), float(np.mean(clip_rates))


def score(posterior, theta):
    """W2² of the draws to the exact posterior, or the negative log-likelihood of each chain's predictions."""
    if isinstance(posterior, GaussianPosterior):
        draws = theta.reshape(-1, posterior.dim)
        return float(
            w2_squared(Gaussian(draws.mean(0), np.cov(draws.T)), posterior.exact)
        )
    logits = np.einsum(
        "nd,csad->csna",
        TEST_SET[0],
        theta.reshape(*theta.shape[:2], posterior.classes, -1),
    )
    log_p = log_softmax(logits, -1)[..., np.arange(len(TEST_SET[1])), TEST_SET[1]]
    return float(-(logsumexp(log_p, axis=1) - np.log(theta.shape[1])).mean())


def measured(rate):
    """What a run tells of its chains."""
    return Evaluation(None, None, None, None, 0.0, 0, 1.5, None, None, {"burn_in": rate, "samples": rate}, None, None,
                      None, 1.0)  # fmt: skip


@pytest.fixture(scope="module")
def followed():
    """Every bad scenario: its diagnosis, and the score before and after its first change."""
    followed_advice = {}
    for name, (content, changes) in BAD.items():
        if name in ONLY_IN_FULL and not FULL:
            continue
        scenario = of(content, changes)
        inputs = build(scenario)
        plan = make_plan(scenario, inputs)
        theta, rate = chains(inputs.posterior, plan)
        causes = diagnose_plan(
            PlanSource(scenario, inputs), plan, Measured.from_evaluation(measured(rate))
        )
        change = next(
            (cause["change"] for cause in causes if cause["change"] is not None), None
        )
        after = None
        if change is not None:
            other = with_values(
                scenario, {change["key"]: change["value"], **change["with"]}
            )
            inputs = build(other)
            after = score(
                inputs.posterior, chains(inputs.posterior, make_plan(other, inputs))[0]
            )
        followed_advice[name] = causes, score(build(scenario).posterior, theta), after
    return followed_advice


def test_following_the_first_advice_helps(followed):
    """Nine of ten, of two models; the scores are those of chains, which the diagnosis has not seen."""
    for model in (False, True):
        rows = {
            name: row
            for name, row in followed.items()
            if name.startswith("softmax") == model
        }
        better = [
            name
            for name, (_, before, after) in rows.items()
            if after is not None and after < before
        ]
        assert len(better) >= 0.9 * len(rows), sorted(set(rows) - set(better))
    gains = [
        before / after
        for name, (_, before, after) in followed.items()
        if not name.startswith("softmax")
    ]
    assert np.median(gains) > 5


def test_causes_are_those_that_were_made(followed):
    expected = {
        "clip too small": ("clip too small", "privacy.clip", "up"),
        "clip too large": ("privacy noise", "privacy.clip", "down"),
        "tiny SNR": ("channel noise", "link.snr_db", "up"),
        "short burn-in": ("burn-in too short", "sampler.burn_in", "up"),
        "small step": ("step size too small", "sampler.step_size", "up"),
        "large step": ("step size too large", "sampler.step_size", "down"),
        "unlike devices": ("clip too small", "privacy.clip", "up"),
        "softmax: clip too small": ("clip too small", "privacy.clip", "up"),
        "softmax: clip too large": ("privacy noise", "privacy.clip", "down"),
        "softmax: small clip of examples": (
            "clip too small",
            "privacy.example_clip",
            "up",
        ),
        "softmax: narrow prior": ("prior too narrow", "posterior.prior_std", "up"),
    }
    for name, (cause, key, direction) in expected.items():
        first = followed[name][0][0]
        assert (
            first["cause"],
            first["change"]["key"],
            first["change"]["direction"],
        ) == (cause, key, direction), name
    for name in ("tiny epsilon", "many rounds", "few devices", "softmax: tiny epsilon"):
        assert followed[name][0][0]["cause"] in ("privacy noise", "noise of burn-in"), (
            name
        )


def test_one_diagnosis_does_not_contradict_itself(followed):
    """No key twice, no rounds or clips to raise and to lower at once, and names that say what the change does."""
    for name, (causes, _, _) in followed.items():
        changes = [
            change
            for cause in causes
            for change in (cause["change"], cause["instead"])
            if change is not None
        ]
        keys = [change["key"] for change in changes]
        assert len(set(keys)) == len(keys), name
        for group in (
            ("sampler.burn_in", "sampler.samples"),
            ("privacy.clip", "privacy.example_clip"),
        ):
            assert (
                len(
                    {
                        change["direction"]
                        for change in changes
                        if change["key"] in group
                    }
                )
                <= 1
            ), name
        for cause in causes:
            turn = (
                ""
                if cause["change"] is None
                else f"{cause['change']['key']} {cause['change']['direction']}"
            )
            assert turn != OPPOSITE.get(cause["cause"]), name
            expected = None if cause["change"] is None else cause["change"]["expected"]
            assert expected is None or expected["after"] < expected["before"]
            assert "nan" not in cause["text"]
        assert len(diagnosis_lines(causes)) == min(CAUSES_SHOWN, max(1, len(causes)))


def test_warnings_give_no_advice():
    """Advice is the diagnosis alone: fewer rounds in one warning and more in another help nobody."""
    advice = re.compile(r"\b(helps?|[Uu]se a|[Tt]ry|fewer|larger|smaller|higher)\b")
    for name in (
        "tiny epsilon",
        "many rounds",
        "clip too small",
        "tiny SNR",
        "softmax: tiny epsilon",
    ):
        scenario = of(*BAD[name])
        plan = make_plan(scenario, inputs := build(scenario))
        evaluation = dataclasses.replace(
            measured(0.9), rhat_max=3.0, noise_ratio=plan.noise_ratio
        )
        assert not [
            text
            for text in (*plan.warnings, *evaluation.warnings)
            if advice.search(text)
        ], name
        # What every plan like it says comes last.
        assert codes_of(plan)[-1] == "data-constants"
        assert data_notices(inputs.not_covered) == plan.notices[-1:]


@pytest.mark.parametrize("name", ["overdamped", "kinetic"])
def test_the_forecast_is_the_exact_law_where_nothing_is_clipped(name, small):
    fair = wflmc.gaussian_regression(jax.random.key(1), devices=5, examples=43, dim=3)
    options = {"step_size": 0.4 / (fair.mu + fair.L)}
    if name == "kinetic":
        options = {
            "step_size": fair.L**-0.5,
            "dynamics": "kinetic",
            "friction": 2 * fair.mu**0.5,
            "power": "equal",
        }
    link = wflmc.Link(channel.static(0.01), snr_db=20)
    for posterior in (fair, small):
        plan = wflmc.plan(
            posterior,
            link,
            wflmc.Privacy(8, 0.01, 30),
            **grouped(burn_in=9, samples=7, schedule="all", **options),
        )
        actual = forecast(plan, model_of(plan, posterior), clipping=False)
        size = np.trace(posterior.exact.covariance)
        assert actual.w2_sq * size == pytest.approx(
            wflmc.exact_w2_sq(posterior, plan)[9:].max(), rel=1e-9
        )
        variance = np.diagonal(posterior.exact.covariance) / wflmc.evaluation.exact_ess(
            posterior, plan
        )
        assert actual.inverse_ess * size == pytest.approx(variance.sum(), rel=1e-9)


@pytest.mark.parametrize(
    "name",
    ["clip too small", "tiny epsilon", "many rounds", "short burn-in", "kinetic"],
)
def test_the_forecast_of_clipped_chains(name):
    """From a fraction of the posterior's variance to millions of it, within half of what chains show."""
    scenario = of(*BAD[name])
    plan = make_plan(scenario, inputs := build(scenario))
    actual = forecast(plan, model_of(plan, inputs.posterior))
    theta, rate = chains(inputs.posterior, plan, 200)
    exact = inputs.posterior.exact
    rounds = [
        w2_squared(Gaussian(draws.mean(0), np.cov(draws.T)), exact)
        for draws in theta.swapaxes(0, 1)
    ]
    assert actual.w2_sq == pytest.approx(
        max(rounds) / np.trace(exact.covariance), rel=0.5
    )
    assert actual.clip_rate == pytest.approx(rate, abs=0.25)


def test_good_settings_get_no_advice():
    scenario = of(GAUSSIAN, {"sampler.burn_in": 40, "sampler.samples": 300, "link.snr_db": 60.0,
                             "privacy.epsilon": 500.0})  # fmt: skip
    inputs = build(scenario)
    assert (
        diagnose_plan(PlanSource(scenario, inputs), make_plan(scenario, inputs)) == []
    )
    assert "nothing stands out" in diagnosis_lines([])[0]


def test_test_scores_are_not_looked_at():
    scenario = of(*BAD["softmax: small step"])
    inputs = build(scenario)
    plan = make_plan(scenario, inputs)
    scored = [
        dataclasses.replace(measured(0.1), scores=scores)
        for scores in (None, "anything")
    ]
    without, with_scores = (
        find_causes(
            plan, inputs.posterior, measured=Measured.from_evaluation(evaluation)
        )
        for evaluation in scored
    )
    assert without == with_scores


def test_data_are_not_looked_at_where_constants_are_public(monkeypatch):
    public = {
        "posterior.mu": 60.0,
        "posterior.L": 110.0,
        "posterior.initial_w2_sq": 3.0,
        "privacy.clip": 300.0,
    }
    scenario = of(GAUSSIAN, public)
    inputs = build(scenario)
    monkeypatch.setattr(
        GaussianPosterior, "quadratic", lambda *_: pytest.fail("data were looked at")
    )
    first = diagnose_plan(PlanSource(scenario, inputs), make_plan(scenario, inputs))[0]
    assert (first["change"]["key"], first["change"]["direction"]) == (
        "privacy.clip",
        "down",
    )


def test_advice_from_python():
    """A model of one's own; power that limits is told from privacy that does, and changes help by the exact law."""
    gaussian = wflmc.gaussian_regression(
        jax.random.key(0), devices=3, examples=60, dim=2
    )
    posterior = as_custom(gaussian)
    link = wflmc.Link(channel.static(0.01), snr_db=10)
    privacy = wflmc.Privacy(clip=60)
    options = {
        "step_size": 0.4 / (gaussian.mu + gaussian.L),
        "burn_in": 20,
        "samples": 20,
    }
    for model in (posterior, gaussian):
        first = wflmc.advise(model, link, privacy, **grouped(**options))[0]
        assert isinstance(first, Cause)
        assert (first.cause, first.change.direction) == (
            "channel noise",
            {"privacy.clip": "down"}.get(first.change.key, "up"),
        )
        assert f"Try {first.change.key} = " in str(first)
    causes = wflmc.advise(
        gaussian,
        wflmc.Link(channel.static(0.01), snr_db=60),
        privacy,
        **grouped(**options),
    )
    assert [cause.cause for cause in causes] == [TOO_FEW_DRAWS]
    assert "draws of a chain are worth" in str(causes[0])


@pytest.mark.parametrize("content", [GAUSSIAN, SOFTMAX], ids=["gaussian", "softmax"])
def test_devices_pull_in_opposite_directions_at_the_mode(content):
    """Their gradients there sum to zero and have the norms of those of the written-out cost."""
    scenario = of(
        content, {"posterior.partition": "dirichlet:1.0", "policy.power": "noiseless"}
    )
    plan = make_plan(scenario, inputs := build(scenario))
    cost = inputs.posterior.quadratic()
    written_out = gradients(inputs.posterior, cost.mode[None], plan)[0]
    size = np.linalg.norm(written_out, axis=1)
    np.testing.assert_allclose(
        np.linalg.norm(cost.gradients_at_mode, axis=1), size, rtol=1e-6
    )
    assert np.linalg.norm(cost.gradients_at_mode.sum(0)) < 1e-2 * size.max()


@pytest.mark.parametrize("example_clip", [1.0, 2.0, 3.0])
def test_the_forecast_of_clipped_examples(posterior, example_clip):
    """Clipped examples no longer answer to θ, so samples spread, and what they lose shifts the mode."""
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=30)
    privacy = wflmc.Privacy(15, 0.01, 30, "exact", "record", example_clip)
    plan = wflmc.plan(
        posterior,
        link,
        privacy,
        step_size=0.4 / (posterior.mu + posterior.L),
        burn_in=50,
        samples=50,
    )
    theta, _ = chains(posterior, plan, 100)
    away = theta - posterior.exact.mean
    variances, directions = np.linalg.eigh(posterior.exact.covariance)
    away = away @ directions
    off = away.mean(0) ** 2 + (away.std(0) - variances**0.5) ** 2
    simulated = (off / variances).mean(-1).max()
    assert (
        0.4 < forecast(plan, model_of(plan, posterior)).scaled_w2_sq / simulated < 2.5
    )
    (first, *_) = wflmc.advise(
        posterior,
        link,
        privacy,
        step_size=0.4 / (posterior.mu + posterior.L),
        burn_in=50,
        samples=50,
    )
    assert (first.cause, first.change.key, first.change.direction) == (
        "clip too small",
        "privacy.example_clip",
        "up",
    )


def test_chains_that_diverge_are_not_taken_for_good_ones():
    """A public L that is five times too small."""
    posterior = dataclasses.replace(
        wflmc.gaussian_regression(jax.random.key(0), 5, examples=100), mu=1.0, L=20.0
    )
    options = {
        "step_size": 0.08,
        "burn_in": 100,
        "samples": 100,
        "policy": wflmc.Policy(power="noiseless"),
    }
    first, *_ = wflmc.advise(
        posterior, wflmc.Link(channel.static()), wflmc.Privacy(clip=10), **options
    )
    assert (first.cause, first.change.key, first.change.direction) == (
        "step size too large",
        "sampler.step_size",
        "down",
    )


@pytest.mark.parametrize("dynamics", ["overdamped", "kinetic"])
def test_cold_burn_in_is_not_taken_for_long_steps(dynamics):
    posterior = wflmc.gaussian_regression(jax.random.key(0), 10, examples=400)
    step_size = 0.05 / (posterior.mu + posterior.L)
    if dynamics == "kinetic":
        step_size = 0.1 / posterior.L**0.5
    first, *_ = wflmc.advise(
        posterior,
        wflmc.Link(channel.static(), snr_db=200),
        wflmc.Privacy(clip=1e5),
        step_size=step_size,
        burn_in=3000,
        samples=5,
        **grouped(
            dynamics=dynamics, friction=30.0, burn_in_temperature=0.05, power="no-dp"
        ),
    )
    assert first.cause == "burn-in too cold"
    assert first.change.values == {"sampler.burn_in_temperature": 1.0}
    assert first.change.expected.after < 0.1 * first.change.expected.before


COLD = {
    "posterior": {"devices": 30},
    "link": {"fading": "static", "power": 1e-4, "snr_db": 60.0},
    "privacy": {"epsilon": 5000.0, "delta": 0.01, "clip": 30.0},
    "sampler": {"burn_in": 50, "samples": 1, "step_size": "0.4/(mu+L)"},
    "policy": {"power": "equal"},
}
"""One draw after a burn-in whose last rounds a step does not forget."""


def diagnosed(changes):
    """The plan of COLD with changes, its forecast, and its causes."""
    scenario = of(COLD, changes)
    inputs = build(scenario)
    plan = make_plan(scenario, inputs)
    causes = diagnose_plan(PlanSource(scenario, inputs), plan)
    return plan, forecast(plan, model_of(plan, inputs.posterior)), causes


def test_long_steps_are_not_blamed_for_narrow_draws():
    """With full noise W2² would be larger still, as the steps of burn-in are long."""
    plan, actual, causes = diagnosed(
        {"sampler.burn_in_temperature": 0.1, "sampler.step_schedule": "planned"}
    )
    assert plan.step_size.max() > 4 * plan.step_size[-1]
    assert actual.scaled_w2_sq == pytest.approx(0.073, abs=0.002)
    assert actual.narrow_w2_sq == pytest.approx(actual.scaled_w2_sq, rel=1e-3)
    assert actual.wide_w2_sq == 0
    assert [cause["cause"] for cause in causes] == ["burn-in too cold"]
    assert causes[0]["cost"] == pytest.approx(actual.scaled_w2_sq)
    change = causes[0]["change"]
    assert (change["key"], change["direction"]) == (
        "sampler.burn_in_temperature",
        "up",
    )
    assert change["expected"]["after"] < 0.1 * change["expected"]["before"]


@pytest.mark.parametrize("schedule", ["constant", "planned"])
@pytest.mark.parametrize("temperature", [0.3, 0.7, 0.8, 1.0])
def test_draws_that_a_notice_calls_narrow_stand_out(temperature, schedule):
    """Also where W2² is small enough for good samples."""
    plan, actual, causes = diagnosed(
        {
            "sampler.burn_in_temperature": temperature,
            "sampler.step_schedule": schedule,
        }
    )
    assert actual.scaled_w2_sq < 0.05
    has_notice = NoticeCode.COLD_DRAWS in codes_of(plan)
    assert has_notice == (temperature < 0.75)
    names = ["burn-in too cold"] if has_notice else []
    assert [cause["cause"] for cause in causes] == names
    if (temperature, schedule) == (0.3, "constant"):
        assert causes[0]["change"]["value"] == 1


@pytest.mark.parametrize(("temperature", "percent"), [(0.0, "0%"), (0.1, "10%")])
def test_the_evidence_of_cold_is_the_noise_of_burn_in(temperature, percent):
    _, _, causes = diagnosed(
        {"sampler.burn_in_temperature": temperature, "policy.power": "noiseless"}
    )
    assert f" {percent} " in causes[0]["evidence"]


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_steps_that_are_too_long_are_named_though_burn_in_is_cold(temperature):
    """They cost no more than the whole error, which cold burn-in has made smaller."""
    _, actual, causes = diagnosed(
        {
            "sampler.burn_in_temperature": temperature,
            "sampler.step_size": "1.9/(mu+L)",
            "policy.power": "noiseless",
        }
    )
    assert actual.scaled_w2_sq > 0.05
    assert [cause["cause"] for cause in causes] == ["step size too large"]
    assert causes[0]["cost"] == pytest.approx(actual.scaled_w2_sq, rel=0.01)


def test_the_longest_of_several_steps_is_named():
    first = "1.9/(mu+L)*(1-0.9*(s>S_b))"
    plan, _, causes = diagnosed(
        {"sampler.step_size": first, "policy.power": "noiseless"}
    )
    assert causes[0]["cause"] == "step size too large"
    assert f"{plan.step_size[0]:.3g}" in causes[0]["evidence"]


@pytest.mark.parametrize(("clip", "times"), [(3.0, 0.4), (30.0, 1.0)])
def test_following_all_advice_is_no_worse_than_the_first(posterior, clip, times):
    """A later change is tried on top of those before it."""
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=30)
    options = {
        "step_size": times / (posterior.mu + posterior.L),
        "burn_in": 50,
        "samples": 50,
    }
    causes = wflmc.advise(posterior, link, wflmc.Privacy(15, 0.01, clip), **options)
    changes = [cause.change for cause in causes if cause.change is not None]
    assert [change.follows_another for change in changes] == [False, True, True][
        : len(changes)
    ]
    reached = []
    settings = {"clip": clip, **options}
    for change in changes:
        settings |= {change.key.partition(".")[2]: change.value}
        privacy = wflmc.Privacy(15, 0.01, settings["clip"])
        plan = wflmc.plan(
            posterior, link, privacy, **{name: settings[name] for name in options}
        )
        reached.append(score(posterior, chains(posterior, plan, 100)[0]))
    assert reached
    assert all(value < 1.2 * reached[0] for value in reached)


def test_advice_is_about_the_plan_that_the_same_arguments_make(plans_made, monkeypatch):
    """Also where steps and rounds are left to `plan`, and with what chains have shown."""
    posterior = wflmc.gaussian_regression(
        jax.random.key(0), devices=3, examples=60, dim=2
    )
    link = wflmc.Link(channel.static(0.01), snr_db=10)
    privacy = wflmc.Privacy(clip=60)
    judged = []

    def remember(plan, *others):
        judged.append(plan)
        return find_causes(plan, *others)

    monkeypatch.setattr("wflmc.apps.diagnosis.causes.find_causes", remember)
    causes = wflmc.advise(posterior, link, privacy, evaluation=measured(0.25))
    assert judged[0].digest == wflmc.plan(posterior, link, privacy).digest
    assert causes
    assert plans_made() > 2
