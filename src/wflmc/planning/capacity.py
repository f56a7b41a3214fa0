"""What a deployment costs at any size: channel uses, seconds, energy, operations and bytes, and what breaks first.

Everything here is arithmetic on a few numbers; nothing of the size in question is ever built.

>>> found = capacity(Size(devices=10**6, parameters=10**8, rounds=10**4, samples=5000), Traits())
>>> found.air.uplink_seconds, found.digital.uplink_bytes
(2.5, 400000000000000.0)
"""

from __future__ import annotations

import numpy as np

from wflmc.channel import Link
from wflmc.planning.costs import (
    Air,
    Capacity,
    Digital,
    Energy,
    Files,
    Limit,
    Machine,
    Planning,
    Radio,
    Size,
    Time,
    Traits,
    Work,
)
from wflmc.planning.plan import Plan

REAL = 4
"""Bytes of a float32, in which chains, broadcasts and digital gradients are counted."""
NORMAL_OPERATIONS, NORMAL_BYTES = 91, 56
"""Of one normal number drawn and added, by XLA's count."""
DRAW = 36
"""Bytes of a kept round in trace.nc beside θ."""
LINE, LINE_OBJECTS = 190, 75
"""Bytes of a round in the ledger beside its losses (names, hash, number); of memory per loss of the line at hand."""
COPIES = 3
"""Of a ledger's text in memory while it is read: as bytes, as text, and as lines."""


def capacity(size: Size, traits: Traits, radio: Radio | None = None, machine: Machine | None = None) -> Capacity:
    """What `size` costs, for a plan with these traits."""
    radio, machine = radio or Radio(), machine or Machine()
    air = _air(size, traits, radio)
    files = _files(size, traits, machine)
    server, device, emulation = _server(size, traits, machine), _device(size, machine), _emulation(size, machine)
    pairs = size.rounds * size.devices
    sent = traits.senders * size.devices * REAL * size.parameters
    seconds = 8 * sent / (radio.bandwidth * radio.efficiency)
    parts = air.downlink_seconds, device.seconds, air.uplink_seconds, server.seconds
    found = Capacity(
        size=size,
        air=air,
        energy=_energy(size, traits, radio, air),
        server=server,
        device=device,
        digital=Digital(sent, seconds, seconds / air.uplink_seconds),
        files=files,
        planning=Planning(pairs, machine.pair_seconds * pairs, machine.pair_bytes * pairs),
        emulation=emulation,
        time=Time(*parts, size.rounds * sum(parts)),
        limits=(),
    )
    limits = sorted(_limits(found, traits, radio, machine), key=lambda limit: -limit.ratio)
    return found._replace(limits=tuple(limits))


