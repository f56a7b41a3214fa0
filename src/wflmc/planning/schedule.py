"""Who sends in each round: thresholds on the channel gain, chosen round by round."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.errors import InputError

Array = NDArray[np.float64]


class Schedule(NamedTuple):
    """threshold[S] on |h|, and the devices that reach it, active[S, K]."""

    threshold: Array
    active: NDArray[np.bool_]


def participation_error(clip: Array, active: NDArray[np.bool_]) -> Array:
    """Squared gradient error of leaving devices silent, (Σ_silent ℓ + (K−K_a)/K_a Σ_active ℓ)², per round.

    With equal ℓ it is the 4ℓ²(K−K_a)² of Lemma 1.
    """
    if active.all():
        return np.zeros(active.shape[:-1])
    devices = active.shape[-1]
    sending = active.sum(-1)
    heard = (active * clip).sum(-1)
    return np.asarray((clip.sum() - heard + (devices - sending) / sending * heard) ** 2)


def gradient_error(clip: Array, active: NDArray[np.bool_], uncertainty: float) -> Array:
    """The same, with senders that may arrive up to `uncertainty` times as strong as they mean to, per round."""
    silent = participation_error(clip, active)
    if uncertainty == 1:
        return silent
    heard = active.shape[-1] / active.sum(-1) * (active * clip).sum(-1)
    return np.asarray((np.sqrt(silent) + (uncertainty - 1) * heard) ** 2)


def everyone(gains: Array) -> Schedule:
    """All devices in every round."""
    return Schedule(np.zeros(gains.shape[0]), np.ones(gains.shape, dtype=bool))


def threshold_schedule(gains: Array, clip: Array, device_cap: Array, step_size: ArrayLike, weight: float) -> Schedule:
    """The best threshold of every round under full power (paper, Sec. V-D): O(K log K) a round, all rounds at once.

    It weighs the error of silent devices against the excess noise that a weak device forces on all, both
    in units of E‖gradient error‖². Among equally good thresholds the one with more devices is taken.

    Args:
        gains: |h|[S, K].
        device_cap: the power limit of every device on a = α²/N0, P_k|h_k|²/(N0 ℓ_k²), [S, K].
        step_size: η, or η[S].
        weight: factor of the excess noise, 1 (paper) or m (corrected).
    """
    devices = gains.shape[-1]
    order = np.argsort(-gains, axis=-1, kind="stable")
    ranked = np.take_along_axis(gains, order, -1)
    cap = np.minimum.accumulate(np.take_along_axis(device_cap, order, -1), axis=-1)
    heard = np.cumsum(clip[order], axis=-1)
    sending = np.arange(1, devices + 1)
    silent = heard[:, -1:] - heard + (devices - sending) / sending * heard
    excess = np.maximum(0.0, (devices / sending) ** 2 / cap - 2 / np.asarray(step_size)[..., None])
    error = silent**2 + weight * excess
    # A threshold admits all devices of equal gain, so only the last of equals is a candidate.
    error[:, :-1][ranked[:, :-1] == ranked[:, 1:]] = np.inf
    best = devices - 1 - np.argmin(error[:, ::-1], axis=-1)
    threshold = np.take_along_axis(ranked, best[:, None], -1)[:, 0]
    return Schedule(threshold, gains >= threshold[:, None])


def schedule(rule: str, gains: Array, clip: Array, device_cap: Array, step_size: ArrayLike, weight: float) -> Schedule:
    """The schedule by name: `threshold` or `all`."""
    if rule == "all":
        return everyone(gains)
    if rule == "threshold":
        return threshold_schedule(gains, clip, device_cap, step_size, weight)
    raise InputError("schedule", rule, "one of threshold, all")
