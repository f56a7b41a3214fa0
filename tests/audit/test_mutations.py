"""The audit as an adversary: it sees every way we know to break the code, on settings in which intact code passes."""

from __future__ import annotations

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc import channel
from wflmc.apps import audit
from wflmc.apps.audit import attack
from wflmc.sums.constants import MAX_ROWS_OF_SHORT_DEVICE

from ..conftest import FULL
from ..error_tools import missing_facts, raises_input_error
from .audit_tools import (
    KEY,
    LONG,
    SCHEMES,
    SOFTMAX,
    TRIALS,
    flagged_names,
    planned,
    softmax_of,
)

kernel = sys.modules["wflmc.sampling.kernel"]
simulation = sys.modules["wflmc.sampling.simulation"]
gaussian = sys.modules["wflmc.sums.gaussian"]
softmax_classes = sys.modules["wflmc.sums.softmax_classes"]
softmax_rows = sys.modules["wflmc.sums.softmax_rows"]
clipping = sys.modules["wflmc.sums.clipping"]


only_full = pytest.mark.skipif(
    not FULL, reason="other mistakes of its kind are tried: make test-full runs it"
)


@pytest.fixture
def mutate(monkeypatch):
    """Put a mutant in the place of a function, wherever in the package it is known."""

    def change(function, mutant):
        modules = [
            module
            for name, module in list(sys.modules.items())
            if name.startswith("wflmc")
        ]
        places = [
            (m, name)
            for m in modules
            for name, value in list(vars(m).items())
            if value is function
        ]
        assert places
        for module, name in places:
            monkeypatch.setattr(module, name, mutant)
        jax.clear_caches()  # compiled code knows nothing of the change

    yield change
    monkeypatch.undo()
    jax.clear_caches()


def transmitting(change):
    """Return a mutant of `kernel.transmit` that changes the rounds which it transmits in."""
    honest = kernel.transmit

    def mutant(posterior, theta, now, key=None):
        return honest(posterior, theta, change(now), key)

    return mutant


def with_constants(**changes):
    """Return rounds with other constants, each a function of the rounds."""

    def change(now):
        values = {name: value(now) for name, value in changes.items()}
        return dataclasses.replace(now, constants=now.constants._replace(**values))

    return change


def with_rounds(**changes):
    """Return rounds with other values, each a function of the rounds."""

    def change(now):
        values = {name: value(now.rounds) for name, value in changes.items()}
        return dataclasses.replace(
            now, rounds=dataclasses.replace(now.rounds, **values)
        )

    return change


@pytest.fixture
def swap(monkeypatch):
    """Replace a function that a module calls, by its name there."""

    def change(module, name, mutant):
        assert callable(getattr(module, name))
        monkeypatch.setattr(module, name, mutant)
        jax.clear_caches()  # compiled code knows nothing of the change

    yield change
    monkeypatch.undo()
    jax.clear_caches()


def unclipped(weight, clip, norm):
    """`clip_factor` without clipping."""
    del clip
    return jnp.broadcast_to(weight, norm.shape)


# Statistics


@pytest.fixture(scope="module")
def plan(six_devices):
    return planned(six_devices)


@pytest.fixture(scope="module")
def record_plan(six_devices):
    return planned(six_devices, SCHEMES["record"]["privacy"])


def test_server_noise_counted_as_privacy(plan, monkeypatch):
    """It is inert below the Langevin cap, so the audit has plans above it."""
    loud = audit.above_cap(plan, 2.0)
    kinds = ["constant", "turning"]
    assert np.all(loud.server_noise > 0)
    np.testing.assert_allclose(loud.noise_variance, 2 * loud.step_size)
    assert audit.audit(KEY, loud, trials=TRIALS, attacks=kinds).consistent
    honest = wflmc.Plan.loss

    def with_server_noise(self):
        variance_fraction = (
            self.noise_power
            * (self.step_size * self.scale / self.gain) ** 2
            / self.noise_variance
        )
        return honest.fget(self) * variance_fraction[:, None]

    monkeypatch.setattr(wflmc.Plan, "loss", property(with_server_noise))
    below = audit.ATTACKS if FULL else kinds
    assert audit.audit(KEY, plan, trials=TRIALS, attacks=below).consistent
    caught = flagged_names(audit.audit(KEY, loud, trials=TRIALS, attacks=kinds))
    assert "matched filter, part of the rounds" in caught
    with raises_input_error("factor", value=1.0):
        audit.above_cap(plan, 1.0)


