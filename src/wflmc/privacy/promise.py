"""What every device is promised, and the clipping that makes it true."""

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import ArrayLike

from wflmc.privacy.accountants import ACCOUNTANTS, Array, budget, epsilon_spent
from wflmc.support.declarations import Choices, Interval, check_fields, documented
from wflmc.support.errors import InputError, Shown, missing, wrong_length

UNITS = ("device", "record")
ADJACENCIES = ("replace", "add-remove")
HIDDEN = {
    ("device", "replace"): "any change of a device's data",
    ("record", "replace"): "one example replaced by another",
    ("device", "add-remove"): "whether a device sends or is silent",
    (
        "record",
        "add-remove",
    ): "whether an example is there or an empty one in its place",
}
"""What is hidden, by unit and adjacency, in words."""
CLIPS = Interval(above=1e-15, below=1e15, per_device=True)
"""The clipping thresholds ℓ and c for which float32 keeps clipped gradients within them, whatever the data.

Norms are roots of sums of squares. Float32 holds squares from 2⁻¹²⁶ to 2¹²⁸; smaller ones may be flushed to zero.

- *Small numbers.* A sum of m squares lacks at most 2m 2⁻¹²⁶. Twice that is added before the root is taken, so that no
  norm is too small. A norm is then at least √m 2⁻⁶² = 2.2e-19 √m, also that of zero, which is not to be clipped: 1e-15
  is above it for up to 2e7 parameters.
- *Large numbers.* A gradient whose squares overflow, one longer than 2⁶⁴ = 1.8e19, adds nothing, and neither does a row
  of features longer than 2⁶⁰ = 1.2e18. Any other factor ℓ/‖g‖ is at least 1e-15 2⁻⁶⁴ > 2⁻¹¹⁴, which float32 holds with
  all its digits: the clipped gradient is ℓ long, up to the rounding that is charged. 1e15 leaves three orders of
  magnitude between a threshold and 2⁶⁰, so that no gradient within its threshold is left out.
- *Neighbours.* Where records are clipped to less than their device, leaving out a device would be more than one record
  may change. Plans are refused for which N_k c may exceed 2⁵⁸, and the prior's share, which is public, is scaled down
  to 2⁵⁸: their sum stays below 2⁶⁰. What is added to a squared norm moves what is sent by less than m 2⁻¹¹⁷/ℓ, which
  `wflmc.sums.bound` charges (docs/explanation/privacy.md, "Sums in floating point").
"""


@lru_cache(maxsize=1024)
def _one_budget(epsilon: float, delta: float, accountant: str) -> float:
    """Return one budget for all devices; a study asks for the same one hundreds of times."""
    return float(budget(epsilon, delta, accountant))


def round_loss(
    gain: ArrayLike, amplitude: ArrayLike, sensitivity: ArrayLike, noise_power: float
) -> Array:
    """Return the loss per round and device, 2(α r_k ℓ_k)²/N0 (Proposition 2).

    Args:
        gain: α[..., S].
        amplitude: r[..., S, K], 0 where a device is silent, 1 where it sends at full gain.
        sensitivity: half the largest change of a device's gradient, [K].
        noise_power: N0.
    """
    send = np.asarray(gain, dtype=float)[..., None] * np.asarray(amplitude, dtype=float)
    return np.where(
        send > 0,
        2 * (send * np.where(send > 0, sensitivity, 0.0)) ** 2 / noise_power,
        0.0,
    )


