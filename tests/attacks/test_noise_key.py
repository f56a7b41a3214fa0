"""Taking the noise away: who knows its key reads gradients that no ε covers."""

from __future__ import annotations

import json

import arviz
import jax
import numpy as np
import pytest

import wflmc
from wflmc.privacy import releases
from wflmc.privacy import whitening as preconditioning
from wflmc.runs.planning import make_plan
from wflmc.sampling import chain_keys
from wflmc.scenario import build, load_scenario
from wflmc.support.keys import named

from ..error_tools import names_key

SCENARIO = """
[posterior]
devices = 6
examples = 120
dim = 3
mu = 10.0
L = 60.0
initial_w2_sq = 3.0
[link]
fading = "static"
[privacy]
epsilon = 15.0
delta = 0.01
clip = 100.0
[sampler]
burn_in = 0
samples = 16
chains = 2
[policy]
schedule = "all"
"""
GUESSES = 1001
"""Seeds that an attacker tries; all of 2³² take a laptop a day."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("noise_key")
    (path / "s.toml").write_text(SCENARIO)
    return path


def run(call, folder, seed):
    """A run with this seed, made once."""
    place = folder / f"run-{seed}"
    if not place.exists():
        code, _, err = call(
            "run", folder / "s.toml", "--out", place, "--set", f"sampler.seed={seed}"
        )
        assert code == 0, err
    return place


def publish(call, place, *options):
    """The published draws of a run, as ArviZ reads them."""
    file = place.with_suffix(".nc")
    file.unlink(missing_ok=True)
    code, out, err = call("publish", place, "--out", file, *options)
    assert code == 0, err
    return arviz.from_netcdf(file), out


def keys_to_try(posterior):
    """The key that a file tells, else those of the first seeds."""
    published_key = posterior.attrs.get("key")
    guessed = jax.random.key_data(jax.vmap(jax.random.key)(np.arange(GUESSES)))
    return (
        np.asarray(guessed)
        if published_key is None
        else np.array([published_key], np.uint32)
    )


@jax.jit
def noise_of(words, rounds):
    """z and q of the first chain for every key, [key, round, m] each."""

    def drawn(data, index):
        key = jax.random.fold_in(
            chain_keys(jax.random.wrap_key_data(data), np.arange(1))[0], index
        )
        return [
            jax.random.normal(named(key, name), (3,)) for name in ("noise", "server")
        ]

    return jax.vmap(jax.vmap(drawn, (None, 0)), (0, None))(words, rounds)


def attack(posterior, plan):
    """Gradient sums from consecutive draws, by the key that explains them best; and how well it does.

    Without noise a linear model's sums are an affine function of θ. What is left over, relative to the noise, is about
    1 for a wrong key and nearly 0 for the right one: the attacker sees which it is without knowing any data.
    """
    theta = posterior["theta"].values[0].astype(float)
    steps = np.asarray(plan.step_size)[1:, None]
    gain = plan.gain[1:, None]
    z, q = (
        np.asarray(part, float)
        for part in noise_of(keys_to_try(posterior), np.arange(1, len(theta)))
    )
    server = np.sqrt(plan.server_noise)[1:, None]
    received = (theta[:-1] - theta[1:] + server * q) / steps  # Σ g + z/α, for every key
    sums = received - np.sqrt(plan.noise_power) * z / gain
    design = np.hstack([theta[:-1], np.ones((len(theta) - 1, 1))])
    left_over = sums - design @ np.linalg.pinv(design) @ sums
    level = np.sqrt(plan.noise_variance)[1:, None] / steps
    size = np.sqrt(np.mean((left_over / level) ** 2, axis=(1, 2)))
    best = int(np.argmin(size))
    return sums[best], float(size[best])


@pytest.fixture(scope="module")
def truth(folder):
    """What the attacker may know, the plan, and what nobody should: the noiseless sums at given parameters."""
    scenario = load_scenario(folder / "s.toml")
    inputs = build(scenario)
    plan = make_plan(scenario, inputs)
    posterior = inputs.posterior

    def sums(theta):
        gradients = [
            posterior.clipped_sum(position, np.ones(6), plan.clip)[0]
            for position in theta
        ]
        return np.asarray(gradients, float)

    return plan, sums


def error(recovered, theta, sums):
    true = sums(theta[:-1])
    return np.abs(recovered - true).max() / np.abs(true).max()


def test_the_trace_of_a_numbered_seed_gives_the_gradients_away(call, folder, truth):
    """Knows: trace.nc, the plan. Does: draws the noise again, from the key inside. Gets: the exact gradient sums.

    That is why a run folder is for its owner and says so.
    """
    plan, sums = truth
    place = run(call, folder, 7)
    trace = arviz.from_netcdf(place / "trace.nc")
    recovered, left_over = attack(trace.posterior, plan)
    assert left_over < 0.05
    assert error(recovered, trace.posterior["theta"].values[0], sums) < 1e-3
    assert "owner" in trace.posterior.attrs["privacy"]
    assert "owner" in json.loads((place / "summary.json").read_text())["owner_only"]


def test_a_seed_that_can_be_guessed_is_not_published(call, folder, truth):
    """Knows: published draws without a key. Does: tries small seeds. Gets: the gradient sums, so that publish refuses.

    Who accepts it all the same is told so in the file's own statement.
    """
    plan, sums = truth
    place = run(call, folder, 7)
    code, _, err = call("publish", place, "--out", folder / "refused.nc")
    assert (code, (folder / "refused.nc").exists()) == (2, False)
    assert names_key(err, "RUN", "sampler.seed", "--accept-not-covered")
    shown, out = publish(call, place, "--accept-not-covered")
    assert "Not covered" in out
    assert "2³²" in out
    assert "can be guessed" in shown.posterior.attrs["not_covered"]
    recovered, left_over = attack(shown.posterior, plan)
    assert left_over < 0.05
    assert error(recovered, shown.posterior["theta"].values[0], sums) < 1e-3


def test_from_a_secret_key_nothing_is_recovered(call, folder, truth):
    """Knows: draws of a run with a secret seed, published or in trace.nc. Does: the same. Gets: noisy sums."""
    plan, sums = truth
    place = run(call, folder, "secret")
    shown, _ = publish(call, place)
    for posterior in (shown.posterior, arviz.from_netcdf(place / "trace.nc").posterior):
        assert not {"key", "seed"} & set(posterior.attrs)
        recovered, left_over = attack(posterior, plan)
        assert left_over > 0.3  # of 45 numbers for each of 1001 keys, 12 of them fitted
        assert error(recovered, posterior["theta"].values[0], sums) > 0.05
    assert [path.name for path in place.iterdir() if path.name.startswith(".")] == []


def test_a_published_file_has_nothing_but_draws_and_a_statement(call, folder):
    """Knows: the bytes of a published file. Looks for: keys, clip rates, the exact law, constants, paths, digests."""
    place = run(call, folder, "secret")
    shown, _ = publish(call, place)
    groups = [
        name.strip("/")
        for name in (shown.groups() if callable(shown.groups) else shown.groups)
    ]
    assert [name for name in groups if name] == ["posterior"]
    assert list(shown.posterior.data_vars) == ["theta"]
    assert dict(shown.posterior.sizes) == {"chain": 1, "draw": 16, "parameter": 3}
    first = arviz.from_netcdf(place / "trace.nc").posterior["theta"].values[:1]
    np.testing.assert_array_equal(shown.posterior["theta"].values, first)
    assert set(shown.posterior.attrs) == {
        "what", "epsilon", "delta", "accountant", "unit", "adjacency", "promise", "assumes", "not_covered",
        "inference_library", "inference_library_version",
    }  # fmt: skip
    content = place.with_suffix(".nc").read_bytes()
    plan = json.loads((place / "plan.json").read_text())
    secrets = [
        str(folder),
        *plan["files"].values(),
        json.loads((place / "summary.json").read_text())["ledger"]["chain"],
    ]
    assert not [text for text in secrets if text.encode() in content]


def test_a_ledger_does_not_seed_the_noise_of_whitening(six_devices, monkeypatch):
    """Knows: a ledger's line of a release that whitens. Does: seeds with the name of its noise. Gets: other noise."""
    seeds = []
    draw = np.random.default_rng
    monkeypatch.setattr(
        releases.np.random, "default_rng", lambda seed: seeds.append(seed) or draw(seed)
    )
    link = wflmc.Link(wflmc.channel.rayleigh(0.01), snr_db=25)
    promise = wflmc.Privacy(8, 0.01, 30)
    release = preconditioning.release_whitening(
        jax.random.key(5), six_devices, link, promise
    )
    public_numbers = {
        int(name.removeprefix("whiten-"), 16) for name in (release.noise, release.name)
    }
    assert seeds
    assert not public_numbers & {seed for seed in seeds if isinstance(seed, int)}
