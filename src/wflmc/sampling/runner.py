"""Many chains at once: rounds are scanned, chains are mapped, burn-in leaves no samples in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import ArrayLike, NDArray

from wflmc.errors import InputError, SamplingError
from wflmc.keys import check_key, named
from wflmc.planning import Plan
from wflmc.privacy import Ledger
from wflmc.sampling.checkpoint import Checkpoint, Progress, room
from wflmc.sampling.kernel import Rounds, check_belongs, check_posterior, rounds_of, step, with_velocity
from wflmc.sampling.payment import Account, name_run, open_account, refuse_plans
from wflmc.sampling.trace import Trace

BLOCK_WORK = 2**33
"""Operations, as models count them, after which a compiled loop returns to the host, for progress and Ctrl-C: about a
second of two cores' work. An accelerator does 256 times as much."""
MEMORY = 2 * 2**30
"""Bytes for chains and gradients unless the caller sets a limit; on an accelerator eight times as much. Chunks depend
on this and on the problem alone."""

FIXED = ("clip", "noise_power", "example_clip", "friction", "downlink")
"""The parts of `Rounds` that are the same in every round."""

Advance = Callable[[int, int], None]


class _Carry(NamedTuple):
    """What the scan carries: the chains, and their kept samples of this block of rounds, [draw, chain, m].

    With kinetic dynamics each chain is θ and its velocity one after the other, [chain, 2m].
    """

    theta: jax.Array
    kept: jax.Array


class _Chains(NamedTuple):
    """A chunk of chains: which they are, where they are (None: at their start), and how many rounds they have done."""

    number: NDArray[Any]
    theta: NDArray[Any] | None
    rounds: int


class _Need(NamedTuple):
    """Bytes and operations of one chain in one round."""

    memory: float
    work: float


class _Chunks(NamedTuple):
    """How the work is cut: chains at a time, and rounds between two looks of the host."""

    chains: int
    rounds: int


@partial(jax.jit, static_argnames=("init",))
def _start(init_key: jax.Array, posterior: Any, chain: jax.Array, init: str) -> jax.Array:
    """θ[0] of every chain, [chain, m]."""
    return jax.vmap(lambda index: posterior.draw_initial(jax.random.fold_in(init_key, index), init))(chain)


_with_velocity = jax.jit(with_velocity)


def starts(key: jax.Array, posterior: Any, plan: Plan, chain: jax.Array) -> jax.Array:
    """Where chains of these numbers start, with kinetic dynamics their velocities behind it, [chain, m or 2m]."""
    theta = _start(named(key, "init"), posterior, chain, plan.init)
    return theta if plan.friction is None else _with_velocity(named(key, "velocity"), theta, chain)


def chain_keys(key: jax.Array, chain: jax.Array) -> jax.Array:
    """The keys of chains of these numbers, [chain]; a round folds its own number in."""
    return jax.vmap(jax.random.fold_in, (None, 0))(named(key, "noise"), chain)


def _scan(
    posterior: Any,
    rounds: Rounds,
    carry: _Carry,
    keys: jax.Array,
    first: jax.Array,
    skip: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    zipped: bool,
) -> tuple[_Carry, jax.Array, jax.Array]:
    """A block of rounds for all chains: the carry, whether all were finite [S, 1], and clip rates [S, chain].

    Every round writes its samples at its place among the kept ones of the block. Rounds of burn-in all write to the
    first place, where the first kept round overwrites them: burn-in takes no memory and no second compilation.
    """
    axes = Rounds(*(None if values is None else 0 if zipped else None for values in rounds))
    fixed = {name: getattr(rounds, name) for name in FIXED}
    changing = rounds._replace(**dict.fromkeys(FIXED))

    def body(carry: _Carry, at: tuple[Rounds, jax.Array]) -> tuple[_Carry, tuple[jax.Array, jax.Array]]:
        changing, index = at
        now = changing._replace(**fixed)
        round_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, start + index)
        theta, info = jax.vmap(step, (0, None, 0, axes))(round_keys, posterior, carry.theta, now)
        theta = jnp.where(index < stop, theta, carry.theta)  # the last block is filled up with rounds that do nothing
        place = jnp.maximum(index - jnp.maximum(skip, first), 0)
        kept = carry.kept.at[place].set(theta[:, : carry.kept.shape[-1]])
        return _Carry(theta, kept), (info.finite.all(keepdims=True), info.clip_rate)

    carry, (finite, clip_rate) = jax.lax.scan(body, carry, (changing, first + jnp.arange(rounds.gain.shape[0])))
    return carry, finite, clip_rate


