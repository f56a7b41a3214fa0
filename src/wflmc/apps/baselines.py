"""Protocols other than wireless federated Langevin Monte Carlo, for comparison.

Both give a point estimate.

Federated gradient descent over the air (`gradient_descent`) is the frequentist
counterpart and seeks the posterior's mode. The same devices transmit the same clipped
gradients over the same link under the same promise, and the server computes
θ ← θ − η K/(α K_a) y. Noise is of no use here, so that the server adds none and devices
transmit as strongly as their power and an equal part of their privacy budget allow,
also where Langevin sampling would have them transmit more softly. It is the counterpart
of `power = "equal"`: both could spend more in late rounds.

Scalable Bayesian federated learning (`sbfl`, Lee et al. 2020) transmits one-bit
gradients, one device at a time. Each device removes the mean of its gradient's entries
and transmits their signs, on a channel of its own (orthogonal access): S rounds are
⌊S/K⌋ iterations. From what it receives, y = h sign + n with n ~ N(0, 1/SNR) per entry,
the server computes the expected gradient, mean + √(2/π) std tanh(h y SNR), under a
Gaussian prior whose mean and standard deviation the devices report; it sums these over
the devices and takes a step with momentum. The name notwithstanding, what is learned is
a single θ.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.channel import Link
from wflmc.planning import (
    Allocation,
    Plan,
    PlanRequest,
    Policy,
    Problem,
    Sampler,
    plan_from,
)
from wflmc.planning.notices import estimate_notices, input_notices
from wflmc.planning.policies import equal_parts
from wflmc.planning.solvers.closed_form import DP, LIMITS, POWER
from wflmc.posterior import Posterior
from wflmc.posterior.base import check_posterior
from wflmc.privacy import Privacy
from wflmc.support.errors import InputError, SamplingError, unknown
from wflmc.support.keys import check_key, named

POWER_TOLERANCE = 1e-9
"""Relative, by which a device may be below its power limit and still count as at it."""


def gradient_descent(
    posterior: Posterior,
    link: Link,
    privacy: Privacy,
    *,
    step_size: ArrayLike,
    rounds: int,
    average: int = 1,
    schedule: str = "threshold",
    init: str = "prior",
    ledger: ArrayLike | None = None,
) -> Plan:
    """Return descent on −log p(θ|D), as a plan that `wflmc.sample` runs.

    Many replicas run at once. The prior is the weight decay of the descent. With
    `trace = wflmc.sample(key, posterior, plan, chains=…)` the estimates are the last
    iterates, `trace.theta[:, -1]`, or averages of the last rounds,
    `trace.theta.mean(1)`, which are less noisy. Bound, objective and regime of the plan
    are empty: they are about sampling.

    Args:
        posterior: whose mode is sought.
        link: as of `wflmc.plan`.
        privacy: the promise to the devices.
        step_size: η, above 0 and below 2/L: a number, or one for each round.
        rounds: S.
        average: how many of the last ones are kept.
        schedule: which devices transmit: all, or threshold, which are those that
            sampling would have transmit; for small steps these are too few here.
        init: prior or zero, where it starts.
        ledger: what devices have spent before, [K].

    Returns:
        The plan; the server adds no noise.

    Raises:
        InputError: if an argument is outside its range.
    """
    if schedule not in ("threshold", "all"):
        raise unknown("schedule", schedule, ("threshold", "all"))
    _check_count("rounds", rounds, np.inf)
    _check_count("average", average, rounds)
    check_posterior(posterior)
    request = PlanRequest(
        link=link,
        privacy=privacy,
        step_size=step_size,
        burn_in=rounds - average,
        samples=average,
        sampler=Sampler(init=init),
        policy=Policy(loudest, schedule),
        ledger=ledger,
        initial_w2_sq=0.0,
    )
    planned = plan_from(posterior, request)
    at_power = planned.power_share >= 1 - POWER_TOLERANCE
    input_problems = input_notices(posterior, link, privacy)
    estimate_problems = estimate_notices(posterior)
    # Bound, objective and most warnings of a plan are about sampling: here nothing is
    # sampled.
    certificate = replace(
        planned.certificate,
        limit=np.where(at_power, LIMITS.index(POWER), LIMITS.index(DP)),
        regime=None,
        bound=None,
        objective=np.nan,
        notices=(*input_problems, *estimate_problems),
    )
    return Plan(
        rounds=replace(planned.rounds, server_noise=np.zeros(rounds)),
        certificate=certificate,
        context=replace(planned.context, initial_w2_sq=np.nan),
    )


def _check_count(name: str, value: int, largest: float) -> None:
    """Raise unless a value is a whole number from 1 on."""
    is_whole = isinstance(value, int | np.integer)
    if not is_whole or not 1 <= value <= largest:
        raise InputError(name, value, f"a whole number from 1 to {largest}")


def loudest(problem: Problem) -> Allocation:
    """Return the largest power that the power caps and the privacy budgets allow.

    Each active device spends an equal part of its budget in every round in which it
    transmits. In contrast to the policy `equal`, the noise that sampling needs is no
    limit. It is a power policy, as `wflmc.Policy` takes them.

    Args:
        problem: caps of every round, and budgets.
    """
    return Allocation(np.minimum(problem.power_cap, equal_parts(problem)))


class Experiments(NamedTuple):
    """What distinguishes the experiments of `sbfl`: channels and random numbers."""

    gains: jax.Array
    """|h| of every device's own channel block, [experiment, iteration, device]."""
    snr: jax.Array
    """P_k/(m N0) as a ratio, [experiment, device]."""
    numbers: jax.Array
    """Seeds of start and noise, [experiment]."""


