"""The same chains on an accelerator as on the CPU."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import wflmc
from wflmc import channel


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "chains"), [("gaussian", 8), ("softmax", 8), ("softmax", 400)]
)
def test_chains_are_those_of_the_cpu(model, chains):
    # Of 400 chains on 6 devices gradients are those of the kernel, where the GPU has tensor cores.
    if model == "gaussian":
        posterior = wflmc.gaussian_regression(
            jax.random.key(0), devices=6, examples=120
        )
    else:
        posterior = wflmc.softmax_regression(
            jax.random.key(0), devices=6, examples=120, dim=4, classes=3
        )
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=25)
    step = 0.4 / (posterior.mu + posterior.L)
    plan = wflmc.plan(
        posterior,
        link,
        wflmc.Privacy(8, 0.01, 30),
        step_size=step,
        burn_in=10,
        samples=10,
    )
    kinds = (jax.default_backend(), "cpu")
    executions = [
        wflmc.sampling.Execution(accelerators=jax.devices(kind)[:1]) for kind in kinds
    ]
    traces = [
        wflmc.sample(jax.random.key(1), posterior, plan, chains, execution=execution)
        for execution in executions
    ]
    scale = np.abs(traces[1].theta).max()
    np.testing.assert_allclose(traces[0].theta, traces[1].theta, atol=1e-4 * scale)
