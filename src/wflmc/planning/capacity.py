"""Count what a deployment of any size costs, and check what it needs at least (`wflmc plan --capacity`).

Every number is a closed form of a few others; nothing of the size in question is built.

>>> found = estimate_capacity(Size(devices=10**6, parameters=10**8, rounds=10**4, samples=5000), Traits())
>>> found["costs"]["uplink_airtime"]["round"], found["costs"]["digital_uplink"]["round"]
(2.5, 400000000000000.0)
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from wflmc.channel import Link
from wflmc.planning.plan import Plan
from wflmc.support.errors import InputError

REAL, LOSS = 4, 8
"""Bytes of a parameter and of a privacy loss, as numbers."""


class Size(NamedTuple):
    """How large the deployment is: K, m, S and S_u, the rounds that are kept."""

    devices: int
    parameters: int
    rounds: int
    samples: int
    examples: float = 0.0
    """Held by a device, on average."""
    per_example: float = 6.0
    """Operations of a gradient per parameter and example: 6 in networks (2 forward, 4 back), 4 in linear models."""


class Radio(NamedTuple):
    """What the air offers."""

    bandwidth: float = 20e6
    """Hz left for data after pilots and guards; as many complex symbols a second."""
    power: float = 0.2
    """Watts that a device radiates at its power limit, while it sends."""
    efficiency: float = 1.0
    """bit/s/Hz of digital links: the broadcast, and the digital uplink for comparison."""
    coherence: float = 0.01
    """Seconds for which channels stay constant."""


class Traits(NamedTuple):
    """What other sizes take over from a plan; by default all devices send in all rounds, at their power limit."""

    senders: float = 1.0
    """Mean of K_a/K."""
    power: float | None = 1.0
    """Share of the power limit used, mean over devices and rounds, 0 where silent; None on an ideal link."""
    power_most: float | None = 1.0
    """The same for the device that uses most."""
    loss_factor: float = 1.0
    """Mean over rounds of (K s/(K_a ℓ))², 0 where silent, of a device with sensitivity s; ℓ is the mean clip."""
    budget: float = np.inf
    """The loss that this device may still spend. It is the device for which this is hardest."""
    power_factor: float = 1.0
    """(K ℓ_k/(K_a ℓ))² of the sender and round for which the condition on power is hardest."""
    received_snr: float = np.inf
    """SNR |h|² of that sender in that round; infinite on an ideal link."""
    ledger: bool = True
    """Whether losses are recorded: where gradients are clipped."""
    kinetic: bool = False
    server_noise: bool = False
    noisy_broadcast: bool = False
    """Whether θ is broadcast as symbols over a noisy downlink, rather than as bits."""


def traits_of(plan: Plan, link: Link) -> Traits:
    """Return what other sizes take over from a plan, given the link that it was made for."""
    devices, sends = plan.devices, plan.weight > 0
    clip, sensitivity = plan.privacy.clips(devices), plan.privacy.sensitivity(devices)
    square = (plan.scale[:, None] / clip.mean()) ** 2
    budget = plan.privacy.budget(devices) - plan.ledger if plan.enforced else np.full(devices, np.inf)
    loss_factor = (square * sends).mean(0) * (plan.context.uncertainty * sensitivity) ** 2
    hardest = np.argmax(loss_factor / np.minimum(budget, 1e300))
    power: dict[str, Any] = {"power": None, "power_most": None}
    if plan.power_share.any():
        gains = np.abs(link.gains(plan.start + len(plan.rounds), devices))[plan.start :]
        known = gains if plan.received is None else gains / plan.received  # what devices know, and invert
        snr = np.where(sends, link.snr(devices) * known**2, np.inf)
        sent = (plan.gain[:, None] * plan.weight / plan.scale[:, None] * clip) ** 2
        shares, factors = sent / (plan.noise_power * plan.dim * snr), square * clip**2
        worst = np.unravel_index(np.argmax(factors / snr), snr.shape)
        power = {"power": float(shares.mean()), "power_most": float(shares.mean(0).max())}
        power |= {"power_factor": float(factors[worst]), "received_snr": float(snr[worst])}
    return Traits(
        senders=float(sends.mean()),
        loss_factor=float(loss_factor[hardest]),
        budget=float(budget[hardest]),
        ledger=plan.clips,
        kinetic=plan.dynamics.has_velocity,
        server_noise=bool(np.any(plan.server_noise)),
        noisy_broadcast=plan.downlink_noise > 0,
        **power,
    )


def check(values: Mapping[str, float], prefix: str = "") -> None:
    """Refuse sizes and properties of the radio that are out of range."""
    for name, value in values.items():
        whole = name in Size._fields
        if not (1 if whole else 1e-18) <= value <= 1e18 or (whole and value != int(value)):
            allowed = "a whole number between 1 and 1e18" if whole else "a number between 1e-18 and 1e18"
            raise InputError(prefix + name, value, allowed)


def estimate_capacity(size: Size, traits: Traits, radio: Radio | None = None) -> dict[str, Any]:
    """Count what `size` costs for a plan with these traits, and compare what it needs with what there is.

    Returns:
        The `capacity` of a plan's JSON: size, costs by name of one round and in all, necessary conditions needs ≤ has
        with what helps where one does not hold, the hardest first, and what was assumed.
    """
    radio, devices, m, rounds = radio or Radio(), *size[:3]
    check({"devices": devices, "parameters": m, "rounds": rounds, **radio._asdict()})
    senders = traits.senders * devices
    uplink = m / (2 * radio.bandwidth)  # two real numbers, I and Q, go into one complex symbol
    bits = 8 * REAL * m / (radio.bandwidth * radio.efficiency)
    shares, energy = (traits.power, traits.power_most), radio.power * uplink
    mean, most = (None if share is None else energy * share for share in shares)
    a_round: dict[str, tuple[str, float | None]] = {
        "channel_uses": ("", m),
        "uplink_airtime": ("s", uplink),
        "broadcast_airtime": ("s", uplink if traits.noisy_broadcast else bits),
        "digital_uplink_airtime": ("s", senders * bits),
        "mean_energy_of_a_device": ("J", mean),
        "largest_energy_of_a_device": ("J", most),
        "energy_of_all_devices": ("J", None if mean is None else devices * mean),
        "operations_of_the_server": ("", m * ((8 if traits.kinetic else 2) + 2 * traits.server_noise)),
        "operations_of_a_device": ("", m * (size.per_example * size.examples + 3)),
        "broadcast": ("B", REAL * m),
        "digital_uplink": ("B", REAL * m * senders),
        "ledger": ("B", LOSS * devices * traits.ledger),
        "kept_samples": ("B", REAL * m),
    }
    costs = {
        name: {"unit": unit, "round": one, "in_all": None if one is None else rounds * one}
        for name, (unit, one) in a_round.items()
    }
    costs["kept_samples"]["in_all"] = REAL * m * size.samples
    block = math.floor(2 * radio.bandwidth * radio.coherence * (1 + 1e-12))
    cut = f"{-(-m // block):,} blocks of at most {block:,} parameters a round" if block else "more bandwidth"
    fewer = "fewer parameters or rounds, more senders, a larger ε"
    stronger = "more transmit power, less bandwidth, leaving out the weakest devices"
    conditions = [
        ("coherence", "s", uplink, radio.coherence, cut),
        ("privacy", "loss", 2 * m * rounds * traits.loss_factor / devices**2, traits.budget, fewer),
        ("power", "SNR|h|²", traits.power_factor / devices**2, traits.received_snr, stronger),
    ]
    keys = ("name", "unit", "needs", "has", "helps", "ratio")
    compared = [dict(zip(keys, (*each, each[2] / each[3]), strict=True)) for each in conditions]
    return {
        "size": size._asdict(),
        "costs": costs,
        "conditions": sorted(compared, key=lambda condition: -condition["ratio"]),
        "assumed": {"radio": radio._asdict(), "traits": traits._asdict()},
    }


def document(plan: Plan, link: Link, examples: float, given: Mapping[str, float]) -> dict[str, Any]:
    """Return the `capacity` of a plan's JSON; what is not given is the plan's own."""
    planned = len(plan.rounds)
    rounds, kept = int(given.get("rounds", planned)), (planned - plan.burn_in) / planned
    sizes = int(given.get("devices", plan.devices)), int(given.get("parameters", plan.dim))
    size = Size(*sizes, rounds, max(1, round(kept * rounds)), examples, 6.0 if "parameters" in given else 4.0)
    radio = Radio(**{name: given[name] for name in Radio._fields if name in given})
    return estimate_capacity(size, traits_of(plan, link), radio)
