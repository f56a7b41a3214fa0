"""What an audit attacks: a plan at its worst, and the rounds that are listened to.

A `Target` is a plan in which every device arrives as strongly as it may, together with
what the plan claims of every device and round.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.dynamics import Array
from wflmc.planning.plan import Plan
from wflmc.privacy.accountants import epsilon_spent, positive
from wflmc.support.errors import InputError

RoundMask = NDArray[np.bool_]
"""Whether a round is listened to, [S]."""

CANARY_NORM_OVER_CLIP = 1e4
"""Norm of a canary's gradient over the largest clipping threshold, and over what is
transmitted: so far above both that only clipping bounds what arrives."""
MAX_CANARY_NORM = 1e15
"""Largest norm of a canary's gradient, whose square float32 still holds."""


class Target(NamedTuple):
    """A plan under attack."""

    plan: Plan
    """The plan, every device arriving as strongly as the audit assumes."""
    device: int
    """The device that most attacks are on."""
    loss: Array
    """Privacy loss that the plan claims, [S, K]."""
    delta: Array
    """δ at which ε is stated, [K]."""
    signal: Array
    """Half of the distance at which a device's canary and its neighbour arrive, if all
    is as planned, [S, K]."""
    canary_norm: float
    """Norm of the canary's gradient before any clipping."""
    background: Array
    """Norm of the known examples beside a canary, which point against it, [K]. With
    them it and an empty example in its place arrive as ±signal, whatever the clips."""

    @property
    def neighbour(self) -> float:
        """Return the factor of the canary in the neighbouring data set.

        It is −1 where data are replaced: the neighbour's gradient is the canary's with
        the opposite sign. It is 0 under add-remove adjacency, where the neighbouring
        device is silent, or the neighbouring example empty: then the canary adds
        nothing to what arrives at the server.
        """
        return -1.0 if self.plan.privacy.adjacency == "replace" else 0.0

    @property
    def midpoint(self) -> Array:
        """Return what arrives half way between the neighbours, [S, K].

        Tests subtract it, so that what arrives of the two data sets lies at ±signal. It
        is 0 where the neighbours are opposite, which they also are for examples under
        add-remove adjacency because of the background; it is the signal where one of
        the neighbours is a silent device.
        """
        privacy = self.plan.privacy
        is_silent = self.neighbour == 0 and privacy.unit == "device"
        return self.signal if is_silent else np.zeros_like(self.signal)


def attack_target(
    plan: Plan,
    delta: ArrayLike | None = None,
    device: int | None = None,
    csi_error: float | None = None,
) -> Target:
    """Return a plan at its worst, with every device as strong as it may arrive.

    The downlink noise is left out: what devices receive does not change what they may
    transmit, and a canary's gradient does not depend on it.

    Args:
        plan: what is attacked; its scheme has to clip.
        delta: δ at which ε is stated, one number or one for each device; None for
            that of the plan.
        device: index of the attacked device; None for the one with the largest ε.
        csi_error: relative error of the channels that devices know, in [0, 1): they
            arrive up to 1/(1 − error) times as strongly. None for that of the plan.

    Returns:
        The plan with what it claims, and the canary that it is attacked with.

    Raises:
        InputError: if the plan does not clip, if no δ is known, or if an argument is
            outside its range.
    """
    if not plan.clips:
        raise InputError(
            "plan",
            "a scheme that does not clip",
            "one that clips: without it nothing is promised",
        )
    deltas = _deltas(plan, delta)
    attacked_device = _attacked_device(plan, deltas, device)
    received = _strongest_arrival(plan, csi_error)
    rounds = replace(plan.rounds, received=received)
    context = replace(plan.context, downlink_noise=0.0)
    attacked_plan = replace(plan, rounds=rounds, context=context)
    half_change = plan.privacy.half_change(plan.clip, plan.example_clip)
    amplitude = plan.context.uncertainty * plan.weight / plan.scale[:, None]
    signal = plan.gain[:, None] * amplitude * half_change
    over_sent = max(1.0, 1 / plan.gain.min())
    canary_norm = CANARY_NORM_OVER_CLIP * largest_clip(plan) * over_sent
    privacy = plan.privacy
    may_be_empty = privacy.unit == "record" and privacy.adjacency == "add-remove"
    background = half_change if may_be_empty else np.zeros(plan.devices)
    return Target(
        plan=attacked_plan,
        device=attacked_device,
        loss=plan.loss,
        delta=deltas,
        signal=signal,
        canary_norm=float(min(canary_norm, MAX_CANARY_NORM)),
        background=background,
    )


