"""The plan: all that the sampler needs, and what is known about it before anything is transmitted."""

from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, Self

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc.dynamics import OVERDAMPED, Array, Dynamics, Motion
from wflmc.errors import InputError, Shown
from wflmc.keys import digest
from wflmc.planning.solvers.closed_form import REGIMES
from wflmc.privacy import Privacy, round_loss


@dataclass(frozen=True, eq=False)
class Rounds:
    """What acts in every round, as a pytree of arrays with a leading round axis."""

    step_size: Any
    """η[S], or h of kinetic dynamics."""
    gain: Any
    """α[S]."""
    weight: Any
    """Weight of each device's gradient in the update, [S, K]: K/K_a, or 0 for a silent device."""
    server_noise: Any
    """β[S], variance of the noise that the server adds: to θ, or to the velocity of kinetic dynamics."""
    received: Any = None
    """|h/ĥ|[S, K], the amplitude at which a device arrives over the one it meant to; None where both are equal."""
    constants: Any = None
    """What the kernel needs beside them, the same in all rounds (`wflmc.sampling.kernel.Constants`)."""

    def __len__(self) -> int:
        """S."""
        return int(self.gain.shape[0])

    def __getitem__(self, index: Any) -> "Rounds":
        """One of the rounds, or a slice of them."""
        some = jax.tree.map(lambda values: values[index], replace(self, constants=None))
        return replace(some, constants=self.constants)


@dataclass(frozen=True, eq=False)
class Certificate:
    """What is known of a plan before anything is transmitted: the bound, how good it is, and what limits it."""

    threshold: Array
    """The least |h| with which a device transmits, [S]; 0 where all do, nan without one."""
    bound: Array | None
    """B[1..S]; None for kinetic dynamics, for which no bound is known."""
    power_share: Array
    """Share of the transmit power limit that the weakest active device uses, [S]; 0 on an ideal link."""
    limit: NDArray[np.intp]
    """Which limit each round sits at, as an index into REGIMES, [S]."""
    objective: float
    """The worst or the average of the bound after burn-in, nan where there is none; with the objective "transcript" V,
    the variance of the noise in what the kept rounds together say about the gradient."""
    objective_name: str
    """worst, average, exact or transcript."""
    lower_bound: float | None
    """What no plan within the same limits can be below; None where nothing is proven."""
    regime: str | None
    """lmc-limited, power-limited or dp-limited; None where it changes with the channel."""
    gamma: float
    """Factor by which a kept round forgets the start, the largest: of Proposition 1, or of the mean (kinetic)."""
    noise_limit: float = np.inf
    """The limit on a round's noise that power was chosen within, over what all clipped gradients can undo."""
    warnings: tuple[str, ...] = ()
    """What the numbers of the plan do not cover, in sentences."""


@dataclass(frozen=True, eq=False)
class Context:
    """What the plan was made for, the same in all rounds."""

    privacy: Privacy
    """The promise that the plan was made for."""
    clip: Array
    """ℓ[K]; infinite for a scheme that does not clip."""
    example_clip: Array
    """Bound on one example's gradient, [K]; infinite: examples are not clipped one by one."""
    noise_power: float
    """N0."""
    burn_in: int
    """S_b, rounds that are discarded."""
    init: str
    """Where chains start: prior or zero."""
    mu: float
    """Strong convexity of the cost."""
    L: float
    """Smoothness of the cost."""
    dim: int
    """m, the number of parameters."""
    initial_w2_sq: float
    """W2² between start and posterior."""
    ledger: Array
    """Loss that each device had spent before this plan, [K]."""
    start: int = 0
    """The round that this plan begins with, where rounds came before it."""
    uncertainty: float = 1.0
    """The largest |h/ĥ| that the devices' knowledge of their channels leaves open."""
    enforced: bool = True
    """Whether the policy keeps to the budgets; the sampler then refuses what does not."""
    dynamics: Dynamics = OVERDAMPED
    """Overdamped or kinetic."""
    downlink_noise: float = 0.0
    """Variance of the noise in every coordinate that a device receives of θ."""
    rounding: float = 0.0
    """e: clips act at ℓ/(1 + e) and c/(1 + e), so that float32 sums are no more sensitive than is paid for."""