@partial(jax.jit, static_argnames=("zipped", "mesh"), donate_argnames=("carry",))
def _advance(
    posterior: Any,
    rounds: Rounds,
    carry: _Carry,
    keys: jax.Array,
    first: int,
    skip: int,
    start: int,
    stop: int,
    *,
    zipped: bool,
    mesh: Mesh | None,
) -> tuple[_Carry, jax.Array, jax.Array]:
    """`_scan`, with the chains spread over the accelerators of a mesh: each works on its own, nothing is exchanged."""
    places = jnp.asarray(first), jnp.asarray(skip), jnp.asarray(start), jnp.asarray(stop)
    if mesh is None:
        return _scan(posterior, rounds, carry, keys, *places, zipped)
    spec: Any = PartitionSpec
    chain, of_round, everywhere = spec("chain"), spec(None, "chain"), spec()
    per_round, fixed = (of_round, chain) if zipped else (everywhere, everywhere)
    parts = {name: fixed if name in FIXED else per_round for name in Rounds._fields}
    specs = Rounds(**{name: None if getattr(rounds, name) is None else spec for name, spec in parts.items()})
    split = jax.shard_map(
        partial(_scan, zipped=zipped),
        mesh=mesh,
        in_specs=(everywhere, specs, _Carry(chain, of_round), chain, *[everywhere] * 4),
        out_specs=(_Carry(chain, of_round), of_round, of_round),
        check_vma=False,
    )
    return split(posterior, rounds, carry, keys, *places)


