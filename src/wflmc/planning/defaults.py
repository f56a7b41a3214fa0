"""What suits a posterior where the caller of `plan` leaves it out: step size, rounds, and the clip of one example.

Without a promise of privacy rounds cost nothing: kinetic dynamics with the friction that damps the slowest direction
critically, steps well inside what L allows, and as many rounds as give some hundred independent draws of a chain.
With one, diffusion time is what a budget buys: at the noise that Langevin sampling needs a round costs a loss of ηℓ².
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

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
(docs/numpyro.md)."""
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
    return replace(privacy, example_clip=np.clip(affordable, smallest * typical, largest * typical))


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


def fill_in(posterior: Posterior, privacy: Privacy, given: dict[str, Any], sampler_given: bool) -> dict[str, Any]:
    """Return the arguments of `plan` with those that are None replaced by usual values."""
    mu, L, sampler = float(posterior.mu), float(posterior.L), given["sampler"]
    if given["step_size"] is None and privacy.epsilon is None and not sampler_given:
        sampler = replace(sampler, dynamics="kinetic", friction=2 * mu**0.5)
    if sampler.motion.has_velocity:
        step = given["step_size"] or SAFE * min(1.0, FEW / posterior.dim) ** 0.25 / L**0.5
        memory = 8 / (step * mu**0.5)  # rounds in which a direction is forgotten, also of a cost that is not quadratic
    else:
        step = given["step_size"] or OVERDAMPED_STEP / (mu + L)
        memory = 1 / (step * mu)
    burn_in, samples = (min(MOST, max(LEAST, math.ceil(count * memory))) for count in (BURN_IN, SAMPLES))
    if privacy.epsilon is not None:
        loss = step * float((privacy.sensitivity(posterior.devices) ** 2 / privacy.budget(posterior.devices)).max())
        rounds = min(burn_in + samples, max(LEAST, int(1 / loss)))
        burn_in = min(burn_in, rounds // 2)
        samples = rounds - burn_in
    usual = {"step_size": step, "burn_in": burn_in, "samples": samples}
    return given | {name: value for name, value in usual.items() if given[name] is None} | {"sampler": sampler}
