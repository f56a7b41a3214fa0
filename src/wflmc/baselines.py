"""Protocols that are not wireless federated Langevin Monte Carlo, for comparison: both give a point estimate.

Federated gradient descent over the air (`gradient_descent`) is the frequentist counterpart and seeks the posterior's
mode. The same devices send the same clipped gradients over the same link under the same promise, and the server takes
θ ← θ − η K/(α K_a) y. No noise is wanted, so that the server adds none and devices send as strongly as transmit power
and an equal part of their privacy budget allow, also where Langevin sampling would have them send more softly. It is
the counterpart of `power = "equal"`: both could spend more in late rounds.

Scalable Bayesian federated learning (`sbfl`, Lee et al. 2020) sends one-bit gradients, one device at a time. Each
device removes the mean of its gradient's entries and sends their signs, on a channel of its own (orthogonal access):
S rounds are ⌊S/K⌋ iterations. From what it hears, y = h sign + n with n ~ N(0, 1/SNR) per entry, the server takes the
expected gradient, mean + √(2/π) std tanh(h y SNR), under a Gaussian prior whose mean and standard deviation the
devices report; it sums these over the devices and takes a step with momentum. The name notwithstanding, what is
learned is a single θ.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.channel import Link
from wflmc.errors import InputError, unknown
from wflmc.keys import check_key, named
from wflmc.planning import Allocation, Plan, Policy, Problem, Sampler, plan
from wflmc.planning.advice import estimates, input_warnings
from wflmc.planning.options import Options
from wflmc.planning.policies import equal_parts
from wflmc.planning.solvers.closed_form import DP, POWER, REGIMES
from wflmc.posterior import Posterior
from wflmc.privacy import Privacy


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
    """Return descent on −log p(θ|D), as a plan that `wflmc.sample` runs, many replicas at once.

    The prior is its weight decay. With `trace = wflmc.sample(key, posterior, plan, chains=…)` the estimates are the
    last iterates, `trace.theta[:, -1]`, or averages of the last rounds, `trace.theta.mean(1)`, which are less noisy.

    Args:
        posterior, link, privacy: as of `wflmc.plan`.
        step_size: η, above 0 and below 2/L: a number, or one for each round.
        rounds: S.
        average: how many of the last ones are kept.
        schedule: all, or threshold: those that sampling would have send, which for small steps are too few here.
        init: prior or zero, where it starts.
        ledger: what devices have spent before, [K].
    """
    if schedule not in ("threshold", "all"):
        raise unknown("schedule", schedule, ("threshold", "all"))
    for name, value, most in (("rounds", rounds, np.inf), ("average", average, rounds)):
        if not isinstance(value, int | np.integer) or not 1 <= value <= most:
            raise InputError(name, value, f"a whole number from 1 to {most}")
    sampler, policy = Sampler(init=init), Policy(loudest, schedule)
    options = Options(step_size, rounds - average, average, sampler, policy, ledger, initial_w2_sq=0.0)
    planned = plan(posterior, link, privacy, **vars(options))
    at_power = planned.power_share >= 1 - 1e-9
    # Bound, objective and most warnings of a plan are about sampling: here nothing is sampled.
    return planned.replace(
        server_noise=np.zeros(rounds),
        limit=np.where(at_power, REGIMES.index(POWER), REGIMES.index(DP)),
        regime=None,
        bound=None,
        objective=np.nan,
        initial_w2_sq=np.nan,
        warnings=(*input_warnings(posterior, link, privacy), *estimates(posterior, options)),
    )


def loudest(problem: Problem) -> Allocation:
    """Send as strongly as transmit power and each sender's budget, in equal parts over its rounds, allow."""
    return Allocation(np.minimum(problem.power_cap, equal_parts(problem)))


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
    """Return θ after ⌊rounds/K⌋ iterations on each of several links, [link, m].

    Args:
        key: seeds starts and noise; starts are those that `sample` gives to chains of the same numbers.
        posterior: whose mode is sought.
        links: one for each experiment.
        rounds: S, channel blocks in all; device k has every K-th one, beginning with its own.
        step_size: on the sum over devices of the gradients divided by N_k, which weighs devices equally whatever
            their sizes; by default 1/(1 + L/N), as in the paper's experiments, which is larger than plain descent
            on that sum could bear.
        momentum: share of the last step that is taken again.
        init: prior or zero, where it starts.
        numbers: which experiments these are, 0, 1, … by default.
    """
    check_key(key)
    devices, iterations = posterior.devices, rounds // posterior.devices
    if iterations < 1:
        raise InputError("rounds", rounds, f"at least the number of devices ({devices})")
    if not 0 <= momentum < 1:
        raise InputError("momentum", momentum, "at least 0 and below 1")
    sizes = np.asarray(posterior.sizes, dtype=float)
    step = 1 / (1 + posterior.L / sizes.sum()) if step_size is None else step_size
    if not 0 < step < np.inf:
        raise InputError("step_size", step, "finite and above 0")
    slot = np.arange(iterations)[:, None] * devices + np.arange(devices)
    gains = [np.abs(link.gains(iterations * devices, devices))[slot, np.arange(devices)] for link in links]
    snr = np.stack([link.snr(devices) for link in links])
    number = jnp.arange(len(links)) if numbers is None else jnp.asarray(numbers)
    return np.asarray(_descend(key, posterior, init, (np.stack(gains), snr, number), sizes, step, momentum))


@partial(jax.jit, static_argnames=("init",))
def _descend(
    key: jax.Array, posterior: Posterior, init: str, experiments: Any, sizes: Any, step: Any, momentum: Any
) -> jax.Array:
    """Run all experiments at once: (gains[experiment, iteration, device], snr[experiment, device], their numbers)."""

    def experiment(gain: jax.Array, snr: jax.Array, number: jax.Array) -> jax.Array:
        theta = posterior.draw_initial(jax.random.fold_in(named(key, "init"), number), init)
        noise_key = jax.random.fold_in(named(key, "sbfl"), number)

        def iterate(carry: tuple[jax.Array, jax.Array], at: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
            theta, velocity = carry
            index, h = at
            gradient = posterior.gradients(theta) / sizes[:, None]
            noise = jax.random.normal(jax.random.fold_in(noise_key, index), gradient.shape)
            velocity = momentum * velocity + estimate(gradient, h, snr[:, None], noise).sum(0)
            return (theta - step * velocity, velocity), None

        (theta, _), _ = jax.lax.scan(iterate, (theta, jnp.zeros_like(theta)), (jnp.arange(gain.shape[0]), gain))
        return theta

    return jax.vmap(experiment)(*experiments)


def estimate(gradient: jax.Array, gain: jax.Array, snr: jax.Array, noise: jax.Array) -> jax.Array:
    """Return what the server takes each device's gradient for: gradient[K, m], gain[K], standard normal noise[K, m]."""
    mean = gradient.mean(-1, keepdims=True)
    spread = gradient.std(-1, keepdims=True)
    received = gain[:, None] * jnp.sign(gradient - mean) + noise / jnp.sqrt(snr)
    return mean + np.sqrt(2 / np.pi) * spread * jnp.tanh(gain[:, None] * received * snr)
