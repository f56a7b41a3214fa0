r"""One round of wireless federated Langevin Monte Carlo: transmit, receive, update.

The update (Sec. III-A) is θ ← θ − η (K/(α K_a)) y + √β q. Which devices send, and how strongly, is a matter of
the plan; every scheme of the paper is this kernel with another plan. With kinetic dynamics gradients are asked for
half a step ahead and move a velocity, which is carried behind θ in one array. A kernel on its own:

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

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wflmc.channel import superpose
from wflmc.errors import InputError
from wflmc.keys import check_key, named
from wflmc.planning import Plan
from wflmc.posterior.summation import Sum, Total, times, two_sum


class Rounds(NamedTuple):
    """The part of a plan that acts in a round; or in many, where all but clips and noise power have a leading axis."""

    step_size: Any
    gain: Any
    weight: Any
    """[K]."""
    server_noise: Any
    """None where no round of the plan has any, so that none is drawn."""
    clip: Any
    """[K]."""
    noise_power: Any
    example_clip: Any = None
    """[K], or None where examples are not clipped one by one."""
    received: Any = None
    """Amplitude at which each device arrives over the one it meant to, [K]; None where they are equal."""
    friction: Any = None
    """γ_f of kinetic dynamics; None: overdamped."""
    downlink: Any = None
    """Standard deviation of the noise in what devices hear of θ; None where there is none."""

    def at(self, index: Any) -> Rounds:
        """One of many rounds, or a slice of them."""
        return self._replace(
            step_size=self.step_size[index],
            gain=self.gain[index],
            weight=self.weight[index],
            server_noise=None if self.server_noise is None else self.server_noise[index],
            received=None if self.received is None else self.received[index],
        )


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


class Kernel(NamedTuple):
    """init(key) -> state, and step(key, state) -> (state, info)."""

    init: Callable[[jax.Array], State]
    """A start, from a key."""
    step: Callable[[jax.Array, State], tuple[State, Info]]
    """The next round, from a key of its own and the state."""


def rounds_of(plan: Plan) -> Rounds:
    """A plan as arrays with a leading round axis."""
    return Rounds(
        step_size=plan.step_size,
        gain=plan.gain,
        weight=plan.weight,
        server_noise=plan.server_noise if np.any(plan.server_noise) else None,
        clip=plan.clips_at[0],
        noise_power=np.asarray(plan.noise_power),
        example_clip=plan.clips_at[1] if np.any(np.isfinite(plan.example_clip)) else None,
        received=plan.received,
        friction=None if plan.friction is None else np.asarray(plan.friction),
        downlink=np.asarray(plan.downlink_noise**0.5) if plan.downlink_noise else None,
    )


def with_velocity(key: jax.Array, theta: jax.Array, number: jax.Array) -> jax.Array:
    """θ[chain, m] and behind it a velocity from N(0, I), [chain, 2m]; each chain's by its number."""

    def draw(index: jax.Array, place: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(key, index), place.shape, place.dtype)

    return jnp.concatenate([theta, jax.vmap(draw)(number, theta)], axis=-1)


def ahead(state: jax.Array, now: Rounds) -> jax.Array:
    """Where gradients are asked for, [m]: at θ; with kinetic dynamics half a step ahead, at θ + (h/2) v."""
    if now.friction is None:
        return state
    theta, velocity = jnp.split(state, 2)
    return theta + now.step_size / 2 * velocity


def heard(key: jax.Array, theta: jax.Array, now: Rounds) -> jax.Array:
    """What the devices hear of the broadcast θ[m]: θ itself, or with noise of their own, [K, m]."""
    if now.downlink is None:
        return theta
    return theta + now.downlink * jax.random.normal(key, (now.weight.shape[-1], *theta.shape), theta.dtype)


def transmit(posterior: Any, theta: jax.Array, now: Rounds, key: jax.Array | None = None) -> tuple[Total, jax.Array]:
    """What reaches the server before noise, α Σ_k r_k clip(g_k), and ‖g_k‖.

    r_k = weight_k / max weight, times what the channel made of it where devices knew it badly. The key is for models
    that draw mini-batches.
    """
    amplitude = now.weight / now.weight.max()
    if now.received is not None:
        amplitude = amplitude * now.received
    add = getattr(posterior, "unrounded_sum", posterior.clipped_sum)  # a model from elsewhere may have no pairs
    total, norm = add(theta, amplitude, now.clip, key=key, example_clip=now.example_clip)
    return times(now.gain, total) if isinstance(total, Sum) else now.gain * total, norm