@documented
@dataclass(frozen=True, repr=False)
class Privacy(Shown):
    """What every device is promised, and the clipping that makes it true.

    Every number may be one for all devices, or one for each.

    Examples:
        >>> Privacy(epsilon=8, delta=0.01, clip=30, accountant="paper").budget(devices=2).round(6).tolist()
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
        'with unit = "device", how much a change of the device\'s data can change what it '
        "sends.",
    ] = 30.0
    accountant: Annotated[
        str,
        Choices(tuple(ACCOUNTANTS)),
        "`exact` or `paper`, see `wflmc.privacy.accountants`.",
    ] = "exact"
    unit: Annotated[
        str,
        Choices(UNITS),
        "Whose change is hidden: that of `device`, all of a device's data; or of `record`, one example.",
    ] = "device"
    example_clip: Annotated[
        ArrayLike | None,
        CLIPS,
        'c, the largest norm of one example\'s gradient, with unit = "record". Where it is '
        "left out, `plan` chooses one for posteriors that have a `typical_example_norm`, "
        "and refuses all others.",
    ] = None
    adjacency: Annotated[
        str,
        Choices(ADJACENCIES),
        "What the change is: `replace`, by any other data; or `add-remove`, a device that "
        "is silent, or an example that is empty, in its place: it adds nothing, and K and "
        "N_k stay as they are.",
    ] = "replace"

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.epsilon is None) != (self.delta is None):
            absent, present = (
                ("epsilon", "delta") if self.epsilon is None else ("delta", "epsilon")
            )
            reason = f"together with {present} (or leave out both)"
            raise missing(absent, reason, section="privacy")
        if self.unit == "device" and self.example_clip is not None:
            allowed = "given with unit = 'record', else left out"
            raise InputError(
                "example_clip", self.example_clip, allowed, section="privacy"
            )

    def _facts(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _per_device(self, name: str, devices: int) -> Array:
        values = np.asarray(getattr(self, name), dtype=float)
        if values.ndim > 1 or values.size not in (1, devices):
            raise wrong_length(name, values.tolist(), devices, section="privacy")
        return np.broadcast_to(values.reshape(-1), (devices,))

    def of_device(self, device: int, devices: int) -> Self:
        """Return the promise to one of the devices alone."""
        each = [
            name
            for name in ("epsilon", "delta", "clip", "example_clip")
            if getattr(self, name) is not None
        ]
        own: dict[str, Any] = {
            name: float(self._per_device(name, devices)[device]) for name in each
        }
        return replace(self, **own)

    def clips(self, devices: int) -> Array:
        """Return ℓ_k for every device."""
        return self._per_device("clip", devices)

    def example_clips(self, devices: int) -> Array:
        """Return c_k for every device; infinite where examples are not clipped one by one.

        Raises:
            InputError: where they are to be clipped, and c is not known yet.
        """
        if self.unit == "device":
            return np.full(devices, np.inf)
        if self.example_clip is None:
            raise missing("example_clip", "with unit = 'record'", section="privacy")
        return self._per_device("example_clip", devices)

    def sensitivity(self, devices: int) -> Array:
        """Return half the largest change of each device's gradient between neighbours, [K], see `half_change`."""
        return self.half_change(self.clips(devices), self.example_clips(devices))

    def half_change(self, clip: ArrayLike, example_clip: ArrayLike) -> Array:
        """Return half the largest change between neighbours of a gradient clipped to ℓ, its examples to c; [...].

        The last step projects on a ball, which brings no two points further apart, and no two points of it are further
        apart than 2ℓ. One example moves the sum before that by 2c where it is replaced, by c where it is left empty:
        2 min(c, ℓ) and min(c, 2ℓ). Other data on a device move its gradient by 2ℓ. A silent device sends nothing, no
        share of the prior either: ℓ.
        """
        device, record = (
            np.asarray(clip, dtype=float),
            np.asarray(example_clip, dtype=float),
        )
        if self.adjacency == "replace":
            return np.minimum(device, record)
        return device / 2 if self.unit == "device" else np.minimum(device, record / 2)

    def budget(self, devices: int) -> Array:
        """Return R_k for every device; infinite without a constraint."""
        if self.epsilon is None or self.delta is None:
            return np.full(devices, np.inf)
        if np.ndim(self.epsilon) == 0 and np.ndim(self.delta) == 0:
            one = _one_budget(
                float(np.asarray(self.epsilon)),
                float(np.asarray(self.delta)),
                self.accountant,
            )
            return np.full(devices, one)
        return budget(
            self._per_device("epsilon", devices),
            self._per_device("delta", devices),
            self.accountant,
        )

    def epsilons_spent(
        self, loss: ArrayLike, accountant: str | None = None
    ) -> Array | None:
        """Return ε of every device for their losses [K], by the promise's own accountant unless another is named.

        None without a constraint: there is no δ to state it at.
        """
        if self.delta is None:
            return None
        losses = np.asarray(loss, dtype=float)
        return epsilon_spent(
            losses,
            self._per_device("delta", losses.size),
            accountant or self.accountant,
        )

    def epsilon_spent(
        self, loss: ArrayLike, accountant: str | None = None
    ) -> float | None:
        """Return the largest of `epsilons_spent`."""
        found = self.epsilons_spent(loss, accountant)
        return None if found is None else float(found.max())
