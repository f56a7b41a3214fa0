"""How often intervals hold what they should: of one trace by the exact posterior, and over many simulated data sets.

Intervals of level p that know all of their noise hold the parameters in a share p of all experiments. Simulation-based
calibration draws parameters from the prior and data from the model, runs the plan, and counts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from wflmc.evaluation.conditioning import NoiseAware, central_interval, noise_aware
from wflmc.planning.plan import Plan, Rounds
from wflmc.posterior import Gaussian, GaussianPosterior
from wflmc.sampling import Trace
from wflmc.sampling.kernel import State, kernel_rounds, step
from wflmc.sampling.runner import CHAINS, chain_keys, starts
from wflmc.sampling.transcript import Transcript, reception_noise
from wflmc.support.errors import InputError
from wflmc.support.keys import host_generator

Array = NDArray[np.float64]
Interval = tuple[Array, Array]

LEVELS = (0.9, 0.5)
"""Of the intervals that are looked at."""


class Coverage(NamedTuple):
    """What the intervals of a chain and noise-aware ones hold over simulated data sets, and how wide they are."""

    chain: Array
    """Share of data sets and parameters that the chain's intervals hold, [level]."""
    noise_aware: Array
    """The same of noise-aware intervals, [level]."""
    error: Array
    """Standard error of the latter, over data sets, [level]."""
    chain_width: Array
    """Mean width over that of the exact posterior's intervals, [level]."""
    noise_aware_width: Array
    """[level]."""
    trace: Trace
    """Of all data sets, a chain each, with the transcript."""
    result: NoiseAware
    truth: Array
    """The parameters that data were drawn with, [data set, m]."""


def held(law: Gaussian, interval: Interval) -> float:
    """Return the probability by a law that intervals hold a parameter, the mean over chains and parameters."""
    lower, upper = (ndtr((end - law.mean) / np.sqrt(np.diagonal(law.covariance))) for end in interval)
    return float(np.mean(upper - lower))


def simulated_coverage(
    key: jax.Array, posterior: GaussianPosterior, plans: Sequence[Plan], data_sets: int = 500, moments: Any = None
) -> Coverage:
    """Run plans on data sets that are drawn from a linear model, one chain each, and count what intervals hold.

    Args:
        key: seeds parameters, data, starts and noise.
        posterior: gives the features, the devices and the prior; its outcomes are not used.
        plans: overdamped ones, which data sets take in turns.
        moments: public ones; those of the features by default.
    """
    if not isinstance(posterior, GaussianPosterior) or plans[0].dynamics.has_velocity:
        raise InputError("posterior", type(posterior).__name__, "a linear regression with overdamped plans")
    chosen, number = [plans[i % len(plans)] for i in range(data_sets)], jnp.arange(data_sets)
    truth = jax.vmap(posterior.draw_initial)(chain_keys(key, number, "truth"))
    real = np.arange(posterior.features.shape[1]) < posterior.sizes[:, None]
    outcomes = np.einsum("knm,dm->dkn", posterior.features, np.asarray(truth))
    outcomes += real * host_generator(key, "data").standard_normal(outcomes.shape)
    linear = jnp.asarray(np.einsum("knm,dkn->dkm", posterior.features, outcomes), jnp.float32)
    ready, begin = posterior.on_accelerator(data_sets, 2.0**40), starts(key, posterior, plans[0], number)
    told = _run(ready, linear, kernel_rounds(chosen, True), begin, chain_keys(key, number))
    theta, position, received, rate = (np.asarray(values) for values in told)
    noise, scale = reception_noise(chosen, slice(None))
    transcript = Transcript(position, scale[..., None] * received, noise, np.arange(len(theta)), len(theta))
    draws, burn_in = posterior.parameters(theta.swapaxes(0, 1)), plans[0].burn_in
    kept = draws[:, burn_in:], rate[burn_in:].T, rate[:burn_in].mean(1)
    trace = Trace(*kept, None, tuple(chosen), transcript=transcript)
    made, target = noise_aware(trace, moments or posterior), np.asarray(posterior.parameters(truth))
    found = [(central_interval(trace.theta, level), made.interval(level)) for level in LEVELS]
    lower, upper = np.moveaxis(np.array(found), 2, 0)  # [level, chain's or noise-aware, data set, m]
    exact = np.outer(2 * ndtri((1 + np.array(LEVELS)) / 2), np.sqrt(np.diagonal(posterior.exact.covariance)))
    holds, width = (lower < target) & (target < upper), (upper - lower) / exact[:, None, None]
    (chain, aware), (wide, narrow) = holds.mean((-1, -2)).T, width.mean((-1, -2)).T
    return Coverage(chain, aware, holds[:, 1].mean(-1).std(-1) / data_sets**0.5, wide, narrow, trace, made, target)


@jax.jit
def _run(
    posterior: GaussianPosterior, linear: jax.Array, rounds: Rounds, state: State, keys: jax.Array
) -> tuple[Any, ...]:
    """Return θ after every round, where gradients were taken, what was received, [S, data set, m], and clip rates."""

    def one(key: jax.Array, linear: Any, state: State, now: Rounds) -> Any:
        return step(key, replace(posterior, linear=linear), state, now)

    def body(state: State, changing: Rounds) -> tuple[State, tuple[Any, ...]]:
        now = replace(changing, constants=rounds.constants)
        folded = jax.vmap(jax.random.fold_in, (0, None))(keys, state.round)
        state, info = jax.vmap(one, (0, 0, CHAINS, 0), (CHAINS, 0))(folded, linear, state, now)
        return state, (state.theta, info.position, info.received, info.clip_rate)

    return jax.lax.scan(body, state, replace(rounds, constants=None))[1]