def traits_of(plan: Plan, link: Link) -> Traits:
    """What other sizes take over from a plan, and from the link that it was made for."""
    budget = float(plan.privacy.budget(plan.devices).min())
    reach = float((plan.privacy.sensitivity(plan.devices) / plan.privacy.clips(plan.devices)).max())
    wireless = bool(plan.power_share.any())
    shares, received = _shares(plan, link) if wireless else (None, np.array([np.inf]))
    rows = plan.loss[:: max(1, plan.rounds // 100)] if plan.clips else np.zeros((0, 0))
    return Traits(
        senders=float(np.mean(plan.weight > 0)),
        power=None if shares is None else float(shares.mean()),
        power_most=None if shares is None else float(shares.mean(0).max()),
        received_snr=float(np.median(received)),
        budget=budget if plan.enforced else np.inf,
        reach=reach,
        loss_bytes=float(np.mean([len(repr(loss)) + 2 for loss in rows.ravel().tolist()])) if rows.size else 0.0,
        kinetic=plan.friction is not None,
        server_noise=bool(np.any(plan.server_noise)),
        noisy_broadcast=plan.downlink_noise > 0,
    )


def _shares(plan: Plan, link: Link) -> tuple[np.ndarray, np.ndarray]:
    """Share of its power limit that every device uses at most, [S, K], and SNR |h|² of the weakest sender, [S]."""
    last = plan.start + plan.rounds
    gains = np.abs(link.gains(last, plan.devices))[plan.start :]
    if plan.received is not None:
        gains = gains / plan.received  # what devices know, and invert
    quality = link.snr(plan.devices) * gains**2
    meant = plan.gain[:, None] * plan.weight / plan.scale[:, None] * plan.privacy.clips(plan.devices)
    return meant**2 / (plan.noise_power * plan.dim * quality), np.where(plan.weight > 0, quality, np.inf).min(1)


def _air(size: Size, traits: Traits, radio: Radio) -> Air:
    uplink = size.parameters / (2 * radio.bandwidth)
    downlink = uplink if traits.noisy_broadcast else 8 * REAL * size.parameters / (radio.bandwidth * radio.efficiency)
    return Air(
        channel_uses=size.parameters,
        channel_uses_in_all=size.parameters * size.rounds,
        uplink_seconds=uplink,
        downlink_seconds=downlink,
        seconds_in_all=size.rounds * (uplink + downlink),
        blocks=int(np.ceil(uplink / radio.coherence)),
    )


def _energy(size: Size, traits: Traits, radio: Radio, air: Air) -> Energy:
    if traits.power is None or traits.power_most is None:
        return Energy(None, None, None, None)
    full = radio.power * air.uplink_seconds
    mean, rounds = traits.power * full, size.rounds
    return Energy(mean, rounds * mean, rounds * traits.power_most * full, size.devices * rounds * mean)


def _server(size: Size, traits: Traits, machine: Machine) -> Work:
    """θ − c y, of three arrays; with a velocity of five; and where the server draws noise, that."""
    operations, arrays = (7, 5) if traits.kinetic else (2, 3)
    drawn = int(traits.server_noise)
    held = REAL * (arrays + 3 * drawn) * size.parameters
    seconds = size.parameters * (REAL * arrays / machine.bytes_rate + drawn / machine.normal_rate)
    seconds += machine.entry_seconds * size.devices * (traits.loss_bytes > 0)
    return Work(float((operations + NORMAL_OPERATIONS * drawn) * size.parameters), float(held), seconds)


def _device(size: Size, machine: Machine) -> Work:
    """A gradient over the device's examples, its norm, and its scaling; θ and the gradient in memory."""
    operations = size.parameters * (size.per_example * size.examples + 3)
    return Work(operations, 2.0 * REAL * size.parameters, operations / machine.device_rate)


def _emulation(size: Size, machine: Machine) -> Work:
    """Every device's gradient, clipped and added, and the noise of the channel; devices go one after the other."""
    gradients = size.devices * size.parameters * (size.per_example * size.examples + 4)
    seconds = gradients / machine.operations_rate + size.parameters / machine.normal_rate
    operations = gradients + size.parameters * NORMAL_OPERATIONS
    return Work(operations, REAL * 4.0 * size.parameters, seconds)


def _files(size: Size, traits: Traits, machine: Machine) -> Files:
    kept = traits.loss_bytes > 0
    entries = size.rounds * size.devices * kept
    ledger = size.rounds * LINE * kept + traits.loss_bytes * entries
    return Files(
        samples=float(size.samples * (REAL * size.parameters + DRAW)),
        ledger=ledger,
        ledger_memory=COPIES * ledger + LINE_OBJECTS * size.devices * kept,
        ledger_seconds=machine.entry_seconds * size.devices * kept,
    )


def _limits(found: Capacity, traits: Traits, radio: Radio, machine: Machine) -> list[Limit]:
    """Everything that may break, with what helps."""
    size, air, files = found.size, found.air, found.files
    senders = traits.senders * size.devices
    undone = size.parameters / senders**2
    block = int(min(size.parameters, 2 * radio.bandwidth * radio.coherence))
    return [
        Limit(
            "coherence", air.uplink_seconds, radio.coherence, "s",
            f"Cut a round into {air.blocks:,} blocks of {block:,} parameters, all with the same senders and α: the "
            "privacy of a round stays as it is. Plan with each device's weakest block (link.gains).",
        ),
        Limit(
            "privacy", 2 * undone * size.rounds * traits.reach**2, traits.budget, "loss",
            "With less loss a round's noise is more than all clipped gradients can undo. It grows with m·S/K²: send "
            "fewer parameters (sample a head, freeze the rest) or rounds, have more senders, or promise a larger ε.",
        ),
        Limit(
            "power", undone / size.parameters, traits.received_snr, "SNR |h|²",
            "Below it a round's noise is more than all clipped gradients can undo: more transmit power, less "
            "bandwidth, or leave out the far devices.",
        ),
        Limit(
            "planner memory", found.planning.bytes, machine.memory, "bytes",
            "Plan in stretches of rounds, each from what the ledger leaves: wflmc.plan(..., start=, ledger=).",
        ),
        Limit(
            "ledger memory", files.ledger_memory, machine.memory, "bytes",
            "Let every device keep its own losses, S numbers, and the server their sums, K numbers.",
        ),
        Limit(
            "server memory", found.server.bytes, machine.memory, "bytes",
            "Update θ in slices: coordinates do not depend on each other.",
        ),
        Limit(
            "disk", files.samples + files.ledger, machine.disk, "bytes",
            "Keep every n-th sample or a few parameters of each; predictions may be averaged as samples come.",
        ),
    ]  # fmt: skip
