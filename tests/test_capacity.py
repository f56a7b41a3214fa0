"""The capacity model against what is counted elsewhere: XLA's counts, files on disk, plans, and hand arithmetic."""

from __future__ import annotations

import importlib
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc import channel
from wflmc.planning.capacity import capacity, traits_of
from wflmc.planning.costs import Machine, Radio, Size, Traits

from .conftest import count
from .scenarios import Target, make

HUGE = Size(10**6, 10**8, 10**4, 5000, examples=10)


def compiled_update(parameters, kinetic, noise):
    """The server's update of one chain as XLA has it."""
    kernel = importlib.import_module("wflmc.sampling.kernel")
    now = kernel.Rounds(
        *(np.float32(0.1), np.float32(1), np.ones(1, np.float32), np.float32(0.1) if noise else None),
        *(np.ones(1, np.float32), np.float32(1)),
        friction=np.float32(2) if kinetic else None,
    )
    state = jnp.zeros(2 * parameters if kinetic else parameters)
    given = jax.random.key(0), state, jnp.zeros(parameters), jnp.ones(1), now
    return jax.jit(kernel.update).lower(*given).compile()


@pytest.mark.parametrize("kinetic", [False, True])
@pytest.mark.parametrize("noise", [False, True])
def test_the_update_has_the_operations_and_bytes_that_xla_counts(kinetic, noise):
    m = 50_000
    found = capacity(Size(1, m, 1, 1), Traits(kinetic=kinetic, server_noise=noise)).server
    made = compiled_update(m, kinetic, noise)
    memory = made.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert found.operations == pytest.approx(made.cost_analysis()["flops"], rel=0.02)
    assert found.bytes == pytest.approx(held, rel=0.02)


@pytest.mark.parametrize(("dim", "classes"), [(40, 10), (100, 20)])
def test_the_emulation_has_the_operations_that_xla_counts(dim, classes):
    """XLA counts the body of the loop over devices once, and once for all chains what labels alone decide."""
    devices, examples, chains = 4, 800, 16
    posterior = wflmc.softmax_regression(jax.random.key(0), devices, examples=examples, dim=dim, classes=classes)
    ready = posterior.fitted(chains, 1e9)
    assert ready.block == 1

    def sums(model, theta):
        return jax.vmap(lambda at: model.clipped_sum(at, jnp.ones(devices), jnp.ones(devices)))(theta)

    made = jax.jit(sums).lower(ready, jnp.zeros((chains, posterior.dim))).compile()
    counted = devices * (made.cost_analysis()["flops"] / chains)
    labels = 2 * posterior.dim * examples / chains
    size = Size(devices, posterior.dim, 1, 1, examples / devices, per_example=4.0)
    noise = 91 * posterior.dim
    found = capacity(size, Traits()).emulation.operations - noise + labels
    assert found == pytest.approx(counted, rel=0.15)  # exponentials come on top
    assert found < counted


def test_a_network_has_six_operations_per_parameter_and_example():
    """But for its first layer, whose input needs no gradient."""
    widths, rows = [64, *[256] * count(6, 12), 10], 32
    layers = [jnp.ones(pair) for pair in itertools.pairwise(widths)]

    def loss(layers, x):
        for weights in layers[:-1]:
            x = jnp.tanh(x @ weights)
        return -jax.nn.log_softmax(x @ layers[-1])[:, 0].sum()

    made = jax.jit(jax.grad(loss)).lower(layers, jnp.ones((rows, widths[0]))).compile()
    m = sum(weights.size for weights in layers)
    size = Size(1, m, 1, 1, rows)
    needed = capacity(size, Traits()).device.operations - 3 * m
    assert made.cost_analysis()["flops"] == pytest.approx(needed - 2 * rows * layers[0].size, rel=0.03)


