r"""One round of wireless federated Langevin Monte Carlo: transmit, receive, update.

The update (Sec. III-A) is θ ← θ − η (K/(α K_a)) y + √β q. Which devices send, and how
strongly, is a matter of the plan; every scheme of the paper is this kernel with another
plan. With kinetic dynamics the state has a velocity as well (`wflmc.dynamics`). A
kernel on its own:

>>> import jax, wflmc
>>> posterior = wflmc.gaussian_regression(jax.random.key(0), devices=3, examples=30)
>>> link = wflmc.Link(wflmc.channel.static())
>>> plan = wflmc.plan(posterior, link, wflmc.Privacy(), step_size=1e-3, burn_in=0,
...                   samples=10)
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
    """Clipping thresholds that devices apply, [K]."""
    noise_power: Any
    """N0."""
    dynamics: Dynamics
    """How the server moves a chain by a received gradient."""
    example_clip: Any = None
    """Clipping thresholds of single examples, [K]; None where these are not clipped."""
    downlink_std: Any = None
    """Standard deviation of the noise in what devices receive of θ; None where there is
    none."""


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
        """Return the part of the state that dynamics move: θ, and v where there is one.

        The index of the round is left out, as an update needs no count; `update` puts
        the two together again.
        """
        return PhasePoint(self.position, self.velocity)


CHAIN_AXES = State(0, None, 0)  # type: ignore[arg-type]
"""Axes of the states of many chains, for `jax.vmap`: position and velocity are
[chain, m], and all chains share the index of the round."""


class Info(NamedTuple):
    """What is reported of a round."""

    received: jax.Array
    """y[m], all that the server learns of the devices."""
    norm: jax.Array
    """‖g_k‖ before clipping, [K]."""
    clip_rate: jax.Array
    """Fraction of the transmitting devices whose gradient was clipped."""
    finite: jax.Array
    """Whether θ is still finite and no gradient has a norm that is nan; a compiled loop
    cannot raise, the host does."""
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
    """Return the rounds of a plan with their constants, as the kernel takes them.

    This is what custom loops slice by round and pass to `step`, `transmit`, `receive`
    and `update`; all chains share it. The clipping thresholds are those that devices
    clip at, `Plan.clips_at`, which lie a rounding error below the plan's.

    Args:
        plan: the rounds to run, with their privacy and dynamics.

    Returns:
        Rounds [S, ...] and constants, as NumPy arrays on the host.
    """
    return shared_rounds(host_rounds([plan])[0])


def zipped_kernel_rounds(plans: Sequence[Plan]) -> KernelRounds:
    """Return the rounds of several plans, one for each chain, as the kernel takes them.

    The plans must agree in their rounds, devices and dynamics. An array that only some
    of them need, such as the server's noise, is filled with neutral values in the
    others.

    Args:
        plans: one for each chain, in the order of the chains.

    Returns:
        Rounds as [S, plan, ...] and constants as [plan, ...], in float32 on the default
        accelerator.
    """
    return stacked_rounds(host_rounds(plans))


def host_rounds(plans: Sequence[Plan]) -> list[KernelRounds]:
    """Return the rounds of plans that are to run together, as NumPy arrays.

    An array that no plan needs, such as the server's noise, is None in all of them; one
    that any plan needs is an array in all of them, so that the plans have one
    structure and can be stacked. A plan that occurs several times is converted once.

    Args:
        plans: with equal numbers of rounds and devices.

    Returns:
        The rounds and constants of every plan, in the order of the plans.
    """
    different_plans = distinct_plans(plans)
    needs = _ArrayNeeds.of(different_plans)
    by_plan = {id(plan): _plan_on_host(plan, needs) for plan in different_plans}
    return [by_plan[id(plan)] for plan in plans]


class _ArrayNeeds(NamedTuple):
    """Which optional arrays plans that run together need."""

    server_noise: bool
    received: bool
    example_clip: bool
    downlink_std: bool

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> "_ArrayNeeds":
        """Return what any of the plans needs."""
        return cls(
            server_noise=any(np.any(plan.server_noise) for plan in plans),
            received=any(plan.received is not None for plan in plans),
            example_clip=any(np.isfinite(plan.example_clip).any() for plan in plans),
            downlink_std=any(plan.downlink_noise for plan in plans),
        )


def _plan_on_host(plan: Plan, needs: _ArrayNeeds) -> KernelRounds:
    """Return the rounds and constants of one plan, with the arrays that are needed."""
    received = plan.received
    if received is None and needs.received:
        received = np.ones_like(plan.weight)
    rounds = replace(
        plan.rounds,
        server_noise=plan.server_noise if needs.server_noise else None,
        received=received,
    )
    clip, example_clip = plan.clips_at
    constants = KernelConstants(
        clip=clip,
        noise_power=plan.noise_power,
        dynamics=plan.dynamics,
        example_clip=example_clip if needs.example_clip else None,
        downlink_std=plan.downlink_noise**0.5 if needs.downlink_std else None,
    )
    return KernelRounds(rounds, constants)


ALL_ROUNDS = slice(None)
"""The index of every round of a plan."""


def shared_rounds(host: KernelRounds, index: RoundIndex = ALL_ROUNDS) -> KernelRounds:
    """Return rounds of a plan that all chains share.

    Arrays remain those of the host; a compiled loop brings them to the accelerator when
    it is called.

    Args:
        host: one plan, from `host_rounds`.
        index: which rounds, as NumPy indexes an axis; all of them by default.

    Returns:
        Rounds [round, ...] and constants, without an axis of chains.
    """
    constants: KernelConstants = jax.tree.map(np.asarray, host.constants)
    return KernelRounds(host.rounds[index], constants)


def stacked_rounds(
    hosts: Sequence[KernelRounds],
    index: RoundIndex = ALL_ROUNDS,
) -> KernelRounds:
    """Return rounds of several plans, one for each chain, as stacked float32 arrays.

    The copies lie on the default accelerator when this returns.

    Args:
        hosts: plans of one structure, from `host_rounds`, in the order of the chains.
        index: which rounds, as NumPy indexes an axis; all of them by default.

    Returns:
        Rounds [round, plan, ...] and constants [plan, ...].
    """

    def stack_rounds(*by_plan: ArrayLike) -> jax.Array:
        selected = [np.asarray(values)[index] for values in by_plan]
        stacked = _stack_float32(selected)
        return jnp.moveaxis(stacked, 0, 1)

    def stack_constants(*by_plan: ArrayLike) -> jax.Array:
        arrays = [np.asarray(values) for values in by_plan]
        return _stack_float32(arrays)

    rounds_by_plan = [host.rounds for host in hosts]
    constants_by_plan = [host.constants for host in hosts]
    rounds: Rounds = jax.tree.map(stack_rounds, *rounds_by_plan)
    constants = jax.tree.map(stack_constants, *constants_by_plan)
    return KernelRounds(rounds, constants)


def _stack_float32(values: Sequence[NDArray[np.generic]]) -> jax.Array:
    """Stack arrays along a new first axis, on the accelerator."""
    return jax.device_put(np.stack(values, dtype=np.float32, casting="same_kind"))


def broadcast(
    key: jax.Array,
    theta: jax.Array,
    current_round: KernelRounds,
) -> jax.Array:
    """Return what the devices receive when the server broadcasts θ.

    Without downlink noise this is θ itself, and the key is not used. With it, device k
    receives θ + σ ξ_k with an independent standard normal ξ_k, σ being the plan's
    `downlink_std`.

    Args:
        key: of the downlink noise.
        theta: θ[m].
        current_round: one round of a plan.

    Returns:
        θ[m], or [K, m] where every device receives a different vector.
    """
    downlink_std = current_round.constants.downlink_std
    if downlink_std is None:
        return theta
    devices = current_round.rounds.weight.shape[-1]
    shape = (devices, *theta.shape)
    return theta + downlink_std * jax.random.normal(key, shape, theta.dtype)


def transmit(
    posterior: SumsGradients,
    theta: jax.Array,
    current_round: KernelRounds,
    key: jax.Array | None = None,
) -> ClippedSum:
    """Return what reaches the server before noise, α Σ_k r_k clip(g_k), and all ‖g_k‖.

    The amplitude of a device is r_k = weight_k / max weight, times the factor that the
    channel left where devices did not know it exactly; devices of weight 0 do not
    transmit. Gradients longer than the clipping threshold are shortened to it.

    Args:
        posterior: computes the devices' clipped gradients.
        theta: what devices have received, θ[m] or [K, m].
        current_round: one round of a plan.
        key: of mini-batches; only models that draw these need it.

    Returns:
        The sum [m], not yet rounded to float32, and the norms [K] before clipping.
    """
    rounds = current_round.rounds
    constants = current_round.constants
    amplitude = rounds.weight / rounds.weight.max()
    if rounds.received is not None:
        amplitude = amplitude * rounds.received
    total, norms = posterior.unrounded_sum(
        theta,
        amplitude,
        constants.clip,
        key=key,
        example_clip=constants.example_clip,
    )
    return ClippedSum(total.scaled(rounds.gain), norms)


def receive(key: jax.Array, signal: Sum, current_round: KernelRounds) -> jax.Array:
    """Return y = signal + z with z ~ N(0, N0 I): the superposition and channel noise.

    The sum is rounded to float32 when the noise is in it and not before. The proof
    relies on this order (docs/explanation/privacy.md, Sums in floating point).

    Args:
        key: of the noise z.
        signal: the sum [m] of `transmit`.
        current_round: one round of a plan, which has the noise power N0.

    Returns:
        y[m].
    """
    zeros = jnp.zeros_like(signal.high)
    noise = superpose(key, zeros, current_round.constants.noise_power)
    return signal.plus_noise(noise)


def update(
    key: jax.Array,
    state: State,
    received: jax.Array,
    weight: jax.Array,
    current_round: KernelRounds,
) -> State:
    """Return the state after y is received: θ − η (max weight/α) y + √β q.

    That is the overdamped update. With kinetic dynamics the velocity moves by y and the
    server's noise, and θ drifts with it (`wflmc.dynamics`). Where the plan has no
    server noise, β = 0, the key is not used.

    Args:
        key: of the server's noise q.
        state: before the round.
        received: y[m].
        weight: of the devices that really transmitted, [K], zero for all others.
        current_round: one round of a plan.

    Returns:
        The state of the next round.
    """
    rounds = current_round.rounds
    noise = None
    if rounds.server_noise is not None:
        position = state.position
        standard_normal = jax.random.normal(key, position.shape, position.dtype)
        noise = jnp.sqrt(rounds.server_noise) * standard_normal
    moved = current_round.constants.dynamics.step(
        state.phase,
        received,
        noise=noise,
        step_size=rounds.step_size,
        scale=weight.max(),
        gain=rounds.gain,
    )
    return State(moved.position, state.round + 1, moved.velocity)


def step(
    key: jax.Array,
    posterior: SumsGradients,
    state: State,
    current_round: KernelRounds,
) -> tuple[State, Info]:
    """Run one round of one chain: transmit ∘ receive ∘ update.

    Sub-keys are derived by name: batch, downlink, noise and server. The function can be
    compiled and mapped over chains; it never raises for numbers that are not finite but
    reports them in `Info.finite`.

    Args:
        key: of this round and chain alone.
        posterior: computes the devices' clipped gradients.
        state: before the round.
        current_round: one round of a plan.

    Returns:
        The state after the round, and what is reported of it.
    """
    batch_key = named(key, "batch") if posterior.batch else None
    gradient_position = current_round.constants.dynamics.gradient_position(
        state.phase,
        current_round.rounds.step_size,
    )
    downlink_key = named(key, "downlink")
    device_theta = broadcast(downlink_key, gradient_position, current_round)
    signal, norm = transmit(posterior, device_theta, current_round, batch_key)
    received = receive(named(key, "noise"), signal, current_round)
    weight = current_round.rounds.weight
    state = update(named(key, "server"), state, received, weight, current_round)
    clip_rate = _clip_rate(norm, current_round)
    # An infinite velocity needs no check of its own: θ drifts with it.
    finite = jnp.all(jnp.isfinite(state.position)) & ~jnp.isnan(clip_rate)
    return state, Info(received, norm, clip_rate, finite, gradient_position)


def _clip_rate(norm: jax.Array, current_round: KernelRounds) -> jax.Array:
    """Return the fraction of transmitting devices that clip; nan where a norm is nan.

    So one pass over the norms finds both.
    """
    clip = current_round.constants.clip
    transmits = current_round.rounds.weight > 0
    beyond = jnp.where(norm > clip, transmits, jnp.nan)
    clipped = jnp.where(norm <= clip, 0.0, beyond)
    return jnp.sum(clipped) / jnp.sum(transmits)


def check_belongs(plan: object, posterior: Posterior) -> None:
    """Refuse a plan that was computed for a posterior of another size.

    Only the numbers of devices and parameters are compared. A plan for other data of
    the same size passes: studies run one plan on many data sets.

    Args:
        plan: the argument that a caller passed as a plan.
        posterior: that the plan is to be run on.

    Raises:
        InputError: if it is no `Plan`, or its sizes differ from the posterior's.
    """
    if not isinstance(plan, Plan):
        raise InputError("plan", type(plan).__name__, "a plan of wflmc.plan(…)")
    plan_sizes = f"{plan.devices} devices, {plan.dim} parameters"
    posterior_sizes = f"{posterior.devices} devices, {posterior.dim} parameters"
    if plan_sizes != posterior_sizes:
        requirement = f"made for this posterior ({posterior_sizes})"
        raise InputError("plan", f"a plan for {plan_sizes}", requirement)


def kernel(posterior: Posterior, plan: Plan) -> Kernel:
    """Return a plan as a pair of functions for a custom loop.

    `init(key)` draws a start from what the plan names as the initial law, and
    `step(key, state)` runs the round with the index `state.round`, which it increases.
    Both are pure, so that `jax.jit`, `jax.vmap` and `jax.lax.scan` apply to them. No
    budget is checked and no ledger is charged: that is the caller's part. So is
    stopping after `len(plan.rounds)` rounds: further steps would silently run the last
    round again, as JAX limits indices to an array's range.

    Args:
        posterior: what is sampled from.
        plan: the rounds, computed for this posterior.

    Returns:
        The two functions; the module's docstring shows their use.

    Raises:
        InputError: if the plan is not for this posterior; from the functions, if a key
            or a state is of another type.
    """
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
