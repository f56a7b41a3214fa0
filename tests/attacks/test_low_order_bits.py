"""Low-order bits of floating-point noise (Mironov 2012).

The attacker has y of one round and knows that the signal under it is one of two, of neighbouring data sets. It knows
the program, too: which values its noise can have at all. `jax.random.normal` has 2²³ of them in float32, so that in
many coordinates none takes the wrong signal to y, and the wrong neighbour is excluded, whatever ε was promised.
Where devices add noise in float32, a message that is closer to 0 than its signal has the signal's last bits.

It gets nothing from noise that protects somebody: on a lattice every value is possible under both neighbours, and an
attacker who takes it for noise of another kind excludes both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip(
    "flwr", reason="Flower is not installed: pip install 'wflmc[flower]'"
)

from wflmc.apps.federation.device import Device
from wflmc.apps.federation.job import Job
from wflmc.apps.federation.messages import Reception, RoundRequest
from wflmc.apps.federation.server import open_server, serve
from wflmc.privacy import lattice

from ..federation_tools import make_federation

CHAINS = 8
SIGNAL = np.array([0.7, -1.3, 0.9, 0.2, -0.6], np.float32)
Possible = Callable[[Any, Any], bool]
"""From what was received and the signal to whether the noise can have taken the one to the other."""


@pytest.fixture(autouse=True)
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system's entropy, but the same in every test."""
    monkeypatch.setattr(
        lattice, "token_bytes", np.random.default_rng(18).bytes, raising=False
    )


@pytest.fixture(scope="module")
def in_table() -> Possible:
    """Whether one of the 2²³ values of jax.random.normal can have: √2 times erf⁻¹ of 2²³ numbers."""
    low = np.nextafter(np.float32(-1), np.float32(0))
    uniform = (
        np.arange(2**23, dtype=np.float32) / np.float32(2**23) * (np.float32(1) - low)
        + low
    )
    values = np.asarray(jax.jit(jax.lax.erf_inv)(jnp.asarray(uniform)))
    root = np.float32(np.sqrt(2))

    def possible(y: Any, signal: Any) -> bool:
        middle = (float(y) - float(signal)) / float(root)
        first, last = np.searchsorted(values, [middle - 1e-5, middle + 1e-5])
        near = values[first:last]
        two_steps = signal + root * near
        fused = (float(signal) + float(root) * near.astype(float)).astype(np.float32)
        # Processors multiply and add in one step or in two.
        return bool(np.any(two_steps == y) or np.any(fused == y))

    return lambda received, signal: all(
        map(possible, received.ravel(), np.broadcast_to(signal, received.shape).ravel())
    )


def in_float32(received: Any, signal: Any) -> bool:
    """Whether some float32 numbers take the signal to what was received."""
    nearest = (received.astype(float) - signal).astype(np.float32)
    return bool(np.all(signal + nearest == received))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job whose update is θ ← 0 − y/4, so that θ tells y to its last bit."""
    job = make_federation(
        tmp_path_factory.mktemp("attacked"), {"sampler.chains": CHAINS}
    ).job
    plan = job.plan.with_rounds(
        gain=np.ones(7),
        weight=np.ones((7, 5)),
        step_size=np.full(7, 0.25),
        server_noise=np.zeros(7),
    )
    promise = replace(job.plan.privacy, epsilon=None, delta=None)
    plan = replace(plan, context=replace(plan.context, privacy=promise))
    return replace(job, plan=plan, position=np.zeros_like(job.position))


def received_of_a_round(job: Job, folder: Path) -> Any:
    """y[chain, m]."""
    server = open_server(job, folder)

    def exchange(asks: list[RoundRequest]) -> Reception:
        if asks[0].round:
            raise KeyboardInterrupt
        return Reception(np.tile(SIGNAL, (CHAINS, 1)), np.ones(5, bool), {})

    with pytest.raises(KeyboardInterrupt):
        serve(server, exchange)
    theta = server.checkpoint.load().chains.position
    assert theta is not None
    return -4 * theta


def test_noise_of_the_channel_excludes_nobody(
    job: Job, tmp_path: Path, in_table: Possible
) -> None:
    received = received_of_a_round(replace(job, noise="channel"), tmp_path)
    for possible in (in_table, in_float32):
        assert possible(received, SIGNAL) == possible(received, -SIGNAL)


def test_simulated_noise_excludes_the_wrong_neighbour(
    job: Job, tmp_path: Path, in_table: Possible
) -> None:
    """So it protects nobody from those who know the program, as the documentation says."""
    received = received_of_a_round(replace(job, noise="simulated"), tmp_path)
    assert in_table(received, SIGNAL)
    assert not in_table(received, -SIGNAL)


def test_noise_of_a_device_excludes_nobody(tmp_path: Path) -> None:
    changes = {
        "policy.power": "noiseless-dp",
        "privacy.epsilon": 300.0,
        "sampler.chains": 40,
    }
    federation = make_federation(tmp_path, changes, noise="devices")
    job = federation.job
    far = np.full((40, 5), 1e6, np.float32)
    ask = RoundRequest(0, 0, far, float(job.plan.gain[0]), 1.0)
    signal = Device(
        federation.inputs.posterior.device(0), replace(job.terms(0), share=0.0)
    ).answer(ask)
    sent = federation.devices()[0].answer(ask)
    assert 0.1 < np.abs(signal).max() / np.sqrt(job.terms(0).share) < 100
    assert in_float32(sent, signal) == in_float32(sent, -signal)


def test_every_multiple_of_the_step_is_possible_under_both(job: Job) -> None:
    fine = replace(job, noise="channel").lattice
    assert fine is not None
    for side in (SIGNAL, -SIGNAL):
        steps = fine.noisy(np.tile(side, (50, 1))) / fine.step
        np.testing.assert_array_equal(steps, np.rint(steps))
        assert set(np.mod(steps.ravel(), 4)) == {0, 1, 2, 3}