OF_ROUNDS = ("threshold", "bound", "power_share", "limit")
"""The first fields of a certificate, those with a leading round axis."""
PARTS: dict[str, type] = {"rounds": Rounds, "certificate": Certificate, "context": Context}
PART_OF = {field.name: part for part, kind in PARTS.items() for field in fields(kind) if field.name != "constants"}
"""The part of a plan that a name belongs to."""
jax.tree_util.register_dataclass(Rounds, [field.name for field in fields(Rounds)], [])
jax.tree_util.register_dataclass(Certificate, [*OF_ROUNDS], [field.name for field in fields(Certificate)[4:]])


def _by_part(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields of every part."""
    return {part: {name: values[name] for name in values if PART_OF[name] == part} for part in PARTS}


class _PartFields:
    """The fields of a plan's parts under their types; `Plan` reads each by a property."""

    step_size: Array
    gain: Array
    weight: Array
    server_noise: Array
    received: Array | None
    threshold: Array
    bound: Array | None
    power_share: Array
    limit: NDArray[np.intp]
    objective: float
    objective_name: str
    lower_bound: float | None
    regime: str | None
    gamma: float
    noise_limit: float
    warnings: tuple[str, ...]
    privacy: Privacy
    clip: Array
    example_clip: Array
    noise_power: float
    burn_in: int
    init: str
    mu: float
    L: float
    dim: int
    initial_w2_sq: float
    ledger: Array
    start: int
    uncertainty: float
    enforced: bool
    dynamics: Dynamics
    downlink_noise: float
    rounding: float


@dataclass(frozen=True, eq=False, repr=False)
class Plan(_PartFields, Shown):
    """Gains and active devices of every round, with the bound and the privacy they imply.

    The fields of its three parts are read off the plan itself: `plan.gain` is `plan.rounds.gain`.
    """

    rounds: Rounds
    certificate: Certificate
    context: Context

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Make a plan from the fields of its parts."""
        return cls(**{part: PARTS[part](**some) for part, some in _by_part(values).items()})

    def values(self) -> dict[str, Any]:
        """The fields of all parts."""
        return {name: getattr(self, name) for name in PART_OF}

    def replace(self, **changes: Any) -> Self:
        """The same plan with other values of some fields."""
        return replace(self, **{part: replace(getattr(self, part), **some) for part, some in _by_part(changes).items()})

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"devices": self.devices, "parameters": self.dim, "rounds": len(self.rounds)}
        facts |= {"burn-in rounds": self.burn_in, "dynamics": self.dynamics.constants.get("dynamics")}
        facts |= {name: getattr(self, name) for name in ("step_size", "gain", "gap", "regime")}
        facts["objective"] = None if np.isnan(self.objective) else self.objective
        promised = () if self.privacy.epsilon is None else ("epsilon", "delta", "adjacency")
        return facts | {name: getattr(self.privacy, name) for name in promised}

    @property
    def devices(self) -> int:
        """K."""
        return int(self.weight.shape[-1])

    @property
    def active_devices(self) -> NDArray[np.intp]:
        """K_a[S]."""
        return np.count_nonzero(self.weight, axis=-1)

    @property
    def weight_received(self) -> Array:
        """The weight with which every device's gradient really enters the update, [S, K]."""
        return self.weight if self.received is None else self.weight * self.received

    @property
    def motion(self) -> Motion:
        """How chains move by this plan, but for their noise."""
        return Motion(self.step_size, self.weight_received, self.init, self.dynamics, self.downlink_noise)

    @property
    def scale(self) -> Array:
        """The server's factor on the received sum, K/K_a: the largest weight of each round, [S]."""
        return self.weight.max(-1)

    @property
    def regime_share(self) -> dict[str, float]:
        """Share of the rounds that sit at each limit."""
        return {name: float(np.mean(self.limit == index)) for index, name in enumerate(REGIMES)}

    @property
    def kick(self) -> Array:
        """The factor of the gradient in the update of θ, or of the velocity, [S]."""
        return np.asarray(self.dynamics.kick(self.step_size))

    @property
    def noise_variance(self) -> Array:
        """σ²[S] of the update of θ, or of the velocity: channel noise and server noise together."""
        return self.noise_power * (self.kick * self.scale / self.gain) ** 2 + self.server_noise

    @property
    def langevin_noise(self) -> Array:
        """What sampling needs of it, [S]: 2η, or 1 − e² with e = exp(−γ_f h)."""
        return np.asarray(self.dynamics.langevin_noise(self.step_size))

    @property
    def noise_ratio(self) -> float:
        """Noise of the kept rounds over what sampling needs, on average: samples spread some √ of it too wide."""
        return float(np.mean((self.noise_variance / self.langevin_noise)[self.burn_in :]))

    @property
    def excess_noise(self) -> Array:
        """What is too much of it, [S]."""
        return np.maximum(self.noise_variance - self.langevin_noise, 0.0)

    @property
    def clips_at(self) -> tuple[Array, Array]:
        """Where clipping acts, ℓ/(1 + e) and c/(1 + e), each [K]."""
        return self.clip / (1 + self.rounding), self.example_clip / (1 + self.rounding)

    @property
    def loss(self) -> Array:
        """Privacy loss of every round and device, [S, K]; infinite where a device sends unclipped.

        Where channels are known badly it is the largest that the stated error leaves open, or what really arrived
        where that is more.
        """
        reach = self.privacy.half_change(self.clip, self.example_clip)
        strength = self.uncertainty if self.received is None else np.maximum(self.uncertainty, self.received)
        return round_loss(self.gain, strength * self.weight / self.scale[:, None], reach, self.noise_power)

    @property
    def spent(self) -> Array:
        """Total loss per device, [K]."""
        return self.loss.sum(-2)

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped; without clipping no finite ε would be true."""
        return bool(np.all(np.isfinite(np.minimum(self.clip, self.example_clip))))

    @property
    def epsilon_spent(self) -> float | None:
        """ε of the worst device at its δ, earlier spending included; None without clipping or without a δ."""
        return self.privacy.epsilon_spent(self.spent + self.ledger) if self.clips else None

    def rest(self, start: int) -> "Plan":
        """The plan from its round `start` on, with what the rounds before have spent in its ledger.

        Its initial_w2_sq is the bound of the round before; where there is no bound it is not known, nan.
        """
        if not 0 <= start < len(self.rounds):
            raise InputError("start", start, f"between 0 and {len(self.rounds) - 1}")
        distance = self.initial_w2_sq
        if start:
            distance = np.nan if self.bound is None else float(self.bound[start - 1])
        ledger = self.ledger + (self.loss[:start].sum(0) if self.clips else 0.0)
        context = replace(self.context, ledger=ledger, initial_w2_sq=distance, start=self.start + start)
        context = replace(context, burn_in=max(0, self.burn_in - start))
        certificate = jax.tree.map(lambda values: values[start:], self.certificate)
        return Plan(self.rounds[start:], certificate, context)

    @property
    def digest(self) -> str:
        """A short name for all that the plan makes devices and server do."""
        acting = *jax.tree.leaves(self.rounds), self.clip, self.example_clip
        numbers = [self.noise_power, self.start, self.burn_in, *jax.tree.leaves(self.dynamics)]
        numbers += [value for value in (self.downlink_noise, self.rounding) if value]
        return digest(*acting, np.array(numbers), self.init.encode())

    @property
    def gap(self) -> float | None:
        """(objective − lower_bound)/objective, where the policy claims an optimum."""
        if self.lower_bound is None:
            return None
        return 0.0 if self.objective <= self.lower_bound else 1 - self.lower_bound / self.objective


for _name, _part in PART_OF.items():
    setattr(Plan, _name, property(attrgetter(f"{_part}.{_name}")))