class Descent(NamedTuple):
    """Where experiments of `sbfl` end, and how far they have gone."""

    theta: jax.Array
    """θ after the last iteration, [experiment, m]."""
    distance: jax.Array
    """‖θ − θ_0‖ between the last iterate and the start, [experiment]."""
    initial_gradient_norm: jax.Array
    """Σ_k ‖∇f_k(θ_0)‖ at the start, [experiment]."""


DIVERGENCE_FACTOR = 10.0
"""An iterate has diverged if it is so many times farther from the start than the mode
can be."""


def sbfl(
    key: jax.Array,
    posterior: Posterior,
    links: Sequence[Link],
    *,
    rounds: int,
    step_size: float | None = None,
    momentum: float = 0.9,
    init: str = "prior",
    numbers: Sequence[int] | None = None,
) -> NDArray[np.float32]:
    """Run ⌊rounds/K⌋ iterations of scalable Bayesian federated learning on each link.

    With device k's gradient estimated as ĝ_k, an iteration is v ← βv + Σ_k ĝ_k/N_k and
    θ ← θ − ηv. The division by N_k weighs devices equally whatever their sizes. Where
    devices hold unlike data, θ settles near the mode and not at it, because the signs
    of unlike gradients do not cancel where the gradients do.

    Args:
        key: seeds starts and noise; starts are those that `sample` gives to chains of
            the same numbers.
        posterior: whose mode is sought.
        links: one for each experiment.
        rounds: S, channel blocks in all; device k has every K-th one, beginning with
            its own.
        step_size: η; by default `stable_step_size(posterior, momentum)`. The authors'
            experiments on MNIST have 1/(1 + L/N), which is larger than descent on that
            sum can bear.
        momentum: β, the share of the last step that is taken again.
        init: prior or zero, where it starts.
        numbers: which experiments these are, 0, 1, … by default.

    Returns:
        θ after the last iteration, [link, m].

    Raises:
        InputError: fewer rounds than devices, or a step size or momentum out of range.
        SamplingError: an experiment has diverged: θ is not finite, or ten times farther
            from the start than the mode can be.
    """
    check_key(key)
    devices = posterior.devices
    iterations = rounds // devices
    if iterations < 1:
        raise InputError(
            "rounds", rounds, f"at least the number of devices ({devices})"
        )
    if not 0 <= momentum < 1:
        raise InputError("momentum", momentum, "at least 0 and below 1")
    step = stable_step_size(posterior, momentum) if step_size is None else step_size
    if not 0 < step < np.inf:
        raise InputError("step_size", step, "finite and above 0")
    if numbers is None:
        numbers = range(len(links))
    experiments = Experiments(
        gains=jnp.stack([_gains_in_turn(link, iterations, devices) for link in links]),
        snr=jnp.stack([link.snr(devices) for link in links]),
        numbers=jnp.asarray(numbers),
    )
    sizes = np.asarray(posterior.sizes, dtype=float)
    descent = _descend(
        key,
        posterior,
        experiments,
        sizes=sizes,
        step=step,
        momentum=momentum,
        init=init,
    )
    _check_descent(descent, posterior, step=step, momentum=momentum)
    return np.asarray(descent.theta)


def stable_step_size(posterior: Posterior, momentum: float) -> float:
    """Return (1 − β) min_k N_k / L, a step size at which `sbfl` is stable.

    It descends Σ_k f_k/N_k, of which no curvature is above L/min_k N_k, as every f_k is
    convex. Momentum repeats a step 1/(1 − β) times in all, so that the whole step is
    one over that curvature: half of what plain descent can bear. The rest is for the
    errors of one-bit gradients.

    Args:
        posterior: whose smoothness L and sizes N_k are taken.
        momentum: β, at least 0 and below 1.

    Returns:
        η.
    """
    largest_curvature = posterior.L / float(np.min(posterior.sizes))
    return (1 - momentum) / largest_curvature


