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
"""How many times more operations a block has on an accelerator than on a CPU."""
FLOAT32_BYTES = 4.0
"""Bytes of a number in states, draws and transcripts."""
STATE_COPIES = 4
"""Copies of a chain's state that a compiled loop holds: before and after a round, the
gradient and the noise."""
CHAINS_MEMORY = 1 / 2
"""Fraction of the memory that states and gradients of a chunk may take."""
BLOCK_MEMORY = 1 / 4
"""Fraction of the memory that the results of a block may take on the accelerator."""
ARRAYS_PER_TRANSCRIPT_ROUND = 3
"""Arrays [chain, m] that a round with a transcript leaves on the accelerator: its draw,
the position of its gradient, and what was received."""
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
        """Return the memory that one chain takes while it runs, in bytes.

        These are its gradients, as the model counts them, and `STATE_COPIES` copies of
        its state in float32: θ, and with kinetic dynamics v. Draws that are kept are
        not included.
        """
        vectors = 2 if self.has_velocity else 1
        state_bytes = FLOAT32_BYTES * self.dim * vectors
        return self.gradient_bytes + STATE_COPIES * state_bytes

    @property
    def transcript_bytes(self) -> float:
        """Return the memory that a round of all chains takes in a transcript, in bytes.

        For every chain these are a position [m], a gradient [m] and the variance of
        its noise, in float32. A group of merged rounds takes as much as a single round.
        """
        numbers_per_chain = 2 * self.dim + 1
        return FLOAT32_BYTES * self.chains * numbers_per_chain


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

    chains: slice
    """The chains whose results count."""
    members: NDArray[np.intp]
    """The chains that are run, of which the first are `chains`. A chunk that is not
    full is filled up with the last chain, so that nothing is compiled anew."""

    @property
    def size(self) -> int:
        """Return how many chains count, the length of `chains`.

        It is at most the number of `members`: results of a chunk are cut to it along
        the axis of the chains, which drops the copies that fill up the last chunk.
        """
        return int(self.chains.stop - self.chains.start)


class Groups(NamedTuple):
    """The groups of rounds of a transcript that belong to a block."""

    indices: slice
    """Which groups of the transcript these are."""
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
        """Return the number of chunks, ⌈chains / chunk_chains⌉.

        Every chunk runs all rounds of the plan, so that a run consists of this many
        times `rounds` rounds, which progress is reported of. The last chunk may be
        filled up with copies of the last chain.
        """
        return _ceil_divide(self.chains, self.chunk_chains)

    def chunks(self, first_chain: int = 0) -> Iterator[Chunk]:
        """Yield the chunks of chains in order.

        All have equally many members, so that one compiled program serves them all; the
        last one repeats its last chain where the chains do not fill it.

        Args:
            first_chain: the first chain of the first chunk that is wanted, a multiple
                of `chunk_chains`; above 0 where a run continues.
        """
        last_chain = self.chains - 1
        for first in range(first_chain, self.chains, self.chunk_chains):
            unlimited = np.arange(first, first + self.chunk_chains)
            members = np.minimum(unlimited, last_chain)
            end = int(members[-1]) + 1
            yield Chunk(slice(first, end), members)

    def blocks(self, first_round: int = 0) -> Iterator[slice]:
        """Yield the blocks of rounds in order.

        The last one is shorter where the rounds do not fill it. No block is empty, and
        none is yielded where all rounds are done.

        Args:
            first_round: index of the first round of the first block that is wanted;
                above 0 where a chunk continues.
        """
        for first in range(first_round, self.rounds, self.block_rounds):
            end = min(first + self.block_rounds, self.rounds)
            yield slice(first, end)

    def padded_block(self, first_round: int) -> slice | NDArray[np.intp]:
        """Return the rounds of a block, always `block_rounds` of them.

        The last block is filled up with the last round, so that nothing is compiled
        anew; a compiled loop must not let these rounds change anything.

        Args:
            first_round: index of the first round of the block.

        Returns:
            An index of NumPy's: a slice, or the numbers of the rounds where the last
            one is repeated.
        """
        end = first_round + self.block_rounds
        if end <= self.rounds:
            return slice(first_round, end)
        unlimited = np.arange(first_round, end)
        return np.minimum(unlimited, self.rounds - 1)

    def groups(self, block: slice) -> Groups:
        """Return the groups of a transcript that a block consists of.

        No group spans two blocks, so that a block can be merged into rows of the
        transcript without its neighbours.

        Args:
            block: rounds as `blocks` yields them.

        Returns:
            The indices of the groups, and where each begins within the block.
        """
        edges = (block.start, block.stop)
        first, end = np.searchsorted(self.group_starts, edges)
        offsets = self.group_starts[first:end] - block.start
        indices = slice(int(first), int(end))
        return Groups(indices, offsets)


