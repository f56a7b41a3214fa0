"""What is attacked: a plan at its worst, what it claims for every device and round, and which rounds to listen to."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.errors import InputError
from wflmc.planning import Plan
from wflmc.planning.plan import Rounds
from wflmc.privacy import epsilon_spent
from wflmc.privacy.accountants import positive
from wflmc.sampling.kernel import kernel_rounds

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

RAW = 1e4
"""Norm of a canary's gradient over the clip, and over what is sent."""


class Target(NamedTuple):
    """A plan under attack."""

    plan: Plan
    """The plan, every device arriving as strongly as the audit assumes."""
    device: int
    loss: Array
    """Claimed by the plan, [S, K]."""
    delta: Array
    """[K]."""
    signal: Array
    """Half of what the plan means to arrive of a device's canary and not of its neighbour, [S, K]."""
    raw: float
    """Norm of the canary's gradient before any clipping."""
    others: Array
    """What known examples beside a canary add against it, [K]: then it and an empty example in its place arrive as
    ±signal, whatever the clips."""

    @property
    def rounds(self) -> Rounds:
        """As the kernel takes them."""
        return float32_rounds(self.plan)

    @property
    def neighbour(self) -> float:
        """The factor of the canary in the neighbouring data set: −1, or 0 where neighbours are silent or empty."""
        return -1.0 if self.plan.privacy.adjacency == "replace" else 0.0

    @property
    def midpoint(self) -> Array:
        """What arrives half way between the neighbours, [S, K]: half of the signal where one of them is silent."""
        silent = self.neighbour == 0 and self.plan.privacy.unit == "device"
        return self.signal if silent else np.zeros_like(self.signal)


def float32_rounds(plan: Plan) -> Rounds:
    """Return the rounds of a plan as the kernel takes them."""
    return jax.tree.map(lambda values: np.asarray(values, np.float32), kernel_rounds([plan]))


def attack_target(
    plan: Plan, delta: ArrayLike | None = None, device: int | None = None, csi_error: float | None = None
) -> Target:
    """Check what was asked for, and take the plan at its worst: all devices as strong as they may arrive."""
    if not plan.clips:
        raise InputError("plan", "a scheme that does not clip", "one that clips: without it nothing is promised")
    devices = plan.devices
    chance = plan.privacy.delta if delta is None else delta
    if chance is None:
        raise InputError("delta", None, "given: this plan has no privacy constraint, and ε is stated at a δ")
    deltas = positive("delta", chance, 1)
    if deltas.ndim > 1 or deltas.size not in (1, devices):
        raise InputError("delta", chance, f"one number, or one for each of the {devices} devices")
    loss = plan.loss
    deltas = np.broadcast_to(deltas.reshape(-1), (devices,))
    worst = int(np.argmax(epsilon_spent(loss.sum(0), deltas))) if device is None else device
    if not 0 <= worst < devices:
        raise InputError("device", device, f"between 0 and {devices - 1}")
    if csi_error is not None and not 0 <= csi_error < 1:
        raise InputError("csi_error", csi_error, "at least 0 and below 1")
    strength = plan.uncertainty if csi_error is None else 1 / (1 - csi_error)
    received = plan.received
    if strength > 1 or received is not None:
        received = np.maximum(strength, 0.0 if received is None else received) * np.ones_like(plan.weight)
    half = plan.privacy.half_change(plan.clip, plan.example_clip)
    amplitude = plan.uncertainty * plan.weight / plan.scale[:, None]
    largest = np.where(np.isfinite(plan.clip), plan.clip, plan.example_clip).max()
    empty = plan.privacy.unit == "record" and plan.privacy.adjacency == "add-remove"
    # What devices receive does not change what they may send; canaries do not depend on that noise.
    attacked = plan.replace(received=received, downlink_noise=0.0)
    signal, raw = plan.gain[:, None] * amplitude * half, RAW * largest * max(1.0, 1 / plan.gain.min())
    return Target(attacked, worst, loss, deltas, signal, float(min(raw, 1e15)), half if empty else np.zeros(devices))


def above_cap(plan: Plan, factor: float = 2.0) -> Plan:
    """Return a plan to attack the server's noise with: gains `factor` times those at which the channel alone is enough.

    No sensible plan sends so strongly. The server must add the rest of the noise, which hides nothing from itself;
    bound, objective and power share are those of the given plan, and mean nothing here.
    """
    if not factor > 1:
        raise InputError("factor", factor, "above 1")
    at_cap = plan.scale * np.sqrt(plan.dynamics.noise_step(plan.step_size) * plan.noise_power / 2)
    gain = np.maximum(plan.gain, factor * at_cap)
    rest = plan.langevin_noise - plan.noise_power * (plan.kick * plan.scale / gain) ** 2
    return plan.replace(gain=gain, server_noise=rest)


def window(loss: Array, limit: float) -> Mask:
    """Return the rounds to attack: a run of them that is claimed to lose as much as possible within a limit, [S].

    An attack of n trials proves nothing about losses far beyond log n, but claims hold for any part of a transcript.
    A device that is said never to send is attacked in all rounds.
    """
    if not np.any(loss > 0):
        return np.ones(loss.size, dtype=bool)
    best, start, total, chosen = 0.0, 0, 0.0, slice(0, 0)
    for stop in range(loss.size):
        total += loss[stop]
        while total > limit and start <= stop:
            total -= loss[start]
            start += 1
        if total > best:
            best, chosen = total, slice(start, stop + 1)
    mask = np.zeros(loss.size, dtype=bool)
    if best == 0:  # every round is beyond the limit
        mask[np.argmin(np.where(loss > 0, loss, np.inf))] = True
    else:
        mask[chosen] = loss[chosen] > 0
    return mask


def pairs(mask: Mask, first: int = 0) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return neighbours among the chosen rounds, two by two, beginning with the first or the second of them."""
    at = np.flatnonzero(mask)[first:]
    count = at.size // 2
    return at[0 : 2 * count : 2], at[1 : 2 * count : 2]


def differences(signal: Array, mask: Mask, first: int = 0) -> Array:
    """Return the best weights that cancel noise which is the same in two neighbouring rounds."""
    one, two = pairs(mask, first)
    weight = np.zeros(signal.shape)
    half = (signal[..., one] - signal[..., two]) / 2
    weight[..., one], weight[..., two] = half, -half
    return weight


def scaled_differences(signal: Array, mask: Mask, gain: Array) -> Array:
    """Return the best weights that cancel noise which is in two neighbouring rounds as their gains are."""
    one, two = pairs(mask)
    weight = np.zeros(signal.shape)
    across = signal[..., one] * gain[two] - signal[..., two] * gain[one]
    part = across / (gain[one] ** 2 + gain[two] ** 2)
    weight[..., one], weight[..., two] = part * gain[two], -part * gain[one]
    return weight