@only_full
def test_wrong_adjacency(plan, mutate):
    """Half the true distance between neighbours, αℓ in place of 2αℓ, is a quarter of the loss."""
    honest = wflmc.privacy.round_loss
    mutate(honest, lambda *arguments: honest(*arguments) / 4)
    assert "matched filter" in flagged_names(audit.audit(KEY, plan, trials=TRIALS))


@pytest.mark.parametrize("name", ["device", "record"])
def test_the_loss_of_add_remove_for_neighbours_by_replacement(
    plan, record_plan, monkeypatch, name
):
    attacked = plan if name == "device" else record_plan
    honest = wflmc.Privacy.half_change
    monkeypatch.setattr(
        wflmc.Privacy,
        "half_change",
        lambda self, *clips: honest(
            dataclasses.replace(self, adjacency="add-remove"), *clips
        ),
    )
    assert "matched filter" in flagged_names(
        audit.audit(KEY, attacked, trials=TRIALS, attacks=["constant"])
    )


def test_channels_known_worse_than_the_plan_was_made_for(six_devices, plan):
    """A naive plan where devices arrive up to 1/(1 − 0.1) times as strong; and one that was made for it."""
    report = audit.audit(KEY, plan, trials=TRIALS, csi_error=0.1, attacks=["constant"])
    assert "matched filter" in flagged_names(report)
    aware = planned(
        six_devices, link=wflmc.Link(channel.static(0.01), snr_db=40, csi_error=0.1)
    )
    assert audit.audit(KEY, aware, trials=TRIALS, attacks=["constant"]).consistent


def test_models_of_ones_own_are_attacked_in_pairs(six_devices, plan):
    """Whoever has another model gives the two neighbours; here two devices' worth of data, which no claim covers."""
    sides = [
        dataclasses.replace(
            six_devices, linear=six_devices.linear + sign * 1e5 * np.eye(6, 5)
        )
        for sign in (1, -1)
    ]
    assert not audit.audit_pair(KEY, plan, *sides, device=0, trials=20_000).consistent
    shift = np.zeros((6, 5))
    shift[0, 0] = 1e5
    sides = [
        dataclasses.replace(six_devices, linear=six_devices.linear + sign * shift)
        for sign in (1, -1)
    ]
    assert audit.audit_pair(
        KEY, plan, *sides, device=0, trials=20_000
    ).ratio == pytest.approx(0.95, abs=0.05)
    with raises_input_error("posterior", "differ"):
        audit.audit_pair(KEY, plan, six_devices, six_devices, device=0, trials=1000)
    not_a_number = dataclasses.replace(six_devices, linear=six_devices.linear * np.nan)
    with raises_input_error("posterior", "finite"):
        audit.audit_pair(KEY, plan, six_devices, not_a_number, device=0, trials=1000)


@only_full
def test_clip_after_scaling(six_devices, plan, mutate):
    assert plan.gain.max() < 1
    longer = with_constants(clip=lambda now: now.constants.clip / now.rounds.gain)
    mutate(kernel.transmit, transmitting(longer))
    assert "matched filter" in flagged_names(
        audit.audit(KEY, plan, trials=TRIALS, attacks=["constant"])
    )


def test_clip_skipped_on_one_device(plan, mutate):
    assert np.argmax(plan.spent) != 4
    honest = clipping.clip_factor

    def spares_device_4(weight, clip, norm):
        return jnp.where(
            jnp.arange(norm.shape[-1]) == 4, weight, honest(weight, clip, norm)
        )

    mutate(honest, spares_device_4)
    report = audit.audit(
        KEY, plan, trials=TRIALS, attacks=["constant", "turning", "devices"]
    )
    assert flagged_names(report) == {"every device"}
    assert [test.device for test in report.flagged] == [4]
    assert not missing_facts(str(report), ("BROKEN", "'every device'", "device 4"))


@pytest.mark.parametrize(
    ("reused", "flagged"),
    [
        pytest.param(
            lambda number: 0 * number,
            {
                "whole runs, differences of rounds",
                "whole runs, differences beginning with the second",
            },
            marks=only_full,
        ),
        (
            lambda number: (number + 1) // 2,
            {"whole runs, differences beginning with the second"},
        ),
    ],
)
def test_noise_drawn_once(plan, monkeypatch, reused, flagged):
    """In the sampler itself: one draw for all rounds, or for two at a time."""
    honest = simulation.round_keys
    monkeypatch.setattr(
        simulation, "round_keys", lambda keys, number: honest(keys, reused(number))
    )
    jax.clear_caches()  # compiled code knows nothing of the change
    try:
        assert (
            flagged_names(audit.audit(KEY, plan, trials=TRIALS, attacks=["runs"]))
            >= flagged
        )
    finally:
        jax.clear_caches()


