"""What every device is promised, and the clipping that makes it true.

The guarantee: whoever sees everything that the server receives cannot tell two
neighbouring data sets apart better than (ε, δ)-differential privacy allows. `unit` and
`adjacency` define the neighbours:

- `device`, `replace`: all data of one device, replaced by any other;
- `device`, `add-remove`: one device, which is silent instead;
- `record`, `replace`: one example of a device, replaced by any other;
- `record`, `add-remove`: one example, which is empty instead and adds nothing.

Public in all cases are the number of devices, the number of examples of each, the
channels, and all settings, clipping thresholds included; neighbours with other sizes
are not covered. Constants that were computed from private data, such as μ and L, are
not covered either: plans warn about them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Self

import numpy as np
from numpy.typing import ArrayLike

from wflmc.privacy.accountants import ACCOUNTANTS, Array, budget, epsilon_spent
from wflmc.support.declarations import Choices, Interval, check_fields, documented
from wflmc.support.errors import (
    InputError,
    Shown,
    ShownValues,
    missing,
    wrong_length,
)

UNITS = ("device", "record")
"""Whose change is hidden: that of all data of a device, or of one example."""
ADJACENCIES = ("replace", "add-remove")
"""What the change is."""
HIDDEN: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("device", "replace"): "any change of a device's data",
        ("record", "replace"): "one example replaced by another",
        ("device", "add-remove"): "whether a device sends or is silent",
        ("record", "add-remove"): "whether an example is present or empty",
    }
)
"""What is hidden, by unit and adjacency, in words."""
CLIPS = Interval(above=1e-15, below=1e15, per_device=True)
"""Thresholds ℓ and c within which float32 keeps clipped gradients, whatever the data.

Norms are roots of sums of squares. Float32 holds squares from 2⁻¹²⁶ to 2¹²⁸; smaller
ones may be flushed to zero.

- *Small numbers.* A sum of m squares lacks at most 2m 2⁻¹²⁶. Twice that is added before
  the root is taken, so that no norm is too small. A norm is then at least
  √m 2⁻⁶² = 2.2e-19 √m, also that of zero, which is not to be clipped: 1e-15 is above it
  for up to 2e7 parameters.
- *Large numbers.* A gradient whose squares overflow, one longer than 2⁶⁴ = 1.8e19, adds
  nothing, and neither does a row of features longer than 2⁶⁰ = 1.2e18. Any other factor
  ℓ/‖g‖ is at least 1e-15 2⁻⁶⁴ > 2⁻¹¹⁴, which float32 holds with all its digits: the
  clipped gradient is ℓ long, up to the rounding that is charged. 1e15 leaves three
  orders of magnitude between a threshold and 2⁶⁰, so that no gradient within its
  threshold is left out.
