"""Random planning scenarios, and the limits that every plan must keep."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

import wflmc
from tests.plan_tools import grouped
from wflmc import channel
from wflmc.posterior.base import Posterior


class Planned(Posterior):
    """A posterior that has only what planning uses; all other members are None, so that
    a use of them fails.
    """

    dim = digest = initial_w2_sq = draw_initial = unrounded_sum = gradients = (
        example_norms
    ) = None
    on_accelerator = working_bytes = work = device = None


@dataclasses.dataclass(frozen=True)
class Target(Planned):
    """A posterior as planning sees it, with chosen constants; `distance` is W2² of the
    start to it.
    """

    mu: float
    L: float
    dim: int = 1
    devices: int = 1
    distance: float = 5.0

    @property
    def sizes(self) -> np.ndarray:
        """Return a million examples for each device."""
        return np.full(self.devices, 10**6)

    def initial_w2_sq(self, init: str = "prior") -> float:
        """Return W2² of the start to the posterior."""
        return self.distance


def make_plan(target, h, snr_db=20.0, epsilon=8.0, delta=0.01, clip=30.0, **keywords):
    """Return a plan over channel gains h[rounds, devices], by default for a single
    sample after burn-in.
    """
    defaults = {
        "step_size": 0.4 / (target.mu + target.L),
        "burn_in": len(h) - 1,
        "samples": 1,
        "schedule": "all",
    }
    link = wflmc.Link(
        channel.from_array(np.asarray(h)),
        snr_db,
        noise_power=keywords.pop("noise_power", 1.0),
    )
    promise = wflmc.Privacy(epsilon, delta, clip, keywords.pop("accountant", "exact"))
    return wflmc.plan(target, link, promise, **grouped(**{**defaults, **keywords}))


@st.composite
def static_cases(draw):
    """Draw (target, h, keywords of `make_plan`): static channels, in each of the three
    regimes of theorem 1.
    """
    mu = draw(st.floats(0.5, 2000))
    target = Target(
        mu,
        mu * draw(st.floats(1, 30)),
        draw(st.integers(1, 40)),
        draw(st.integers(1, 12)),
    )
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    h = np.broadcast_to(
        0.01 * np.exp(generator.normal(0, 0.7, target.devices)),
        (draw(st.integers(1, 80)), target.devices),
    )
    step = draw(st.floats(0.02, 1.98)) / (target.mu + target.L)
    assume(step < 2 / target.L)
    return (
        target,
        h,
        {
            "step_size": step,
            "snr_db": draw(st.floats(-10, 60)),
            "epsilon": draw(st.floats(0.05, 100)),
            "delta": draw(st.floats(1e-9, 0.3)),
            "clip": draw(st.floats(0.5, 100)),
            "bound": draw(st.sampled_from(["paper", "corrected"])),
            "accountant": draw(st.sampled_from(["paper", "exact"])),
            "schedule": draw(st.sampled_from(["all", "threshold"])),
        },
    )


@st.composite
def fading_cases(draw):
    """Draw (target, h, keywords of `make_plan`): fading channels, any burn-in and
    several samples.
    """
    mu = draw(st.floats(0.5, 2000))
    target = Target(
        mu,
        mu * draw(st.floats(1, 30)),
        draw(st.integers(1, 40)),
        draw(st.integers(1, 12)),
    )
    rounds = draw(st.integers(1, 60))
    law = draw(st.sampled_from([channel.rayleigh, channel.rician]))(
        power=0.01, correlation=draw(st.floats(0, 1))
    )
    h = law.draw(
        np.random.default_rng(draw(st.integers(0, 2**31))), rounds, target.devices
    )
    return (
        target,
        h,
        {
            "snr_db": draw(st.floats(-10, 60)),
            "epsilon": draw(st.floats(0.05, 100)),
            "clip": draw(st.floats(0.5, 100)),
            "burn_in": (burn_in := draw(st.integers(0, rounds - 1))),
            "samples": rounds - burn_in,
            "schedule": draw(st.sampled_from(["all", "threshold"])),
        },
    )


def check_limits(plan, h, snr_db, clip):
    """Check the transmit power of every sending device in every round, and the privacy
    spent by every device.
    """
    sends = plan.weight > 0
    power = (plan.gain[:, None] * clip / np.abs(h)) ** 2
    assert np.all(
        power[sends] <= plan.dim * plan.noise_power * 10 ** (snr_db / 10) * (1 + 1e-9)
    )
    assert np.all(plan.spent <= plan.privacy.budget(plan.devices))
