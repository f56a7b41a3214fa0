"""Compiled blocks of rounds for many chains: rounds are scanned, chains are mapped.

Gradients are added up where the chains are, and noise is float32 from keys: a
simulation, on one accelerator or on several that share the chains.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from wflmc.planning.plan import Plan, Rounds
from wflmc.sampling.chunks import Partition
from wflmc.sampling.kernel import (
    CHAIN_AXES,
    Info,
    KernelRounds,
    State,
    host_rounds,
    shared_rounds,
    stacked_rounds,
)
from wflmc.sampling.starts import round_keys

ChainKernel = Callable[[jax.Array, Any, State, KernelRounds], tuple[State, Info]]
"""One round of one chain: from its key, its model, its state and the round to the next
state and the information of the round, as `wflmc.sampling.step`."""


ArrayOrNone = TypeVar("ArrayOrNone", jax.Array, jax.Array | None)
"""An array, or one that may be missing, such as a velocity."""


class Carry(NamedTuple):
    """What a compiled block carries from round to round."""

    state: State
    """Of all chains."""
    draws: jax.Array
    """Kept draws of this block, [draw, chain, m]; entries after these are undefined."""


class RoundBounds(NamedTuple):
    """Numbers of rounds that a compiled block needs."""

    first_kept: int
    """Index of the first round whose draws are kept."""
    start: int
    """Number of the plan's first round, which keys are folded by."""
    rounds: int
    """S; rounds from there on fill up the last block and do nothing."""


class BlockInfo(NamedTuple):
    """What is reported of a block; a block that is not full has more rounds here."""

    finite: jax.Array
    """Whether all chains were finite, [round, accelerator]."""
    clip_rate: jax.Array
    """[round, chain]."""
    gradient_position: jax.Array | None = None
    """Where gradients were taken, [round, chain, m], for a transcript."""
    received: jax.Array | None = None
    """y[round, chain, m], for a transcript."""


class BlockDraws(NamedTuple):
    """What a simulation reports of a block."""

    info: BlockInfo
    draws: jax.Array
    """Positions after the kept rounds, [draw, chain, m]."""
    first_draw: int
    """How many draws were kept before this block."""

    @property
    def finite(self) -> jax.Array:
        """Return whether all chains were finite, [round, accelerator].

        `run_rounds` reads it before anything of the block is kept. The last block has
        further rounds here, which only fill it up.
        """
        return self.info.finite


class BlockProgram(NamedTuple):
    """What a block is compiled for."""

    kernel: ChainKernel
    model_axes: Hashable = None
    """The axes of the model that chains differ in, as `jax.vmap` takes them; None where
    all chains have the same model."""
    zipped: bool = False
    """Whether every chain has a plan of its own."""
    transcript: bool = False
    """Whether positions and receptions are reported."""


def scan_rounds(
    model: Any,
    rounds: KernelRounds,
    carry: Carry,
    keys: jax.Array,
    bounds: RoundBounds,
    program: BlockProgram,
) -> tuple[Carry, BlockInfo]:
    """Run a block of rounds for all chains.

    Every round writes its draws at its index among the kept ones of the block. Rounds
    of burn-in all write to index 0, where the first kept round overwrites them: burn-in
    takes no memory and no second compilation.

    Args:
        model: what the kernel takes gradients of.
        rounds: of this block, [round, ...] or [round, chain, ...].
        carry: before the block.
        keys: of the chains, [chain].
        bounds: which rounds are kept, how rounds are numbered, how many there are.
        program: what the block is compiled for.

    Returns:
        The state and draws after the block, and what is reported of its rounds.
    """
    rounds_axis = 0 if program.zipped else None
    in_axes = (0, program.model_axes, CHAIN_AXES, rounds_axis)
    kernel = jax.vmap(program.kernel, in_axes, (CHAIN_AXES, 0))
    first = carry.state.round

    def body(carry: Carry, round_values: Rounds) -> tuple[Carry, BlockInfo]:
        current_round = KernelRounds(round_values, rounds.constants)
        before = carry.state
        index = before.round
        round_key = round_keys(keys, bounds.start + index)
        state, info = kernel(round_key, model, before, current_round)

        def unless_filled_up(updated: jax.Array, unchanged: jax.Array) -> jax.Array:
            # The last block is filled up with rounds that do nothing.
            return jnp.where(index < bounds.rounds, updated, unchanged)

        held = jax.tree.map(unless_filled_up, state, before)
        draw_index = jnp.maximum(index - jnp.maximum(bounds.first_kept, first), 0)
        after = Carry(
            state=held._replace(round=state.round),
            draws=carry.draws.at[draw_index].set(held.position),
        )
        block_info = BlockInfo(info.finite.all(keepdims=True), info.clip_rate)
        if program.transcript:
            block_info = block_info._replace(
                gradient_position=info.gradient_position,
                received=info.received,
            )
        return after, block_info

    return jax.lax.scan(body, carry, rounds.rounds)


