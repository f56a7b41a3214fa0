"""Channel uses and transmit energy of a plan, against its power shares and by hand."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import wflmc
from wflmc import channel
from wflmc.planning.resources import channel_uses, transmit_energy

from ..cli_tools import strict
from ..error_tools import raises_input_error

ROUNDS = {"burn_in": 20, "samples": 20}


def plan_over(posterior, link, privacy, **keywords):
    step_size = 0.4 / (posterior.mu + posterior.L)
    return wflmc.plan(
        posterior, link, privacy, step_size=step_size, **ROUNDS, **keywords
    )


def test_a_device_at_its_power_limit_takes_every_channel_use(posterior):
    """A static channel whose power limits every round."""
    link = wflmc.Link(channel.static(1e-4), snr_db=0)
    plan = plan_over(posterior, link, wflmc.Privacy(clip=30))
    assert set(plan.power_share) == {1.0}
    assert channel_uses(plan) == 40 * plan.dim
    np.testing.assert_allclose(
        transmit_energy(plan, link), channel_uses(plan), rtol=1e-9
    )


@pytest.mark.parametrize(
    "policy", [{}, {"schedule": "all"}, {"schedule": "unbiased", "senders": 5}]
)
def test_energy_is_that_of_the_precoder_written_out(posterior, policy):
    """‖α w/(K/K_a)/ĥ · ℓ‖² over N0 SNR, one device and one round at a time."""
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=15)
    plan = plan_over(
        posterior, link, wflmc.Privacy(15, 0.01, 30), policy=wflmc.Policy(**policy)
    )
    gains = np.abs(link.gains(40, 30))
    power = plan.noise_power * 10**1.5
    expected = np.zeros(30)
    for s in range(40):
        for k in np.flatnonzero(plan.weight[s]):
            precoder = plan.gain[s] * plan.weight[s, k] / plan.scale[s] / gains[s, k]
            expected[k] += (precoder * 30) ** 2 / power
    energy = transmit_energy(plan, link)
    np.testing.assert_allclose(energy, expected, rtol=1e-9)
    assert np.all(energy <= channel_uses(plan) * (1 + 1e-9))


def test_energy_is_of_what_devices_know_of_their_channels(posterior):
    exact = wflmc.Link(channel.rayleigh(0.01), snr_db=15)
    blurred = wflmc.Link(channel.rayleigh(0.01), snr_db=15, csi_error=0.1)
    plan = plan_over(posterior, blurred, wflmc.Privacy(15, 0.01, 30))
    known = np.abs(blurred.gains(40, 30)) / plan.received
    sent = (plan.gain[:, None] * plan.weight / plan.scale[:, None] * 30 / known) ** 2
    expected = sent.sum(0) / (plan.noise_power * 10**1.5)
    np.testing.assert_allclose(transmit_energy(plan, blurred), expected, rtol=1e-9)
    assert (
        transmit_energy(plan_over(posterior, exact, wflmc.Privacy(15, 0.01, 30)), exact)
        is not None
    )


def test_an_ideal_link_takes_no_energy(posterior):
    assert transmit_energy(wflmc.plan(posterior), wflmc.Link(channel.static())) is None


def test_plans_and_sweeps_have_both(plan_of, call, scenario, tmp_path):
    document = plan_of(scenario)
    assert document["channel_uses"] == 51 * document["constants"]["dim"]
    assert len(document["energy"]) == 30
    grid = (
        "--grid",
        "link.snr_db=10,20",
        "--plan-only",
        "--out",
        tmp_path / "sweep",
        "--cache",
        tmp_path / "cache",
    )
    code, out, err = call("sweep", scenario, *grid, "--json")
    assert code == 0, err
    assert strict(out)["done"] == 2
    header, *rows = (tmp_path / "sweep" / "sweep.csv").read_text().splitlines()
    columns = header.split(",")
    total = plan_of(scenario, "--set", "link.snr_db=10")["energy"]
    first = dict(zip(columns, rows[0].split(","), strict=True))
    assert int(first["channel_uses"]) == document["channel_uses"]
    assert float(first["energy"]) == pytest.approx(sum(total))


def test_an_unlimited_number_of_rounds_is_refused_with_a_page_to_read():
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
    with raises_input_error("samples", "docs/guides/scale.md", section="sampler"):
        wflmc.plan(posterior, step_size=1e-3, burn_in=10, samples=10**9)