def above_cap(plan: Plan, factor: float = 2.0) -> Plan:
    """Return a louder plan, in which the server has to add noise of its own.

    Up to a cap on the gain, the channel's noise alone is what the Langevin dynamics
    need. Beyond it the server adds the remaining noise, which hides nothing from the
    server itself and must not be counted as privacy. No sensible plan transmits so
    strongly: this one is for testing that the noise is not counted. The bound, the
    objective and the shares of power are those of the original plan, and mean nothing
    in the result.

    Args:
        plan: whose gains are raised, never lowered.
        factor: smallest gain of the result over the gain at the cap; above 1.

    Returns:
        The plan with larger gains, and with the server's noise that they require.

    Raises:
        InputError: if the factor is not above 1.
    """
    if not factor > 1:
        raise InputError("factor", factor, "above 1")
    noise_step = plan.dynamics.noise_step(plan.step_size)
    gain_at_cap = plan.scale * np.sqrt(noise_step * plan.noise_power / 2)
    gain = np.maximum(plan.gain, factor * gain_at_cap)
    channel_noise = plan.noise_power * (plan.kick * plan.scale / gain) ** 2
    server_noise = plan.langevin_noise - channel_noise
    return plan.with_rounds(gain=gain, server_noise=server_noise)


def window(loss: Array, limit: float) -> RoundMask:
    """Return the successive rounds with the largest claimed loss within a limit.

    An attack of n trials proves nothing about losses far beyond log n, but a claim
    holds for every part of a transcript, so that a part is attacked which is small
    enough. Rounds without any loss inside the window are left out. If every round is
    beyond the limit, the round with the smallest loss is chosen; if the device is
    claimed never to transmit, all rounds are.

    Args:
        loss: privacy loss claimed of every round, [S].
        limit: largest sum of losses in the window; may be infinite.

    Returns:
        The mask of the chosen rounds, [S].
    """
    if not np.any(loss > 0):
        return np.ones(loss.size, dtype=bool)
    best_total = 0.0
    best_window = slice(0, 0)
    total = 0.0
    start = 0
    for stop in range(loss.size):
        total += loss[stop]
        while total > limit and start <= stop:
            total -= loss[start]
            start += 1
        if total > best_total:
            best_total = total
            best_window = slice(start, stop + 1)
    mask = np.zeros(loss.size, dtype=bool)
    if best_total == 0:  # every round is beyond the limit
        positive_loss = np.where(loss > 0, loss, np.inf)
        mask[np.argmin(positive_loss)] = True
    else:
        mask[best_window] = loss[best_window] > 0
    return mask


def largest_clip(plan: Plan) -> float:
    """Return the largest clipping threshold of a plan's gradients.

    For each device it is ℓ, or c where only the records of a device are clipped.

    Args:
        plan: a plan that clips.
    """
    return float(acting_clips(plan).max())


def acting_clips(plan: Plan) -> Array:
    """Return the clipping threshold that bounds what a device sends of a canary, [K].

    It is ℓ, the threshold of the device's gradient as a whole, wherever that is finite,
    also where c bounds a record's part of it more tightly. Where ℓ is infinite, the
    device clips only its records, and the threshold is c.

    Args:
        plan: a plan that clips.
    """
    return np.where(np.isfinite(plan.clip), plan.clip, plan.example_clip)


def _deltas(plan: Plan, delta: ArrayLike | None) -> Array:
    """Return δ of every device, [K], from an argument or else from the plan."""
    stated_delta = plan.privacy.delta if delta is None else delta
    if stated_delta is None:
        raise InputError(
            "delta",
            None,
            "given: this plan has no privacy constraint, and ε is stated at a δ",
        )
    deltas = positive("delta", stated_delta, 1)
    if deltas.ndim > 1 or deltas.size not in (1, plan.devices):
        raise InputError(
            "delta",
            stated_delta,
            f"one number, or one for each of the {plan.devices} devices",
        )
    return np.broadcast_to(deltas.reshape(-1), (plan.devices,))


def _attacked_device(plan: Plan, deltas: Array, device: int | None) -> int:
    """Return the index of the attacked device, by default that of the largest ε."""
    if device is None:
        return int(np.argmax(epsilon_spent(plan.loss.sum(0), deltas)))
    if not 0 <= device < plan.devices:
        raise InputError("device", device, f"between 0 and {plan.devices - 1}")
    return device


def _strongest_arrival(plan: Plan, csi_error: float | None) -> Array | None:
    """Return the amplitude of what arrives over what was planned, at most, [S, K]."""
    if csi_error is not None and not 0 <= csi_error < 1:
        raise InputError("csi_error", csi_error, "at least 0 and below 1")
    strength = plan.context.uncertainty
    if csi_error is not None:
        strength = 1 / (1 - csi_error)
    received = plan.received
    if strength <= 1 and received is None:
        return None
    planned_strength = 0.0 if received is None else received
    return np.maximum(strength, planned_strength) * np.ones_like(plan.weight)
