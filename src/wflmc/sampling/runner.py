"""Many chains at once: rounds are scanned, chains are mapped, burn-in leaves no draws in memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import ArrayLike, NDArray

from wflmc.dynamics import Dynamics
from wflmc.planning.plan import Plan, Rounds, distinct
from wflmc.posterior.base import Posterior, check_posterior
from wflmc.privacy import Ledger
from wflmc.sampling.averages import Averages, Draws, averages
from wflmc.sampling.checkpoint import Checkpoint, Progress, room
from wflmc.sampling.kernel import State, check_belongs, host_rounds, stacked, step
from wflmc.sampling.payment import name_run, open_account, refuse_plans
from wflmc.sampling.trace import Trace
from wflmc.sampling.transcript import Transcript, group_starts, merged, reception_noise
from wflmc.support.errors import InputError, SamplingError
from wflmc.support.keys import check_key, digest, named

BLOCK_WORK = 2**33
"""Operations, as models count them, after which a compiled loop returns to the host, for progress and Ctrl-C: about a
second of two cores' work. An accelerator does 128 times as much."""
MEMORY = 2 * 2**30
"""Bytes for chains and gradients unless the caller sets a limit; on an accelerator eight times as much. Chunks depend
on this and on the problem alone."""

Advance = Callable[[int, int], None]
Charge = Callable[[slice], None]
CHAINS = State(0, None, 0)  # type: ignore[arg-type]
"""The axes of many chains' states."""


class Execution(NamedTuple):
    """How `sample` runs its chains."""

    memory: float | None = None
    store: str | Path | None = None
    checkpoint: str | Path | None = None
    accelerators: Sequence[jax.Device] | None = None
    progress: Advance | None = None
    predictions: ArrayLike | None = None
    transcript: bool = False

    @property
    def kept(self) -> str:
        """A name for what is kept, for checkpoints."""
        return "draws" if self.predictions is None else digest(np.asarray(self.predictions))


Carry = tuple[State, jax.Array]
"""What the scan carries: the chains' states, and their kept draws of this block of rounds, [draw, chain, m]."""


class _Job(NamedTuple):
    """The chains that `sample` is asked for, checked."""

    key: jax.Array
    posterior: Posterior
    plans: list[Plan]
    zipped: bool
    """Whether every chain has a plan of its own."""
    number: NDArray[Any]
    """Which chains these are, [chain]."""
    initial: NDArray[np.float32] | None
    """Where chains begin in their coordinates, with kinetic dynamics and their velocities, [chain, m or 2m]."""
    keep_burn_in: bool
    transcript: bool = False

    @property
    def skip(self) -> int:
        """Rounds of which no draws are kept."""
        return 0 if self.keep_burn_in else int(self.plan.burn_in)

    @property
    def plan(self) -> Plan:
        """The plan, or the first of them."""
        return self.plans[0]


class _Machine(NamedTuple):
    """What chains are run on, and how the work is cut: chains at a time, and rounds between two looks of the host."""

    posterior: Posterior
    """On its accelerators."""
    mesh: Mesh | None
    chains: int
    rounds: int
    groups: NDArray[np.intp]
    """The first round of every group of rounds whose reception is merged in the transcript."""

    def name(self, skip: int, transcript: bool) -> str:
        """How sums are cut: a round that is repeated must repeat the same sum, or their difference has no noise."""
        told = f"-transcript-{self.groups.size}" if transcript else ""
        blocks = f"{self.posterior.block}-{self.posterior.example_block}"
        return f"{self.chains}-{self.rounds}-{skip}-{blocks}-{jax.default_backend()}{told}"

    def groups_of(self, block: slice) -> tuple[slice, NDArray[np.intp]]:
        """Return which groups of rounds a block consists of, and where they begin in it."""
        first, last = np.searchsorted(self.groups, (block.start, block.stop))
        return slice(first, last), self.groups[first:last] - block.start


def packed(state: State) -> NDArray[Any]:
    """Return the states of chains as one array for a file, [chain, m]; with kinetic dynamics [chain, 2m]."""
    parts = [values for values in (state.theta, state.velocity) if values is not None]
    return np.concatenate([np.asarray(values) for values in parts], axis=-1)


def unpacked(values: ArrayLike, plan: Plan, done: int = 0) -> State:
    """Return the states of chains from [chain, m or 2m], with `done` rounds of the plan behind them."""
    both = np.asarray(values, np.float32)
    velocity = jnp.array(both[:, plan.dim :]) if both.shape[-1] > plan.dim else None
    return State(jnp.array(both[:, : plan.dim]), jnp.asarray(done, jnp.int32), velocity)


