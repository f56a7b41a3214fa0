"""Scalable Bayesian federated learning (Lee et al. 2020): one-bit gradients, one device at a time, a point estimate.

Each device removes the mean of its gradient's entries and sends their signs, on a channel of its own (orthogonal
access): S rounds are ⌊S/K⌋ iterations. From what it hears, y = h sign + n with n ~ N(0, 1/SNR) per entry, the server
takes the expected gradient, mean + √(2/π) std tanh(h y SNR), under a Gaussian prior whose mean and standard deviation
the devices report; it sums these over the devices and takes a step with momentum. The name notwithstanding, what is
learned is a single θ.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.channel import Link
from wflmc.errors import InputError
from wflmc.keys import check_key, named
from wflmc.posterior.base import Posterior


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
