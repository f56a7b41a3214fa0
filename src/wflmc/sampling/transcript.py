"""What the server has received in every round, and where gradients were taken: all that
it learns of the devices.

Post-processing of a transcript costs no privacy: the promise of a plan is against
whoever sees all of it. Where it would be large, successive rounds are merged with
weights 1/v, v being the variance of their noise. While gradients are affine in θ
nothing is lost by that, since the merged position and the merged gradient belong
together as those of one round do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from wflmc.planning import Plan
from wflmc.support.errors import Shown

Floats = NDArray[np.floating]


class GradientEstimate(NamedTuple):
    """What the server knows of gradients after a round, or after a group of rounds."""

    position: Floats
    """Where gradients were taken, [..., m]."""
    gradient: Floats
    """The server's estimate (K/(α K_a)) y of the gradient there, [..., m]."""
    noise: Floats
    """The variance of its noise, [...]; infinite where nothing was received."""


def transcript_dtype(dim: int) -> np.dtype[np.void]:
    """Return the type of a row of a stored transcript: a `GradientEstimate` of m
    parameters."""
    return np.dtype(
        [
            ("position", np.float32, (dim,)),
            ("gradient", np.float32, (dim,)),
            ("noise", np.float32),
        ]
    )


def write_rows(
    rows: NDArray[np.void],
    index: int | slice | tuple[slice, slice],
    estimate: GradientEstimate,
) -> None:
    """Write estimates into rows[round, chain] of a stored transcript."""
    for name, values in estimate._asdict().items():
        rows[name][index] = values


@dataclass(frozen=True, eq=False, repr=False)
class Transcript(Shown):
    """Receptions in the coordinates that chains move in; a merged group of rounds
    counts as one."""

    position: Floats
    """Where gradients were taken, [round, chain, m]: θ, or half a drift ahead with
    kinetic dynamics."""
    gradient: Floats
    """The server's estimate (K/(α K_a)) y of the gradient there, [round, chain, m]."""
    noise: Floats
    """v = N0 (K/(α K_a))², the variance of its noise, [round, chain]; infinite where
    nothing was received."""
    start: NDArray[np.intp]
    """The first round of every group, [round]: 0, 1, 2, … where none are merged."""
    rounds: int
    """S, of the plan."""

    @classmethod
    def from_rows(
        cls,
        rows: NDArray[np.void],
        start: NDArray[np.intp],
        rounds: int,
    ) -> Self:
        """Return the transcript that is stored as rows[round, chain].

        Args:
            rows: of the type of `transcript_dtype`.
            start: the first round of every row.
            rounds: S, of the plan.
        """
        return cls(
            position=rows["position"],
            gradient=rows["gradient"],
            noise=rows["noise"],
            start=start,
            rounds=rounds,
        )

    def received(self, noise_power: float) -> Floats:
        """Return y[round, chain, m]; of merged rounds, that of one round with all of
        their power."""
        return self.gradient * np.sqrt(noise_power / self.noise)[..., None]

    def share(self, values: Floats) -> Floats:
        """Return the mean of values[S, ...] over the rounds of every group,
        [round, ...]."""
        lengths = np.diff(np.append(self.start, self.rounds))
        lengths = lengths.reshape(-1, *[1] * (values.ndim - 1))
        return np.add.reduceat(values, self.start, axis=0) / lengths

    def _facts(self) -> dict[str, int]:
        groups, chains, dim = self.position.shape
        return {
            "rounds": self.rounds,
            "groups": groups,
            "chains": chains,
            "parameters": dim,
        }


class ReceptionNoise(NamedTuple):
    """How y becomes an estimate of the gradient, [S, 1 or chain] each."""

    scale: Floats
    """The factor K/(α K_a) on y."""
    variance: Floats
    """v = N0 (K/(α K_a))², of the noise of the estimate."""


def reception_noise(plans: Sequence[Plan], block: slice) -> ReceptionNoise:
    """Return scale and variance in a block of rounds.

    Args:
        plans: one that all chains share, or one for each chain.
        block: which rounds.
    """
    scale = np.stack([(plan.scale / plan.gain)[block] for plan in plans], axis=1)
    noise_power = np.array([plan.noise_power for plan in plans])
    return ReceptionNoise(scale, noise_power * scale**2)


def merge_rounds(
    position: Floats,
    received: Floats,
    noise: ReceptionNoise,
    group_offsets: NDArray[np.intp],
) -> GradientEstimate:
    """Merge a block of rounds into groups, with weights 1/v.

    Args:
        position: where gradients were taken, [S, chain, m].
        received: y[S, chain, m].
        noise: of these rounds.
        group_offsets: the first round of every group.

    Returns:
        Estimates of the groups, [group, chain, ...].
    """
    precision = np.broadcast_to(1 / noise.variance, position.shape[:2])[..., None]
    gradient = noise.scale[..., None] * received
    total = np.add.reduceat(precision, group_offsets, axis=0)

    def weighted_mean(values: Floats) -> Floats:
        return np.add.reduceat(precision * values, group_offsets, axis=0) / total

    return GradientEstimate(
        position=weighted_mean(position),
        gradient=weighted_mean(gradient),
        noise=1 / total[..., 0],
    )
