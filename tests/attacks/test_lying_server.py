"""A server that lies to a device about its channel.

The attacker is the server. It knows the plan, chooses θ, announces α r (`gain`) and |ĥ| (`known`) as it likes, and
receives over the true channel h. It wants a device to transmit strongly while its ledger pays little: it announces
values whose ratio, the precoder, is large, and whose gain, by which a round used to be paid for, is tiny. Nine such
rounds cost the device 1e-14 by its own ledger, and over the true channel hundreds of ε where 1 was promised.

It gets nothing now: a device has its own estimates of its channel and an agreed gain for every round, refuses what goes
beyond them, and pays for what it sends.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip(
    "flwr", reason="Flower is not installed: pip install 'wflmc[flower]'"
)

from wflmc.apps.federation.messages import RoundRequest
from wflmc.support.errors import InputError, OverspendError

from ..error_tools import raises_input_error
from ..federation_tools import Federation, make_federation

ROUNDS = 9


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Nine rounds over fading channels, for which every device is promised ε = 1."""
    changes = {
        "privacy.epsilon": 1.0,
        "sampler.burn_in": 0,
        "sampler.samples": ROUNDS,
        "sampler.chains": 1,
    }
    return make_federation(tmp_path_factory.mktemp("lied-to"), changes)


def tiny(limit: float, ask: RoundRequest) -> RoundRequest:
    """A tiny gain and a tiny |ĥ|, which make the device transmit at its power limit."""
    return ask._replace(gain=1e-9, channel_estimate=1e-9 / limit)


def scaled(limit: float, ask: RoundRequest) -> RoundRequest:
    """Both a millionth of what was agreed, so that the device transmits as agreed, and pays a trillionth."""
    return ask._replace(
        gain=1e-6 * ask.gain, channel_estimate=1e-6 * ask.channel_estimate
    )


def faded(limit: float, ask: RoundRequest) -> RoundRequest:
    """The agreed gain, for a channel said to be worse than it is."""
    return ask._replace(
        channel_estimate=max(0.5 * ask.channel_estimate, ask.gain / limit)
    )


def louder(limit: float, ask: RoundRequest) -> RoundRequest:
    """More than was agreed, over the channel as it is."""
    return ask._replace(gain=limit * ask.channel_estimate)


@pytest.mark.parametrize(
    "lie", [tiny, scaled, faded, louder], ids=lambda lie: str(lie.__name__)
)
def test_a_device_pays_for_what_arrives(
    federation: Federation, lie: Callable[[float, RoundRequest], RoundRequest]
) -> None:
    job = federation.job
    far = np.full((1, job.plan.dim), 1e6, np.float32)  # where every gradient is clipped
    worst = 0.0
    for k, device in enumerate(federation.devices()):
        assert device.ledger is not None
        limit = float(np.sqrt(job.power[k]) / job.plan.clip[k])
        arrived = 0.0
        for round_index in range(ROUNDS):
            gain = float(
                job.plan.gain[round_index]
                * job.plan.weight[round_index, k]
                / job.plan.scale[round_index]
            )
            ask = RoundRequest(
                k,
                round_index,
                far,
                gain or 1e-3,
                float(job.channel_estimates[round_index, k]),
            )
            try:
                sent = float(np.linalg.norm(device.answer(lie(0.999 * limit, ask))))
            except (InputError, OverspendError):
                continue
            arrived += (
                2
                * float(job.channel_estimates[round_index, k] * sent) ** 2
                / job.plan.noise_power
            )
        assert arrived <= device.ledger.spent[0] * (1 + 1e-4)
        worst = max(worst, arrived)
    assert federation.inputs.privacy.epsilon_spent(np.full(5, worst)) <= 1 + 1e-6  # type: ignore[operator]


def test_the_schedule_itself_is_answered(federation: Federation) -> None:
    for k, device in enumerate(federation.devices()):
        for round_index in np.flatnonzero(federation.job.plan.weight[:, k]):
            theta = np.zeros((1, federation.job.plan.dim), np.float32)
            device.answer(
                RoundRequest(
                    k,
                    int(round_index),
                    theta,
                    float(federation.job.gain[round_index, k]),
                    float(federation.job.channel_estimates[round_index, k]),
                )
            )
        assert device.ledger is not None
        assert device.ledger.spent[0] == pytest.approx(federation.job.plan.spent[k])


def test_a_refused_request_does_not_take_the_place_of_an_answer(tmp_path: Path) -> None:
    """Else a server could have an answer that was paid for forgotten, and the round with it."""
    device = make_federation(tmp_path, noise="channel").devices()[0]
    terms = device.terms
    round_index = next(number for number, gain in enumerate(terms.gain) if gain > 0)
    position = np.zeros((terms.chains, terms.dim), np.float32)
    ask = RoundRequest(
        0, round_index, position, terms.gain[round_index], terms.known[round_index]
    )
    sent = device.answer(ask)
    spent = device.ledger and device.ledger.spent.copy()
    with raises_input_error("request", "another one for round 1"):
        device.answer(ask._replace(theta=position + 1))
    np.testing.assert_array_equal(device.answer(ask), sent)
    assert device.ledger is not None
    np.testing.assert_array_equal(device.ledger.spent, spent)