def partition(workload: Workload, limits: WorkLimits) -> Partition:
    """Cut a run into equal parts within limits.

    Chunks are cut first, by memory; then blocks, by the work and results of a chunk;
    then the groups of a transcript, which lie within blocks.

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

    States and gradients of a chunk take at most `CHAINS_MEMORY` of the memory, unless a
    single chain takes more: then a chunk is one chain. The chains are then spread
    evenly over as many chunks as that makes, and over the accelerators, which may round
    the chains of a chunk up.

    Args:
        workload: sizes of the run.
        limits: memory, and accelerators that share every chunk.

    Returns:
        A multiple of the number of accelerators.

    Raises:
        InputError: if not even one chain fits into the memory.
    """
    chain_bytes = workload.chain_bytes
    if chain_bytes > limits.memory:
        requirement = f"at least {chain_bytes:.3g} bytes, which one chain takes"
        raise InputError("memory", f"{limits.memory:.3g} bytes", requirement)
    chains = workload.chains
    fitting = max(1, (CHAINS_MEMORY * limits.memory) // chain_bytes)
    largest_chunk = int(min(chains, fitting))
    chunk_count = _ceil_divide(chains, largest_chunk)
    per_accelerator = _ceil_divide(chains, chunk_count * limits.accelerators)
    return per_accelerator * limits.accelerators


def rounds_per_block(workload: Workload, limits: WorkLimits, chunk_chains: int) -> int:
    """Return the rounds of a block; all blocks but the last are equal.

    Only kept rounds take memory: where all of them fit at once, the work alone decides.
    With a transcript every round does, three times: for its draw, its position and what
    was received.

    Args:
        workload: sizes of the run.
        limits: memory, and operations of a block.
        chunk_chains: how many chains run together.

    Returns:
        At least 1, however much a single round exceeds the limits.
    """
    draw_bytes = FLOAT32_BYTES * chunk_chains * workload.dim
    block_memory = BLOCK_MEMORY * limits.memory
    fitting_draws = int(max(1, block_memory // draw_bytes))
    operations = chunk_chains * workload.operations
    longest = int(max(1, limits.operations // operations))
    if workload.transcript:
        fitting_rounds = max(1, fitting_draws // ARRAYS_PER_TRANSCRIPT_ROUND)
        longest = min(longest, fitting_rounds)
    elif workload.kept_rounds > fitting_draws:
        longest = min(longest, fitting_draws)
    block_count = _ceil_divide(workload.rounds, min(longest, workload.rounds))
    return _ceil_divide(workload.rounds, block_count)


def transcript_groups(
    workload: Workload,
    limits: WorkLimits,
    block_rounds: int,
) -> NDArray[np.intp]:
    """Return the first round of every group of rounds that a transcript merges.

    No group spans two blocks, and all groups together fit into their part of the
    memory, unless that would take groups longer than a block. Where memory suffices,
    every round is a group.

    Args:
        workload: sizes of the run.
        limits: the memory.
        block_rounds: how many rounds a block has.

    Returns:
        Indices of rounds, increasing from 0, [group].
    """
    rounds = workload.rounds
    transcript_memory = TRANSCRIPT_MEMORY * limits.memory
    fitting = int(transcript_memory / workload.transcript_bytes)
    merged_rounds = _ceil_divide(rounds, max(1, fitting))
    group_rounds = min(block_rounds, merged_rounds)
    starts = []
    for first in range(0, rounds, block_rounds):
        end = min(first + block_rounds, rounds)
        block_starts = np.arange(first, end, group_rounds)
        starts.append(block_starts)
    return np.concatenate(starts)


def block_operations(backend: str) -> float:
    """Return how many operations a block may have on a backend of JAX's.

    Operations are counted as models do, in `Posterior.work`. The limit lets the host
    report progress and notice Ctrl-C about once a second.

    Args:
        backend: `jax.default_backend()`; everything but "cpu" counts as an accelerator.
    """
    return BLOCK_WORK if backend == "cpu" else ACCELERATOR_SPEED * BLOCK_WORK


def _ceil_divide(numerator: int, denominator: int) -> int:
    """Return the quotient of whole numbers, rounded up."""
    return -(-numerator // denominator)
