"""A chain whose noise protects for real: drawn exactly, on a lattice, from the operating system's entropy.

Noise of a simulation is float32 and has few values: who sees draws and knows all rows but one can exclude what that one
is not (Mironov 2012). Here sums of gradients are rounded to a lattice before a discrete Gaussian is added
(`wflmc.privacy.lattice`).
"""

import secrets

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.planning import Plan, Rounds
from wflmc.posterior import Posterior
from wflmc.privacy import Ledger
from wflmc.privacy.lattice import Lattice
from wflmc.sampling import Trace, default_memory, kernel_rounds, transmit
from wflmc.sums.devices import Sum


@jax.jit
def _sent(posterior: Posterior, theta: jax.Array, now: Rounds) -> Sum:
    return transmit(posterior, theta, now).total


def protected_chain(
    posterior: Posterior, plan: Plan, start: NDArray[np.float64], ledger: Ledger | None = None
) -> Trace:
    """Run one chain over an ideal link, as `wflmc.sample` would; losses are those of the plan.

    Sums come as pairs, whose rounding the clips of the plan make up for; rounding to the lattice is paid for by noise
    that is wider by as much.

    Args:
        posterior: of the private rows.
        plan: of one chain.
        start: the parameters to begin at, [m]; they must tell nothing of the rows that is not paid for.
        ledger: charged before anything is drawn.
    """
    if ledger is not None:
        ledger.charge(f"chain-{secrets.token_hex(16)}", plan.start, plan.loss)
    model = posterior.on_accelerator(1, default_memory(), by_example=bool(np.isfinite(plan.example_clip).any()))
    rounds = jax.device_put(kernel_rounds([plan]))
    clip, generator = plan.clips_at[0], np.random.default_rng(secrets.randbits(128))
    half = plan.privacy.half_change(*plan.clips_at)
    theta = np.asarray(posterior.coordinates_of(start), dtype=float)
    kept = []
    for number in range(len(plan.rounds)):
        gain, weight = float(plan.gain[number]), plan.weight[number]
        amplitude = gain * weight / weight.max()
        norm, total = np.zeros(plan.devices), float(amplitude @ clip)
        lattice = Lattice.fitted(plan.noise_power**0.5, 2 * amplitude * half, norm, total, plan.dim)
        received = lattice.noisy(_sent(model, jnp.asarray(theta, jnp.float32), rounds[number]).double)
        theta = theta - plan.step_size[number] * (weight.max() / gain) * received
        theta = theta + np.sqrt(plan.server_noise[number]) * generator.standard_normal(plan.dim)
        kept.append(theta)
    draws = posterior.parameters(np.array(kept[plan.burn_in :]))[None]
    return Trace(draws, np.full(draws.shape[:2], np.nan), np.full(plan.burn_in, np.nan), None, (plan,))
