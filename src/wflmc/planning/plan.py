"""The plan: all that the sampler needs, and what is known about it before anything is transmitted."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Self, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc.dynamics import OVERDAMPED, Array, Dynamics, Motion, Moving
from wflmc.planning.solvers.closed_form import LIMITS, POLICY
from wflmc.privacy import Privacy, round_loss
from wflmc.support.errors import InputError, Shown
from wflmc.support.keys import digest

Values = TypeVar("Values")
"""Arrays of NumPy in a plan, of any kind in the sampler."""


@dataclass(frozen=True, eq=False)
class Acting(Generic[Values]):
    """What acts in every round, as arrays with a leading round axis."""

    step_size: Values
    """η[S], or h of kinetic dynamics."""
    gain: Values
    """α[S]."""
    weight: Values
    """Weight of each device's gradient in the update, [S, K]: K/K_a, or 0 for a silent device."""
    server_noise: Values
    """β[S], variance of the noise that the server adds: to θ, or to the velocity of kinetic dynamics."""
    received: Values | None = None
    """|h/ĥ|[S, K], the amplitude at which a device arrives over the one it meant to; None where both are equal."""


@dataclass(frozen=True, eq=False)
class Rounds(Acting[Any]):
    """The same as a pytree, which can be sliced, stacked and scanned over."""

    constants: Any = None
    """What the kernel needs beside them, the same in all rounds (`wflmc.sampling.kernel.KernelConstants`)."""

    def __len__(self) -> int:
        """S."""
        return int(self.gain.shape[0])

    def __getitem__(self, index: Any) -> "Rounds":
        """One of the rounds, or a slice of them."""
        some = jax.tree.map(lambda values: values[index], replace(self, constants=None))
        return replace(some, constants=self.constants)


@dataclass(frozen=True, eq=False, kw_only=True)
class Certificate:
    """What is known of a plan before anything is transmitted: the bound, how good it is, and what limits it."""

    threshold: Array
    """The least |h| with which a device transmits, [S]; 0 where all do, nan without one."""
    bound: Array | None
    """B[1..S]; None for kinetic dynamics, for which no bound is known."""
    power_share: Array
    """Share of the transmit power limit that the weakest active device uses, [S]; 0 on an ideal link."""
    limit: NDArray[np.intp]
    """Which limit each round sits at, as an index into LIMITS, [S]."""
    objective: float
    """The worst or the average of the bound after burn-in, nan where there is none; with the objective "transcript" V,
    the variance of the noise in what the kept rounds together say about the gradient."""
    objective_name: str
    """worst, average, exact or transcript."""
    lower_bound: float | None
    """What no plan within the same limits can be below; None where nothing is proven."""
    regime: str | None
    """lmc-limited, power-limited or dp-limited; policy-limited where the policy reaches
    none of these limits; None where it changes with the round."""
    gamma: float
    """Factor by which a kept round forgets the start, the largest: of Proposition 1, or of the mean (kinetic)."""
    noise_limit: float = np.inf
    """The limit on a round's noise that power was chosen within, over what all clipped gradients can undo."""
    warnings: tuple[str, ...] = ()
    """What the numbers of the plan do not cover, in sentences."""


@dataclass(frozen=True, eq=False, kw_only=True)
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


BY_ROUND = (*(field.name for field in fields(Acting)), "threshold", "bound", "power_share", "limit")
"""Fields of a plan with a leading round axis."""
jax.tree_util.register_dataclass(Rounds, [field.name for field in fields(Rounds)], [])


def distinct(plans: "Iterable[Plan]") -> "list[Plan]":
    """Return every plan once, where several chains share one."""
    return list({id(plan): plan for plan in plans}.values())


def _fields_of(part: type[Any], plan: "Plan") -> dict[str, Any]:
    """Return the fields of a part of a plan."""
    return {field.name: getattr(plan, field.name) for field in fields(part)}


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Shown, Moving, Acting[Array], Certificate, Context):
    """Gains and active devices of every round, with the bound and the privacy they imply.

    The fields of its three parts are its own: `plan.gain` is `plan.rounds.gain`.
    """

    def replace(self, **changes: Any) -> Self:
        """The same plan with other values of some fields."""
        return replace(self, **changes)

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"devices": self.devices, "parameters": self.dim, "rounds": len(self.rounds)}
        facts |= {"burn-in rounds": self.burn_in, "dynamics": self.dynamics.constants.get("dynamics")}
        facts |= {name: getattr(self, name) for name in ("step_size", "gain", "gap", "regime")}
        facts["objective"] = None if np.isnan(self.objective) else self.objective
        promised = () if self.privacy.epsilon is None else ("epsilon", "delta", "adjacency")
        return facts | {name: getattr(self.privacy, name) for name in promised}

    @property
    def rounds(self) -> Rounds:
        """What acts in every round, as the sampler takes it."""
        return Rounds(**_fields_of(Acting, self))

    @property
    def certificate(self) -> Certificate:
        """What is known of the plan before anything is transmitted."""
        return Certificate(**_fields_of(Certificate, self))

    @property
    def context(self) -> Context:
        """What the plan was made for."""
        return Context(**_fields_of(Context, self))

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
        """Share of the rounds at each limit; policy-limited only if it is not 0."""
        share = {name: float(np.mean(self.limit == index)) for index, name in enumerate(LIMITS)}
        if share[POLICY] == 0:
            del share[POLICY]
        return share

    @property
    def noise_variance(self) -> Array:
        """σ²[S] of the update of θ, or of the velocity: channel noise and server noise together."""
        return self.noise_power * (self.kick * self.scale / self.gain) ** 2 + self.server_noise

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
        later = {name: getattr(self, name)[start:] for name in BY_ROUND if getattr(self, name) is not None}
        later |= {"ledger": ledger, "initial_w2_sq": distance, "start": self.start + start}
        return replace(self, **later, burn_in=max(0, self.burn_in - start))

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
