"""Many chains at once: rounds are scanned, chains are mapped, burn-in leaves no samples in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.errors import InputError, SamplingError
from wflmc.keys import named
from wflmc.planning import Plan
from wflmc.sampling.kernel import Rounds, rounds_of, step
from wflmc.sampling.trace import Trace

BLOCK_WORK = 2**28
"""Device-gradient entries after which a compiled loop returns to the host: progress, and Ctrl-C."""

Progress = Callable[[int, int], None]


class _Carry(NamedTuple):
    """What the scan carries: the chains, and what is kept of them, [draw, chain, ...]."""

    theta: jax.Array
    kept: jax.Array
    clip_rate: jax.Array


@partial(jax.jit, static_argnames=("init",))
def _start(init_key: jax.Array, posterior: Any, chain: jax.Array, init: str) -> jax.Array:
    """θ[0] of every chain, [chain, m]."""
    return jax.vmap(lambda index: posterior.draw_initial(jax.random.fold_in(init_key, index), init))(chain)


@partial(jax.jit, static_argnames=("zipped",), donate_argnames=("carry",))
def _advance(
    posterior: Any, rounds: Rounds, carry: _Carry, keys: jax.Array, first: int, skip: int, *, zipped: bool
) -> tuple[_Carry, dict[str, jax.Array]]:
    """Scan a block of rounds for all chains; rounds[S, ...] are shared, or rounds[S, chain, ...] zipped with them.

    Every round writes its samples at its place among the kept ones. The first `skip` rounds all write to the
    first place, where the first kept round overwrites them: burn-in takes no memory and no second compilation.
    """

    def body(carry: _Carry, at: tuple[Rounds, jax.Array]) -> tuple[_Carry, dict[str, jax.Array]]:
        now, index = at
        round_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, index)
        theta, info = jax.vmap(step, (0, None, 0, 0 if zipped else None))(round_keys, posterior, carry.theta, now)
        place = jnp.maximum(index - skip, 0)
        carry = _Carry(theta, carry.kept.at[place].set(theta), carry.clip_rate.at[place].set(info.clip_rate))
        return carry, {"finite": info.finite.all(), "clip_rate": info.clip_rate.mean()}

    return jax.lax.scan(body, carry, (rounds, first + jnp.arange(rounds.gain.shape[0])))


def sample(
    key: jax.Array,
    posterior: Any,
    plan: Plan | Sequence[Plan],
    chains: int | None = None,
    *,
    keep_burn_in: bool = False,
    numbers: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Run chains of a plan, or one chain for each of several plans of one shape.

    Chains are replicas of the whole experiment: each one alone has the plan's privacy, and publishing
    several of them from the same real devices would add their losses up.

    Args:
        key: seeds starts and noise; the same key gives the same noise to every plan.
        chains: number of chains (100 for a single plan); for several plans it is their number.
        keep_burn_in: keep the samples of burn-in as well.
        numbers: which chains these are, 0, 1, … by default; equal numbers share start and noise.
        progress: called with (rounds done, rounds in all).
    """
    plans = [plan] if isinstance(plan, Plan) else list(plan)
    zipped = not isinstance(plan, Plan)
    first = plans[0] if plans else None
    if first is None or any(_shape(p) != _shape(first) for p in plans):
        raise InputError("plan", f"{len(plans)} plans", "one plan, or several of equal rounds, devices and start")
    if zipped and chains not in (None, len(plans)):
        raise InputError("chains", chains, f"the number of plans ({len(plans)})")
    count = len(plans) if zipped else 100 if chains is None else chains
    if count < 1:
        raise InputError("chains", count, "at least 1")
    if first.devices != posterior.devices or first.dim != posterior.dim:
        raise InputError(
            "plan",
            f"a plan for {first.devices} devices and {first.dim} parameters",
            f"made for this posterior ({posterior.devices} devices, {posterior.dim} parameters)",
        )
    rounds = _stack(plans) if zipped else rounds_of(first)
    skip = 0 if keep_burn_in else first.burn_in
    chain = jnp.arange(count) if numbers is None else jnp.asarray(numbers)
    if chain.shape != (count,):
        raise InputError("numbers", f"{chain.size} numbers", f"one for each of {count} chains")
    theta = _start(named(key, "init"), posterior, chain, first.init)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(named(key, "noise"), chain)
    draws = first.rounds - skip
    carry = _Carry(theta, jnp.zeros((draws, *theta.shape), theta.dtype), jnp.zeros((draws, count)))
    block = max(1, BLOCK_WORK // (count * first.devices * first.dim))
    rates = []
    for at in range(0, first.rounds, block):
        upto = min(at + block, first.rounds)
        part = jax.tree.map(itemgetter(slice(at, upto)), rounds)
        carry, out = _advance(posterior, part, carry, keys, at, skip, zipped=zipped)
        _raise_if_lost(np.asarray(out["finite"]), at)
        rates.append(np.asarray(out["clip_rate"]))
        if progress is not None:
            progress(upto, first.rounds)
    samples = np.asarray(carry.kept).swapaxes(0, 1)
    own = first.burn_in - skip
    return Trace(
        theta=samples[:, own:],
        clip_rate=np.asarray(carry.clip_rate).T[:, own:],
        burn_in_clip_rate=np.concatenate(rates)[: first.burn_in],
        warmup=samples[:, :own] if keep_burn_in else None,
        plans=tuple(plans),
    )


def _shape(plan: Plan) -> tuple[object, ...]:
    return plan.rounds, plan.devices, plan.dim, plan.burn_in, plan.init


def _stack(plans: Sequence[Plan]) -> Rounds:
    """Rounds of several plans as [S, plan, ...]."""
    parts = [rounds_of(p) for p in plans]
    if any(part.server_noise is not None for part in parts):
        parts = [part._replace(server_noise=p.server_noise) for part, p in zip(parts, plans, strict=True)]
    return Rounds(*(None if values[0] is None else np.stack(values, axis=1) for values in zip(*parts, strict=True)))


def _raise_if_lost(finite: NDArray[np.bool_], first: int) -> None:
    if not finite.all():
        lost = first + int(np.argmin(finite)) + 1
        raise SamplingError(
            f"A chain left the finite numbers in round {lost}: the noise or the step is too large for it to come "
            "back. Use a smaller step size, a larger clip, or a policy with less noise in early rounds."
        )
