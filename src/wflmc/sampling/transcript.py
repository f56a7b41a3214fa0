"""What the server has received in every round, and where gradients were taken: all that
it learns of the devices.

Post-processing of a transcript costs no privacy: the promise of a plan holds against an
observer of all of it. Where it would be large, successive rounds are merged with
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
    """Return the type of a row of a stored transcript.

    A row has the fields of a `GradientEstimate` in float32, 4 (2 m + 1) bytes. One
    array of rows is one file, so that a checkpoint has a single file to flush.

    Args:
        dim: m, the number of parameters.
    """
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
    """Write estimates into rows of a stored transcript.

    Values are rounded to float32, the type of the rows.

    Args:
        rows: of the type of `transcript_dtype`, [round, chain].
        index: which rows: one round, a slice of rounds, or slices of rounds and chains.
        estimate: its arrays shaped as the indexed rows, position and gradient with m
            numbers for each.
    """
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

        Its arrays are views of the rows; of a file no more is read than is used.

        Args:
            rows: of the type of `transcript_dtype`, as `write_rows` fills them.
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
        """Return what the server received: y = √(N0/v) g for an estimate g of noise v.

        For merged rounds it is the y of one round that would have transmitted with the
        power of all of them. Where nothing was received, v is infinite and y is 0.

        Args:
            noise_power: N0 of the plan.

        Returns:
            y[round, chain, m].
        """
        scale = np.sqrt(noise_power / self.noise)
        return self.gradient * scale[..., None]

    def group_means(self, values: Floats) -> Floats:
        """Return the mean of a quantity of the plan over the rounds of every group.

        Where no rounds are merged, these are the values themselves.

        Args:
            values: one number or array for every round of the plan, [S, ...].

        Returns:
            Means, [group, ...].
        """
        edges = np.append(self.start, self.rounds)
        lengths = np.diff(edges)
        trailing_axes = [1] * (values.ndim - 1)
        lengths = lengths.reshape(-1, *trailing_axes)
        totals = np.add.reduceat(values, self.start, axis=0)
        return totals / lengths

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
    """Return how the receptions of a block become estimates of gradients.

    The estimate is (K/(α K_a)) y, whose noise has the variance N0 (K/(α K_a))².

    Args:
        plans: one that all chains share, or one for each chain.
        block: which rounds.

    Returns:
        Factors and variances, [round, 1] for a shared plan, else [round, chain].
    """
    scales = []
    for plan in plans:
        plan_scale = plan.scale / plan.gain
        scales.append(plan_scale[block])
    scale = np.stack(scales, axis=1)
    noise_power = np.array([plan.noise_power for plan in plans])
    variance = noise_power * scale**2
    return ReceptionNoise(scale, variance)


def merge_rounds(
    position: Floats,
    received: Floats,
    noise: ReceptionNoise,
    group_offsets: NDArray[np.intp],
) -> GradientEstimate:
    """Merge a block of rounds into groups, with weights 1/v.

    Positions and gradients of a group are averaged with the same weights, and the
    merged noise has the variance 1/Σ(1/v). A group of a single round keeps its values.

    Args:
        position: where gradients were taken, [S, chain, m].
        received: y[S, chain, m].
        noise: of these rounds.
        group_offsets: the first round of every group.

    Returns:
        Estimates of the groups, [group, chain, ...].
    """
    shape = position.shape[:2]
    precision = np.broadcast_to(1 / noise.variance, shape)[..., None]
    gradient = noise.scale[..., None] * received
    total = np.add.reduceat(precision, group_offsets, axis=0)

    def weighted_mean(values: Floats) -> Floats:
        weighted = precision * values
        sums = np.add.reduceat(weighted, group_offsets, axis=0)
        return sums / total

    return GradientEstimate(
        position=weighted_mean(position),
        gradient=weighted_mean(gradient),
        noise=1 / total[..., 0],
    )
