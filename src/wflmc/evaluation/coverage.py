"""How often intervals contain what they should.

Those of one trace are compared with the exact posterior, those of a method with the
parameters of many simulated data sets. Intervals of level p that account for all of
their noise contain the parameters in a fraction p of all experiments. Simulation-based
calibration draws parameters from the prior and data from the model, runs the plan, and
counts.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from wflmc.evaluation.conditioning import (
    Moments,
    NoiseAware,
    central_interval,
    noise_aware,
)
from wflmc.planning.plan import Plan
from wflmc.posterior import Gaussian, GaussianPosterior, Posterior
from wflmc.sampling import (
    Info,
    KernelRounds,
    State,
    Trace,
    chain_keys,
    initial_states,
    step,
)
from wflmc.sampling.chunks import Partition
from wflmc.sampling.loop import charge_nothing, run_rounds, superpose_locally
from wflmc.sampling.simulation import BlockDraws, BlockProgram, Simulation
from wflmc.sampling.transcript import Transcript, reception_noise
from wflmc.support.errors import InputError, without_data
from wflmc.support.keys import host_generator

Array = NDArray[np.float64]
Interval = tuple[Array, Array]
"""Lower and upper ends, [chain, m] each."""

UNLIMITED_MEMORY = 2.0**40
"""Bytes: chains of small linear regressions are never cut."""
LEVELS = (0.9, 0.5)
"""Of the intervals that are evaluated."""


class Coverage(NamedTuple):
    """What intervals contain over simulated data sets, and how wide they are.

    The intervals are those of chains, and noise-aware ones.
    """

    chain: Array
    """Fraction of data sets and parameters that the chain's intervals contain,
    [level]."""
    noise_aware: Array
    """The same of noise-aware intervals, [level]."""
    error: Array
    """Standard error of `noise_aware`, over data sets, [level]."""
    chain_width: Array
    """Mean width of the chain's intervals over that of the exact posterior's, [level]."""
    noise_aware_width: Array
    """The same of noise-aware intervals, [level]."""
    trace: Trace
    """Of all data sets, a chain each, with the transcript."""
    result: NoiseAware
    """The noise-aware posteriors of all data sets."""
    truth: Array
    """The parameters that data were drawn with, [data set, m]."""


def probability_inside(law: Gaussian, interval: Interval) -> float:
    """Return the probability by a law that intervals contain a parameter.

    Args:
        law: of the parameters, one for all chains.
        interval: the lower and the upper ends, [chain, m] each.

    Returns:
        The mean over chains and parameters.
    """
    lower, upper = interval
    deviation = np.sqrt(np.diagonal(law.covariance))
    below_lower = ndtr((lower - law.mean) / deviation)
    below_upper = ndtr((upper - law.mean) / deviation)
    return float(np.mean(below_upper - below_lower))


def simulated_coverage(
    key: jax.Array,
    posterior: GaussianPosterior,
    plans: Sequence[Plan],
    data_sets: int = 500,
    moments: Moments | Posterior | None = None,
) -> Coverage:
    """Count what intervals contain, over data sets drawn from a linear model.

    Each data set has one chain that runs a plan on it. Standard errors are over data
    sets, so that some hundreds tell 90 % from 88 %.

    Args:
        key: seeds parameters, data, starts and noise.
        posterior: gives the features, the devices and the prior; its outcomes are not
            used.
        plans: overdamped ones, which data sets take in turns.
        data_sets: how many are drawn.
        moments: public ones; those of the features by default.

    Returns:
        Coverage and width of both kinds of intervals, at levels 90 % and 50 %, and the
        trace that they come from.

    Raises:
        InputError: if the posterior is no linear regression, or a plan is kinetic.
    """
    has_velocity = any(plan.dynamics.has_velocity for plan in plans)
    if not isinstance(posterior, GaussianPosterior) or has_velocity:
        raise InputError(
            "posterior",
            type(posterior).__name__,
            "a linear regression with overdamped plans",
        )
    in_turns = itertools.cycle(plans)
    plans_of_data_sets = list(itertools.islice(in_turns, data_sets))
    simulated = _simulate_data(key, posterior, data_sets)
    trace = _run_chains(key, posterior, simulated.linear, plans_of_data_sets)
    noise_aware_law = noise_aware(trace, moments or posterior)
    chain_intervals = [central_interval(trace.theta, level) for level in LEVELS]
    aware_intervals = [noise_aware_law.interval(level) for level in LEVELS]
    of_chains = _count(chain_intervals, simulated.parameters, posterior)
    of_noise_aware = _count(aware_intervals, simulated.parameters, posterior)
    return Coverage(
        chain=of_chains.fraction,
        noise_aware=of_noise_aware.fraction,
        error=of_noise_aware.error,
        chain_width=of_chains.mean_width,
        noise_aware_width=of_noise_aware.mean_width,
        trace=trace,
        result=noise_aware_law,
        truth=simulated.parameters,
    )


@without_data
class _SimulatedData(NamedTuple):
    """Parameters that were drawn from the prior, and data sets from the model."""

    parameters: Array
    """[data set, m]."""
    linear: jax.Array
    """X_kᵀ y_k of every device, [data set, K, m]: all that a linear regression needs of
    its outcomes."""


def _simulate_data(
    key: jax.Array,
    posterior: GaussianPosterior,
    data_sets: int,
) -> _SimulatedData:
    """Draw parameters from the prior, and outcomes for the posterior's features."""
    features = posterior.features
    keys = chain_keys(key, jnp.arange(data_sets), "truth")
    truth = jax.vmap(posterior.draw_initial)(keys)
    outcomes = np.einsum("knm,dm->dkn", features, np.asarray(truth))
    generator = host_generator(key, "data")
    noise = generator.standard_normal(outcomes.shape)
    is_real = np.arange(features.shape[1]) < posterior.sizes[:, None]
    outcomes += is_real * noise
    of_outcomes = np.einsum("knm,dkn->dkm", features, outcomes)
    linear = of_outcomes + posterior.prior_linear
    return _SimulatedData(
        parameters=np.asarray(posterior.parameters(truth)),
        linear=jnp.asarray(linear, jnp.float32),
    )