def sample(
    key: jax.Array,
    posterior: Any,
    plan: Plan | Sequence[Plan],
    chains: int | None = None,
    *,
    keep_burn_in: bool = False,
    numbers: Sequence[int] | None = None,
    memory: float | None = None,
    store: str | Path | None = None,
    initial: ArrayLike | None = None,
    ledger: Ledger | None = None,
    checkpoint: str | Path | None = None,
    accelerators: Sequence[jax.Device] | None = None,
    progress: Advance | None = None,
) -> Trace:
    """Run chains of a plan, or one chain for each of several plans of one shape.

    Chains are replicas of the whole experiment: each one alone has the plan's privacy, and publishing
    several of them from the same real devices would add their losses up.

    Args:
        key: seeds starts and noise; the same key gives the same noise to every plan.
        chains: number of chains (100 for a single plan); for several plans it is their number.
        keep_burn_in: keep the samples of burn-in as well.
        numbers: which chains these are, 0, 1, … by default; equal numbers share start and noise.
        memory: bytes for chains and gradients at a time (2 GiB); less means smaller chunks, and changes results by
            float rounding alone. The samples themselves come on top, unless they are stored.
        store: a file that the samples go to round by round, for traces larger than memory; the trace reads from it.
        initial: the parameters that chains are at, [chain, m], for a plan that goes on from others; drawn by default.
            With kinetic dynamics it may have their velocities (`Trace.velocity`) behind that, [chain, 2m], else these
            are drawn.
        ledger: charged for every round before it is sent. A round that would take a device beyond its budget is
            refused with OverspendError before anything is sent, with or without a ledger.
        checkpoint: a folder that progress and samples are kept in; a call with the same arguments goes on from there,
            and ends with the same samples as one that was never stopped.
        accelerators: where chains are spread; by default over all that JAX sees.
        progress: called with (rounds done, rounds in all).
    """
    check_key(key)
    check_posterior(posterior)
    if not isinstance(plan, Plan | list | tuple):
        raise InputError("plan", type(plan).__name__, "one plan of wflmc.plan(…), or several")
    plans = [plan] if isinstance(plan, Plan) else list(plan)
    zipped = not isinstance(plan, Plan)
    first = plans[0] if plans else None
    if first is None or any(_shape(p) != _shape(first) for p in plans):
        raise InputError(
            "plan", f"{len(plans)} plans", "one plan, or several of equal rounds, devices, start and dynamics"
        )
    if zipped and chains not in (None, len(plans)):
        raise InputError("chains", chains, f"the number of plans ({len(plans)})")
    count = len(plans) if zipped else 100 if chains is None else chains
    if not isinstance(count, int | np.integer) or count < 1:
        raise InputError("chains", count, "a whole number of at least 1")
    if memory is not None and not (isinstance(memory, int | float) and memory > 0):
        raise InputError("memory", memory, "a number of bytes above 0")
    check_belongs(first, posterior)
    number = np.arange(count) if numbers is None else np.asarray(numbers)
    if number.shape != (count,):
        raise InputError("numbers", f"{number.size} numbers", f"one for each of {count} chains")
    places = list(jax.devices() if accelerators is None else accelerators)
    if not places:
        raise InputError("accelerators", "none", "at least one of jax.devices()")
    mesh = Mesh(np.array(places), ("chain",)) if len(places) > 1 or accelerators is not None else None
    refuse_plans(plans)
    skip = 0 if keep_burn_in else first.burn_in
    draws = first.rounds - skip
    limit = default_memory() if memory is None else memory
    by_example = any(np.isfinite(p.example_clip).any() for p in plans)
    need = _Need(posterior.working_bytes(1, by_example), posterior.work(by_example))
    chunks = _chunks(need, first, count, draws, limit, len(places))
    ready = posterior.on_accelerator(-(-chunks.chains // len(places)), limit / 4, by_example)
    begun = None if initial is None else _positions(initial, count, first, posterior)
    run = "" if ledger is None and checkpoint is None else name_run(key, posterior, plans, number, begun)
    kept_in = None if checkpoint is None else Checkpoint(Path(checkpoint), f"{run}-{_cut(chunks, skip, ready)}")
    saved = Progress() if kept_in is None else kept_in.load()
    account = None if ledger is None else open_account(ledger, run, key, posterior, plans)
    if account is not None:
        account.check(sent=first.rounds if saved.at else saved.rounds)
    theta = room((draws, count, first.dim), store if kept_in is None else kept_in.samples, saved.theta is not None)
    clip_rate = np.zeros((draws, count), np.float32) if saved.clip_rate is None else saved.clip_rate
    burn_in_rate = np.zeros(first.burn_in) if saved.burn_in_rate is None else saved.burn_in_rate
    velocity = np.zeros((count, _width(first) - first.dim), np.float32) if saved.velocity is None else saved.velocity
    work = first.rounds * -(-count // chunks.chains)
    done = first.rounds * (saved.at // chunks.chains) + saved.rounds
    for at in range(saved.at, count, chunks.chains):
        # A last chunk that is not full is filled up with a chain again, so that nothing is compiled anew.
        chosen = np.minimum(np.arange(at, at + chunks.chains), count - 1)
        own = min(chunks.chains, count - at)
        rounds = _stack([plans[index] for index in chosen]) if zipped else rounds_of(first)
        where = saved.theta if at == saved.at and saved.rounds else None if begun is None else begun[chosen]
        chain = _Chains(number[chosen], where, saved.rounds if at == saved.at else 0)
        for block, kept, rate, now in _run(
            key, ready, first, rounds, chain, skip, chunks.rounds, zipped, mesh, account
        ):
            fresh = slice(max(block.start, skip) - skip, max(block.stop, skip) - skip)
            theta[fresh, at : at + own] = _in(posterior, "parameters")(kept[: fresh.stop - fresh.start, :own])
            clip_rate[fresh, at : at + own] = rate[max(skip - block.start, 0) :, :own]
            early = slice(block.start, min(block.stop, first.burn_in))
            burn_in_rate[early] += rate[: max(early.stop - early.start, 0), :own].sum(1) / count
            velocity[at : at + own] = now[:own, first.dim :]
            done += block.stop - block.start
            if kept_in is not None:
                theta.flush()
                kept_in.save(Progress(at, block.stop, now, clip_rate, burn_in_rate, velocity))
            if progress is not None:
                progress(done, work)
    samples, before = theta.swapaxes(0, 1), first.burn_in - skip
    return Trace(
        theta=samples[:, before:],
        clip_rate=clip_rate.T[:, before:],
        burn_in_clip_rate=burn_in_rate,
        warmup=samples[:, :before] if keep_burn_in else None,
        plans=tuple(plans),
        velocity=None if first.friction is None else velocity,
        warmup_clip_rate=clip_rate.T[:, :before] if keep_burn_in else None,
        key=tuple(np.ravel(jax.random.key_data(key)).tolist()),
    )


def _cut(chunks: _Chunks, skip: int, ready: Any) -> str:
    """How sums are cut: a round that is repeated must repeat the same sum, or their difference has no noise."""
    return f"{chunks}-{skip}-{ready.block}-{getattr(ready, 'example_block', 0)}-{jax.default_backend()}"


def default_memory() -> int:
    """The limit of memory where none is given."""
    return MEMORY if jax.default_backend() == "cpu" else 8 * MEMORY


def _chunks(need: _Need, plan: Plan, count: int, draws: int, limit: float, places: int) -> _Chunks:
    """Chains at a time and rounds at a time, in equal parts, within a limit of bytes."""
    one = need.memory + 16.0 * _width(plan)
    if one > limit:
        raise InputError("memory", f"{limit:.3g} bytes", f"at least {one:.3g} bytes, which one chain takes")
    groups = -(-count // int(min(count, max(1, (limit / 2) // one))))
    chains = -(-count // (groups * places)) * places
    kept = int(max(1, (limit / 4) // (4.0 * chains * plan.dim)))
    work = BLOCK_WORK if jax.default_backend() == "cpu" else 256 * BLOCK_WORK
    most = int(max(1, work // (chains * need.work)))
    # Only kept rounds take memory; burn-in may be cut as coarsely as the work allows.
    most = most if draws <= kept else min(most, kept)
    return _Chunks(chains, -(-plan.rounds // -(-plan.rounds // min(most, plan.rounds))))


def _in(posterior: Any, way: str) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """The map from a chain's coordinates to `parameters`, or back; models without coordinates need none."""
    return getattr(posterior, way, lambda values: values)


def _width(plan: Plan) -> int:
    """Numbers that a chain carries: θ, and its velocity with kinetic dynamics."""
    return plan.dim if plan.friction is None else 2 * plan.dim


def _positions(initial: ArrayLike, count: int, plan: Plan, posterior: Any) -> NDArray[np.float32]:
    """Where chains begin, in the coordinates that they move in; velocities are of these already."""
    given = np.asarray(initial, np.float32)
    shapes = [(count, plan.dim), (count, _width(plan))]
    if given.shape not in shapes or not np.all(np.isfinite(given)):
        raise InputError("initial", f"shape {given.shape}", f"finite, [{count} chains, {plan.dim} parameters]")
    theta = np.asarray(_in(posterior, "coordinates_of")(given[:, : plan.dim]), np.float32)
    return np.concatenate([theta, given[:, plan.dim :]], axis=1)


def _run(
    key: jax.Array,
    posterior: Any,
    plan: Plan,
    rounds: Rounds,
    chains: _Chains,
    skip: int,
    size: int,
    zipped: bool,
    mesh: Mesh | None,
    account: Account | None,
) -> Iterator[tuple[slice, NDArray[Any], NDArray[Any], NDArray[Any]]]:
    """One chunk of chains: block by block of rounds, its kept samples, clip rates, and where the chains are."""
    chain = jnp.asarray(chains.number)
    theta = starts(key, posterior, plan, chain) if chains.theta is None else jnp.array(chains.theta, jnp.float32)
    if theta.shape[-1] < _width(plan):
        theta = _with_velocity(named(key, "velocity"), theta, chain)
    keys = chain_keys(key, chain)
    kept = jnp.zeros((min(size, plan.rounds - skip), len(theta), plan.dim), theta.dtype)
    if mesh is not None:  # where they will come back, so that the second block is compiled no more than the first
        spec: Any = PartitionSpec
        theta, keys = jax.device_put((theta, keys), NamedSharding(mesh, spec("chain")))
        kept = jax.device_put(kept, NamedSharding(mesh, spec(None, "chain")))
    for at in range(chains.rounds, plan.rounds, size):
        block = slice(at, min(at + size, plan.rounds))
        if account is not None:
            account.charge(block)
        whole = block.stop - block.start == size
        filled = rounds.at(block if whole else np.minimum(np.arange(at, at + size), plan.rounds - 1))
        carry, finite, rate = _advance(
            posterior, filled, _Carry(theta, kept), keys, at, skip, plan.start, plan.rounds, zipped=zipped, mesh=mesh
        )
        theta, kept = carry
        length = block.stop - block.start
        _raise_if_lost(np.asarray(finite)[:length], at)
        fresh = block.stop - max(block.start, min(skip, block.stop))
        yield block, np.asarray(kept[:fresh]), np.asarray(rate)[:length], np.array(theta)  # a copy: θ is given away


def _shape(plan: Plan) -> tuple[object, ...]:
    return plan.rounds, plan.devices, plan.dim, plan.burn_in, plan.init, plan.start, plan.dynamics


def _stack(plans: Sequence[Plan]) -> Rounds:
    """Rounds of several plans as [S, plan, ...], what does not change as [plan, ...]."""
    noisy = any(np.any(p.server_noise) for p in plans)
    by_example = any(np.isfinite(p.example_clip).any() for p in plans)
    off = any(p.received is not None for p in plans)

    def together(values: Iterable[Any]) -> jax.Array:
        return jnp.asarray(np.stack(list(values), dtype=np.float32, casting="same_kind"))

    def by_round(values: Iterable[Any]) -> jax.Array:
        return together(values).swapaxes(0, 1)

    return Rounds(
        step_size=by_round(p.step_size for p in plans),
        gain=by_round(p.gain for p in plans),
        weight=by_round(p.weight for p in plans),
        server_noise=by_round(p.server_noise for p in plans) if noisy else None,
        clip=together(p.clips_at[0] for p in plans),
        noise_power=together(np.asarray(p.noise_power) for p in plans),
        example_clip=together(p.clips_at[1] for p in plans) if by_example else None,
        received=by_round(np.ones_like(p.weight) if p.received is None else p.received for p in plans) if off else None,
        friction=None if plans[0].friction is None else together(np.asarray(p.friction) for p in plans),
        downlink=together(np.asarray(p.downlink_noise**0.5) for p in plans)
        if any(p.downlink_noise for p in plans)
        else None,
    )


def _raise_if_lost(finite: NDArray[np.bool_], first: int) -> None:
    """finite[round, accelerator] of a block that begins at round `first`."""
    if not finite.all():
        lost = first + int(np.argmin(finite.all(1))) + 1
        raise SamplingError(
            f"A chain left the finite numbers in round {lost}: the noise or the step is too large for it to come back "
            "(a smaller step size, a larger clip, or a policy with less noise in early rounds help), or a model of "
            "your own has no finite gradient where the chain was."
        )
