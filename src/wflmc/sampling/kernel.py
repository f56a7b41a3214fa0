r"""One round of wireless federated Langevin Monte Carlo: transmit, receive, update.

The update (Sec. III-A) is θ ← θ − η (K/(α K_a)) y + √β q. Which devices send, and how strongly, is a matter of
the plan; every scheme of the paper is this kernel with another plan. With kinetic dynamics the state has a velocity as
well (`wflmc.dynamics`). A kernel on its own:

>>> import jax, wflmc
>>> posterior = wflmc.gaussian_regression(jax.random.key(0), devices=3, examples=30)
>>> plan = wflmc.plan(posterior, wflmc.Link(wflmc.channel.static()), wflmc.Privacy(), step_size=1e-3,
...                   burn_in=0, samples=10)
>>> kernel = wflmc.sampling.kernel(posterior, plan)
>>> state = kernel.init(jax.random.key(1))
>>> state, info = kernel.step(jax.random.key(2), state)
>>> int(state.round), state.theta.shape
(1, (5,))
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wflmc.channel import superpose
from wflmc.dynamics import Dynamics
from wflmc.planning.plan import Plan, Rounds, distinct
from wflmc.posterior.base import Posterior, SumsGradients, check_posterior
from wflmc.sums.devices import ClippedSum, Sum
from wflmc.support.errors import InputError
from wflmc.support.keys import check_key, named


class Constants(NamedTuple):
    """What is the same in all rounds of a plan."""

    clip: Any
    """[K], where clipping acts."""
    noise_power: Any
    dynamics: Dynamics
    example_clip: Any = None
    """[K], or None where examples are not clipped one by one."""
    downlink_std: Any = None
    """Standard deviation of the noise in what devices receive of θ; None where there is none."""


class State(NamedTuple):
    """What is carried from round to round."""

    theta: jax.Array
    """[m]."""
    round: jax.Array
    """The round that comes next, from 0."""
    velocity: jax.Array | None = None
    """Of kinetic dynamics, [m]."""


class Info(NamedTuple):
    """What is reported of a round."""

    received: jax.Array
    """y[m], all that the server learns of the devices."""
    norm: jax.Array
    """‖g_k‖ before clipping, [K]."""
    clip_rate: jax.Array
    """Share of the sending devices whose gradient was clipped."""
    finite: jax.Array
    """Whether θ and all gradients are still finite; a compiled loop cannot raise, the host does."""
    position: jax.Array
    """Where gradients were asked for, [m]: θ, or half a drift ahead with kinetic dynamics."""


class Kernel(NamedTuple):
    """init(key) -> state, and step(key, state) -> (state, info)."""

    init: Callable[[jax.Array], State]
    """A start, from a key."""
    step: Callable[[jax.Array, State], tuple[State, Info]]
    """The next round, from a key of its own and the state."""


def kernel_rounds(plans: Sequence[Plan], zipped: bool = False) -> Rounds:
    """Return the rounds of a plan with their constants, as the kernel takes them; what no plan has is None.

    Args:
        zipped: stack several plans: their rounds as [S, plan, ...], their constants as [plan, ...].
    """
    return stacked(host_rounds(plans), zipped)


def host_rounds(plans: Sequence[Plan]) -> list[tuple[Rounds, Constants]]:
    """Return the rounds and the constants of every plan as NumPy arrays; all plans have the same ones."""
    different, each = distinct(plans), {}
    noisy = any(np.any(plan.server_noise) for plan in different)
    mismatched = any(plan.received is not None for plan in different)
    by_example = any(np.isfinite(plan.example_clip).any() for plan in different)
    noisy_downlink = any(plan.downlink_noise for plan in different)
    for plan in different:
        received = np.ones_like(plan.weight) if plan.received is None and mismatched else plan.received
        rounds = replace(plan.rounds, server_noise=plan.server_noise if noisy else None, received=received)
        clip, example_clip = plan.clips_at
        downlink_std = plan.downlink_noise**0.5 if noisy_downlink else None
        example = example_clip if by_example else None
        each[id(plan)] = rounds, Constants(clip, plan.noise_power, plan.dynamics, example, downlink_std)
    return [each[id(plan)] for plan in plans]


def stacked(each: Sequence[tuple[Rounds, Constants]], zipped: bool, part: Any = slice(None)) -> Rounds:
    """Return `host_rounds` as the kernel takes them: those of several plans stacked, or those of the only one.

    Args:
        part: a slice of the rounds, or their numbers.
    """
    if not zipped:
        return replace(each[0][0], constants=jax.tree.map(np.asarray, each[0][1]))[part]

    def stack(axis: int, index: Any, *values: Any) -> jax.Array:
        some = [np.asarray(value)[index] for value in values]
        return jnp.moveaxis(jax.device_put(np.stack(some, dtype=np.float32, casting="same_kind")), 0, axis)

    rounds, constants = zip(*each, strict=True)
    together: Rounds = jax.tree.map(partial(stack, 1, part), *rounds)
    return replace(together, constants=jax.tree.map(partial(stack, 0, ...), *constants))


def broadcast(key: jax.Array, theta: jax.Array, now: Rounds) -> jax.Array:
    """Return what the devices receive of the broadcast θ[m]: θ itself, or with downlink noise, [K, m]."""
    if now.constants.downlink_std is None:
        return theta
    shape = (now.weight.shape[-1], *theta.shape)
    return theta + now.constants.downlink_std * jax.random.normal(key, shape, theta.dtype)


def transmit(posterior: SumsGradients, theta: jax.Array, now: Rounds, key: jax.Array | None = None) -> ClippedSum:
    """What reaches the server before noise, α Σ_k r_k clip(g_k), and ‖g_k‖.

    r_k = weight_k / max weight, times what the channel made of it where devices knew it badly. The key is for models
    that draw mini-batches.
    """
    amplitude = now.weight / now.weight.max()
    if now.received is not None:
        amplitude = amplitude * now.received
    clip, example_clip = now.constants.clip, now.constants.example_clip
    total, norms = posterior.unrounded_sum(theta, amplitude, clip, key=key, example_clip=example_clip)
    return ClippedSum(total.scaled(now.gain), norms)


def receive(key: jax.Array, signal: Sum, now: Rounds) -> jax.Array:
    """y = signal + z, z ~ N(0, N0 I); the sum is rounded to float32 when the noise is in it and not before."""
    noise = superpose(key, jnp.zeros_like(signal.high), now.constants.noise_power)
    return signal.plus_noise(noise)


def update(key: jax.Array, state: State, received: jax.Array, weight: jax.Array, now: Rounds) -> State:
    """Return the state after y[m] is received: θ − η (max weight/α) y + √β q for overdamped dynamics.

    The weights are those of the devices that really transmitted. With kinetic dynamics the velocity moves by y and the
    server's noise, and θ drifts with it (`wflmc.dynamics`).
    """
    noise = None
    if now.server_noise is not None:
        noise = jnp.sqrt(now.server_noise) * jax.random.normal(key, state.theta.shape, state.theta.dtype)
    theta, velocity = now.constants.dynamics.step(
        state.theta, state.velocity, received, noise, now.step_size, weight.max(), now.gain
    )
    return State(theta, state.round + 1, velocity)


def step(key: jax.Array, posterior: SumsGradients, state: State, now: Rounds) -> tuple[State, Info]:
    """Run one round: transmit ∘ receive ∘ update."""
    batch_key = named(key, "batch") if posterior.batch else None
    place = now.constants.dynamics.gradient_position(state.theta, state.velocity, now.step_size)
    signal, norm = transmit(posterior, broadcast(named(key, "downlink"), place, now), now, batch_key)
    received = receive(named(key, "noise"), signal, now)
    state = update(named(key, "server"), state, received, now.weight, now)
    sends, clip = now.weight > 0, now.constants.clip
    clipped = jnp.where(norm <= clip, 0.0, jnp.where(norm > clip, sends, jnp.nan))
    clip_rate = jnp.sum(clipped) / jnp.sum(sends)  # not a number where a norm is none: one pass over the norms
    finite = jnp.all(jnp.isfinite(state.theta)) & ~jnp.isnan(clip_rate)  # no θ drifts by an infinite velocity
    return state, Info(received, norm, clip_rate, finite, place)


def check_belongs(plan: object, posterior: Posterior) -> None:
    """Refuse a plan that was made for another posterior."""
    if not isinstance(plan, Plan):
        raise InputError("plan", type(plan).__name__, "a plan of wflmc.plan(…)")
    made = f"{plan.devices} devices, {plan.dim} parameters"
    wanted = f"{posterior.devices} devices, {posterior.dim} parameters"
    if made != wanted:
        raise InputError("plan", f"a plan for {made}", f"made for this posterior ({wanted})")


def kernel(posterior: Posterior, plan: Plan) -> Kernel:
    """Return the plan as a kernel for a custom loop; `state.round` is the number of the next round."""
    check_posterior(posterior)
    check_belongs(plan, posterior)
    rounds = jax.device_put(kernel_rounds([plan]))

    def init(key: jax.Array) -> State:
        check_key(key)
        theta = posterior.draw_initial(named(key, "init"), plan.init)
        return State(theta, jnp.zeros((), jnp.int32), plan.dynamics.draw_velocity(named(key, "velocity"), theta))

    def advance(key: jax.Array, state: State) -> tuple[State, Info]:
        check_key(key)
        if not isinstance(state, State):
            raise InputError("state", type(state).__name__, "of kernel.init or the round before: step(key, state)")
        return step(key, posterior, state, rounds[state.round])

    return Kernel(init, advance)