def test_noise_shared_between_rounds_is_seen_by_signs_that_vary_alone(plan, swap):
    """The same for transcripts of the kernel, where the audit itself gives every round its key."""
    honest = attack.round_keys
    swap(attack, "round_keys", lambda keys, index: honest(keys, 0))
    caught = flagged_names(
        audit.audit(KEY, plan, trials=TRIALS, attacks=["constant", "turning"])
    )
    assert "matched filter" not in caught
    assert caught >= {"signs that vary", "differences of rounds"}


@only_full
def test_gain_off_by_root_two(plan, mutate):
    louder = with_rounds(gain=lambda rounds: 2**0.5 * rounds.gain)
    mutate(kernel.transmit, transmitting(louder))
    report = audit.audit(
        KEY, plan, trials=TRIALS, attacks=["constant", "turning", "runs"]
    )
    assert flagged_names(report) >= {"matched filter", "signs that vary", "whole runs"}


def test_noise_too_weak(plan, mutate):
    honest = channel.superpose
    mutate(
        honest,
        lambda key, signal, noise_power: honest(key, signal, 0.8**2 * noise_power),
    )
    assert "matched filter" in flagged_names(
        audit.audit(KEY, plan, trials=TRIALS, attacks=["constant"])
    )


def test_silent_devices_that_send(six_devices, mutate):
    plan = planned(six_devices, link=SCHEMES["silent rounds"]["link"])
    all_send = with_rounds(weight=lambda rounds: jnp.ones_like(rounds.weight))
    mutate(kernel.transmit, transmitting(all_send))
    assert "rounds of silence" in flagged_names(
        audit.audit(KEY, plan, trials=TRIALS, attacks=["constant"])
    )


def test_example_clip_skipped_by_the_kernel(six_devices, record_plan, mutate):
    """The record hides inside the device's clip, which alone is larger than what is claimed of a record."""
    mutate(kernel.transmit, transmitting(with_constants(example_clip=lambda now: None)))
    caught = flagged_names(
        audit.audit(
            KEY,
            record_plan,
            six_devices,
            trials=TRIALS,
            attacks=["constant", "devices", "model"],
        )
    )
    assert caught >= {"matched filter", "every device", "gaussian model"}


def test_device_clip_skipped_by_the_gaussian_model(six_devices, plan, swap):
    swap(gaussian, "clip_factor", unclipped)
    report = audit.audit(
        KEY, plan, six_devices, trials=TRIALS, attacks=["turning", "model"]
    )
    assert flagged_names(report) == {"gaussian model"}


@only_full
def test_example_clip_skipped_by_the_gaussian_model(six_devices, record_plan, swap):
    swap(gaussian, "clip_residuals", lambda residuals, limits: residuals)
    assert not audit.audit_model(
        KEY, record_plan, six_devices, trials=20_000
    ).consistent


@pytest.mark.parametrize(
    ("examples", "promise", "rounds"), SOFTMAX + LONG if FULL else SOFTMAX[1:]
)
def test_clips_skipped_by_the_softmax_model(examples, promise, rounds, swap):
    posterior, plan = softmax_of(examples, promise, rounds)
    short = posterior.features.shape[1] <= MAX_ROWS_OF_SHORT_DEVICE
    module = softmax_rows if short else softmax_classes
    if promise is None:
        swap(module, "clip_factor", unclipped)
    else:
        swap(module, "clip_residuals", lambda residuals, norms, limits: residuals)
    assert not audit.audit_model(KEY, plan, posterior, trials=8000).consistent


def test_noise_that_is_not_gaussian_is_seen_by_counting(six_devices, monkeypatch):
    """Uniform noise of the right variance: nothing for the Gaussian curve at its middle, all of it in the tail."""
    plan = planned(six_devices, wflmc.Privacy(1, 0.01, 30), rounds=2)

    def uniform(key, signal, noise_power):
        width = jax.numpy.sqrt(12 * noise_power)
        return signal + width * (jax.random.uniform(key, signal.shape) - 0.5)

    monkeypatch.setattr(kernel, "superpose", uniform)
    jax.clear_caches()
    try:
        report = audit.audit(KEY, plan, trials=TRIALS, attacks=["constant"])
    finally:
        monkeypatch.undo()
        jax.clear_caches()
    assert report.epsilon_lower_counting > report.epsilon
    assert not report.consistent


@only_full
def test_a_model_that_clips_by_the_largest_coordinate_is_seen(six_devices, swap):
    plan = planned(six_devices)
    swap(
        gaussian, "vector_norms", lambda gradients: jnp.max(jnp.abs(gradients), axis=-1)
    )
    assert not audit.audit_model(KEY, plan, six_devices, trials=TRIALS).consistent