def chain_keys(key: jax.Array, chain: jax.Array, name: str = "noise") -> jax.Array:
    """Return the keys of chains of these numbers, [chain]; a round folds its own number in."""
    return _fold_in(named(key, name), chain)


_fold_in = jax.jit(jax.vmap(jax.random.fold_in, (None, 0)))


@partial(jax.jit, static_argnames=("init",))
def _start(keys: jax.Array, posterior: Posterior, init: str) -> jax.Array:
    """θ[0] of every chain, [chain, m]."""
    return jax.vmap(lambda key: posterior.draw_initial(key, init))(keys)


@jax.jit
def _velocities(keys: jax.Array, theta: jax.Array, dynamics: Dynamics) -> jax.Array | None:
    """v[0] of every chain, [chain, m]; None for dynamics without one."""
    return jax.vmap(dynamics.draw_velocity)(keys, theta)


def starts(key: jax.Array, posterior: Posterior, plan: Plan, chain: jax.Array, begin: State | None = None) -> State:
    """Return the states that chains of these numbers start from: what is not given of them is drawn."""
    if begin is None:
        begin = State(_start(chain_keys(key, chain, "init"), posterior, plan.init), jax.device_put(np.int32(0)))
    if begin.velocity is not None or not plan.dynamics.has_velocity:
        return begin
    return begin._replace(velocity=_velocities(chain_keys(key, chain, "velocity"), begin.theta, plan.dynamics))


def _scan(
    posterior: Posterior, rounds: Rounds, carry: Carry, keys: jax.Array, bounds: Any, zipped: bool, transcript: bool
) -> tuple[Carry, tuple[jax.Array, ...]]:
    """Run a block of rounds for all chains: the carry, whether all were finite [S, 1], and clip rates [S, chain].

    With `transcript` also where gradients were taken and what was received, each [S, chain, m].

    Every round writes its draws at its place among the kept ones of the block. Rounds of burn-in all write to the
    first place, where the first kept round overwrites them: burn-in takes no memory and no second compilation.
    """
    axis, first, (skip, start, stop) = 0 if zipped else None, carry[0].round, bounds

    def body(carry: Carry, changing: Rounds) -> tuple[Carry, tuple[jax.Array, ...]]:
        (before, kept), now = carry, replace(changing, constants=rounds.constants)
        index = before.round
        round_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, start + index)
        state, info = jax.vmap(step, (0, None, CHAINS, axis), (CHAINS, 0))(round_keys, posterior, before, now)
        # The last block is filled up with rounds that do nothing.
        held = jax.tree.map(lambda new, old: jnp.where(index < stop, new, old), state, before)
        place = jnp.maximum(index - jnp.maximum(skip, first), 0)
        done = held._replace(round=state.round), kept.at[place].set(held.theta)
        told = info.finite.all(keepdims=True), info.clip_rate
        return done, (*told, info.position, info.received) if transcript else told

    return jax.lax.scan(body, carry, replace(rounds, constants=None))


@partial(jax.jit, static_argnames=("flags", "mesh"), donate_argnames=("carry",))
def _advance(
    posterior: Posterior, rounds: Rounds, carry: Carry, keys: jax.Array, bounds: Any, *, flags: Any, mesh: Mesh | None
) -> tuple[Carry, tuple[jax.Array, ...]]:
    """`_scan`, with the chains spread over the accelerators of a mesh: each works on its own, nothing is exchanged.

    Args:
        bounds: rounds without kept draws, the number of the plan's first round, and the number of its rounds.
        flags: whether every chain has a plan of its own, and whether there is to be a transcript.
    """
    zipped, transcript = flags
    bounds = jax.tree.map(jnp.asarray, bounds)
    if mesh is None:
        return _scan(posterior, rounds, carry, keys, bounds, zipped, transcript)
    spec: Any = PartitionSpec
    chain, of_round, everywhere = spec("chain"), spec(None, "chain"), spec()
    per_round, constant = (of_round, chain) if zipped else (everywhere, everywhere)
    specs = jax.tree.map(lambda _: per_round, replace(rounds, constants=None))
    specs = replace(specs, constants=jax.tree.map(lambda _: constant, rounds.constants))
    carried = jax.tree.map(lambda values: chain if values.ndim else everywhere, carry[0]), of_round
    split = jax.shard_map(
        partial(_scan, zipped=zipped, transcript=transcript),
        mesh=mesh,
        in_specs=(everywhere, specs, carried, chain, everywhere),
        out_specs=(carried, of_round),
        check_vma=False,
    )
    return split(posterior, rounds, carry, keys, bounds)


