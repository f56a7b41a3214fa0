"""What tests of kinetic dynamics share."""

from __future__ import annotations

import jax
import numpy as np

import wflmc
from tests.plan_tools import grouped
from wflmc import channel
from wflmc.planning import POLICIES, Allocation

CHAINS = 20_000


def kinetic_plan(
    posterior,
    power="no-dp",
    *,
    factor=None,
    step=0.8,
    friction=2.0,
    csi_error=0.0,
    loss=None,
    **keywords,
):
    """Return a kinetic plan with step size h = step/√L and friction γ_f = friction·√μ.

    Args:
        posterior: to plan for.
        power: the policy; ignored where `factor` is given.
        factor: of the Langevin cap, by which every round is powered.
        step: h √L.
        friction: γ_f / √μ.
        csi_error: of the link.
        loss: path loss of each device; from 1 to 1e-3 by default.
        **keywords: of `wflmc.plan`, its sampler and its policy.
    """
    path_loss = np.geomspace(1.0, 1e-3, posterior.devices) if loss is None else loss
    link = wflmc.Link(channel.static(path_loss), snr_db=40, csi_error=csi_error)
    if factor is not None:
        power = POLICIES["noiseless"]._replace(
            allocate=lambda problem: Allocation(factor * problem.lmc_cap)
        )
    defaults = {
        "burn_in": 11,
        "samples": 1,
        "step_size": step / posterior.L**0.5,
        "dynamics": "kinetic",
    }
    promise = keywords.pop("privacy", wflmc.Privacy(15, 0.01, 300))
    chosen = {
        "power": power,
        "friction": friction * posterior.mu**0.5,
        **defaults,
        **keywords,
    }
    return wflmc.plan(posterior, link, promise, **grouped(**chosen))


def ill_conditioned():
    """Return a Gaussian posterior of five parameters whose curvatures go from 1 to
    1000.
    """
    generator = np.random.default_rng(0)
    turn, _ = np.linalg.qr(generator.standard_normal((5, 5)))
    X = np.sqrt(np.geomspace(1, 1000, 5) - 0.01)[:, None] * turn
    y = X @ generator.standard_normal(5)
    return wflmc.gaussian_regression(
        jax.random.key(0), 5, X=X, y=y, prior_std=10.0, partition="blocks"
    )


def five_parts(plan, posterior, s):
    """Return round s as an affine map of (θ, v), by the five parts of the splitting:
    matrix, offset, effect of noise.

    Drift by h/2, kick by h/2, damping, kick by h/2, drift by h/2; written apart from
    the code under test.
    """
    m = posterior.dim
    h = plan.step_size[s]
    identity = np.eye(m)
    zeros = np.zeros((m, m))
    hessian = np.tensordot(plan.weight_received[s], posterior.hessian, 1)
    linear = plan.weight_received[s] @ posterior.linear
    decay = np.exp(-plan.dynamics.friction * h)
    drift = np.block([[identity, h / 2 * identity], [zeros, identity]])
    damp = np.block([[identity, zeros], [zeros, decay * identity]])
    # The second kick has the gradient of the first, taken at the same θ.
    kick = np.block([[identity, zeros], [-h / 2 * hessian, identity]])
    push = np.concatenate([np.zeros(m), h / 2 * linear])
    matrix = drift @ kick @ damp @ kick @ drift
    offset = drift @ (kick @ damp @ push + push)
    return matrix, offset, drift @ np.concatenate([zeros, identity])


def law_by_parts(plan, posterior):
    """Yield mean and covariance of θ after every round, by `five_parts`."""
    start = posterior._initial(plan.init)
    m = posterior.dim
    mean, covariance = np.zeros(2 * m), np.eye(2 * m)
    mean[:m], covariance[:m, :m] = start.mean, start.covariance
    for s in range(len(plan.rounds)):
        matrix, offset, enters = five_parts(plan, posterior, s)
        mean = matrix @ mean + offset
        covariance = (
            matrix @ covariance @ matrix.T + plan.noise_variance[s] * enters @ enters.T
        )
        yield mean[:m], covariance[:m, :m]


def law_of(posterior, plan):
    """Return the exact law of the chain of a plan, as the library computes it."""
    return posterior.law(
        plan.step_size,
        plan.weight_received,
        plan.noise_variance,
        plan.init,
        dynamics=plan.dynamics,
    )
