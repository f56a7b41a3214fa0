"""Where chains start, and the keys of their noise: by name, then chain, then round."""

from dataclasses import dataclass
from functools import partial
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.dynamics import Dynamics
from wflmc.planning.plan import Plan
from wflmc.posterior.base import Posterior
from wflmc.sampling.kernel import State
from wflmc.support.errors import InputError
from wflmc.support.keys import named


@dataclass(frozen=True, eq=False)
class Start:
    """Where chains start.

    Args:
        position: θ of every chain, [chain, m].
        velocity: v of every chain with kinetic dynamics, [chain, m]; drawn where it is
            None. It belongs to the coordinates that chains move in, as
            `Trace.velocity` does.

    Example:
        Continue from where another run stopped::

            start = wflmc.sampling.Start(trace.theta[:, -1], trace.velocity)
            wflmc.sample(key, posterior, plan.from_round(100), initial=start)
    """

    position: NDArray[np.float32]
    velocity: NDArray[np.float32] | None = None

    @property
    def arrays(self) -> tuple[NDArray[np.float32], ...]:
        """Return position and, where there is one, velocity.

        They are part of the name under which a ledger charges a run: two runs from
        different starts send different gradients, even with the same plan and key.
        """
        if self.velocity is None:
            return (self.position,)
        return self.position, self.velocity

    @classmethod
    def of_state(cls, state: State) -> Self:
        """Return the states of chains as arrays of the host.

        This waits for the accelerator. The index of the round is left out, and has to
        be stored separately.

        Args:
            state: of all chains, [chain, m].
        """
        velocity = None if state.velocity is None else np.asarray(state.velocity)
        return cls(np.asarray(state.position), velocity)

    def state(
        self,
        round_index: int = 0,
        chains: NDArray[np.intp] | None = None,
    ) -> State:
        """Return the states of chains on the accelerator, in float32.

        The arrays are copies, which a compiled block may overwrite. A velocity that is
        missing is None in the state as well; `initial_states` draws it.

        Args:
            round_index: the index of their next round.
            chains: the indices of the chains; all of them by default.
        """
        selection = slice(None) if chains is None else chains
        position = jnp.array(self.position[selection], jnp.float32)
        velocity = None
        if self.velocity is not None:
            velocity = jnp.array(self.velocity[selection], jnp.float32)
        return State(position, jnp.asarray(round_index, jnp.int32), velocity)


def chain_keys(key: jax.Array, chain: jax.Array, name: str = "noise") -> jax.Array:
    """Return the keys of chains by their numbers.

    The name is folded into the key first and the number of the chain second, so that
    a chain has the same key whichever others run beside it.

    Args:
        key: of the run.
        chain: the numbers of the chains, [chain]; equal numbers give equal keys.
        name: what is drawn with the keys: "noise", "init" or "velocity".

    Returns:
        One key for each chain, [chain].
    """
    return _fold_in_chains(named(key, name), chain)


def round_keys(keys: jax.Array, round_number: jax.Array | int) -> jax.Array:
    """Return the keys of one round from those of the chains.

    A plan that continues another counts on from the other's rounds, so that it does not
    repeat their noise.

    Args:
        keys: of the chains, [chain], from `chain_keys`.
        round_number: `plan.start` plus the index of the round.

    Returns:
        One key for each chain, [chain].
    """
    return jax.vmap(jax.random.fold_in, (0, None))(keys, round_number)


compiled_round_keys = jax.jit(round_keys)
"""`round_keys` for rounds that run on the host."""
_fold_in_chains = jax.jit(jax.vmap(jax.random.fold_in, (None, 0)))


@partial(jax.jit, static_argnames=("init",))
def _draw_positions(keys: jax.Array, posterior: Posterior, init: str) -> jax.Array:
    """Return θ[0] of every chain, [chain, m]."""
    return jax.vmap(lambda key: posterior.draw_initial(key, init))(keys)


@jax.jit
def _draw_velocities(
    keys: jax.Array,
    position: jax.Array,
    dynamics: Dynamics,
) -> jax.Array | None:
    """Return v[0] of every chain, [chain, m]; None for dynamics without one."""
    return jax.vmap(dynamics.draw_velocity)(keys, position)


def initial_states(
    key: jax.Array,
    posterior: Posterior,
    plan: Plan,
    chain: jax.Array,
    begin: State | None = None,
) -> State:
    """Return the states that chains start from; missing parts are drawn.

    Positions are drawn with the sub-key "init", velocities with "velocity", each then
    folded by the number of the chain.

    Args:
        key: seeds starts, as that of `wflmc.sample`.
        posterior: whose prior positions are drawn from.
        plan: says how positions are drawn, and whether chains have velocities.
        chain: the numbers of the chains, [chain].
        begin: positions, perhaps with velocities; None to draw both.

    Returns:
        Their states, [chain, m] each.
    """
    if begin is None:
        keys = chain_keys(key, chain, "init")
        position = _draw_positions(keys, posterior, plan.init)
        begin = State(position, jax.device_put(np.int32(0)))
    if begin.velocity is not None or not plan.dynamics.has_velocity:
        return begin
    keys = chain_keys(key, chain, "velocity")
    velocity = _draw_velocities(keys, begin.position, plan.dynamics)
    return begin._replace(velocity=velocity)


def check_start(
    initial: ArrayLike | Start,
    *,
    chains: int,
    plan: Plan,
    posterior: Posterior,
) -> Start:
    """Check where chains are to start, and convert it to the chains' coordinates.

    Users state parameters; a custom model with preconditioning or transformed sites
    moves in other coordinates. A velocity is in these coordinates already.

    Args:
        initial: parameters [chain, m], or a `Start` of parameters.
        chains: how many chains there are.
        plan: whose dynamics may have a velocity.
        posterior: has the coordinates.

    Returns:
        A start in float32; without a velocity where that is to be drawn.

    Raises:
        InputError: if a shape is another one, a number is not finite, or there is a
            velocity with overdamped dynamics.
    """
    start = initial if isinstance(initial, Start) else Start(np.asarray(initial))
    shape = (chains, plan.dim)
    requirement = f"finite, [{chains} chains, {plan.dim} parameters]"
    position = np.asarray(start.position, np.float32)
    if position.shape != shape or not np.all(np.isfinite(position)):
        raise InputError("initial", f"shape {position.shape}", requirement)
    position = np.asarray(posterior.coordinates_of(position), np.float32)
    if start.velocity is None:
        return Start(position)
    velocity = np.asarray(start.velocity, np.float32)
    if not plan.dynamics.has_velocity:
        raise InputError("initial.velocity", "given", "None with overdamped dynamics")
    if velocity.shape != shape or not np.all(np.isfinite(velocity)):
        raise InputError("initial.velocity", f"shape {velocity.shape}", requirement)
    return Start(position, velocity)
