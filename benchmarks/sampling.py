"""The sampler and the exact law against the loops a first program would write."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

import wflmc
from benchmarks.timing import side_by_side
from wflmc import channel


def numpy_chain(posterior, plan, generator):
    """One chain as a first program would write it: a loop over rounds, and one over
    devices.
    """
    theta = generator.standard_normal(posterior.dim)
    for s in range(len(plan.rounds)):
        received = np.sqrt(plan.noise_power) * generator.standard_normal(posterior.dim)
        for k in range(posterior.devices):
            if plan.weight[s, k] > 0:
                gradient = posterior.hessian[k] @ theta - posterior.linear[k]
                received += (
                    plan.gain[s]
                    * gradient
                    * min(1.0, plan.clip[k] / np.linalg.norm(gradient))
                )
        theta = theta - plan.step_size[s] * plan.scale[s] / plan.gain[s] * received
    return theta


def numpy_chains(posterior, plan, generator, chains):
    """All chains at once in NumPy, with a loop over rounds and one over devices: what a
    careful program would do.
    """
    theta = generator.standard_normal((chains, posterior.dim))
    for s in range(len(plan.rounds)):
        received = np.sqrt(plan.noise_power) * generator.standard_normal(theta.shape)
        for k in range(posterior.devices):
            if plan.weight[s, k] > 0:
                gradient = theta @ posterior.hessian[k] - posterior.linear[k]
                factor = np.minimum(
                    1.0, plan.clip[k] / np.linalg.norm(gradient, axis=1, keepdims=True)
                )
                received += plan.gain[s] * factor * gradient
        theta = theta - plan.step_size[s] * plan.scale[s] / plan.gain[s] * received
    return theta


def numpy_law(posterior, plan):
    """The law of the chain round by round."""
    mean, covariance = (
        np.zeros(posterior.dim),
        posterior.prior_std**2 * np.eye(posterior.dim),
    )
    for s in range(len(plan.rounds)):
        step = np.eye(posterior.dim) - plan.step_size[s] * np.tensordot(
            plan.weight[s], posterior.hessian, 1
        )
        mean = step @ mean + plan.step_size[s] * plan.weight[s] @ posterior.linear
        covariance = step @ covariance @ step.T + plan.noise_variance[s] * np.eye(
            posterior.dim
        )
    return mean, covariance


def study() -> tuple[Any, Any]:
    """Return the posterior and the plan of the Gaussian study."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
    plan = wflmc.plan(
        posterior, wflmc.Link(channel.rayleigh(0.01), snr_db=20), wflmc.Privacy(15, 0.01, 30),
        step_size=0.4 / (posterior.mu + posterior.L), burn_in=50, samples=50,
    )  # fmt: skip
    return posterior, plan


def against_parts(chains: int = 10_000) -> Table:
    """The sampler against what it is made of: noise by itself, and gradients with
    clipping by themselves.
    """
    posterior, plan = study()
    ready = posterior.on_accelerator(chains, 2**29)
    rounds, (weight, clip) = (
        len(plan.rounds),
        (jnp.asarray(v, jnp.float32) for v in (plan.weight, plan.clip)),
    )
    theta = jax.random.normal(jax.random.key(1), (chains, posterior.dim))

    @jax.jit
    def noise(theta: Any) -> Any:
        keys = jax.random.split(jax.random.key(0), rounds)
        return jax.lax.scan(
            lambda at, key: (at + jax.random.normal(key, at.shape), None), theta, keys
        )[0]

    @jax.jit
    def gradients(held: Any, theta: Any) -> Any:
        def body(at: Any, w: Any) -> Any:
            total = jax.vmap(
                lambda one: held.unrounded_sum(one, w, clip).total.rounded
            )(at)
            return at - 1e-6 * total, None

        return jax.lax.scan(body, theta, weight)[0]

    sampler, random, sums = side_by_side(
        lambda: wflmc.sample(jax.random.key(0), posterior, plan, chains),
        lambda: noise(theta).block_until_ready(),
        lambda: gradients(ready, theta).block_until_ready(),
        repeats=5,
    )
    table = Table(title=f"Gaussian, {chains:,} chains × {rounds} rounds × 30 devices")
    for name in (
        "sampler",
        "noise alone",
        "gradients and clipping alone",
        "times its parts",
    ):
        table.add_column(name, justify="right")
    times = (f"{seconds:.3f} s" for seconds in (sampler, random, sums))
    table.add_row(*times, f"{sampler / (random + sums):.2f}")
    return table


def against_products(examples: int = 60_000, dim: int = 3969) -> Table:
    """Record clips of images as scattering features: a round's gradients against the
    two matrix products in them.
    """
    generator, classes, devices = np.random.default_rng(0), 10, 30
    X = generator.standard_normal((examples, dim), np.float32) / np.float32(dim**0.5)
    made = wflmc.softmax_regression(
        jax.random.key(0),
        devices,
        X=X,
        y=generator.integers(classes, size=examples),
        classes=classes,
    )
    table = Table(
        title=f"Softmax, {examples:,} × {dim:,} features, record clip, per chain and round"
    )
    for name in ("chains", "gradients", "two products", "times the products"):
        table.add_column(name, justify="right")
    for chains in (3, 12, 36):
        held = made.on_accelerator(chains, 2**29, by_example=True)
        theta = 0.1 * jax.random.normal(jax.random.key(1), (chains, made.dim))
        columns, rows = theta.reshape(-1, dim).T, held.features.reshape(-1, dim)
        limits = (
            jnp.ones(devices),
            jnp.full(devices, 400.0),
            None,
            jnp.full(devices, 0.8),
        )
        ours = jax.jit(
            lambda held, theta, limits=limits: jax.vmap(
                lambda at: held.unrounded_sum(at, *limits)
            )(theta)
        )
        products = jax.jit(lambda rows, columns: rows.T @ (rows @ columns))
        seconds = side_by_side(
            lambda ours=ours, held=held, theta=theta: jax.block_until_ready(
                ours(held, theta)
            ),
            lambda products=products, rows=rows, columns=columns: jax.block_until_ready(
                products(rows, columns)
            ),
            repeats=2,
        )
        mine, floor = (1e3 * each / chains for each in seconds)
        table.add_row(
            str(chains), f"{mine:.0f} ms", f"{floor:.0f} ms", f"{mine / floor:.2f}"
        )
    return table


def against_loops() -> Table:
    """Per chain for the sampler, per call for the law."""
    posterior, plan = study()
    chains, few, generator = 10_000, 5, np.random.default_rng(0)
    sampler, loop, at_once = side_by_side(
        lambda: wflmc.sample(jax.random.key(0), posterior, plan, chains),
        lambda: [numpy_chain(posterior, plan, generator) for _ in range(few)],
        lambda: numpy_chains(posterior, plan, generator, chains),
        repeats=3,
    )
    law, law_loop = side_by_side(
        lambda: posterior.law(plan.step_size, plan.weight, plan.noise_variance),
        lambda: numpy_law(posterior, plan),
        repeats=20,
    )
    table = Table(title="Against plain NumPy loops")
    for name in ("what", "times faster"):
        table.add_column(name, justify="right")
    size = "10,000 chains × 100 rounds × 30 devices"
    table.add_row(
        f"{size}, against one chain at a time",
        f"{(loop / few) / (sampler / chains):.0f}",
    )
    table.add_row(f"{size}, against all chains at once", f"{at_once / sampler:.1f}")
    table.add_row("exact law of 100 rounds", f"{law_loop / law:.1f}")
    return table
