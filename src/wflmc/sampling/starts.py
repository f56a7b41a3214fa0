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
        A run that goes on from where another one stopped::

            start = wflmc.sampling.Start(trace.theta[:, -1], trace.velocity)
            wflmc.sample(key, posterior, plan.from_round(100), initial=start)
    """

    position: NDArray[np.float32]
    velocity: NDArray[np.float32] | None = None

    @property
    def arrays(self) -> tuple[NDArray[np.float32], ...]:
        """The arrays that are there, for the name of a run."""
        if self.velocity is None:
            return (self.position,)
        return self.position, self.velocity

    @classmethod
    def of_state(cls, state: State) -> Self:
        """Return the states of chains as arrays of the host."""
        velocity = None if state.velocity is None else np.asarray(state.velocity)
        return cls(np.asarray(state.position), velocity)

    def state(
        self,
        round_index: int = 0,
        chains: NDArray[np.intp] | None = None,
    ) -> State:
        """Return the states of chains on the accelerator.

        Args:
            round_index: the index of their next round.
            chains: the indices of the chains; all of them by default.
        """
        chosen = slice(None) if chains is None else chains
        position = jnp.array(self.position[chosen], jnp.float32)
        velocity = None
        if self.velocity is not None:
            velocity = jnp.array(self.velocity[chosen], jnp.float32)
        return State(position, jnp.asarray(round_index, jnp.int32), velocity)


def chain_keys(key: jax.Array, chain: jax.Array, name: str = "noise") -> jax.Array:
    """Return the keys of chains of these numbers, [chain]."""
    return _fold_in_chains(named(key, name), chain)


def round_keys(keys: jax.Array, round_number: jax.Array | int) -> jax.Array:
    """Return the keys of one round, [chain], from those of the chains, [chain]."""
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
    """Return the states that chains start from; what is not given of them is drawn.

    Args:
        key: seeds starts, as that of `wflmc.sample`.
        posterior: whose prior positions are drawn from.
        plan: says how positions are drawn, and whether chains have velocities.
        chain: the numbers of the chains, [chain].
        begin: positions that are known, perhaps with velocities.

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
    """Return a start in the coordinates that chains move in.

    Args:
        initial: parameters [chain, m], or a `Start` of parameters.
        chains: how many chains there are.
        plan: whose dynamics may have a velocity.
        posterior: has the coordinates.

    Raises:
        InputError: if a shape is another one, or a number is not finite.
    """
    start = initial if isinstance(initial, Start) else Start(np.asarray(initial))
    shape = (chains, plan.dim)
    allowed = f"finite, [{chains} chains, {plan.dim} parameters]"
    position = np.asarray(start.position, np.float32)
    if position.shape != shape or not np.all(np.isfinite(position)):
        raise InputError("initial", f"shape {position.shape}", allowed)
    position = np.asarray(posterior.coordinates_of(position), np.float32)
    if start.velocity is None:
        return Start(position)
    velocity = np.asarray(start.velocity, np.float32)
    if not plan.dynamics.has_velocity:
        raise InputError("initial.velocity", "given", "None with overdamped dynamics")
    if velocity.shape != shape or not np.all(np.isfinite(velocity)):
        raise InputError("initial.velocity", f"shape {velocity.shape}", allowed)
    return Start(position, velocity)
