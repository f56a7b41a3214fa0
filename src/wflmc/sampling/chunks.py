"""Cutting a run into chunks of chains and blocks of rounds: arithmetic on sizes alone.

A chunk of chains is run together, and its rounds are run in blocks, between which the
host charges, checks, stores and reports. Sums are cut with the work, so that a round
that is repeated repeats the same sum only if it is cut in the same way: a `Partition`
depends on shapes and limits, never on values.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.support.errors import InputError

BLOCK_WORK = 2**33
"""Operations, as models count them, in a block of rounds: about a second of two cores'
work, after which the host reports progress and notices Ctrl-C."""
ACCELERATOR_SPEED = 128
"""How many times as many operations an accelerator is given."""
FLOAT32_BYTES = 4.0
STATE_COPIES = 4
"""Copies of a chain's state that a compiled loop holds: before and after a round, the
gradient and the noise."""
CHAINS_MEMORY = 1 / 2
"""Fraction of the memory that states and gradients of a chunk may take."""
BLOCK_MEMORY = 1 / 4
"""Fraction of the memory that the results of a block may take on the accelerator."""
TRANSCRIPT_MEMORY = 1 / 4
"""Fraction of the memory that the transcript of all rounds may take on the host."""


class Workload(NamedTuple):
    """What is to be run, as far as cutting it depends on it."""

    chains: int
    rounds: int
    """S."""
    kept_rounds: int
    """Rounds whose draws are kept."""
    dim: int
    """m."""
    has_velocity: bool
    gradient_bytes: float
    """Memory that the gradients of one chain take."""
    operations: float
    """Of one chain in one round."""
    transcript: bool
    """Whether positions and receptions of all rounds are kept."""

    @property
    def chain_bytes(self) -> float:
        """Memory that one chain takes while it runs."""
        state_size = self.dim * (2 if self.has_velocity else 1)
        return self.gradient_bytes + STATE_COPIES * FLOAT32_BYTES * state_size

    @property
    def transcript_bytes(self) -> float:
        """Memory that a round of all chains takes in a transcript.

        These are a position, a gradient and the variance of its noise.
        """
        return FLOAT32_BYTES * self.chains * (2 * self.dim + 1)


class WorkLimits(NamedTuple):
    """What a part of a run may take."""

    memory: float
    """Bytes."""
    operations: float
    """In a block of rounds."""
    accelerators: int
    """Over which the chains of a chunk are spread evenly."""


class Chunk(NamedTuple):
    """Chains that are run together."""

    own: slice
    """The chains whose results count."""
    members: NDArray[np.intp]
    """The chains that are run, of which the first are its own. A chunk that is not full
    is filled up with the last chain, so that nothing is compiled anew."""

    @property
    def size(self) -> int:
        """How many chains are its own."""
        return int(self.own.stop - self.own.start)


class Groups(NamedTuple):
    """The groups of rounds of a transcript that belong to a block."""

    own: slice
    """Which groups these are."""
    offsets: NDArray[np.intp]
    """Where they begin, counted from the first round of the block."""


@dataclass(frozen=True, eq=False)
class Partition:
    """How a run is cut."""

    chains: int
    """In all."""
    rounds: int
    """In all."""
    chunk_chains: int
    """Chains of a chunk, a multiple of the number of accelerators."""
    block_rounds: int
    """Rounds of a block."""
    group_starts: NDArray[np.intp]
    """The first round of every group that a transcript merges into one row."""

    @property
    def chunk_count(self) -> int:
        """The number of chunks."""
        return _ceil_divide(self.chains, self.chunk_chains)

    def chunks(self, first_chain: int = 0) -> Iterator[Chunk]:
        """Yield the chunks from the one that begins with `first_chain` on."""
        for first in range(first_chain, self.chains, self.chunk_chains):
            unlimited = np.arange(first, first + self.chunk_chains)
            members = np.minimum(unlimited, self.chains - 1)
            yield Chunk(slice(first, int(members[-1]) + 1), members)

    def blocks(self, first_round: int = 0) -> Iterator[slice]:
        """Yield the blocks from the one that begins with `first_round` on."""
        for first in range(first_round, self.rounds, self.block_rounds):
            yield slice(first, min(first + self.block_rounds, self.rounds))

    def padded_block(self, first_round: int) -> slice | NDArray[np.intp]:
        """Return the rounds of a block, always `block_rounds` of them.

        The last block is filled up with the last round, so that nothing is compiled
        anew; a compiled loop must not let these rounds change anything.
        """
        end = first_round + self.block_rounds
        if end <= self.rounds:
            return slice(first_round, end)
        return np.minimum(np.arange(first_round, end), self.rounds - 1)

    def groups(self, block: slice) -> Groups:
        """Return the groups of a transcript that a block consists of."""
        first, last = np.searchsorted(self.group_starts, (block.start, block.stop))
        offsets = self.group_starts[first:last] - block.start
        return Groups(slice(int(first), int(last)), offsets)


def partition(workload: Workload, limits: WorkLimits) -> Partition:
    """Cut a run into equal parts within limits.

    Args:
        workload: sizes of the run.
        limits: memory, operations, and accelerators that share every chunk.

    Returns:
        The chains of a chunk, the rounds of a block, and the groups of a transcript.

    Raises:
        InputError: if not even one chain fits into the memory.
    """
    chunk_chains = chains_per_chunk(workload, limits)
    block_rounds = rounds_per_block(workload, limits, chunk_chains)
    return Partition(
        chains=workload.chains,
        rounds=workload.rounds,
        chunk_chains=chunk_chains,
        block_rounds=block_rounds,
        group_starts=transcript_groups(workload, limits, block_rounds),
    )


def chains_per_chunk(workload: Workload, limits: WorkLimits) -> int:
    """Return the chains of a chunk; all chunks are equal, and as few as fit.

    Raises:
        InputError: if not even one chain fits into the memory.
    """
    needed = workload.chain_bytes
    if needed > limits.memory:
        allowed = f"at least {needed:.3g} bytes, which one chain takes"
        raise InputError("memory", f"{limits.memory:.3g} bytes", allowed)
    fitting = max(1, (CHAINS_MEMORY * limits.memory) // needed)
    chunk_count = _ceil_divide(workload.chains, int(min(workload.chains, fitting)))
    per_accelerator = _ceil_divide(workload.chains, chunk_count * limits.accelerators)
    return per_accelerator * limits.accelerators


def rounds_per_block(workload: Workload, limits: WorkLimits, chunk_chains: int) -> int:
    """Return the rounds of a block; all blocks but the last are equal.

    Only kept rounds take memory: burn-in may be cut as coarsely as its work allows.
    With a transcript every round does, three times: for its draw, its position and its
    reception.
    """
    draw_bytes = FLOAT32_BYTES * chunk_chains * workload.dim
    kept_draws = int(max(1, (BLOCK_MEMORY * limits.memory) // draw_bytes))
    operations = chunk_chains * workload.operations
    longest = int(max(1, limits.operations // operations))
    if workload.transcript:
        longest = min(longest, max(1, kept_draws // 3))
    elif workload.kept_rounds > kept_draws:
        longest = min(longest, kept_draws)
    block_count = _ceil_divide(workload.rounds, min(longest, workload.rounds))
    return _ceil_divide(workload.rounds, block_count)


def transcript_groups(
    workload: Workload,
    limits: WorkLimits,
    block_rounds: int,
) -> NDArray[np.intp]:
    """Return the first round of every group of rounds that a transcript merges.

    No group spans two blocks, and all groups together fit into their part of the
    memory, unless that would take groups longer than a block.
    """
    fitting = int(TRANSCRIPT_MEMORY * limits.memory / workload.transcript_bytes)
    group_rounds = min(block_rounds, _ceil_divide(workload.rounds, max(1, fitting)))
    starts = [
        np.arange(first, min(first + block_rounds, workload.rounds), group_rounds)
        for first in range(0, workload.rounds, block_rounds)
    ]
    return np.concatenate(starts)


def block_operations(backend: str) -> float:
    """Return the operations of a block on a backend of JAX's."""
    return BLOCK_WORK if backend == "cpu" else ACCELERATOR_SPEED * BLOCK_WORK


def _ceil_divide(numerator: int, denominator: int) -> int:
    """Return the quotient of whole numbers, rounded up."""
    return -(-numerator // denominator)
