"""How long a chain remembers its start: a burn-in from R-hat over many chains, as the paper proposes.

R-hat compares the variance between chains with that within them (Gelman & Rubin 1992). Its usual form needs
chains many times longer than the memory it is to measure. The nested form (Margossian et al., 2022) does not:
groups of chains share a start, and round by round the variance between the groups' means, which only a
remembered start can cause, is compared with the variance inside the groups.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from wflmc import channel
from wflmc.channel import Link
from wflmc.dynamics import OVERDAMPED, Dynamics
from wflmc.planning import PlanRequest, Policy, Sampler, plan_from
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
GROUPS, MEMBERS = 16, 256
"""With 256 members the R-hat of independent groups is about 1 + 1/512, well below the limit."""
BLOCK = 64


def nested_rhat(theta: jax.Array) -> jax.Array:
    """Return √((W + B)/W) of theta[group, member, m] for each parameter, [m]."""
    between = jnp.var(theta.mean(1), axis=0, ddof=1)
    within = jnp.var(theta, axis=1, ddof=1).mean(0)
    return jnp.sqrt((within + between) / within)


@jax.jit
def _block(
    posterior: Posterior,
    now: KernelRounds,
    state: State,
    keys: jax.Array,
) -> tuple[State, jax.Array]:
    """Run BLOCK rounds of all chains; also return the largest R-hat after each."""

    def body(state: State, _: object) -> tuple[State, jax.Array]:
        advance = jax.vmap(step, (0, None, CHAIN_AXES, None), (CHAIN_AXES, 0))
        moved, _ = advance(round_keys(keys, state.round), posterior, state, now)
        return moved, nested_rhat(moved.position.reshape(GROUPS, MEMBERS, -1)).max()

    return jax.lax.scan(body, state, None, BLOCK)


def choose_burn_in(
    key: jax.Array,
    posterior: Posterior,
    step_size: float,
    limit: int,
    dynamics: Dynamics = OVERDAMPED,
) -> int:
    """Return the smallest S_b after which R-hat over the chains stays below 1.01, by a noiseless pilot.

    The pilot is a simulation on pooled data, in which real devices take no part. It starts from draws of the
    prior, because equal starts would hide what R-hat looks for, and goes on until R-hat has stayed below the
    limit for as long as it took to get there.

    Args:
        limit: the largest number of pilot rounds.
        dynamics: overdamped by default. Groups share their first velocity too where there is one.
    """
    request = PlanRequest(
        link=Link(channel.static()),
        privacy=Privacy(),
        step_size=step_size,
        burn_in=0,
        samples=1,
        sampler=Sampler(dynamics=dynamics),
        policy=Policy("noiseless"),
    )
    ideal = plan_from(posterior, request)
    needed = dynamics.rounds_to_forget(step_size, posterior.mu, ideal.gamma)
    if needed > limit:
        why = f"which a step of {step_size:.3g} with mu = {posterior.mu:.3g} takes to forget the start"
        allowed = f"at least {needed:.3g}, {why} (or give burn_in)"
        raise InputError("max_burn_in", limit, allowed, section="sampler")
    now = jax.device_put(kernel_rounds(ideal)[0])
    posterior = posterior.on_accelerator(GROUPS * MEMBERS, default_memory() / 4)
    key = named(key, "pilot")  # not the numbers of the run that the burn-in is for
    theta = jax.vmap(partial(posterior.draw_initial, init="prior"))(
        jax.random.split(named(key, "init"), GROUPS)
    )
    begin = initial_states(
        key,
        posterior,
        ideal,
        jnp.arange(GROUPS),
        State(theta, jnp.zeros((), jnp.int32)),
    )
    state: State = jax.tree.map(
        lambda each: jnp.repeat(each, MEMBERS, axis=0) if each.ndim else each, begin
    )
    keys = jax.random.split(named(key, "noise"), GROUPS * MEMBERS)
    rhat = np.zeros(0)
    while rhat.size < limit:
        state, more = _block(posterior, now, state, keys)
        rhat = np.concatenate([rhat, np.asarray(more)])[:limit]
        remembers = np.flatnonzero(~(rhat < RHAT_LIMIT))
        settled = int(remembers[-1]) + 1 if remembers.size else 0
        if 2 * settled + BLOCK // 2 <= rhat.size or (
            rhat.size == limit and 2 * settled <= limit
        ):
            return settled
    allowed = f"larger: R-hat over the chains has not settled below {RHAT_LIMIT} (or give burn_in)"
    raise InputError("max_burn_in", limit, allowed, section="sampler")
