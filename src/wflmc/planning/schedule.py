"""Who transmits in each round: by thresholds on the channel gain, or equally often.

`threshold_schedule` silences devices in a deep fade (paper, Sec. V-D), and
`by_quality` has the same number of devices in every round, each of them equally often.
`Rule` is a schedule by name, for the rounds of a plan and for rounds that may come.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.channel import ChannelRanking

Array = NDArray[np.float64]


RULES = ("threshold", "all", "unbiased")
"""The names that `Policy.schedule` may have."""


class Schedule(NamedTuple):
    """Who transmits in every round."""

    threshold: Array
    """The smallest |h| with which a device transmits, [S]; nan where there is none."""
    active: NDArray[np.bool_]
    """Whether a device transmits, [S, K]."""


def participation_error(clip: Array, active: NDArray[np.bool_]) -> Array:
    r"""Bound the squared gradient error of leaving devices silent, for every round.

    With weight K/K_a on active gradients the error of the sum is at most
    $\sum_{\mathrm{silent}} \ell_k + \frac{K - K_a}{K_a} \sum_{\mathrm{active}} \ell_k$,
    and its square is returned. With equal ℓ it is the 4ℓ²(K−K_a)² of Lemma 1. It is 0
    where all devices are active.

    Args:
        clip: ℓ[K], the clipping thresholds of the devices.
        active: who transmits, [..., S, K], at least one device in every round.

    Returns:
        The squared error of every round, [..., S].
    """
    if active.all():
        return np.zeros(active.shape[:-1])
    devices = active.shape[-1]
    senders = active.sum(-1)
    active_norms = (active * clip).sum(-1)
    silent_norms = clip.sum() - active_norms
    overweight = (devices - senders) / senders * active_norms
    return np.asarray((silent_norms + overweight) ** 2)


def sampling_variance(clip: Array, senders: int) -> float:
    r"""Bound E‖gradient error‖² of a random set of senders.

    Where q of K devices transmit at weight K/q and every subset is equally likely,
    sampling without replacement gives
    $\frac{K(K-q)}{q(K-1)} \sum_k \lVert g_k - \bar g\rVert^2$, and the sum is at most
    Σ ‖g_k‖² ≤ Σ ℓ_k². It is 0 for q = K.

    Args:
        clip: ℓ[K], the clipping thresholds of the devices.
        senders: q, from 1 to K.

    Returns:
        The bound, in the units of a squared gradient.
    """
    devices = clip.size
    pairs = senders * max(1, devices - 1)
    return devices * (devices - senders) / pairs * float(np.sum(clip**2))


def threshold_schedule(
    gains: Array,
    clip: Array,
    device_cap: Array,
    step_size: ArrayLike,
    noise_weight: float,
) -> Schedule:
    """Choose the best threshold of every round under full power (paper, Sec. V-D).

    In each round it minimizes
    participation error + noise weight · max(0, (K/K_a)²/cap − 2/η)
    over the thresholds g ∈ {|h_1|, …, |h_K|}: the error of silent devices against the
    excess noise that a weak device forces on all, both in units of
    E‖gradient error‖². The cap is that of the weakest active device. Among equally good
    thresholds the one with more devices is taken. It takes O(K log K) a round, all
    rounds at once.

    Args:
        gains: |h|[S, K].
        clip: ℓ[K], the clipping thresholds of the devices.
        device_cap: the power limit of every device on a = α²/N0, P_k|h_k|²/(N0 ℓ_k²),
            [S, K].
        step_size: η, or η[S].
        noise_weight: factor of the excess noise, 1 (paper) or m (corrected).

    Returns:
        The thresholds, and who transmits.
    """
    step_sizes = np.broadcast_to(np.asarray(step_size, dtype=float), gains.shape[:1])
    threshold = gains.min(-1)
    # Where the weakest device forces no noise on the others, all of them transmit.
    excess = 1 / device_cap.min(-1) - 2 / step_sizes
    contested = np.flatnonzero(excess > 0)
    if contested.size:
        threshold[contested] = _best_threshold(
            gains[contested],
            clip,
            device_cap[contested],
            step_sizes[contested],
            noise_weight,
        )
    return Schedule(threshold, gains >= threshold[:, None])


def _best_threshold(
    gains: Array, clip: Array, device_cap: Array, step_size: Array, noise_weight: float
) -> Array:
    """Return the |h| of the weakest sender that is best, [S].

    The objective and the arguments are those of `threshold_schedule`, for the rounds in
    which the weakest device would force noise on the others.
    """
    devices = gains.shape[-1]
    order = np.argsort(-gains, axis=-1, kind="stable")
    ranked_gains = np.take_along_axis(gains, order, -1)
    ranked_caps = np.take_along_axis(device_cap, order, -1)
    cap = np.minimum.accumulate(ranked_caps, axis=-1)
    active_norms = np.cumsum(clip[order], axis=-1)
    senders = np.arange(1, devices + 1)
    silent_norms = active_norms[:, -1:] - active_norms
    silent_error = silent_norms + (devices - senders) / senders * active_norms
    noise = (devices / senders) ** 2 / cap
    excess = np.maximum(0.0, noise - 2 / step_size[:, None])
    error = silent_error**2 + noise_weight * excess
    # A threshold admits all devices of equal gain: only the last one is a candidate.
    has_equal_successor = ranked_gains[:, :-1] == ranked_gains[:, 1:]
    error[:, :-1][has_equal_successor] = np.inf
    # Reversed, so that the largest number of senders is the first of equals.
    best = devices - 1 - np.argmin(error[:, ::-1], axis=-1)
    return np.take_along_axis(ranked_gains, best[:, None], -1)[:, 0]


def by_quality(quality: Array, tie_breaks: Array, senders: int) -> Schedule:
    """Choose the devices whose channels are best for them, the same number every round.

    Where the qualities are independent and identically distributed over devices, every
    subset is equally likely, whatever the path losses, and every device transmits
    equally often.

    Args:
        quality: P(|h| ≤ the present |h|) by the device's own law, [S, K].
        tie_breaks: random numbers that decide between equal qualities, [S, K].
        senders: q, the active devices of every round, from 1 to K.

    Returns:
        Who transmits; there are no thresholds on |h|, which are nan.
    """
    order = np.lexsort((tie_breaks, -quality), axis=-1)
    active = np.zeros(quality.shape, dtype=bool)
    np.put_along_axis(active, order[..., :senders], True, -1)
    no_threshold = np.full(quality.shape[:-1], np.nan)
    return Schedule(no_threshold, active)


def best_senders(
    quality: Array,
    tie_breaks: Array,
    clip: Array,
    device_cap: Array,
    step_size: float,
    noise_weight: float,
) -> int:
    """Return the number of senders with the least mean error of a round at full power.

    It minimizes `sampling_variance` + noise weight · E max(0, (K/q)²/cap − 2/η) over q,
    the mean being that over n simulated rounds: few senders have a large variance, many
    senders a weak device among them. Of equally good numbers it takes the largest.

    Args:
        quality: of simulated rounds, as of `by_quality`, [n, K].
        tie_breaks: as of `by_quality`, [n, K].
        clip: ℓ[K], the clipping thresholds of the devices.
        device_cap: the power limit of every device on a, [n, K].
        step_size: η.
        noise_weight: factor of the excess noise, 1 (paper) or m (corrected).

    Returns:
        q, from 1 to K.
    """
    devices = clip.size
    order = np.lexsort((tie_breaks, -quality), axis=-1)
    ranked_caps = np.take_along_axis(device_cap, order, -1)
    cap = np.minimum.accumulate(ranked_caps, axis=-1)
    candidates = np.arange(1, devices + 1)
    noise = (devices / candidates) ** 2 / cap
    excess = np.maximum(0.0, noise - 2 / step_size).mean(0)
    variance = np.array([sampling_variance(clip, int(q)) for q in candidates])
    error = variance + noise_weight * excess
    # Reversed, so that the largest number is the first of equals.
    return int(devices - np.argmin(error[::-1]))


@dataclass(frozen=True)
class Rule:
    """A schedule by name and what it needs to know.

    It serves for the rounds of a plan and for those that a forecast expects.
    """

    name: str
    """One of RULES."""
    clip: Array
    """ℓ[K]."""
    unit_gain_cap: Array
    """The power limit of a device on a = α²/N0 where |h| = 1, P_k/(N0 ℓ_k²), [K]."""
    step_size: ArrayLike
    """η, or `Dynamics.noise_step` of kinetic steps: one for all rounds, or [S]."""
    noise_weight: float
    """Factor of the excess noise, 1 (paper) or m (corrected)."""
    uncertainty: float = 1.0
    """The largest |h/ĥ|, by which senders may arrive more strongly than intended."""
    senders: int = 0
    """The number of senders of `unbiased`."""

    def __call__(self, gains: Array, ranking: ChannelRanking | None = None) -> Schedule:
        """Return who transmits.

        Args:
            gains: |h|[S, K].
            ranking: how good the channels are for their own devices; for `unbiased`,
                which needs it, and for no other rule.
        """
        if ranking is not None:
            return by_quality(ranking.quality, ranking.tie_breaks, self.senders)
        if self.name == "all":
            no_threshold = np.zeros(gains.shape[0])
            return Schedule(no_threshold, np.ones(gains.shape, dtype=bool))
        return threshold_schedule(
            gains,
            self.clip,
            self.unit_gain_cap * gains**2,
            self.step_size,
            self.noise_weight,
        )

    def power_cap(self, gains: Array, active: NDArray[np.bool_]) -> Array:
        """Return the largest a that the weakest sender of a round can afford.

        The power limit ‖x_k‖² ≤ P_k of a device that transmits a gradient of norm ℓ_k
        is a = α²/N0 ≤ P_k|h_k|²/(N0 ℓ_k²), and the same α holds for all senders.

        Args:
            gains: |h|[S, K].
            active: who transmits, [S, K].

        Returns:
            The cap on a of every round, [S].
        """
        device_cap = self.unit_gain_cap * gains**2
        return np.asarray(np.where(active, device_cap, np.inf).min(-1))

    def error(self, active: NDArray[np.bool_]) -> Array:
        """Return the squared gradient error that the choice of senders causes.

        It is `participation_error`, and for `unbiased` its mean over the random choice,
        `sampling_variance`. Where senders may arrive up to `uncertainty` times as
        strongly as intended, (u − 1)(K/K_a) Σ_active ℓ_k is added to its root.

        Args:
            active: who transmits, [..., S, K].

        Returns:
            The squared error of every round, [..., S].
        """
        error = participation_error(self.clip, active)
        if self.name == "unbiased":
            variance = sampling_variance(self.clip, self.senders)
            error = np.full(active.shape[:-1], variance)
        if self.uncertainty == 1:
            return error
        scale = active.shape[-1] / active.sum(-1)
        received_norms = scale * (active * self.clip).sum(-1)
        mismatch = (self.uncertainty - 1) * received_norms
        return np.asarray((np.sqrt(error) + mismatch) ** 2)
