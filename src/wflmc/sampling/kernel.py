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
>>> int(state.round), state.position.shape
(1, (5,))
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.channel import superpose
from wflmc.dynamics import Dynamics, PhasePoint
from wflmc.planning.plan import Plan, RoundIndex, Rounds, distinct_plans
from wflmc.posterior.base import Posterior, SumsGradients, check_posterior
from wflmc.sums.devices import ClippedSum, Sum
from wflmc.support.errors import InputError
from wflmc.support.keys import check_key, named


class KernelConstants(NamedTuple):
    """What is the same in all rounds of a plan.

    Arrays are NumPy's on the host and JAX's in compiled rounds.
    """

    clip: Any
    """[K], where clipping acts."""
    noise_power: Any
    """N0."""
    dynamics: Dynamics
    example_clip: Any = None
    """[K], or None where examples are not clipped one by one."""
    downlink_std: Any = None
    """Standard deviation of the noise in what devices receive of θ; None where there is none."""


class State(NamedTuple):
    """What a chain carries from round to round."""

    position: jax.Array
    """θ[m], the parameters in the coordinates that chains move in."""
    round: jax.Array
    """The index of the next round, from 0."""
    velocity: jax.Array | None = None
    """v[m] of kinetic dynamics."""

    @property
    def phase(self) -> PhasePoint[jax.Array]:
        """The part of the state that dynamics move."""
        return PhasePoint(self.position, self.velocity)


CHAIN_AXES = State(0, None, 0)  # type: ignore[arg-type]
"""Axes of the states of many chains, [chain, m] each, for `jax.vmap`."""


class Info(NamedTuple):
    """What is reported of a round."""

    received: jax.Array
    """y[m], all that the server learns of the devices."""
    norm: jax.Array
    """‖g_k‖ before clipping, [K]."""
    clip_rate: jax.Array
    """Fraction of the transmitting devices whose gradient was clipped."""
    finite: jax.Array
    """Whether θ and all gradients are still finite; a compiled loop cannot raise, the
    host does."""
    gradient_position: jax.Array
    """Where gradients were taken, [m]: θ, or half a drift ahead with kinetic
    dynamics."""


