"""A chain whose noise protects for real.

It is drawn exactly, on a lattice, from the operating system's entropy. Noise of a
simulation is float32 and has few values: an attacker who sees draws and knows all rows
but one can exclude values of that one (Mironov 2012). Here sums of gradients are
rounded to a lattice before a discrete Gaussian is added (`wflmc.privacy.lattice`).
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.dynamics import PhasePoint
from wflmc.planning import Plan
from wflmc.posterior import Posterior
from wflmc.privacy import Ledger
from wflmc.privacy.lattice import Lattice
from wflmc.sampling import KernelRounds, Trace, default_memory, kernel_rounds, transmit
from wflmc.sampling.loop import (
    HostInfo,
    HostRound,
    charge_nothing,
    run_rounds,
    single_rounds,
)
from wflmc.sampling.noise import LatticeNoise
from wflmc.sums.devices import Sum

Array = NDArray[np.float64]
Point = PhasePoint[Array]


def protected_chain(
    posterior: Posterior,
    plan: Plan,
    start: NDArray[np.float64],
    ledger: Ledger | None = None,
) -> Trace:
    """Run one chain over an ideal link with noise that protects real data.

    The chain has the law of one that `wflmc.sample` runs, and its privacy losses are
    those of the plan. Sums come as pairs of floats, whose rounding the clips of the
    plan make up for; rounding to the lattice is paid for by noise that is wider by as
    much.

    Args:
        posterior: of the private rows.
        plan: of one overdamped chain.
        start: the parameters to begin at, [m]; they must tell nothing of the rows that
            is not paid for.
        ledger: charged for all rounds before anything is drawn; None where they are
            paid for already.

    Returns:
        The kept draws, [1, draw, m]. How often gradients were clipped is nan: that is
        about the rows, and no loss covers it.

    Raises:
        OverspendError: if the ledger does not leave enough for the plan.
    """
    if ledger is not None:
        ledger.charge(f"chain-{secrets.token_hex(16)}", plan.start, plan.loss)
    position = np.asarray(posterior.coordinates_of(start), dtype=float)
    positions: list[Array] = []

    def keep(block: slice, point: Point, info: HostInfo[Array]) -> None:
        positions.append(point.position)

    run_rounds(
        PhasePoint(position),
        single_rounds(0, len(plan.rounds)),
        transport=_local_sum(posterior, plan),
        charge=charge_nothing,
        advance=HostRound(
            receive=LatticeNoise(_LatticeOfRound.of(plan)),
            update=_Float64Update.of(plan),
        ),
        keep=keep,
    )
    kept_positions = np.array(positions[plan.burn_in :])
    draws = posterior.parameters(kept_positions)[None]
    return Trace(
        theta=draws,
        clip_rate=np.full(draws.shape[:2], np.nan),
        burn_in_clip_rate=np.full(plan.burn_in, np.nan),
        warmup=None,
        plans=(plan,),
    )


def _local_sum(posterior: Posterior, plan: Plan) -> Callable[[slice, Point], Array]:
    """Return the transport: the clipped sum of all rows, added up here as pairs."""
    by_example = bool(np.isfinite(plan.example_clip).any())
    model = posterior.on_accelerator(1, default_memory(), by_example=by_example)
    rounds = jax.device_put(kernel_rounds(plan))

    def transport(block: slice, point: Point) -> Array:
        step_size = float(plan.step_size[block.start])
        position = plan.dynamics.gradient_position(point, step_size)
        float32_position = jnp.asarray(position, jnp.float32)
        return _transmitted(model, float32_position, rounds[block.start]).double

    return transport


@jax.jit
def _transmitted(
    posterior: Posterior, position: jax.Array, kernel_round: KernelRounds
) -> Sum:
    """Return the sum that reaches the server, [m], as a pair."""
    return transmit(posterior, position, kernel_round).total


@dataclass(frozen=True, eq=False)
class _LatticeOfRound:
    """The lattice that a round's noise lies on.

    Args:
        plan: of the chain.
        clip: where clipping of a device's gradient acts, [K].
        half_change: half of what a neighbour changes in the gradient of a device, [K].
    """

    plan: Plan
    clip: Array
    half_change: Array

    @classmethod
    def of(cls, plan: Plan) -> "_LatticeOfRound":
        """Return the lattices of a plan."""
        clip, example_clip = plan.clips_at
        half_change = plan.privacy.half_change(clip, example_clip)
        return cls(plan, clip, half_change)

    def __call__(self, round_index: int) -> Lattice:
        """Return the finest lattice for the amplitudes of a round."""
        plan = self.plan
        weight = plan.weight[round_index]
        gain = float(plan.gain[round_index])
        amplitude = gain * weight / weight.max()
        change = 2 * amplitude * self.half_change
        # No norm: the sum arrives as a pair, and no signal is rounded to float32.
        return Lattice.fitted(
            deviation=plan.noise_power**0.5,
            change=change,
            norm=np.zeros(plan.devices),
            total=float(amplitude @ self.clip),
            dim=plan.dim,
        )


@dataclass(frozen=True, eq=False)
class _Float64Update:
    """The update of the plan's dynamics in float64, with noise of the server's own."""

    plan: Plan
    generator: np.random.Generator

    @classmethod
    def of(cls, plan: Plan) -> "_Float64Update":
        """Return a plan's update, with noise seeded by the operating system."""
        return cls(plan, np.random.default_rng(secrets.randbits(128)))

    def __call__(
        self,
        round_index: int,
        point: Point,
        signal: Array,
        received: Array,
    ) -> Point:
        """Return where the chain is after a round."""
        plan = self.plan
        deviation = np.sqrt(plan.server_noise[round_index])
        noise = deviation * self.generator.standard_normal(plan.dim)
        return plan.dynamics.step(
            point,
            received,
            noise=noise,
            step_size=float(plan.step_size[round_index]),
            scale=float(plan.weight[round_index].max()),
            gain=float(plan.gain[round_index]),
        )