@without_data
class _DataSets(NamedTuple):
    """A linear regression whose chains have outcomes of their own: the model.

    `BlockProgram.model_axes` takes the same value with axes in place of arrays, as
    `jax.vmap` does: None for the posterior, which all chains have in common, and 0 for
    `linear`, of which each has its own.
    """

    posterior: GaussianPosterior | None
    """With features, devices and prior; its own outcomes are not used."""
    linear: jax.Array | int
    """X_kᵀ y_k and the share of the prior of every device, [data set, K, m]."""


def _step_of_data_set(
    key: jax.Array,
    model: _DataSets,
    state: State,
    rounds: KernelRounds,
) -> tuple[State, Info]:
    """Run one round of the chain of one data set."""
    assert model.posterior is not None
    linear = cast("Array", model.linear)  # traced, in the place of an array on the host
    return step(key, replace(model.posterior, linear=linear), state, rounds)


def _run_chains(
    key: jax.Array,
    posterior: GaussianPosterior,
    linear: jax.Array,
    plans: Sequence[Plan],
) -> Trace:
    """Run one chain for each data set, and return their trace with the transcript."""
    chain_numbers = jnp.arange(len(plans))
    partition = _single_block(plans)
    ready = posterior.on_accelerator(len(plans), UNLIMITED_MEMORY)
    program = BlockProgram(
        kernel=_step_of_data_set,
        model_axes=_DataSets(posterior=None, linear=0),
        zipped=True,
        transcript=True,
    )
    simulation = Simulation(
        _DataSets(ready, linear),
        plans,
        chain_keys(key, chain_numbers),
        partition=partition,
        first_kept=plans[0].burn_in,
        program=program,
    )
    blocks: list[BlockDraws] = []
    run_rounds(
        initial_states(key, posterior, plans[0], chain_numbers),
        partition.blocks(),
        transport=superpose_locally,
        charge=charge_nothing,
        advance=simulation,
        keep=lambda block, state, draws: blocks.append(draws),
    )
    (draws,) = blocks
    return _trace_of(draws, posterior, plans)


def _single_block(plans: Sequence[Plan]) -> Partition:
    """Return all chains and rounds as one block."""
    chains = len(plans)
    rounds = len(plans[0].rounds)
    return Partition(
        chains=chains,
        rounds=rounds,
        chunk_chains=chains,
        block_rounds=rounds,
        group_starts=np.arange(rounds),
    )


def _trace_of(
    block: BlockDraws, posterior: GaussianPosterior, plans: Sequence[Plan]
) -> Trace:
    """Return the trace of a block of all rounds, with its transcript."""
    rounds = len(plans[0].rounds)
    burn_in = plans[0].burn_in
    info = block.info
    noise = reception_noise(plans, slice(None))
    received = np.asarray(info.received)
    gradient = noise.scale[..., None] * received
    transcript = Transcript(
        position=np.asarray(info.gradient_position),
        gradient=gradient,
        noise=noise.variance,
        start=np.arange(rounds),
        rounds=rounds,
    )
    clip_rate = np.asarray(info.clip_rate)
    kept_clip_rate = clip_rate[burn_in:]
    burn_in_clip_rate = clip_rate[:burn_in]
    draws = np.asarray(block.draws)
    return Trace(
        theta=posterior.parameters(draws.swapaxes(0, 1)),
        clip_rate=kept_clip_rate.T,
        burn_in_clip_rate=burn_in_clip_rate.mean(1),
        warmup=None,
        plans=tuple(plans),
        transcript=transcript,
    )


class _Counts(NamedTuple):
    """What intervals contain, and how wide they are."""

    is_inside: NDArray[np.bool_]
    """Whether an interval contains the parameter, [level, data set, m]."""
    width: Array
    """Over that of the exact posterior's interval, [level, data set, m]."""

    @property
    def fraction(self) -> Array:
        """Return the fraction of data sets and parameters inside, [level]."""
        return self.is_inside.mean((-1, -2))

    @property
    def error(self) -> Array:
        """Return the standard error of `fraction`, [level].

        It is over data sets, which are independent; parameters of one are not.
        """
        of_data_sets = self.is_inside.mean(-1)
        data_sets = of_data_sets.shape[-1]
        return of_data_sets.std(-1) / data_sets**0.5

    @property
    def mean_width(self) -> Array:
        """Return the mean of `width` over data sets and parameters, [level]."""
        return self.width.mean((-1, -2))


def _count(
    intervals: Sequence[Interval],
    parameters: Array,
    posterior: GaussianPosterior,
) -> _Counts:
    """Compare the intervals of every level with parameters[data set, m]."""
    lower_ends, upper_ends = zip(*intervals, strict=True)
    lower = np.array(lower_ends)
    upper = np.array(upper_ends)
    variance = np.diagonal(posterior.exact.covariance)
    upper_probability = (1 + np.array(LEVELS)) / 2
    normal_width = 2 * ndtri(upper_probability)
    exact_width = np.outer(normal_width, np.sqrt(variance))
    is_above = lower < parameters
    is_below = parameters < upper
    return _Counts(
        is_inside=is_above & is_below,
        width=(upper - lower) / exact_width[:, None],
    )