class Kernel(NamedTuple):
    """init(key) -> state, and step(key, state) -> (state, info)."""

    init: Callable[[jax.Array], State]
    """A start, from a key."""
    step: Callable[[jax.Array, State], tuple[State, Info]]
    """The next round, from a key of its own and the state."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class KernelRounds:
    """Rounds of a plan with their constants, as the kernel takes them.

    It is a pytree, which can be sliced by round.
    """

    rounds: Rounds
    """What changes from round to round."""
    constants: KernelConstants
    """What is the same in all of them."""

    def __len__(self) -> int:
        """Return the number of rounds."""
        return len(self.rounds)

    def __getitem__(self, index: RoundIndex) -> "KernelRounds":
        """Return one of the rounds, or some of them."""
        return replace(self, rounds=self.rounds[index])


def kernel_rounds(plan: Plan) -> KernelRounds:
    """Return the rounds of a plan with their constants, as the kernel takes them."""
    return shared_rounds(host_rounds([plan])[0])


def zipped_kernel_rounds(plans: Sequence[Plan]) -> KernelRounds:
    """Return the rounds of several plans, one for each chain, as the kernel takes them.

    Returns:
        Rounds as [S, plan, ...], their constants as [plan, ...].
    """
    return stacked_rounds(host_rounds(plans))


def host_rounds(plans: Sequence[Plan]) -> list[KernelRounds]:
    """Return the rounds of plans that are to run together, as NumPy arrays.

    An array that no plan needs, such as the server's noise, is None in all of them;
    one that some plan needs is there in all of them.
    """
    different_plans = distinct_plans(plans)
    noisy_server = any(np.any(plan.server_noise) for plan in different_plans)
    mismatched = any(plan.received is not None for plan in different_plans)
    noisy_downlink = any(plan.downlink_noise for plan in different_plans)
    by_example = any(np.isfinite(plan.example_clip).any() for plan in different_plans)
    by_plan = {}
    for plan in different_plans:
        received = plan.received
        if received is None and mismatched:
            received = np.ones_like(plan.weight)
        rounds = replace(
            plan.rounds,
            server_noise=plan.server_noise if noisy_server else None,
            received=received,
        )
        clip, example_clip = plan.clips_at
        constants = KernelConstants(
            clip=clip,
            noise_power=plan.noise_power,
            dynamics=plan.dynamics,
            example_clip=example_clip if by_example else None,
            downlink_std=plan.downlink_noise**0.5 if noisy_downlink else None,
        )
        by_plan[id(plan)] = KernelRounds(rounds, constants)
    return [by_plan[id(plan)] for plan in plans]


ALL_ROUNDS = slice(None)


def shared_rounds(host: KernelRounds, index: RoundIndex = ALL_ROUNDS) -> KernelRounds:
    """Return some rounds of the one plan that all chains share."""
    constants: KernelConstants = jax.tree.map(np.asarray, host.constants)
    return KernelRounds(host.rounds[index], constants)


def stacked_rounds(
    hosts: Sequence[KernelRounds],
    index: RoundIndex = ALL_ROUNDS,
) -> KernelRounds:
    """Return some rounds of plans, one for each chain: [round, plan, ...]."""

    def stack_rounds(*values: ArrayLike) -> jax.Array:
        chosen = [np.asarray(value)[index] for value in values]
        return jnp.moveaxis(_stack_float32(chosen), 0, 1)

    def stack_constants(*values: ArrayLike) -> jax.Array:
        return _stack_float32([np.asarray(value) for value in values])

    rounds: Rounds = jax.tree.map(stack_rounds, *(host.rounds for host in hosts))
    constants = jax.tree.map(stack_constants, *(host.constants for host in hosts))
    return KernelRounds(rounds, constants)


def _stack_float32(values: Sequence[NDArray[np.generic]]) -> jax.Array:
    """Stack arrays along a new first axis, on the accelerator."""
    return jax.device_put(np.stack(values, dtype=np.float32, casting="same_kind"))


def broadcast(key: jax.Array, theta: jax.Array, now: KernelRounds) -> jax.Array:
    """Return what the devices receive of the broadcast θ[m]: θ itself, or with downlink noise, [K, m]."""
    if now.constants.downlink_std is None:
        return theta
    shape = (now.rounds.weight.shape[-1], *theta.shape)
    return theta + now.constants.downlink_std * jax.random.normal(
        key, shape, theta.dtype
    )


def transmit(
    posterior: SumsGradients,
    theta: jax.Array,
    now: KernelRounds,
    key: jax.Array | None = None,
) -> ClippedSum:
    """What reaches the server before noise, α Σ_k r_k clip(g_k), and ‖g_k‖.

    r_k = weight_k / max weight, times what the channel made of it where devices knew it badly. The key is for models
    that draw mini-batches.
    """
    amplitude = now.rounds.weight / now.rounds.weight.max()
    if now.rounds.received is not None:
        amplitude = amplitude * now.rounds.received
    clip, example_clip = now.constants.clip, now.constants.example_clip
    total, norms = posterior.unrounded_sum(
        theta, amplitude, clip, key=key, example_clip=example_clip
    )
    return ClippedSum(total.scaled(now.rounds.gain), norms)


def receive(key: jax.Array, signal: Sum, now: KernelRounds) -> jax.Array:
    """y = signal + z, z ~ N(0, N0 I); the sum is rounded to float32 when the noise is in it and not before."""
    noise = superpose(key, jnp.zeros_like(signal.high), now.constants.noise_power)
    return signal.plus_noise(noise)


def update(
    key: jax.Array,
    state: State,
    received: jax.Array,
    weight: jax.Array,
    now: KernelRounds,
) -> State:
    """Return the state after y[m] is received: θ − η (max weight/α) y + √β q for overdamped dynamics.

    The weights are those of the devices that really transmitted. With kinetic dynamics the velocity moves by y and the
    server's noise, and θ drifts with it (`wflmc.dynamics`).
    """
    noise = None
    if now.rounds.server_noise is not None:
        position = state.position
        standard_normal = jax.random.normal(key, position.shape, position.dtype)
        noise = jnp.sqrt(now.rounds.server_noise) * standard_normal
    moved = now.constants.dynamics.step(
        state.phase,
        received,
        noise=noise,
        step_size=now.rounds.step_size,
        scale=weight.max(),
        gain=now.rounds.gain,
    )
    return State(moved.position, state.round + 1, moved.velocity)


def step(
    key: jax.Array,
    posterior: SumsGradients,
    state: State,
    now: KernelRounds,
) -> tuple[State, Info]:
    """Run one round: transmit ∘ receive ∘ update."""
    batch_key = named(key, "batch") if posterior.batch else None
    gradient_position = now.constants.dynamics.gradient_position(
        state.phase,
        now.rounds.step_size,
    )
    reached = broadcast(named(key, "downlink"), gradient_position, now)
    signal, norm = transmit(posterior, reached, now, batch_key)
    received = receive(named(key, "noise"), signal, now)
    state = update(named(key, "server"), state, received, now.rounds.weight, now)
    clip_rate = _clip_rate(norm, now)
    # An infinite velocity needs no check of its own: θ drifts with it.
    finite = jnp.all(jnp.isfinite(state.position)) & ~jnp.isnan(clip_rate)
    return state, Info(received, norm, clip_rate, finite, gradient_position)


def _clip_rate(norm: jax.Array, now: KernelRounds) -> jax.Array:
    """Return the fraction of transmitting devices that clip; nan where a norm is nan.

    So one pass over the norms finds both.
    """
    clip = now.constants.clip
    transmits = now.rounds.weight > 0
    beyond = jnp.where(norm > clip, transmits, jnp.nan)
    clipped = jnp.where(norm <= clip, 0.0, beyond)
    return jnp.sum(clipped) / jnp.sum(transmits)


def check_belongs(plan: object, posterior: Posterior) -> None:
    """Refuse a plan that was made for another posterior."""
    if not isinstance(plan, Plan):
        raise InputError("plan", type(plan).__name__, "a plan of wflmc.plan(…)")
    made = f"{plan.devices} devices, {plan.dim} parameters"
    wanted = f"{posterior.devices} devices, {posterior.dim} parameters"
    if made != wanted:
        raise InputError(
            "plan", f"a plan for {made}", f"made for this posterior ({wanted})"
        )


def kernel(posterior: Posterior, plan: Plan) -> Kernel:
    """Return the plan as a kernel for a custom loop; `state.round` is the number of the next round."""
    check_posterior(posterior)
    check_belongs(plan, posterior)
    rounds = jax.device_put(kernel_rounds(plan))

    def init(key: jax.Array) -> State:
        check_key(key)
        position = posterior.draw_initial(named(key, "init"), plan.init)
        velocity = plan.dynamics.draw_velocity(named(key, "velocity"), position)
        return State(position, jnp.zeros((), jnp.int32), velocity)

    def advance(key: jax.Array, state: State) -> tuple[State, Info]:
        check_key(key)
        if not isinstance(state, State):
            raise InputError(
                "state",
                type(state).__name__,
                "of kernel.init or the round before: step(key, state)",
            )
        return step(key, posterior, state, rounds[state.round])

    return Kernel(init, advance)