def sample(
    key: jax.Array,
    posterior: Posterior,
    plan: Plan | Sequence[Plan],
    chains: int | None = None,
    *,
    keep_burn_in: bool = False,
    numbers: Sequence[int] | None = None,
    initial: ArrayLike | None = None,
    ledger: Ledger | None = None,
    **execution: Any,
) -> Trace:
    """Run chains of a plan, or one chain for each of several plans of one shape.

    Chains are replicas of the whole experiment: each one alone has the plan's privacy, and publishing
    several of them from the same real devices would add their losses up.

    Args:
        key: seeds starts and noise; the same key gives the same noise to every plan.
        chains: number of chains (100 for a single plan); for several plans it is their number.
        keep_burn_in: keep the draws of burn-in as well.
        numbers: which chains these are, 0, 1, … by default; equal numbers share start and noise.
        initial: the parameters that chains are at, [chain, m], for a plan that continues others; drawn by default.
            With kinetic dynamics it may have their velocities (`Trace.velocity`) behind that, [chain, 2m], else these
            are drawn.
        ledger: charged for every round before it is transmitted. A round that would take a device beyond its budget is
            refused with OverspendError before anything is transmitted, with or without a ledger.
        memory: bytes for chains and gradients at a time (2 GiB); less means smaller chunks, and changes results by
            float rounding alone. The draws themselves come on top, unless they are stored.
        store: a file that the draws go to round by round, for traces larger than memory; the trace reads from it.
        checkpoint: a folder that progress and draws are kept in; a call with the same arguments continues from there,
            and ends with the same draws as one that was never stopped.
        accelerators: where chains are spread; by default over all that JAX sees.
        progress: called with (rounds done, rounds in all).
        predictions: features u[n, d]: of every chain only the mean prediction at these is kept, with mean and variance
            of the parameters (`Trace.predictions`), and `Trace.theta` is that mean. For softmax regressions with too
            many parameters to keep every draw.
        transcript: keep what the server has received in every round and where, as `Trace.transcript`.
    """
    how = Execution(**execution)
    if how.predictions is not None and (keep_burn_in or how.store is not None):
        raise InputError("predictions", "features", "given without keep_burn_in and store, which are for draws")
    job = _check(key, posterior, plan, chains, numbers, initial, keep_burn_in)._replace(transcript=how.transcript)
    refuse_plans(job.plans)
    machine = _machine(job, how)
    run = ""
    if ledger is not None or how.checkpoint is not None:
        run = name_run(key, posterior, job.plans, job.number, job.initial)
    checkpoint, charge, saved = None, None, Progress()
    if how.checkpoint is not None:
        name = f"{run}-{machine.name(job.skip, job.transcript)}-{how.kept}"
        checkpoint = Checkpoint(Path(how.checkpoint), name)
        saved = checkpoint.load()
    count, rounds = job.number.size, len(job.plan.rounds)
    if ledger is not None:
        charge = open_account(ledger, run, key, posterior, job.plans, rounds if saved.at else saved.rounds)
    kept: Draws | Averages
    store = how.store if checkpoint is None else checkpoint.samples
    if how.predictions is None:
        kept = Draws(room((rounds - job.skip, count, job.plan.dim), store, saved.theta is not None))
    else:
        kept = averages(posterior, how.predictions, count, rounds - job.skip, saved.averages)
    if saved.theta is None:
        states = np.zeros((count, _width(job.plan)), np.float32)
        saved = Progress(0, 0, states, np.zeros((rounds, count), np.float32))
    told = None
    if job.transcript:
        shape = (machine.groups.size, count, 2 * job.plan.dim + 1)
        told = room(shape, None if store is None else Path(store).with_name("transcript.npy"), saved.rounds > 0)
    for done in _run(job, machine, charge, (kept, told), saved):
        saved = done
        if checkpoint is not None:
            kept.flush()
            if told is not None:
                told.flush()
            checkpoint.save(done)
        if how.progress is not None:
            how.progress(rounds * (done.at // machine.chains) + done.rounds, rounds * -(-count // machine.chains))
    heard = None if told is None else Transcript.of(told, machine.groups, rounds)
    return replace(_trace(job, kept, saved), transcript=heard)


def _check(
    key: jax.Array, posterior: Posterior, plan: Any, chains: int | None, numbers: Any, initial: Any, keep_burn_in: bool
) -> _Job:
    """Refuse what cannot be run together."""
    check_key(key)
    check_posterior(posterior)
    zipped = isinstance(plan, list | tuple)
    plans = list(plan) if zipped else [plan]
    for each in (different := distinct(plans)):
        check_belongs(each, posterior)
    if len({_shape(each) for each in different}) != 1:
        allowed = "one plan, or several of equal rounds, devices, start and dynamics"
        raise InputError("plan", f"{len(plans)} plans", allowed)
    if zipped and chains not in (None, len(plans)):
        raise InputError("chains", chains, f"the number of plans ({len(plans)})")
    count = len(plans) if zipped else 100 if chains is None else chains
    if not isinstance(count, int | np.integer) or count < 1:
        raise InputError("chains", count, "a whole number of at least 1")
    number = np.arange(count) if numbers is None else np.asarray(numbers)
    if number.shape != (count,):
        raise InputError("numbers", f"{number.size} numbers", f"one for each of {count} chains")
    begin = None if initial is None else _positions(initial, count, plans[0], posterior)
    return _Job(key, posterior, plans, zipped, number, begin, keep_burn_in)


def _machine(job: _Job, how: Execution) -> _Machine:
    """Cut the work into equal parts within the memory limit, and bring the posterior to the accelerators."""
    if how.memory is not None and not (isinstance(how.memory, int | float) and how.memory > 0):
        raise InputError("memory", how.memory, "a number of bytes above 0")
    places = list(jax.devices() if how.accelerators is None else how.accelerators)
    if not places:
        raise InputError("accelerators", "none", "at least one of jax.devices()")
    mesh = Mesh(np.array(places), ("chain",)) if len(places) > 1 or how.accelerators is not None else None
    limit = how.memory or default_memory()
    by_example = any(np.isfinite(plan.example_clip).any() for plan in distinct(job.plans))
    posterior, count, rounds = job.posterior, job.number.size, len(job.plan.rounds)
    one = posterior.working_bytes(1, by_example) + 16.0 * _width(job.plan)
    if one > limit:
        raise InputError("memory", f"{limit:.3g} bytes", f"at least {one:.3g} bytes, which one chain takes")
    groups = -(-count // int(min(count, max(1, (limit / 2) // one))))
    per_place = -(-count // (groups * len(places)))
    chains = per_place * len(places)
    kept = int(max(1, (limit / 4) // (4.0 * chains * job.plan.dim)))
    work = BLOCK_WORK if jax.default_backend() == "cpu" else 128 * BLOCK_WORK
    most = int(max(1, work // (chains * posterior.work(by_example))))
    if job.transcript:
        most = min(most, max(1, kept // 3))
    elif rounds - job.skip > kept:  # only kept rounds take memory; burn-in may be cut as coarsely as the work allows
        most = min(most, kept)
    ready = posterior.on_accelerator(per_place, limit / 4, by_example)
    block, told = -(-rounds // -(-rounds // min(most, rounds))), 4.0 * count * (2 * job.plan.dim + 1)
    return _Machine(ready, mesh, chains, block, group_starts(rounds, block, told, limit))


def default_memory() -> int:
    """The limit of memory where none is given."""
    return MEMORY if jax.default_backend() == "cpu" else 8 * MEMORY


def _width(plan: Plan) -> int:
    """Numbers that a chain carries: θ, and its velocity where the dynamics have one."""
    return plan.dim * (1 + plan.dynamics.has_velocity)


def _positions(initial: ArrayLike, count: int, plan: Plan, posterior: Posterior) -> NDArray[np.float32]:
    """Where chains begin, in the coordinates that they move in; velocities are of these already."""
    given = np.asarray(initial, np.float32)
    shapes = [(count, plan.dim), (count, _width(plan))]
    if given.shape not in shapes or not np.all(np.isfinite(given)):
        raise InputError("initial", f"shape {given.shape}", f"finite, [{count} chains, {plan.dim} parameters]")
    theta = np.asarray(posterior.coordinates_of(given[:, : plan.dim]), np.float32)
    return np.concatenate([theta, given[:, plan.dim :]], axis=1)


def _run(
    job: _Job, machine: _Machine, charge: Charge | None, rooms: tuple[Draws | Averages, Any], saved: Progress
) -> Iterator[Progress]:
    """Run chains chunk by chunk and rounds block by block from where they were saved, and write to the rooms.

    The first is for what is kept of draws, the second for the transcript, None where there is none.
    """
    keep, told = rooms
    plan, skip, size, mesh, count = job.plan, job.skip, machine.rounds, machine.mesh, job.number.size
    total, states, rates = len(plan.rounds), saved.theta, saved.clip_rate
    for at in range(saved.at, count, machine.chains):
        # A last chunk that is not full is filled up with a chain again, so that nothing is compiled anew.
        chosen = np.minimum(np.arange(at, at + machine.chains), count - 1)
        own = slice(at, chosen[-1] + 1)
        each = host_rounds([job.plans[i] for i in chosen] if job.zipped else [plan])
        chain, done = jax.device_put(job.number[chosen]), saved.rounds if at == saved.at else 0
        begin = states if done else job.initial
        given = None if begin is None else unpacked(begin[chosen], plan)
        state, keys = starts(job.key, machine.posterior, plan, chain, given), chain_keys(job.key, chain)
        kept = jnp.zeros((min(size, total - skip), chain.size, plan.dim), state.theta.dtype)
        if mesh is not None:  # where they will come back, so that the second block is compiled no more than the first
            spec: Any = PartitionSpec
            of_chains, of_draws = NamedSharding(mesh, spec("chain")), NamedSharding(mesh, spec(None, "chain"))
            position, velocity, keys = jax.device_put((state.theta, state.velocity, keys), of_chains)
            state, kept = state._replace(theta=position, velocity=velocity), jax.device_put(kept, of_draws)
        coming = stacked(each, job.zipped, _padded(done, size, total))
        for first in range(done, total, size):
            block = slice(first, min(first + size, total))
            if charge is not None:
                charge(block)
            carry = state._replace(round=jax.device_put(np.int32(first))), kept
            flags = job.zipped, told is not None
            (state, kept), (finite, rate, *heard) = _advance(
                machine.posterior, coming, carry, keys, (skip, plan.start, total), flags=flags, mesh=mesh
            )
            if block.stop < total:  # brought to the accelerator while it works on this block
                coming = stacked(each, job.zipped, _padded(block.stop, size, total))
            length, mine = block.stop - first, own.stop - at
            _raise_if_lost(np.asarray(finite)[:length], first)
            new = block.stop - max(first, min(skip, block.stop))  # rounds whose draws are kept
            draws = np.asarray(kept[:new])[:, :mine]
            keep.add(block.stop - skip - new, own, job.posterior.parameters(draws))
            rates[block, own], states[own] = np.asarray(rate)[:length, :mine], packed(state)[:mine]
            if told is not None:
                groups, starts_at = machine.groups_of(block)
                noise, scale = reception_noise([job.plans[i] for i in chosen[:mine]] if job.zipped else [plan], block)
                position, received = (np.asarray(values)[:length, :mine] for values in heard)
                told[groups, own] = merged(position, received, noise, scale, starts_at)
            yield Progress(at, block.stop, states, rates, keep.numbers)


def _padded(first: int, size: int, total: int) -> Any:
    """Return a block's rounds; the last block is filled up with the last round, so that nothing is compiled anew."""
    last = first + size
    return slice(first, last) if last <= total else np.minimum(np.arange(first, last), total - 1)


def _trace(job: _Job, kept: Draws | Averages, done: Progress) -> Trace:
    """Return the trace of all chains."""
    plan, states, rates = job.plan, done.theta, done.clip_rate
    predictions = kept.result if isinstance(kept, Averages) else None
    theta = kept.room.swapaxes(0, 1) if isinstance(kept, Draws) else kept.result.mean[:, None]
    burn_in, before = plan.burn_in, plan.burn_in - job.skip
    return Trace(
        theta=theta[:, before:],
        clip_rate=rates[burn_in:].T,
        burn_in_clip_rate=(rates[:burn_in].sum(1) / job.number.size).astype(float),
        warmup=theta[:, :before] if job.keep_burn_in else None,
        plans=tuple(job.plans),
        velocity=states[:, plan.dim :] if plan.dynamics.has_velocity else None,
        warmup_clip_rate=rates[:burn_in].T if job.keep_burn_in else None,
        key=tuple(np.ravel(jax.random.key_data(job.key)).tolist()),
        predictions=predictions,
    )


def _shape(plan: Plan) -> tuple[object, ...]:
    return len(plan.gain), plan.devices, plan.dim, plan.burn_in, plan.init, plan.start, plan.dynamics.name


def _raise_if_lost(finite: NDArray[np.bool_], first: int) -> None:
    """finite[round, accelerator] of a block that begins at round `first`."""
    if not finite.all():
        lost = first + int(np.argmin(finite.all(1))) + 1
        raise SamplingError(
            f"A chain left the finite numbers in round {lost}: the noise or the step is too large for it to come back "
            "(a smaller step size, a larger clip, or a policy with less noise in early rounds help), or a model of "
            "your own has no finite gradient where the chain was."
        )