- *Neighbours.* Where records are clipped to less than their device, leaving out a
  device would be more than one record may change. Plans are refused for which N_k c
  may exceed 2⁵⁸, and the prior's share, which is public, is scaled down to 2⁵⁸: their
  sum stays below 2⁶⁰. What is added to a squared norm moves what is sent by less than
  m 2⁻¹¹⁷/ℓ, which `wflmc.sums.bound` charges (docs/explanation/privacy.md, "Sums in
  floating point").
"""


@lru_cache(maxsize=1024)
def _budget_of_all(epsilon: float, delta: float, accountant: str) -> float:
    """Return the budget of all devices; a study needs the same one many times."""
    return float(budget(epsilon, delta, accountant))


def round_loss(
    gain: ArrayLike, amplitude: ArrayLike, sensitivity: ArrayLike, noise_power: float
) -> Array:
    r"""Return the privacy loss of every round and device (Proposition 2).

    $x_{s,k} = 2(\alpha_s r_{s,k} \ell_k)^2/N_0$, with the sensitivity in the place of
    the clipping threshold $\ell_k$: they are equal where all data of a device are
    replaced. A silent device loses nothing, even where its sensitivity is infinite.

    Args:
        gain: α, [..., S].
        amplitude: r, [..., S, K]; 0 where a device is silent, 1 where it sends at full
            gain.
        sensitivity: half the largest change of a device's gradient between neighbours,
            [K] (`Privacy.sensitivity`).
        noise_power: N0, the variance of the noise on every coordinate.

    Returns:
        The losses, [..., S, K], which add up over rounds.
    """
    by_round = np.asarray(gain, dtype=float)[..., None]
    sent_amplitude = by_round * np.asarray(amplitude, dtype=float)
    is_sent = sent_amplitude > 0
    change = sent_amplitude * np.where(is_sent, sensitivity, 0.0)
    return np.where(is_sent, 2 * change**2 / noise_power, 0.0)


@documented
@dataclass(frozen=True, repr=False)
class Privacy(Shown):
    """What every device is promised, and the clipping that makes it true.

    Every number may be the same for all devices, or a list with one for each. The
    module's docstring states the guarantee and what it does not cover.

    Examples:
        >>> privacy = Privacy(epsilon=8, delta=0.01, clip=30, accountant="paper")
        >>> privacy.budget(devices=2).round(6).tolist()
        [2.341635, 2.341635]
    """

    epsilon: Annotated[
        ArrayLike | None,
        Interval(minimum=1e-50, maximum=1e50, per_device=True),
        "ε of the promise; None, together with `delta`, for no constraint.",
    ] = None
    delta: Annotated[
        ArrayLike | None,
        Interval(above=0, below=1, per_device=True),
        "δ of the promise; None, together with `epsilon`, for no constraint.",
    ] = None
    clip: Annotated[
        ArrayLike,
        CLIPS,
        "ℓ, the largest norm of a device's gradient: it bounds the transmit power and, "
        'with unit = "device", how much a change of the device\'s data can change what '
        "it sends.",
    ] = 30.0
    accountant: Annotated[
        str,
        Choices(tuple(ACCOUNTANTS)),
        "`exact` or `paper`, see `wflmc.privacy.accountants`.",
    ] = "exact"
    unit: Annotated[
        str,
        Choices(UNITS),
        "Whose change is hidden: that of `device`, all of a device's data; or of "
        "`record`, one example.",
    ] = "device"
    example_clip: Annotated[
        ArrayLike | None,
        CLIPS,
        'c, the largest norm of one example\'s gradient, with unit = "record". Where '
        "it is left out, `plan` chooses one for posteriors that have a "
        "`typical_example_norm`, and refuses all others.",
    ] = None
    adjacency: Annotated[
        str,
        Choices(ADJACENCIES),
        "What the change is: `replace`, by any other data; or `add-remove`, a device "
        "that is silent, or an example that is empty, in its place: it adds nothing, "
        "and K and N_k stay as they are.",
    ] = "replace"

    def __post_init__(self) -> None:
        check_fields(self)
        has_epsilon = self.epsilon is not None
        has_delta = self.delta is not None
        if has_epsilon != has_delta:
            absent = "delta" if has_epsilon else "epsilon"
            present = "epsilon" if has_epsilon else "delta"
            reason = f"together with {present} (or leave out both)"
            raise missing(absent, reason, section="privacy")
        if self.unit == "device" and self.example_clip is not None:
            requirement = "given with unit = 'record', else left out"
            raise InputError(
                "example_clip", self.example_clip, requirement, section="privacy"
            )

    def _facts(self) -> ShownValues:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _per_device(self, name: str, devices: int) -> Array:
        """Return a field for every device, [K]."""
        values = np.asarray(getattr(self, name), dtype=float)
        if values.ndim > 1 or values.size not in (1, devices):
            raise wrong_length(name, values.tolist(), devices, section="privacy")
        return np.broadcast_to(values.reshape(-1), (devices,))

    def of_device(self, device: int, devices: int) -> Self:
        """Return the promise to one of the devices alone.

        Args:
            device: its index, from 0.
            devices: K.

        Returns:
            The same promise with single numbers; those that are None stay so.

        Raises:
            InputError: if a list does not have K numbers.
        """

        def own(name: str) -> float | None:
            if getattr(self, name) is None:
                return None
            return float(self._per_device(name, devices)[device])

        return replace(
            self,
            epsilon=own("epsilon"),
            delta=own("delta"),
            clip=float(self.clips(devices)[device]),
            example_clip=own("example_clip"),
        )

    def clips(self, devices: int) -> Array:
        """Return ℓ_k, to which the gradient of each device is clipped.

        Args:
            devices: K.

        Returns:
            The clipping thresholds, [K].

        Raises:
            InputError: if `clip` is a list of another length.
        """
        return self._per_device("clip", devices)

    def example_clips(self, devices: int) -> Array:
        """Return c_k, to which the gradient of each example of a device is clipped.

        Args:
            devices: K.

        Returns:
            The clipping thresholds, [K]; infinite with unit = "device", where examples
            are not clipped one by one.

        Raises:
            InputError: if they are to be clipped and `example_clip` is None, or if it
                is a list of another length.
        """
        if self.unit == "device":
            return np.full(devices, np.inf)
        if self.example_clip is None:
            raise missing("example_clip", "with unit = 'record'", section="privacy")
        return self._per_device("example_clip", devices)

    def sensitivity(self, devices: int) -> Array:
        """Return half the largest change of each device's gradient between neighbours.

        Args:
            devices: K.

        Returns:
            `half_change` of the promise's own thresholds, [K].

        Raises:
            InputError: as of `clips` and `example_clips`.
        """
        return self.half_change(self.clips(devices), self.example_clips(devices))

    def half_change(self, clip: ArrayLike, example_clip: ArrayLike) -> Array:
        """Return half the largest change of a clipped gradient between neighbours.

        The last step projects on a ball of radius ℓ, which brings no two points further
        apart, and no two points of it are further apart than 2ℓ. One example moves the
        sum before that by 2c where it is replaced, by c where it is left empty: so the
        changes are 2 min(c, ℓ) and min(c, 2ℓ). Other data on a device move its gradient
        by 2ℓ. A silent device sends nothing, no share of the prior either: ℓ.

        Args:
            clip: ℓ, the largest norm of a device's gradient, [...].
            example_clip: c, the largest norm of an example's gradient, [...]; infinite
                where examples are not clipped.

        Returns:
            Half the change, [...]: s in the loss 2(αs)²/N0.
        """
        device_clip = np.asarray(clip, dtype=float)
        record_clip = np.asarray(example_clip, dtype=float)
        if self.unit == "device":
            # Many examples may change, so that c limits nothing.
            return device_clip if self.adjacency == "replace" else device_clip / 2
        if self.adjacency == "replace":
            return np.minimum(device_clip, record_clip)
        return np.minimum(device_clip, record_clip / 2)

    def budget(self, devices: int) -> Array:
        """Return the largest total loss R_k that keeps the promise to each device.

        Args:
            devices: K.

        Returns:
            The budgets, [K], by the promise's accountant; infinite without ε and δ.

        Raises:
            InputError: if ε or δ is a list of another length.
        """
        if self.epsilon is None or self.delta is None:
            return np.full(devices, np.inf)
        if np.ndim(self.epsilon) == 0 and np.ndim(self.delta) == 0:
            epsilon = float(np.asarray(self.epsilon))
            delta = float(np.asarray(self.delta))
            common = _budget_of_all(epsilon, delta, self.accountant)
            return np.full(devices, common)
        epsilons = self._per_device("epsilon", devices)
        deltas = self._per_device("delta", devices)
        return budget(epsilons, deltas, self.accountant)

    def epsilons_spent(
        self, loss: ArrayLike, accountant: str | None = None
    ) -> Array | None:
        """Return the ε that every device has spent, at the promise's δ.

        Args:
            loss: the total loss of every device, [K], at least 0; infinite losses have
                an infinite ε.
            accountant: `exact` or `paper`; the promise's own by default.

        Returns:
            ε, [K]; None without a promise, which has no δ to state it at.

        Raises:
            InputError: for a negative loss or an unknown accountant, or if δ is a list
                of another length.
        """
        if self.delta is None:
            return None
        losses = np.asarray(loss, dtype=float)
        deltas = self._per_device("delta", losses.size)
        return epsilon_spent(losses, deltas, accountant or self.accountant)

    def epsilon_spent(
        self, loss: ArrayLike, accountant: str | None = None
    ) -> float | None:
        """Return the largest ε that a device has spent, at the promise's δ.

        Args:
            loss: the total loss of every device, [K], at least 0.
            accountant: `exact` or `paper`; the promise's own by default.

        Returns:
            The largest of `epsilons_spent`; None without a promise.

        Raises:
            InputError: as of `epsilons_spent`.
        """
        epsilons = self.epsilons_spent(loss, accountant)
        return None if epsilons is None else float(epsilons.max())