def _gains_in_turn(link: Link, iterations: int, devices: int) -> NDArray[np.float64]:
    """Return |h| of every device's own channel blocks, [iteration, device]."""
    device = np.arange(devices)
    block = np.arange(iterations)[:, None] * devices + device
    all_gains = np.abs(link.gains(iterations * devices, devices))
    return all_gains[block, device]


def _check_descent(
    descent: Descent,
    posterior: Posterior,
    *,
    step: float,
    momentum: float,
) -> None:
    """Raise `SamplingError` if an experiment has diverged.

    By strong convexity the mode is at most ‖∇f(θ_0)‖/μ away from the start. The norms
    of the devices' gradients are added up instead, as unlike devices may lead θ away
    from a start at the mode.
    """
    is_finite = np.isfinite(descent.theta).all(-1)
    farthest_mode = np.asarray(descent.initial_gradient_norm) / posterior.mu
    largest_distance = DIVERGENCE_FACTOR * farthest_mode
    is_near = np.asarray(descent.distance) <= largest_distance
    diverged = np.flatnonzero(~(is_finite & is_near))
    if diverged.size:
        stable = stable_step_size(posterior, momentum)
        raise SamplingError(
            f"{diverged.size} of {is_finite.size} experiments of sbfl diverged: "
            f"step_size = {step:g} is too large with momentum = {momentum:g}. "
            f"Leave it out, or try {stable:g} or less."
        )


@partial(jax.jit, static_argnames=("init",))
def _descend(
    key: jax.Array,
    posterior: Posterior,
    experiments: Experiments,
    *,
    sizes: NDArray[np.float64],
    step: float,
    momentum: float,
    init: str,
) -> Descent:
    """Run all experiments at once."""

    def experiment(gains: jax.Array, snr: jax.Array, number: jax.Array) -> Descent:
        """Run one experiment.

        Args:
            gains: |h|, [iteration, device].
            snr: as a ratio, [device].
            number: seed of start and noise.
        """
        start_key = jax.random.fold_in(named(key, "init"), number)
        start = posterior.draw_initial(start_key, init)
        noise_key = jax.random.fold_in(named(key, "sbfl"), number)

        def iterate(
            carry: tuple[jax.Array, jax.Array],
            scheduled: tuple[jax.Array, jax.Array],
        ) -> tuple[tuple[jax.Array, jax.Array], None]:
            """Run one iteration.

            Args:
                carry: θ and velocity, [m] each.
                scheduled: index of the iteration, and |h| of every device.
            """
            theta, velocity = carry
            index, gain = scheduled
            gradient = posterior.gradients(theta) / sizes[:, None]
            iteration_key = jax.random.fold_in(noise_key, index)
            noise = jax.random.normal(iteration_key, gradient.shape)
            estimates = estimate_from_signs(gradient, gain, snr, noise)
            velocity = momentum * velocity + estimates.sum(0)
            return (theta - step * velocity, velocity), None

        scheduled = (jnp.arange(gains.shape[0]), gains)
        at_rest = (start, jnp.zeros_like(start))
        (theta, _), _ = jax.lax.scan(iterate, at_rest, scheduled)
        distance = jnp.linalg.norm(theta - start)
        initial_gradients = posterior.gradients(start)
        gradient_norms = jnp.linalg.norm(initial_gradients, axis=-1)
        return Descent(theta, distance, gradient_norms.sum())

    return jax.vmap(experiment)(*experiments)


def estimate_from_signs(
    gradient: jax.Array,
    gain: jax.Array,
    snr: jax.Array,
    noise: jax.Array,
) -> jax.Array:
    """Return the server's estimate of each device's gradient from its signs.

    The server takes the entries of a gradient for draws of a Gaussian, whose mean and
    standard deviation the device reports without error. From y = h sign(g − mean) +
    n/√SNR it computes the expected entries, mean + √(2/π) std tanh(h y SNR).

    Args:
        gradient: g of every device, [K, m].
        gain: h = |h_k| of every device's channel, [K].
        snr: P_k/(m N0) as a ratio, [K].
        noise: standard normal, [K, m].

    Returns:
        The estimates, [K, m].
    """
    mean = gradient.mean(-1, keepdims=True)
    deviation = gradient.std(-1, keepdims=True)
    signs = jnp.sign(gradient - mean)
    amplitude = gain[:, None]
    device_snr = snr[:, None]
    received = amplitude * signs + noise / jnp.sqrt(device_snr)
    expected_signs = jnp.tanh(amplitude * received * device_snr)
    return mean + np.sqrt(2 / np.pi) * deviation * expected_signs