def test_the_files_of_a_run_have_the_bytes_that_are_predicted(tmp_path):
    chains, devices, rounds = 3, 50, 40
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices, examples=200, dim=40)
    link, promise = wflmc.Link(channel.rayleigh(0.01), snr_db=20), wflmc.Privacy(15, 0.01, 30)
    plan = wflmc.plan(posterior, link, promise, step_size=0.4 / (posterior.mu + posterior.L), burn_in=10, samples=30)
    ledger = wflmc.privacy.Ledger(promise, devices, subject=posterior.digest, path=tmp_path / "ledger.jsonl")
    wflmc.sample(jax.random.key(1), posterior, plan, chains, ledger=ledger).save(tmp_path / "trace.nc")
    files = capacity(Size(devices, posterior.dim, rounds, 30), traits_of(plan, link)).files
    _, *lines = (tmp_path / "ledger.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == rounds
    assert files.ledger == pytest.approx(sum(map(len, lines)), abs=4 * rounds)  # digits of the round's number
    apart = (tmp_path / "trace.nc").stat().st_size - chains * files.samples
    assert 0 < apart < 40_000  # names and coordinates, whatever the size


def test_energy_is_that_of_the_plans_own_powers(posterior):
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=np.linspace(15, 25, 30), csi_error=0.1)
    step = 0.4 / (posterior.mu + posterior.L)
    plan = wflmc.plan(posterior, link, wflmc.Privacy(15, 0.01, 30), step_size=step, burn_in=20, samples=20)
    heard = np.abs(link.gains(40, 30)) / link.mismatch(40, 30)
    limit = plan.dim * plan.noise_power * 10 ** (np.linspace(15, 25, 30) / 10)
    share = np.where(plan.weight > 0, (plan.gain[:, None] * 30 / heard) ** 2, 0) / limit
    np.testing.assert_allclose(share.max(1), plan.power_share)
    traits = traits_of(plan, link)
    assert traits.power == pytest.approx(share.mean())
    assert traits.senders == pytest.approx(plan.active_devices.mean() / 30)
    weakest = np.where(plan.weight > 0, limit / plan.dim / plan.noise_power * heard**2, np.inf).min(1)
    assert traits.received_snr == pytest.approx(np.median(weakest))
    radio = Radio(bandwidth=1e6, power=0.5)
    size = Size(30, plan.dim, 40, 20)
    energy = capacity(size, traits, radio).energy
    joules = 0.5 * plan.dim / 2e6 * share
    assert energy.all_devices == pytest.approx(joules.sum())
    assert energy.device_most == pytest.approx(joules.sum(0).max())
    assert energy.device == pytest.approx(joules.sum() / 30)


def test_an_ideal_link_radiates_nothing(posterior):
    link = wflmc.Link(channel.static())
    plan = wflmc.plan(posterior, link, wflmc.Privacy(), step_size=1e-4, burn_in=1, samples=1, power="noiseless")
    traits = traits_of(plan, link)
    assert capacity(Size(30, 5, 2, 1), traits).energy == (None, None, None, None)
    assert (traits.loss_bytes, traits.received_snr) == (0, np.inf)


def test_the_huge_case_by_hand():
    found = capacity(HUGE, Traits(), Radio(bandwidth=20e6, power=0.2, efficiency=2.0, coherence=0.05))
    assert found.air.channel_uses == 10**8
    assert found.air.channel_uses_in_all == 10**12
    assert found.air.uplink_seconds == 1e8 / 2 / 20e6
    assert found.air.downlink_seconds == 32e8 / 40e6
    assert found.air.blocks == 50
    assert found.energy.device == pytest.approx(0.2 * 2.5 * 1e4)
    assert found.digital.uplink_bytes == 4e14
    assert found.digital.times == pytest.approx(32 * 1e6)  # 32 bits at 2 bit/s/Hz against half a symbol
    assert found.files.samples == pytest.approx(5000 * 4e8)
    assert found.time.in_all == pytest.approx(1e4 * (80 + 2.5 + found.device.seconds + found.server.seconds))
    assert found.time.longest == "broadcast"
    noisy = capacity(HUGE, Traits(noisy_broadcast=True))
    assert noisy.air.downlink_seconds == noisy.air.uplink_seconds
    limits = {limit.name: limit for limit in found.limits}
    assert limits["coherence"].ratio == pytest.approx(50)
    assert limits["privacy"].needs == pytest.approx(2 * 1e8 * 1e4 / 1e12)
    assert limits["privacy"].ratio == 0  # nothing promised
    ratios = [limit.ratio for limit in found.limits]
    assert ratios == sorted(ratios, reverse=True)


