"""What a device has agreed to before the first round, and what it is asked in one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.errors import InputError, without_data
from wflmc.federated.lattice import Lattice
from wflmc.privacy import Privacy

TUPLES = ("gain", "known", "privacy")
UNMASKED = (
    "that of a federation without secure aggregation, which wflmc no longer has: begin a new one in another folder, "
    "and name this one's ledger by --ledger"
)
UNSCHEDULED = (
    "with the gains of all rounds, which an earlier version did not write: begin a new federation in another folder, "
    "and name this one's ledger by --ledger"
)


@dataclass(frozen=True)
class Terms:
    """What a device has agreed to; it answers no request that goes beyond."""

    run: str
    device: int
    chains: int
    dim: int
    start: int
    """The number of the first round."""
    gain: tuple[float, ...]
    """α r_k of every round, the largest amplitude at which its gradient is to arrive; 0 where it is silent."""
    known: tuple[float, ...]
    """|ĥ_k| of every round, by the device's own estimate; 1 on an ideal link. The factor covers its error."""
    clip: float
    """ℓ_k."""
    example_clip: float
    """c_k; infinite where examples are not clipped one by one."""
    rounding: float
    """e: clips act at ℓ/(1 + e) and c/(1 + e), see `Plan.rounding`."""
    noise_power: float
    """N0 of the sum."""
    share: float
    """Variance of the noise that the device adds itself; 0 where it relies on the channel's."""
    step: float
    """Its messages are multiples of this, where it adds noise."""
    factor: float
    """What a round costs over 2 (α r ℓ)²/N0: more where messages are seen one by one or channels are known badly."""
    power: float
    """P: the most that ‖x‖² may be."""
    enforced: bool
    """Whether the device keeps to its budget; a policy that ignores privacy is still written down."""
    simulated: bool
    """Whether the noise is that of a simulation, which protects nobody: answers are then repeated, but not kept."""
    privacy: tuple[float | None, float | None, str, str, str]
    """ε, δ, accountant, unit and adjacency of the promise to this device."""

    @property
    def rounds(self) -> int:
        """Rounds are numbered below this."""
        return self.start + len(self.gain)

    @property
    def lattice(self) -> Lattice:
        """Where its messages lie, and how wide its noise is."""
        return Lattice(self.step, round(self.share**0.5 / self.step))

    @property
    def sensitivity(self) -> float:
        """Half of what a neighbouring data set can change."""
        return float(self.promise.half_change(self.clip, self.example_clip))

    @property
    def promise(self) -> Privacy:
        """The promise to this device."""
        epsilon, delta, accountant, unit, adjacency = self.privacy
        own = min(self.example_clip, 1e300) if unit == "record" else None
        return Privacy(epsilon, delta, min(self.clip, 1e300), accountant, unit, own, adjacency)

    def save(self, path: Path) -> None:
        """Write them as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Terms:
        """Read them again."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            earlier = "privacy" in found and "gain" not in found
            terms = None if earlier else cls(**found | {name: tuple(found[name]) for name in TUPLES})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError("terms", str(path), f"a file that `wflmc federate` has prepared ({error})") from None
        if terms is None:
            raise InputError("terms", str(path), UNSCHEDULED)
        return terms


@without_data
class Ask(NamedTuple):
    """What a device is asked in a round."""

    device: int
    round: int
    theta: NDArray[Any]
    """What the device hears of where the chains are, [chain, m]."""
    gain: float
    """α r_k, the amplitude at which its gradient is to arrive."""
    known: float
    """|ĥ_k|, what it knows of its channel; a device refuses another value than its own."""
    arrives: float = 1.0
    """|h_k|, what the channel does with what it sends; the device is not told."""
    batch: NDArray[np.uint32] | None = None
    """Keys of its mini-batches, one for each chain."""

    @property
    def precoder(self) -> float:
        """α r_k/|ĥ_k|: what the clipped gradient is sent with."""
        return self.gain / self.known


@without_data
class Heard(NamedTuple):
    """What the server has heard in a round."""

    total: NDArray[Any]
    """Σ_k h_k x_k of those who sent, [chain, m]."""
    sent: NDArray[np.bool_]
    """[K]."""
    absent: dict[int, str]
    """Why others who were asked did not send."""
