"""What the server has received in every round, and where gradients were taken: all that it learns of the devices.

Post-processing of a transcript costs no privacy: the promise of a plan is against whoever sees all of it. Where it
would be large, successive rounds are merged with weights 1/v, v being the variance of their noise. While gradients are
affine in θ nothing is lost by that, since the merged position and the merged gradient belong together as those of one
round do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from wflmc.planning import Plan
from wflmc.support.errors import Shown

Floats = NDArray[np.floating]


@dataclass(frozen=True, eq=False, repr=False)
class Transcript(Shown):
    """Receptions in the coordinates that chains move in; a merged group of rounds counts as one."""

    position: Floats
    """Where gradients were asked for, [round, chain, m]: θ, or half a drift ahead with kinetic dynamics."""
    gradient: Floats
    """The server's estimate (K/(α K_a)) y of the gradient there, [round, chain, m]."""
    noise: Floats
    """v = N0 (K/(α K_a))², the variance of its noise, [round, chain]; infinite where nothing was received."""
    start: NDArray[np.intp]
    """The first round of every group, [round]: 0, 1, 2, … where none are merged."""
    rounds: int
    """S, of the plan."""

    @classmethod
    def of(cls, told: Floats, start: NDArray[np.intp], rounds: int) -> Self:
        """Return the transcript that is stored as told[round, chain, 2m + 1]."""
        position, gradient = np.split(told[..., :-1], 2, axis=-1)
        return cls(position, gradient, told[..., -1], start, rounds)

    def received(self, noise_power: float) -> Floats:
        """Return y[round, chain, m]; of merged rounds, that of one round with all of their power."""
        return self.gradient * np.sqrt(noise_power / self.noise)[..., None]

    def share(self, values: Floats) -> Floats:
        """Return the mean of values[S, ...] over the rounds of every group, [round, ...]."""
        lengths = np.diff(np.append(self.start, self.rounds)).reshape(-1, *[1] * (values.ndim - 1))
        return np.add.reduceat(values, self.start, axis=0) / lengths

    def _facts(self) -> dict[str, Any]:
        groups, chains, dim = self.position.shape
        return {"rounds": self.rounds, "groups": groups, "chains": chains, "parameters": dim}


def group_starts(rounds: int, block: int, size: float, limit: float) -> NDArray[np.intp]:
    """Return the first round of every group, such that none spans two blocks and all fit into a quarter of the limit.

    Args:
        rounds: S; block: rounds that are run between two looks of the host.
        size: bytes of one round; limit: bytes.
    """
    every = min(block, -(-rounds // max(1, int(limit / 4 / size))))
    starts = [np.arange(first, min(first + block, rounds), every) for first in range(0, rounds, block)]
    return np.concatenate(starts)


def reception_noise(plans: Sequence[Plan], block: slice) -> tuple[Floats, Floats]:
    """Return the variance v of gradients as received, and the factor K/(α K_a) on y, both [S, 1 or chain]."""
    scale = np.stack([(plan.scale / plan.gain)[block] for plan in plans], axis=1)
    return np.array([plan.noise_power for plan in plans]) * scale**2, scale


def merged(position: Floats, received: Floats, noise: Floats, scale: Floats, starts: NDArray[np.intp]) -> Floats:
    """Return the groups of a block of rounds as they are stored, [group, chain, 2m + 1].

    Args:
        position, received: [S, chain, m]; noise, scale: v and K/(α K_a), [S, 1 or chain].
        starts: the first round of every group.
    """
    weight = np.broadcast_to(1 / noise, position.shape[:2])[..., None]
    both = np.concatenate([position, scale[..., None] * received], axis=-1)
    total = np.add.reduceat(weight, starts, axis=0)
    return np.concatenate([np.add.reduceat(weight * both, starts, axis=0) / total, 1 / total], axis=-1)
