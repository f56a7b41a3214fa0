"""What a plan should be warned about, and what would help."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wflmc.planning.options import Options, Target
from wflmc.planning.plan import Plan
from wflmc.planning.problem import Problem
from wflmc.planning.single_sample import REGIMES


def advice(posterior: Target, made: Plan, problem: Problem, options: Options) -> tuple[str, ...]:
    """All warnings about a plan."""
    return (
        *_spread(made),
        *_of_the_plan(made, problem, getattr(posterior, "coordinates", None) is not None),
        *_divergence(posterior, made),
        *estimates(posterior, options),
        *_oracle(made, options),
    )


WIDE = 2.0
"""Noise over what sampling needs, from which on samples say too little of the posterior's spread."""


def _spread(made: Plan) -> list[str]:
    """Noise that stays after burn-in widens the samples, and no diagnostic of the chains can see it."""
    ratio = made.noise_ratio
    if not ratio > WIDE:
        return []
    kept = made.limit[made.burn_in :]
    power = np.count_nonzero(kept == REGIMES.index("power-limited")) > kept.size / 2
    more = "a higher SNR" if power else "a larger epsilon or fewer rounds"
    return [
        f"After burn-in there is {ratio:.3g} times the noise that sampling needs: samples spread some {ratio**0.5:.2g} "
        f"times as wide as the posterior. A smaller clip (near the norms of gradients) or step size helps, and {more}."
    ]


def estimates(posterior: Target, options: Options) -> list[str]:
    """Models without a closed form can only estimate their constants, and how far the start is from the posterior."""
    found = []
    guessed = getattr(posterior, "estimated", ())
    if guessed:
        found.append(
            f"{' and '.join(guessed)} {'is' if len(guessed) == 1 else 'are'} estimated by the Hessian at the start and "
            "at a mode: elsewhere the cost may curve otherwise, so that the bound is no proof, and epsilon does not "
            "cover that the estimate depends on the data."
        )
    if getattr(posterior, "batch", None):
        found.append("Mini-batches make gradients noisier, which the bound and the server's noise do not know.")
    if options.initial_w2_sq is None and getattr(posterior, "start_is_estimate", False):
        so = ", and the bound is no better than it" if options.dynamics == "overdamped" else ""
        found.append(
            f"W2² between start and posterior is a Laplace estimate{so}; posterior.initial_w2_sq can be given instead."
        )
    return found


def _oracle(made: Plan, options: Options) -> list[str]:
    """A plan for the exact law looks at the posterior."""
    if made.lower_bound is None or options.proxy is not None or made.privacy.epsilon is None:
        return []
    if options.objective != "exact":
        return []
    return [
        "The objective 'exact' is an oracle: the plan depends on the devices' private data, which epsilon does not "
        "cover. Give a public proxy where data are real."
    ]


def _divergence(posterior: Target, made: Plan) -> list[str]:
    """Partial participation may undo what η < 2/L or h < 2/√L ensures; models that know their Hessian can tell."""
    expansion = getattr(posterior, "expansion", None)
    if expansion is None or made.active_devices.min() == made.devices:
        return []
    # A kinetic step is stable while |1 − h²λ/2| < 1.
    step = made.step_size if made.friction is None else made.step_size**2 / 2
    largest = float(step.max())
    factor = expansion(largest, made.weight * (step / largest)[:, None])
    if factor <= 1:
        return []
    stretches = f"stretches errors {factor:.3g} times" if made.friction is None else "is beyond 2/√L of theirs alone"
    return [
        "The devices that send in some rounds are so unlike the rest that a step "
        f"{stretches}: without clipping the chain may diverge. Use a smaller step size or schedule = 'all'."
    ]


def _remedy(problem: Problem, made: Plan, loud: NDArray[np.intp]) -> str:
    """What helps against noise that clipped gradients cannot undo in the rounds `loud`, by what makes it."""
    least = made.dim * (problem.scale / made.clip.sum()) ** 2  # the power at which they just can
    if np.any((least > problem.lmc_cap)[loud]):
        return "It is the noise that Langevin sampling itself needs: a larger clip or more devices help."
    if np.any((least > problem.power_cap)[loud]):
        others = "" if made.active_devices.min() < made.devices else " or schedule = 'threshold'"
        return f"Transmit power makes it: a higher SNR, more devices{others} help."
    if not problem.affordable(least):
        return "Privacy makes it: fewer rounds, more devices or a larger epsilon help."
    return "A smaller step size or max_round_noise = 1 helps."


def _of_the_plan(made: Plan, problem: Problem, moves_elsewhere: bool) -> list[str]:
    found = []
    factor = problem.noise_limit if np.isfinite(problem.noise_limit) else 1.0
    if made.gap is not None and made.gap > 1e-6:
        found.append(f"The power is proven optimal only to a relative gap of {made.gap:.1g}.")
    if made.clips:
        # A round of a small step makes little noise, and the rounds after it undo that.
        reach = factor * np.maximum(made.kick, made.kick[-1]) * made.clip.sum()
        spread = made.dim * made.noise_variance
        # Langevin's own noise is undone over many rounds: clipped gradients hold it within m σ²/(2η Σ ℓ_k).
        beyond = made.noise_variance > 1.05 * made.langevin_noise
        beyond |= spread / (2 * reach) > made.initial_w2_sq**0.5
        loud = np.flatnonzero((np.sqrt(spread) > reach * (1 + 1e-9)) & beyond)
        if loud.size:
            found.append(
                f"In {loud.size} of {made.rounds} rounds the noise of one round exceeds {_times(factor)}what all "
                f"clipped gradients together can undo ({'η' if made.friction is None else 'h'} Σ ℓ_k); the "
                f"{'bound' if made.friction is None else 'exact law'} ignores clipping, and chains may not come "
                f"back. {_remedy(problem, made, loud)}"
            )
    if not made.clips and made.privacy.epsilon is not None:
        found.append("This scheme does not clip: epsilon is not kept, and no finite one would be true.")
    # A plan by the exact law is measured in parameters, its start in the coordinates that chains move in.
    alike = made.objective_name != "exact" or not moves_elsewhere
    if alike and made.objective > 10 * max(made.initial_w2_sq, 1e-300):
        found.append(
            "The chain is farther from the posterior after burn-in than at the start."
            if made.objective_name == "exact"
            else "The bound after burn-in is far above the distance at the start: it says nothing here."
        )
    if made.clips:
        limit = made.privacy.budget(made.devices)
        over = np.flatnonzero(made.spent + made.ledger > limit * (1 + 1e-9))
        if over.size:
            found.append(
                f"{over.size} of {made.devices} devices spend more than the privacy budget, which this policy ignores."
            )
    if made.friction is not None:
        low, high = 0.2 * made.mu**0.5, 20 * made.L**0.5
        if not low <= made.friction <= high:
            found.append(
                f"friction = {made.friction:.3g} is outside {low:.3g} to {high:.3g} (0.2√mu to 20√L): the chain swings "
                "or creeps for many rounds. 2√mu is a good choice."
            )
    return found


def _times(factor: float) -> str:
    return "" if factor == 1 else f"{factor:g} times "
