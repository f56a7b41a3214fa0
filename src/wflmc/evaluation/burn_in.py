"""How long a chain remembers its start: a burn-in from R-hat over many chains.

The paper proposes R-hat, which compares the variance between chains with that within
them (Gelman & Rubin 1992). Its usual form needs chains many times longer than the
memory it is to measure. The nested form (Margossian et al., 2022) does not: groups of
chains have a common start, and round by round the variance between the groups' means,
which only a remembered start can cause, is compared with the variance inside the
groups.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from wflmc import channel
from wflmc.channel import Link
from wflmc.dynamics import OVERDAMPED, Dynamics
from wflmc.planning import Plan, PlanRequest, Policy, Sampler, plan_from
from wflmc.posterior.base import Posterior
from wflmc.privacy import Privacy
from wflmc.sampling import (
    CHAIN_AXES,
    KernelRounds,
    State,
    default_memory,
    initial_states,
    kernel_rounds,
    round_keys,
    step,
)
from wflmc.support.errors import InputError
from wflmc.support.keys import named

RHAT_LIMIT = 1.01
"""R-hat below which chains have forgotten their start (Vehtari et al. 2021)."""
GROUPS = 16
"""Starts that are compared."""
MEMBERS = 256
"""Chains of a group. The R-hat of independent groups is then about 1 + 1/512, well
below the limit."""
BLOCK = 64
"""Rounds that are run at a time."""


def nested_rhat(theta: jax.Array) -> jax.Array:
    """Return the nested R-hat √((W + B)/W) of every parameter at one time.

    B is the variance of the groups' means, W the mean variance inside the groups. A
    parameter that does not move within any group has no R-hat: nan, or infinite.

    Args:
        theta: [group, member, m].

    Returns:
        R-hat, [m].
    """
    means_of_groups = theta.mean(1)
    variances_in_groups = jnp.var(theta, axis=1, ddof=1)
    between = jnp.var(means_of_groups, axis=0, ddof=1)
    within = variances_in_groups.mean(0)
    return jnp.sqrt((within + between) / within)


@jax.jit
def _run_block(
    posterior: Posterior,
    rounds: KernelRounds,
    state: State,
    keys: jax.Array,
) -> tuple[State, jax.Array]:
    """Run BLOCK rounds of all chains; also return the largest R-hat after each."""

    def body(state: State, _: object) -> tuple[State, jax.Array]:
        advance = jax.vmap(step, (0, None, CHAIN_AXES, None), (CHAIN_AXES, 0))
        keys_of_round = round_keys(keys, state.round)
        moved, _ = advance(keys_of_round, posterior, state, rounds)
        by_group = moved.position.reshape(GROUPS, MEMBERS, -1)
        rhat = nested_rhat(by_group)
        return moved, rhat.max()

    return jax.lax.scan(body, state, None, BLOCK)


def choose_burn_in(
    key: jax.Array,
    posterior: Posterior,
    step_size: float,
    limit: int,
    dynamics: Dynamics = OVERDAMPED,
) -> int:
    """Return the smallest S_b after which R-hat over the chains stays below 1.01.

    A noiseless pilot is simulated on pooled data, in which real devices take no part.
    Its result depends on the data, which ε does not cover. It starts from draws of the
    prior, because equal starts would hide what R-hat looks for, and goes on until R-hat
    has stayed below the limit for as long as it took to get there, and half a block of
    rounds more; where `limit` rounds end before that, for as long as it took is enough.

    Args:
        key: seeds the pilot, with numbers other than those of a run with this key.
        posterior: of the pooled data.
        step_size: η, or h of kinetic dynamics.
        limit: the largest number of pilot rounds.
        dynamics: overdamped by default. Groups have a common first velocity too where
            there is one.

    Returns:
        S_b, in rounds.

    Raises:
        InputError: if the start cannot be forgotten within the limit, or R-hat has not
            settled at its end.
    """
    pilot = _noiseless_plan(posterior, step_size, dynamics)
    min_rounds = dynamics.rounds_to_forget(step_size, posterior.mu, pilot.gamma)
    if min_rounds > limit:
        raise InputError(
            "max_burn_in",
            limit,
            f"at least {min_rounds:.3g}, which a step of {step_size:.3g} with mu = "
            f"{posterior.mu:.3g} takes to forget the start (or give burn_in)",
            section="sampler",
        )
    rounds = jax.device_put(kernel_rounds(pilot)[0])
    posterior = posterior.on_accelerator(GROUPS * MEMBERS, default_memory() / 4)
    key = named(key, "pilot")  # not the numbers of the run that the burn-in is for
    state = _initial_state(key, posterior, pilot)
    keys = jax.random.split(named(key, "noise"), GROUPS * MEMBERS)
    rhat = np.zeros(0)
    while rhat.size < limit:
        state, rhat_of_block = _run_block(posterior, rounds, state, keys)
        rhat = np.concatenate([rhat, np.asarray(rhat_of_block)])[:limit]
        burn_in = _rounds_remembered(rhat)
        has_stayed = 2 * burn_in + BLOCK // 2 <= rhat.size
        has_stayed_to_end = rhat.size == limit and 2 * burn_in <= limit
        if has_stayed or has_stayed_to_end:
            return burn_in
    raise InputError(
        "max_burn_in",
        limit,
        f"larger: R-hat over the chains has not settled below {RHAT_LIMIT} (or give "
        "burn_in)",
        section="sampler",
    )


def _noiseless_plan(posterior: Posterior, step_size: float, dynamics: Dynamics) -> Plan:
    """Return a plan without channel noise, of a single round."""
    request = PlanRequest(
        link=Link(channel.static()),
        privacy=Privacy(),
        step_size=step_size,
        burn_in=0,
        samples=1,
        sampler=Sampler(dynamics=dynamics),
        policy=Policy("noiseless"),
    )
    return plan_from(posterior, request)


def _initial_state(key: jax.Array, posterior: Posterior, pilot: Plan) -> State:
    """Return the state of all chains, in which the members of a group are equal."""
    draw_from_prior = partial(posterior.draw_initial, init="prior")
    group_keys = jax.random.split(named(key, "init"), GROUPS)
    positions = jax.vmap(draw_from_prior)(group_keys)
    start = State(positions, jnp.zeros((), jnp.int32))
    groups = initial_states(key, posterior, pilot, jnp.arange(GROUPS), start)

    def repeat(values: jax.Array) -> jax.Array:
        return jnp.repeat(values, MEMBERS, axis=0) if values.ndim else values

    state: State = jax.tree.map(repeat, groups)
    return state


def _rounds_remembered(rhat: np.ndarray) -> int:
    """Return the number of rounds up to the last whose R-hat is not below the limit."""
    remembers = np.flatnonzero(~(rhat < RHAT_LIMIT))
    return int(remembers[-1]) + 1 if remembers.size else 0
