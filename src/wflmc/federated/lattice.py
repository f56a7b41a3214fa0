"""The integers that masked messages are made of, and what rounding to them costs in privacy.

Masks are added modulo 2³², so that every device rounds z_k = x_k + n_k to multiples of a quantum q first, at random to
the one above or below. The server then learns Σ round(z_k), which is no function of Σ z_k. It is as private all the
same:

A message z ~ N(x, σ²), rounded at random, is j q with probability q f(j q - x), where f is the density of N(0, σ²)
plus two independent numbers uniform on ±q/2. Its characteristic function is F(t) = exp(i x t - σ²t²/2) sinc²(q t/2),
repeated at all t + 2π m/q and added up. In the sum of K messages these functions are multiplied; were there no terms
with m ≠ 0, the sum would be j q with probability q f_K(j q - Σ x), where f_K is the density of N(0, Kσ²) plus 2K such
uniform numbers. That is the probability of N(Σ x, Kσ²) plus 2K - 1 uniform numbers being nearest to j q: it is made
from Σ z_k, by adding something independent and rounding once, and post-processing costs nothing. The terms with m ≠ 0
are at most ρ = 2 exp(-A)/(1 - exp(-8A)) together, A = (π σ/q)²/2, for every message; so the two laws differ by at most
(1 + ρ)^K - 1 + ρ at every j, and `rounding` adds that up over j. With σ = 10 q it is below 1e-200.

Clipping to ±C happens before rounding, to one message at a time. It is bounded by its chance: |n| > 12 σ has
probability 4e-33. Both together are a distance τ in total variation from a mechanism that keeps (ε, δ), hence keep (ε,
δ + (1 + e^ε) τ): `extra_delta`. Numbers are taken as real here as everywhere in this package: devices compute in
float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from wflmc.errors import InputError
from wflmc.federated.job import Job
from wflmc.federated.terms import Terms

MODULUS = 1 << 32
"""Flower's largest modulus."""
LEVELS = 1 << 22
"""Flower's usual number of integers for one value."""
TAIL = 12.0
"""Standard deviations of a device's noise that fit into the range."""
FINE = 10.0
"""How often the quantum must fit into that standard deviation."""
SLACK = 1e-6
"""Relative rounding that a device forgives the server."""


class Lattice(NamedTuple):
    """Values within ±reach, as integers from 0 to levels."""

    reach: float
    levels: int

    @classmethod
    def holding(cls, reach: float, senders: int) -> Lattice:
        """As fine as sums of so many senders allow."""
        return cls(reach, min(LEVELS, MODULUS >> senders.bit_length()))

    @property
    def quantum(self) -> float:
        """What one step of the integers is worth."""
        return 2 * self.reach / self.levels

    def refuse_coarse(self, share: float, senders: int) -> None:
        """InputError unless sums of so many senders, each with noise of this variance, can be represented."""
        if not (0 < self.reach < math.inf and self.levels > 0 and senders * self.levels < MODULUS):
            given = f"{senders} senders of {self.levels} levels within ±{self.reach:g}"
            raise InputError("aggregated", given, f"sums below {MODULUS}, of finite values")
        if self.quantum * FINE > math.sqrt(share) * (1 + SLACK):
            given = (
                f"a quantum of {self.quantum:.3g} beside noise of {math.sqrt(share):.3g} for each of {senders} devices"
            )
            raise InputError(
                "aggregated", given, f"finer by {FINE:g} times than the noise: fewer devices, or more noise"
            )

    def refuse_beyond(self, terms: Terms, precoder: float) -> None:
        """InputError if a clipped gradient, sent with this factor, could leave the range with its noise."""
        needed = precoder * terms.clip + TAIL * math.sqrt(terms.share)
        if not needed <= self.reach * (1 + SLACK):
            raise InputError(
                "gain", precoder, f"such that ±{self.reach:g} holds the message, which may reach {needed:g}"
            )


def lattice_of(job: Job) -> Lattice:
    """Range and levels for all messages of a job."""
    plan = job.plan
    senders = int(plan.active_devices.max())
    if int(np.maximum(job.quorum, plan.active_devices // 2 + 1).min()) < 2:
        raise InputError(
            "aggregated", True, "used with at least 2 senders in every round: of one, the sum is its message"
        )
    strength = plan.gain[:, None] * plan.weight / np.reshape(plan.scale, (-1, 1)) / job.known
    share = float(job.share.max())
    loudest = float(np.max(np.where(plan.weight > 0, strength * plan.clip, 0.0)))
    lattice = Lattice.holding(loudest + TAIL * math.sqrt(share), senders)
    lattice.refuse_coarse(share, senders)
    return lattice


def rounding(ratio: float, senders: int) -> float:
    """How far the law of a sum of rounded messages is from that of a rounded sum, in total variation, at most.

    Args:
        ratio: σ/q of one message.
    """
    A = (math.pi * ratio) ** 2 / 2
    alias = 2 * math.exp(-A) / -math.expm1(-8 * A)
    everywhere = math.expm1(senders * math.log1p(alias)) + alias
    far = 30.0  # standard deviations of the sum that are counted point by point
    points = 2 * (senders + far * math.sqrt(senders) * ratio) + 1
    return 0.5 * points * everywhere + _outside(far)


def extra_delta(job: Job) -> float:
    """What rounding and clipping of masked messages add to δ over all rounds, for the largest ε of the promise."""
    lattice, plan = lattice_of(job), job.plan
    senders = int(plan.active_devices.max())
    ratio = math.sqrt(job.share.max()) / lattice.quantum
    each = rounding(ratio, senders) + senders * _outside(TAIL)
    distance = plan.rounds * job.chains * plan.dim * each
    epsilon = plan.privacy.epsilon
    return distance * (1 + math.exp(0.0 if epsilon is None else float(np.max(np.asarray(epsilon)))))


def _outside(deviations: float) -> float:
    """Chance of a Gaussian beyond so many standard deviations, on either side."""
    return math.erfc(deviations / math.sqrt(2))