@partial(jax.jit, static_argnames=("program", "mesh"), donate_argnames=("carry",))
def advance_block(
    model: Any,
    rounds: KernelRounds,
    carry: Carry,
    keys: jax.Array,
    bounds: RoundBounds,
    *,
    program: BlockProgram,
    mesh: Mesh | None,
) -> tuple[Carry, BlockInfo]:
    """Run a block as `scan_rounds` does, compiled, with the chains spread over a mesh.

    Each accelerator works on its own chains; nothing is exchanged. The memory of the
    carry is donated: the caller must not use it afterwards.

    Args:
        model: what the kernel takes gradients of; a copy lies on every accelerator.
        rounds: of this block, [round, ...] or [round, chain, ...].
        carry: before the block.
        keys: of the chains, [chain].
        bounds: which rounds are kept, how rounds are numbered, how many there are.
        program: what the block is compiled for; a new value compiles anew.
        mesh: of the accelerators; None to run where the arrays are.

    Returns:
        The state and draws after the block, and what is reported of its rounds.
    """
    bounds = jax.tree.map(jnp.asarray, bounds)
    scan = partial(scan_rounds, program=program)
    if mesh is None:
        return scan(model, rounds, carry, keys, bounds)
    spec: Any = PartitionSpec  # untyped in JAX
    by_chain = spec("chain")
    by_round_and_chain = spec(None, "chain")
    everywhere = spec()
    of_rounds = by_round_and_chain if program.zipped else everywhere
    of_constants = by_chain if program.zipped else everywhere
    rounds_specs = KernelRounds(
        jax.tree.map(lambda _: of_rounds, rounds.rounds),
        jax.tree.map(lambda _: of_constants, rounds.constants),
    )
    state_specs = State(by_chain, everywhere, by_chain)
    if carry.state.velocity is None:
        state_specs = state_specs._replace(velocity=None)
    carry_specs = Carry(state_specs, by_round_and_chain)
    sharded = jax.shard_map(
        scan,
        mesh=mesh,
        in_specs=(everywhere, rounds_specs, carry_specs, by_chain, everywhere),
        out_specs=(carry_specs, by_round_and_chain),
        check_vma=False,
    )
    return sharded(model, rounds, carry, keys, bounds)


class Simulation:
    """The advance of a chunk of chains by compiled blocks of rounds.

    It holds what stays on the accelerator between two blocks: the array of kept draws,
    and the rounds of the next block, which are brought there while it works.

    Args:
        model: what the kernel takes gradients of, on the accelerators.
        plans: one that all chains share, or one for each chain (`program.zipped`).
        keys: of the chains, [chain].
        partition: how rounds are cut into blocks.
        first_kept: index of the first round whose draws are kept.
        program: what blocks are compiled for.
        mesh: of the accelerators that share the chains.
    """

    def __init__(
        self,
        model: Any,
        plans: Sequence[Plan],
        keys: jax.Array,
        *,
        partition: Partition,
        first_kept: int,
        program: BlockProgram,
        mesh: Mesh | None = None,
    ) -> None:
        self.model = model
        self.partition = partition
        self.program = program
        self.mesh = mesh
        self.bounds = RoundBounds(
            first_kept=first_kept,
            start=plans[0].start,
            rounds=partition.rounds,
        )
        self.keys = _shard(keys, mesh, axis=0)
        self._hosts: list[KernelRounds] = host_rounds(plans)
        self._draws: jax.Array | None = None
        self._fetched: KernelRounds | None = None
        self._fetched_start = -1

    def place(self, state: State) -> State:
        """Return a state where blocks leave it, spread over the accelerators.

        Without this the second block would be compiled again, as its state would lie
        elsewhere than that of the first. On a single default accelerator the state is
        returned as it is.

        Args:
            state: of all chains before the first block.
        """
        return state._replace(
            position=_shard(state.position, self.mesh, axis=0),
            velocity=_shard(state.velocity, self.mesh, axis=0),
        )

    def __call__(
        self,
        block: slice,
        state: State,
        signal: None,
    ) -> tuple[State, BlockDraws]:
        """Run a block.

        The accelerator may still be working when this returns; reading the values waits
        for it.

        Args:
            block: successive rounds, as the partition cuts them.
            state: of all chains before the block.
            signal: nothing, as gradients are added up within the compiled rounds.

        Returns:
            The state after the block, its kept draws and what is reported of it.
        """
        state = state._replace(round=jax.device_put(np.int32(block.start)))
        if self._draws is None:
            self._draws = self._empty_draws(state)
        if self._fetched is None or self._fetched_start != block.start:
            self._fetch(block.start)
        carry, info = advance_block(
            self.model,
            self._fetched,
            Carry(state, self._draws),
            self.keys,
            self.bounds,
            program=self.program,
            mesh=self.mesh,
        )
        self._draws = carry.draws
        if block.stop < self.partition.rounds:  # while the accelerator works
            self._fetch(block.stop)
        first_kept = max(block.start, min(self.bounds.first_kept, block.stop))
        draw_count = block.stop - first_kept
        draws_so_far = block.stop - self.bounds.first_kept
        simulated = BlockDraws(
            info=info,
            draws=carry.draws[:draw_count],
            first_draw=draws_so_far - draw_count,
        )
        return carry.state, simulated

    def _fetch(self, first_round: int) -> None:
        """Bring the rounds of a block to the accelerator."""
        index = self.partition.padded_block(first_round)
        if self.program.zipped:
            self._fetched = stacked_rounds(self._hosts, index)
        else:
            self._fetched = shared_rounds(self._hosts[0], index)
        self._fetched_start = first_round

    def _empty_draws(self, state: State) -> jax.Array:
        """Return the array that kept draws are written to."""
        kept_rounds = self.partition.rounds - self.bounds.first_kept
        length = min(self.partition.block_rounds, kept_rounds)
        draws = jnp.zeros((length, *state.position.shape), state.position.dtype)
        return _shard(draws, self.mesh, axis=1)


def _shard(values: ArrayOrNone, mesh: Mesh | None, axis: int) -> ArrayOrNone:
    """Spread an array over the accelerators of a mesh along the axis of its chains."""
    if mesh is None or values is None:
        return values
    spec: Any = PartitionSpec  # untyped in JAX
    return jax.device_put(values, NamedSharding(mesh, spec(*[None] * axis, "chain")))
