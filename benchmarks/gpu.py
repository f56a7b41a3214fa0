"""Figure 8's sampling on one accelerator: `python -m benchmarks.gpu`, where only jax,
numpy and scipy are needed.
"""

from __future__ import annotations

import time
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import wflmc
from wflmc import channel
from wflmc.posterior.softmax import synthetic_labels
from wflmc.sampling import State, default_memory, step, zipped_kernel_rounds
from wflmc.sampling.simulation import BlockProgram, Carry, RoundBounds, advance_block
from wflmc.sums import softmax_gpu

CHAINS, ROUNDS = 1300, 600


def best(call, repeats: int = 3) -> float:
    """The shortest of several calls, after one that compiles."""
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def bytes_per_round(posterior, plans) -> float:
    """Bytes that XLA's own count of the compiled loop reads and writes, for one chain
    and round.
    """
    chains, ready = (
        len(plans),
        posterior.on_accelerator(len(plans), default_memory() / 4),
    )
    theta = jnp.zeros((chains, posterior.dim))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(
        jax.random.key(0), jnp.arange(chains)
    )
    rounds = zipped_kernel_rounds(plans)[:1]
    carry = Carry(State(theta, jnp.zeros((), jnp.int32)), theta[None])
    bounds = RoundBounds(first_kept=0, start=0, rounds=1)
    program = BlockProgram(kernel=step, zipped=True)
    compiled = advance_block.lower(
        ready, rounds, carry, keys, bounds, program=program, mesh=None
    ).compile()
    found = compiled.cost_analysis()
    found = found[0] if isinstance(found, list) else found
    return float(found["bytes accessed"]) / chains


def main() -> None:
    """Seconds of the whole call, and what they mean in arithmetic and in bytes."""
    # Features with the spread of MNIST's first thirty principal directions.
    X, y = synthetic_labels(jax.random.key(0), 12_000, 30)
    X = X * np.sqrt(np.concatenate([[38.0], np.linspace(5, 0.4, 29)]))
    posterior = wflmc.softmax_regression(
        jax.random.key(0), 30, X=X, y=y, partition="blocks"
    )
    links = [
        wflmc.Link(channel.rayleigh(1e-4), 20.0, seed=seed) for seed in range(CHAINS)
    ]
    every = wflmc.plan_many(
        posterior, links, wflmc.Privacy(50, 0.1, 300, "paper"), step_size=2 / (posterior.mu + posterior.L),
        burn_in=ROUNDS - 50, samples=50, policy=wflmc.Policy(objective="average", bound="paper"), initial_w2_sq=0.0,
    )  # fmt: skip
    plans = every[:50] * (CHAINS // 50)
    call = partial(wflmc.sample, jax.random.key(0), posterior, plans)
    seconds, theta = best(call), call().theta
    own = best(partial(wflmc.sample, jax.random.key(0), posterior, every))
    flops = CHAINS * ROUNDS * 2 * 2 * 12_000 * 30 * 10
    logits = 4 * CHAINS * ROUNDS * 12_000 * 10
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    each = 1e6 * seconds / (CHAINS * ROUNDS)
    print(
        f"{CHAINS} chains x {ROUNDS} rounds: {seconds:.2f} s, {each:.2f} us per chain and round"
    )
    print(f"with a plan of its own for every chain instead of 50 plans: {own:.2f} s")
    if softmax_gpu.fits(jnp.ones((30, 400, 30)), jnp.ones((30, 10, CHAINS))):
        with mock.patch.object(softmax_gpu, "fits", return_value=False):
            jax.clear_caches()
            separate, other = best(call), call().theta
        jax.clear_caches()
        apart = np.abs(theta - other).max() / np.abs(other).max()
        print(
            f"with separate products: {separate:.2f} s, {separate / seconds:.2f} times as long, {apart:.1e} apart"
        )
    big = jnp.ones((8192, 8192))
    product = jax.jit(lambda a: jnp.matmul(a, a, precision="highest"))
    arithmetic = 2 * 8192**3 / best(lambda: product(big).block_until_ready())
    long = jnp.ones(2**29)
    copy = jax.jit(lambda a: a + 1)
    bandwidth = 2 * long.nbytes / best(lambda: copy(long).block_until_ready())
    print(
        f"arithmetic: {flops / seconds / 1e12:.1f} TFLOP/s of {arithmetic / 1e12:.1f} in a large float32 product"
    )
    counted = bytes_per_round(posterior, plans) * CHAINS * ROUNDS
    print(
        f"bytes by XLA's count: {counted / seconds / 1e12:.2f} TB/s of {bandwidth / 1e12:.2f} in a large copy"
    )
    print(
        f"logits alone, written and read twice: {4 * logits / seconds / 1e12:.2f} TB/s of {bandwidth / 1e12:.2f}"
    )


if __name__ == "__main__":
    main()
