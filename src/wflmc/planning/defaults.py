"""What suits a posterior where the caller of `plan` leaves it out: step size, rounds, and the clip of one example.

Without a promise of privacy rounds cost nothing: kinetic dynamics with the friction that damps the slowest direction
critically, steps well inside what L allows, and as many rounds as give some hundred independent draws of a chain.
With one, diffusion time is what a budget buys: at the noise that Langevin sampling needs a round costs a loss of ηℓ².
"""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from wflmc.planning.options import Sampler
from wflmc.posterior.base import Posterior
from wflmc.privacy import Privacy
from wflmc.support.notices import Notice, NoticeCode

SAFE, FEW = 0.5, 10
"""h√L of kinetic steps up to so many parameters; of more, the fourth root of their number less, as the error of a step
adds up over them. The bias of a cost that is not quadratic is then a few percent of a standard deviation."""
OVERDAMPED_STEP = 0.4
"""η(μ + L), as in scenarios."""
BURN_IN, SAMPLES = 3, 50
"""In units of the rounds in which a chain forgets where it was."""
LEAST, MOST = 20, 4000
"""Rounds."""
EXAMPLE_CLIPS = 2.0, 5.0
"""The smallest and the largest usual c, in typical norms. Of nine data sets of 1000 examples that followed their
models, clipping at five moved the mode by 0.07 standard deviations at most, at three by 0.42, at two by 1.95
(docs/guides/numpyro.md)."""
SAMPLES_OF_CLIP = 20
"""Of `SAMPLES`, those for which c leaves budget. A chain's mean was better or nearly as good with so few, as it had
less bias: 0.83 posterior standard deviations off in place of 1.84 (linear regression, 1000 examples, ε = 8)."""


def fill_in_example_clip(posterior: Posterior, privacy: Privacy) -> Privacy:
    """Return a promise with a usual c, where it hides examples and has none.

    The longer the gradients that are left as they are, the smaller the bias of a chain, and the fewer rounds a budget
    buys. So c is as large as leaves the budget for burn-in and `SAMPLES_OF_CLIP`, but within `EXAMPLE_CLIPS`. It
    depends on no example.

    Raises:
        InputError: for a posterior of which no typical norm is known.
    """
    if privacy.unit == "device" or privacy.example_clip is not None:
        return privacy
    typical = posterior.typical_example_norm()
    budget = float(privacy.budget(posterior.devices).min())
    time = (BURN_IN + SAMPLES_OF_CLIP) / float(posterior.mu)
    affordable_sensitivity = (budget / time) ** 0.5
    sensitivity_of_unit_clip = float(privacy.half_change(np.inf, 1.0))
    affordable = affordable_sensitivity / sensitivity_of_unit_clip
    smallest, largest = EXAMPLE_CLIPS
    return replace(
        privacy, example_clip=np.clip(affordable, smallest * typical, largest * typical)
    )


def example_clip_notice(privacy: Privacy) -> Notice:
    """Return the notice about a c that was filled in."""
    chosen = np.asarray(privacy.example_clip, dtype=float)
    smallest, largest = f"{chosen.min():.3g}", f"{chosen.max():.3g}"
    numbers = smallest if smallest == largest else f"{smallest} to {largest}"
    return Notice(
        NoticeCode.EXAMPLE_CLIP_CHOSEN,
        f"privacy.example_clip was not given: {numbers} is used, chosen by the numbers of "
        "parameters and examples and by the budget, without a look at the examples. "
        "example_clip_rate of a run says how many of them it clips.",
    )


class ChainSettings(NamedTuple):
    """Step size, numbers of rounds, and the chain beyond that."""

    step_size: ArrayLike
    burn_in: int
    samples: int
    sampler: Sampler


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
        The settings, all of them given.
    """
    if step_size is not None and burn_in is not None and samples is not None:
        return ChainSettings(step_size, burn_in, samples, sampler)
    mu = float(posterior.mu)
    L = float(posterior.L)
    if step_size is None and privacy.epsilon is None and may_be_kinetic:
        sampler = replace(sampler, dynamics="kinetic", friction=2 * mu**0.5)
    longest_step = 0.0 if step_size is None else float(np.max(np.asarray(step_size)))
    if sampler.motion.has_velocity:
        usual_step = SAFE * min(1.0, FEW / posterior.dim) ** 0.25 / L**0.5
        step = longest_step or usual_step
        memory = (
            8 / (step * mu**0.5)
        )  # rounds in which a direction is forgotten, also of a cost that is not quadratic
    else:
        usual_step = OVERDAMPED_STEP / (mu + L)
        step = longest_step or usual_step
        memory = 1 / (step * mu)
    usual_burn_in = _rounds_of(BURN_IN * memory)
    usual_samples = _rounds_of(SAMPLES * memory)
    if privacy.epsilon is not None:
        privacy = fill_in_example_clip(posterior, privacy)
        sensitivity = privacy.sensitivity(posterior.devices)
        loss = step * float((sensitivity**2 / privacy.budget(posterior.devices)).max())
        rounds = min(usual_burn_in + usual_samples, max(LEAST, int(1 / loss)))
        usual_burn_in = min(usual_burn_in, rounds // 2)
        usual_samples = rounds - usual_burn_in
    return ChainSettings(
        step_size=usual_step if step_size is None else step_size,
        burn_in=usual_burn_in if burn_in is None else burn_in,
        samples=usual_samples if samples is None else samples,
        sampler=sampler,
    )


def _rounds_of(count: float) -> int:
    """Return a number of rounds within what is usual."""
    return min(MOST, max(LEAST, math.ceil(count)))
