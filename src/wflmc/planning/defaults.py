"""Step size, burn-in and number of samples that suit a posterior, where the caller of `plan` leaves them out.

Without a promise of privacy rounds cost nothing: kinetic dynamics with the friction that damps the slowest direction
critically, steps well inside what L allows, and as many rounds as give some hundred independent draws of a chain.
With one, diffusion time is what a budget buys: at the noise that Langevin sampling needs a round costs a loss of ηℓ².
"""

import math
from dataclasses import replace
from typing import Any

from wflmc.posterior.base import Posterior
from wflmc.privacy import Privacy

SAFE, FEW = 0.5, 10
"""h√L of kinetic steps up to so many parameters; of more, the fourth root of their number less, as the error of a step
adds up over them. The bias of a cost that is not quadratic is then a few percent of a standard deviation."""
OVERDAMPED_STEP = 0.4
"""η(μ + L), as in scenarios."""
BURN_IN, SAMPLES = 3, 50
"""In units of the rounds in which a chain forgets where it was."""
LEAST, MOST = 20, 4000
"""Rounds."""


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
