"""What suits a posterior where the caller of `plan` leaves it out.

Step size, numbers of rounds, and the clip of one example. Without a promise of privacy
rounds cost nothing: kinetic dynamics with the friction that damps the slowest direction
critically, steps well inside what L allows, and as many rounds as give some hundred
independent draws of a chain. With one, diffusion time is what a budget buys: at the
noise that Langevin sampling needs a round costs a loss of ηℓ² (of kinetic steps, with
`Dynamics.noise_step` as η).
"""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from wflmc.dynamics import Dynamics
from wflmc.planning.options import Sampler
from wflmc.posterior.base import Posterior
from wflmc.privacy import Privacy
from wflmc.support.notices import Notice, NoticeCode

KINETIC_STEP = 0.5
"""h√L of kinetic steps up to `MAX_FULL_STEP_DIM` parameters.

The bias of a cost that is not quadratic is then a few percent of a standard deviation.
"""
MAX_FULL_STEP_DIM = 10
"""The most parameters for which kinetic steps have their full size.

For m of them steps are shorter by the fourth root of m/10, as the error of a step adds
up over them.
"""
OVERDAMPED_STEP = 0.4
"""η(μ + L), as in scenarios."""
BURN_IN_MEMORIES = 3
"""Burn-in, in units of the rounds in which a chain forgets where it was."""
SAMPLES_MEMORIES = 50
"""Samples, in the same units."""
MIN_ROUNDS = 20
"""The fewest usual rounds of burn-in, of samples, and of both under a promise."""
MAX_ROUNDS = 4000
"""The most usual rounds of burn-in, and of samples."""
SMALLEST_EXAMPLE_CLIP = 2.0
"""The smallest usual c, in typical norms of examples' gradients."""
LARGEST_EXAMPLE_CLIP = 5.0
"""The largest usual c, in typical norms of examples' gradients.

Of nine data sets of 1000 examples that followed their models, clipping at five moved
the mode by 0.07 standard deviations at most, at three by 0.42, at two by 1.95
(docs/guides/numpyro.md).
"""
CLIP_SAMPLES_MEMORIES = 20
"""Of `SAMPLES_MEMORIES`, those for which c leaves budget.

A chain's mean was better or nearly as good with so few, as it had less bias: 0.83
posterior standard deviations off in place of 1.84 (linear regression, 1000 examples,
ε = 8).
"""


def fill_in_example_clip(posterior: Posterior, privacy: Privacy) -> Privacy:
    """Return a promise with a usual c, where it hides examples and has none.

    The longer the gradients that are left as they are, the smaller the bias of a chain,
    and the fewer rounds a budget buys. So c is as large as leaves the budget for
    burn-in and `CLIP_SAMPLES_MEMORIES`, but at least two and at most five typical norms
    of an example's gradient. It depends on no example.

    Args:
        posterior: the model, which knows the typical norm.
        privacy: the promise.

    Returns:
        The promise itself where it hides devices or has a c; otherwise one with a c.

    Raises:
        InputError: for a posterior of which no typical norm is known.
    """
    if privacy.unit == "device" or privacy.example_clip is not None:
        return privacy
    typical_norm = posterior.typical_example_norm()
    budget = float(privacy.budget(posterior.devices).min())
    memories = BURN_IN_MEMORIES + CLIP_SAMPLES_MEMORIES
    diffusion_time = memories / float(posterior.mu)
    affordable_sensitivity = (budget / diffusion_time) ** 0.5
    sensitivity_of_unit_clip = float(privacy.half_change(np.inf, 1.0))
    affordable_clip = affordable_sensitivity / sensitivity_of_unit_clip
    clip = np.clip(
        affordable_clip,
        SMALLEST_EXAMPLE_CLIP * typical_norm,
        LARGEST_EXAMPLE_CLIP * typical_norm,
    )
    return replace(privacy, example_clip=clip)


def example_clip_notice(privacy: Privacy) -> Notice:
    """Return the notice about a c that was filled in.

    It names the value, or the range over devices, and that no example was looked at.

    Args:
        privacy: the promise, with the c of `fill_in_example_clip`.

    Returns:
        A notice with the code `NoticeCode.EXAMPLE_CLIP_CHOSEN`.
    """
    chosen = np.asarray(privacy.example_clip, dtype=float)
    smallest = f"{chosen.min():.3g}"
    largest = f"{chosen.max():.3g}"
    numbers = smallest if smallest == largest else f"{smallest} to {largest}"
    return Notice(
        NoticeCode.EXAMPLE_CLIP_CHOSEN,
        f"privacy.example_clip was not given: {numbers} is used, chosen by the numbers "
        "of parameters and examples and by the budget, without a look at the examples. "
        "example_clip_rate of a run says how many of them it clips.",
    )