@pytest.mark.parametrize("margin", [0.99, 1.01])
@pytest.mark.parametrize("name", ["privacy", "power"])
def test_privacy_and_power_end_where_no_plan_with_a_noise_limit_is_left(name, margin):
    """The planner itself refuses max_round_noise = 1 exactly where the model says that it cannot be had."""
    target, rounds = Target(100.0, 200.0, 40, 6), 10
    size = Size(target.devices, target.dim, rounds, 1)
    needs = {limit.name: limit.needs for limit in capacity(size, Traits()).limits}[name]
    promise = {"epsilon": None, "delta": None}
    if name == "privacy":
        promise = {"epsilon": wflmc.Privacy(1, 0.01).epsilon_spent([margin * needs]), "delta": 0.01}
    snr_db = 60.0 if name == "privacy" else 10 * np.log10(margin * needs)
    h = np.ones((rounds, target.devices))

    def tried():
        return make(target, h, snr_db=snr_db, clip=100.0, max_round_noise=1.0, step_size=1e-3, **promise)

    if margin < 1:
        with pytest.raises(wflmc.errors.InputError, match=f"max_round_noise .*{name} allows"):
            tried()
    else:
        assert tried().noise_limit == 1


def test_a_faster_machine_is_faster():
    slow, fast = (capacity(HUGE, Traits(), machine=Machine()._replace(pair_seconds=s)) for s in (1e-6, 1e-9))
    assert slow.planning.seconds == pytest.approx(1000 * fast.planning.seconds)


def test_the_command_for_its_own_size_and_for_another(call, plan_of, scenario):
    own = plan_of(scenario, "--no-compare", "--capacity", "--bandwidth", "1e6")["capacity"]
    assert own["size"] == {
        "devices": 30, "parameters": 5, "rounds": 51, "samples": 1, "examples": 40.0, "per_example": 4.0,
    }  # fmt: skip
    assert own["air"]["uplink_seconds"] == 2.5e-6
    sizes = ["--devices", "1e6", "--parameters", "1e8", "--rounds", "1e4"]
    document = plan_of(scenario, "--no-compare", "--capacity", *sizes)
    huge = document["capacity"]
    assert document["constants"]["devices"] == 30  # the plan itself is the scenario's
    assert (huge["size"]["devices"], huge["size"]["samples"]) == (10**6, round(1e4 / 51))
    assert huge["assumed"]["traits"] == own["assumed"]["traits"]
    assert next(limit["name"] for limit in huge["limits"] if limit["breaks"]) == "coherence"
    assert json.dumps(huge, allow_nan=False)
    code, text, _ = call("plan", scenario, "--no-compare", "--capacity", *sizes)
    assert code == 0
    assert "1,000,000 devices, 100,000,000 parameters, 10,000 rounds" in text
    assert "Cut a round into 250 blocks" in " ".join(text.replace("│", " ").split())
    assert "capacity" not in plan_of(scenario, "--no-compare")


def test_the_answer_of_an_inverse_question_has_a_capacity_too(plan_of, scenario):
    asked = ["--solve-for", "privacy.epsilon", "--target", "1", "--capacity"]
    assert plan_of(scenario, "--no-compare", *asked)["capacity"]["size"]["devices"] == 30


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--devices", "1e6"], "--devices = 1000000.0 was given, but it must be left out without --capacity."),
        (["--capacity", "--rounds", "1.5"], "--rounds = 1.5 was given, but it must be a whole number"),
        (["--capacity", "--parameters", "1e30"], "--parameters = 1e+30 was given, but it must be a whole number"),
        (
            ["--capacity", "--bandwidth", "0"],
            "--bandwidth = 0.0 was given, but it must be a number between 1e-18 and 1e18.",
        ),
        (["--capacity", "--coherence", "1e-300"], "--coherence = 1e-300 was given, but it must be a number between"),
        (["--capacity", "--power", "nan"], "--power = nan was given, but it must be a number between"),
        (
            ["--capacity", "--coherence", "inf"],
            "--coherence = inf was given, but it must be a number between 1e-18 and 1e18.",
        ),
        (["--capacity", "--devices", "many"], "'many' is not a valid float"),
    ],
)
def test_bad_sizes_are_refused_in_a_sentence(call, scenario, arguments, sentence):
    code, out, err = call("plan", scenario, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