def receive(key: jax.Array, signal: Total, now: Rounds) -> jax.Array:
    """y = signal + z, z ~ N(0, N0 I); a pair is rounded to float32 when the noise is in it and not before."""
    if not isinstance(signal, Sum):
        return superpose(key, signal, now.noise_power)
    noisy = two_sum(signal.high, superpose(key, jnp.zeros_like(signal.high), now.noise_power))
    return noisy.high + (noisy.low + signal.low)


def update(key: jax.Array, theta: jax.Array, received: jax.Array, weight: jax.Array, now: Rounds) -> jax.Array:
    """θ − η (max weight/α) y + √β q, with the weights of the devices that really sent.

    With kinetic dynamics from (θ, v)[2m] to the next: v' = e v − (h/2)(1 + e)(max weight/α) y + √β q, and θ drifts half
    a step with v and half a step with v'. There, and not where gradients were asked for, the samples of a Gaussian
    posterior have exactly its law.
    """
    if now.friction is not None:
        return _kinetic_update(key, theta, weight.max() / now.gain * received, now)
    theta = theta - now.step_size * weight.max() / now.gain * received
    if now.server_noise is None:
        return theta
    return theta + jnp.sqrt(now.server_noise) * jax.random.normal(key, theta.shape, theta.dtype)


def _kinetic_update(key: jax.Array, state: jax.Array, gradient: jax.Array, now: Rounds) -> jax.Array:
    theta, velocity = jnp.split(state, 2)
    half, decay = now.step_size / 2, jnp.exp(-now.friction * now.step_size)
    fresh = decay * velocity - half * (1 + decay) * gradient
    if now.server_noise is not None:
        fresh = fresh + jnp.sqrt(now.server_noise) * jax.random.normal(key, theta.shape, theta.dtype)
    return jnp.concatenate([theta + half * (velocity + fresh), fresh])


def step(key: jax.Array, posterior: Any, theta: jax.Array, now: Rounds) -> tuple[jax.Array, Info]:
    """One round: transmit ∘ receive ∘ update, of θ[m] or, with kinetic dynamics, of (θ, v)[2m]."""
    draws = named(key, "batch") if getattr(posterior, "batch", None) else None
    signal, norm = transmit(posterior, heard(named(key, "downlink"), ahead(theta, now), now), now, draws)
    received = receive(named(key, "noise"), signal, now)
    theta = update(named(key, "server"), theta, received, now.weight, now)
    sends = now.weight > 0
    clipped = jnp.where(norm <= now.clip, 0.0, jnp.where(norm > now.clip, sends, jnp.nan))
    clip_rate = jnp.sum(clipped) / jnp.sum(sends)  # not a number where a norm is none: one pass over the norms
    return theta, Info(received, norm, clip_rate, jnp.all(jnp.isfinite(theta)) & ~jnp.isnan(clip_rate))


def check_posterior(posterior: object) -> None:
    """Refuse what has no gradients."""
    if not hasattr(posterior, "clipped_sum"):
        raise InputError("posterior", type(posterior).__name__, "a posterior, such as that of wflmc.posterior_from(…)")


def check_belongs(plan: object, posterior: Any) -> None:
    """Refuse a plan that was made for another posterior."""
    if not isinstance(plan, Plan):
        raise InputError("plan", type(plan).__name__, "a plan of wflmc.plan(…)")
    if plan.devices != posterior.devices or plan.dim != posterior.dim:
        raise InputError(
            "plan",
            f"a plan for {plan.devices} devices and {plan.dim} parameters",
            f"made for this posterior ({posterior.devices} devices, {posterior.dim} parameters)",
        )


def kernel(posterior: Any, plan: Plan) -> Kernel:
    """The plan as a kernel for loops of one's own; `state.round` says which round comes next."""
    check_posterior(posterior)
    check_belongs(plan, posterior)
    rounds = jax.tree.map(jnp.asarray, rounds_of(plan))

    def init(key: jax.Array) -> State:
        check_key(key)
        theta, first = posterior.draw_initial(named(key, "init"), plan.init), jnp.zeros((), jnp.int32)
        if plan.friction is None:
            return State(theta, first)
        return State(theta, first, jax.random.normal(named(key, "velocity"), theta.shape, theta.dtype))

    def advance(key: jax.Array, state: State) -> tuple[State, Info]:
        check_key(key)
        if not isinstance(state, State):
            raise InputError("state", type(state).__name__, "of kernel.init or the round before: step(key, state)")
        now = rounds.at(state.round)
        if plan.friction is None:
            theta, info = step(key, posterior, state.theta, now)
            return State(theta, state.round + 1), info
        if state.velocity is None:
            raise InputError("state.velocity", None, "given with kinetic dynamics; kernel.init draws one")
        both, info = step(key, posterior, jnp.concatenate([state.theta, state.velocity]), now)
        theta, velocity = jnp.split(both, 2)
        return State(theta, state.round + 1, velocity), info

    return Kernel(init, advance)
