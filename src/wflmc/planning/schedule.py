"""Who sends in each round: by thresholds on the channel gain, or as many each time, each device as often."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


RULES = ("threshold", "all", "unbiased")


class Schedule(NamedTuple):
    """threshold[S] on |h| (nan where there is none), and the devices that send, active[S, K]."""

    threshold: Array
    active: NDArray[np.bool_]


def participation_error(clip: Array, active: NDArray[np.bool_]) -> Array:
    """Squared gradient error of leaving devices silent, (Σ_silent ℓ + (K−K_a)/K_a Σ_active ℓ)², per round.

    With equal ℓ it is the 4ℓ²(K−K_a)² of Lemma 1.
    """
    devices, sending, heard = active.shape[-1], active.sum(-1), (active * clip).sum(-1)
    if active.all():
        return np.zeros(active.shape[:-1])
    return np.asarray((clip.sum() - heard + (devices - sending) / sending * heard) ** 2)


def sampling_variance(clip: Array, senders: int) -> float:
    """E‖gradient error‖² when q of K devices send, every subset as likely, at weight K/q.

    Sampling without replacement gives K(K−q)/(q(K−1)) Σ‖g_k − ḡ‖², and Σ‖g_k − ḡ‖² ≤ Σ‖g_k‖² ≤ Σ ℓ_k².
    """
    devices = clip.size
    return (
        devices
        * (devices - senders)
        / (senders * max(1, devices - 1))
        * float(np.sum(clip**2))
    )


def threshold_schedule(
    gains: Array, clip: Array, device_cap: Array, step_size: ArrayLike, weight: float
) -> Schedule:
    """The best threshold of every round under full power (paper, Sec. V-D): O(K log K) a round, all rounds at once.

    It weighs the error of silent devices against the excess noise that a weak device forces on all, both
    in units of E‖gradient error‖². Among equally good thresholds the one with more devices is taken.

    Args:
        gains: |h|[S, K].
        device_cap: the power limit of every device on a = α²/N0, P_k|h_k|²/(N0 ℓ_k²), [S, K].
        step_size: η, or η[S].
        weight: factor of the excess noise, 1 (paper) or m (corrected).
    """
    step = np.broadcast_to(np.asarray(step_size, dtype=float), gains.shape[:1])
    threshold = gains.min(-1)
    # Where the weakest device forces no noise on the others, all of them send.
    contested = np.flatnonzero(1 / device_cap.min(-1) - 2 / step > 0)
    if contested.size:
        threshold[contested] = _best_threshold(
            gains[contested],
            clip,
            device_cap[contested],
            step[contested],
            weight,
        )
    return Schedule(threshold, gains >= threshold[:, None])


def _best_threshold(
    gains: Array, clip: Array, device_cap: Array, step_size: Array, weight: float
) -> Array:
    """Return the best threshold of every round, [S]; arguments as of `threshold_schedule`."""
    devices = gains.shape[-1]
    order = np.argsort(-gains, axis=-1, kind="stable")
    ranked = np.take_along_axis(gains, order, -1)
    cap = np.minimum.accumulate(np.take_along_axis(device_cap, order, -1), axis=-1)
    heard = np.cumsum(clip[order], axis=-1)
    sending = np.arange(1, devices + 1)
    silent = heard[:, -1:] - heard + (devices - sending) / sending * heard
    excess = np.maximum(0.0, (devices / sending) ** 2 / cap - 2 / step_size[:, None])
    error = silent**2 + weight * excess
    # A threshold admits all devices of equal gain, so only the last of equals is a candidate.
    error[:, :-1][ranked[:, :-1] == ranked[:, 1:]] = np.inf
    best = devices - 1 - np.argmin(error[:, ::-1], axis=-1)
    return np.take_along_axis(ranked, best[:, None], -1)[:, 0]


def by_quality(quality: Array, lots: Array, senders: int) -> Schedule:
    """In every round the devices whose channels are best for them, always as many; lots decide between equals.

    Where u[s, k] are independent and alike over devices, every subset is as likely, whatever the path losses.
    """
    order = np.lexsort((lots, -quality), axis=-1)
    active = np.zeros(quality.shape, dtype=bool)
    np.put_along_axis(active, order[..., :senders], True, -1)
    return Schedule(np.full(quality.shape[:-1], np.nan), active)


def best_senders(
    quality: Array,
    lots: Array,
    clip: Array,
    device_cap: Array,
    step_size: float,
    weight: float,
) -> int:
    """The number of senders with the least mean error of a round under full power, over simulated rounds [n, K].

    It weighs sampling variance against excess noise, in the units of `threshold_schedule`.
    """
    devices = clip.size
    order = np.lexsort((lots, -quality), axis=-1)
    cap = np.minimum.accumulate(np.take_along_axis(device_cap, order, -1), axis=-1)
    excess = np.maximum(
        0.0, (devices / np.arange(1, devices + 1)) ** 2 / cap - 2 / step_size
    ).mean(0)
    error = (
        np.array([sampling_variance(clip, q) for q in range(1, devices + 1)])
        + weight * excess
    )
    return int(devices - np.argmin(error[::-1]))


@dataclass(frozen=True)
class Rule:
    """A schedule by name and what it needs to know, for the rounds that are and for those that may come."""

    name: str
    clip: Array
    reach: Array
    """The power limit of a device on a over |h|², P_k/(N0 ℓ_k²), [K]."""
    step_size: ArrayLike
    """η, one for all rounds or for each, [S]."""
    weight: float
    """Factor of the excess noise, 1 (paper) or m (corrected)."""
    uncertainty: float = 1.0
    senders: int = 0
    """The number of senders of `unbiased`."""

    def __call__(
        self, gains: Array, ranking: tuple[Array, Array] | None = None
    ) -> Schedule:
        """Who sends, given |h|[S, K], and for `unbiased` how good that is for each device, with lots."""
        if ranking is not None:
            return by_quality(*ranking, self.senders)
        if self.name == "all":
            return Schedule(np.zeros(gains.shape[0]), np.ones(gains.shape, dtype=bool))
        return threshold_schedule(
            gains, self.clip, self.reach * gains**2, self.step_size, self.weight
        )

    def power_cap(self, gains: Array, active: NDArray[np.bool_]) -> Array:
        """The largest a that the weakest sender of a round can afford, [S]."""
        return np.asarray(np.where(active, self.reach * gains**2, np.inf).min(-1))

    def error(self, active: NDArray[np.bool_]) -> Array:
        """Squared gradient error of those who are silent, or of its mean for `unbiased`, [S].

        Senders may arrive up to `uncertainty` times as strong as they mean to.
        """
        silent = participation_error(self.clip, active)
        if self.name == "unbiased":
            silent = np.full(
                active.shape[:-1], sampling_variance(self.clip, self.senders)
            )
        if self.uncertainty == 1:
            return silent
        heard = active.shape[-1] / active.sum(-1) * (active * self.clip).sum(-1)
        return np.asarray((np.sqrt(silent) + (self.uncertainty - 1) * heard) ** 2)
