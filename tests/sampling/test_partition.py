"""Chunks of chains, blocks of rounds and groups of a transcript, as arithmetic on sizes alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wflmc.sampling import chunks
from wflmc.sampling.chunks import WorkLimits, Workload, partition

from ..error_tools import raises_input_error

WORKLOADS = st.builds(
    lambda burn_in, **sizes: Workload(rounds=burn_in + sizes["kept_rounds"], **sizes),
    burn_in=st.integers(0, 60),
    chains=st.integers(1, 70),
    kept_rounds=st.integers(1, 60),
    dim=st.integers(1, 300),
    has_velocity=st.booleans(),
    gradient_bytes=st.floats(0, 1e5),
    operations=st.floats(1, 1e6),
    transcript=st.booleans(),
)
LIMITS = st.builds(
    WorkLimits,
    memory=st.floats(2e5, 1e8),
    operations=st.floats(1, 1e9),
    accelerators=st.integers(1, 4),
)


def small(**sizes) -> Workload:
    known = {
        "chains": 10,
        "rounds": 12,
        "kept_rounds": 7,
        "dim": 5,
        "has_velocity": False,
    }
    work = {"gradient_bytes": 100.0, "operations": 10.0, "transcript": False}
    return Workload(**{**known, **work, **sizes})


@given(WORKLOADS, LIMITS)
def test_every_chain_is_in_one_chunk_and_every_round_in_one_block(workload, limits):
    cut = partition(workload, limits)
    chains = [
        index
        for chunk in cut.chunks()
        for index in range(chunk.chains.start, chunk.chains.stop)
    ]
    assert chains == [*range(workload.chains)]
    assert len([*cut.chunks()]) == cut.chunk_count
    rounds = [
        index for block in cut.blocks() for index in range(block.start, block.stop)
    ]
    assert rounds == [*range(workload.rounds)]


@given(WORKLOADS, LIMITS)
def test_parts_are_equal_and_the_last_one_is_filled_up(workload, limits):
    cut = partition(workload, limits)
    assert cut.chunk_chains % limits.accelerators == 0
    for chunk in cut.chunks():
        assert chunk.members.size == cut.chunk_chains
        np.testing.assert_array_equal(
            chunk.members[: chunk.size],
            np.arange(chunk.chains.start, chunk.chains.stop),
        )
        assert np.all(chunk.members[chunk.size :] == workload.chains - 1)
    numbers = np.arange(workload.rounds)
    for block in cut.blocks():
        padded = numbers[cut.padded_block(block.start)]
        length = block.stop - block.start
        assert padded.size == cut.block_rounds
        np.testing.assert_array_equal(padded[:length], numbers[block])
        assert np.all(padded[length:] == workload.rounds - 1)


@given(WORKLOADS, LIMITS)
def test_parts_respect_the_limits(workload, limits):
    """Unless a part is one chain of every accelerator, or one round."""
    cut = partition(workload, limits)
    if cut.chunk_chains > limits.accelerators:
        # Chunks are rounded up to whole chains of every accelerator.
        fewer = cut.chunk_chains - limits.accelerators
        assert fewer * workload.chain_bytes <= limits.memory / 2
    if cut.block_rounds == 1:
        return
    assert (
        cut.block_rounds * cut.chunk_chains * workload.operations <= limits.operations
    )
    copies = 3 if workload.transcript else 1
    kept_rounds = workload.rounds if workload.transcript else workload.kept_rounds
    stored = copies * min(cut.block_rounds, kept_rounds)
    assert stored * 4 * cut.chunk_chains * workload.dim <= limits.memory / 4


@given(WORKLOADS, LIMITS)
def test_groups_of_a_transcript_stay_within_blocks_and_memory(workload, limits):
    cut = partition(workload, limits)
    groups = [cut.groups(block) for block in cut.blocks()]
    indices = [
        index
        for group in groups
        for index in range(group.indices.start, group.indices.stop)
    ]
    assert indices == [*range(cut.group_starts.size)]
    for block, group in zip(cut.blocks(), groups, strict=True):
        assert group.offsets[0] == 0  # no group reaches over from the block before
        np.testing.assert_array_equal(
            block.start + group.offsets, cut.group_starts[group.indices]
        )
    blocks = len(groups)
    # Otherwise groups are whole blocks and cannot be longer.
    if cut.group_starts.size > blocks:
        longest = np.diff(np.append(cut.group_starts, workload.rounds)).max()
        fitting = limits.memory / 4 / workload.transcript_bytes
        assert workload.rounds / longest <= max(1.0, fitting)


@given(WORKLOADS, LIMITS)
def test_a_run_that_goes_on_is_cut_where_it_was(workload, limits):
    cut = partition(workload, limits)
    blocks, parts = [*cut.blocks()], [*cut.chunks()]
    middle = len(blocks) // 2
    assert [*cut.blocks(blocks[middle].start)] == blocks[middle:]
    last = [*cut.chunks(parts[-1].chains.start)]
    assert [chunk.chains for chunk in last] == [parts[-1].chains]


def test_cuts_that_are_known():
    """Pinned: another cut rounds differently, so that a stopped run would not go on from its checkpoint."""
    limits = WorkLimits(memory=2000.0, operations=1e9, accelerators=1)
    # A chain takes 180 bytes, and five fit into half of the memory.
    cut = partition(small(), limits)
    assert (cut.chunk_chains, cut.block_rounds, cut.chunk_count) == (5, 4, 2)
    cut = partition(small(), limits._replace(accelerators=2))
    assert (cut.chunk_chains, cut.chunk_count) == (6, 2)
    assert partition(small(has_velocity=True), limits).chunk_chains == 3
    cut = partition(small(), limits._replace(memory=1e9, operations=300.0))
    assert (cut.chunk_chains, cut.block_rounds) == (10, 3)
    four_rows = WorkLimits(memory=4 * 4 * 12.0, operations=1e9, accelerators=1)
    groups = chunks.transcript_groups(
        small(chains=1, rounds=10, dim=1), four_rows, block_rounds=5
    )
    # Groups of three, none across a block.
    np.testing.assert_array_equal(groups, [0, 3, 5, 8])


def test_only_kept_rounds_take_memory():
    limits = WorkLimits(memory=1e4, operations=1e9, accelerators=1)
    assert partition(small(rounds=1000, kept_rounds=10), limits).block_rounds == 1000
    assert partition(small(rounds=1000, kept_rounds=1000), limits).block_rounds < 20


def test_too_little_memory_is_refused():
    with raises_input_error("memory", "one chain"):
        partition(small(), WorkLimits(memory=100.0, operations=1e9, accelerators=1))


def test_accelerators_get_longer_blocks():
    assert chunks.block_operations("gpu") == 128 * chunks.block_operations("cpu")