class ChainSettings(NamedTuple):
    """Step size, numbers of rounds, and the chain beyond that."""

    step_size: ArrayLike
    """η, or h of kinetic dynamics: a number, or one for each round."""
    burn_in: int
    """S_b."""
    samples: int
    """S_u."""
    sampler: Sampler
    """Everything else about the chain."""


def fill_in_chain(
    posterior: Posterior,
    privacy: Privacy,
    *,
    step_size: ArrayLike | None,
    burn_in: int | None,
    samples: int | None,
    sampler: Sampler,
    may_be_kinetic: bool,
) -> ChainSettings:
    """Return the settings of a chain, those that are None replaced by usual values.

    Args:
        posterior: the model.
        privacy: the promise, whose budget limits the number of rounds.
        step_size: η, or None.
        burn_in: S_b, or None.
        samples: S_u, or None.
        sampler: the chain, beyond that.
        may_be_kinetic: whether kinetic dynamics may be chosen, where nothing is
            promised and the step size is left out too.

    Returns:
        The settings, all of them set. What was passed is returned unchanged, and no
        constant of the posterior is computed where nothing is left out.
    """
    if step_size is not None and burn_in is not None and samples is not None:
        return ChainSettings(step_size, burn_in, samples, sampler)
    if step_size is None and privacy.epsilon is None and may_be_kinetic:
        sampler = _critically_damped(posterior, sampler)
    if step_size is None:
        step_size = _usual_step(posterior, sampler.motion)
    rounds = _usual_rounds(posterior, privacy, sampler.motion, step_size)
    return ChainSettings(
        step_size=step_size,
        burn_in=rounds.burn_in if burn_in is None else burn_in,
        samples=rounds.samples if samples is None else samples,
        sampler=sampler,
    )


def _critically_damped(posterior: Posterior, sampler: Sampler) -> Sampler:
    """Return the chain with kinetic dynamics of friction 2√μ."""
    critical_friction = 2 * float(posterior.mu) ** 0.5
    return replace(sampler, dynamics="kinetic", friction=critical_friction)


def _usual_step(posterior: Posterior, motion: Dynamics) -> float:
    """Return the usual step size, η or h."""
    L = float(posterior.L)
    if motion.has_velocity:
        factor = min(1.0, MAX_FULL_STEP_DIM / posterior.dim) ** 0.25
        return KINETIC_STEP * factor / L**0.5
    return OVERDAMPED_STEP / (float(posterior.mu) + L)


class _RoundCounts(NamedTuple):
    """How many rounds a chain has."""

    burn_in: int
    samples: int


def _usual_rounds(
    posterior: Posterior, privacy: Privacy, motion: Dynamics, step_size: ArrayLike
) -> _RoundCounts:
    """Return the usual numbers of rounds for the longest of the step sizes.

    Args:
        posterior: the model.
        privacy: the promise, whose budget buys only so many rounds.
        motion: the dynamics.
        step_size: η or h, a number or one for each round. A step size of 0 is refused
            later, and counts as the usual one here.
    """
    mu = float(posterior.mu)
    longest_step = float(np.max(np.asarray(step_size)))
    longest_step = longest_step or _usual_step(posterior, motion)
    memory = 1 / (longest_step * mu)
    if motion.has_velocity:
        # Rounds in which a direction is forgotten, also of a cost that is not
        # quadratic.
        memory = 8 / (longest_step * mu**0.5)
    burn_in = _rounds_of(BURN_IN_MEMORIES * memory)
    samples = _rounds_of(SAMPLES_MEMORIES * memory)
    if privacy.epsilon is None:
        return _RoundCounts(burn_in, samples)
    privacy = fill_in_example_clip(posterior, privacy)
    sensitivity = privacy.sensitivity(posterior.devices)
    budget = privacy.budget(posterior.devices)
    # At the Langevin cap a = η/2 a round costs 2a s² = ηs², with the overdamped step η
    # that needs as much noise.
    noise_step = motion.noise_step(longest_step)
    budget_fraction = noise_step * float((sensitivity**2 / budget).max())
    affordable = max(MIN_ROUNDS, int(1 / budget_fraction))
    rounds = min(burn_in + samples, affordable)
    burn_in = min(burn_in, rounds // 2)
    return _RoundCounts(burn_in, rounds - burn_in)


def _rounds_of(count: float) -> int:
    """Return a number of rounds within what is usual."""
    return min(MAX_ROUNDS, max(MIN_ROUNDS, math.ceil(count)))
