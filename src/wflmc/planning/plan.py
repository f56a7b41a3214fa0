"""The plan: all that the sampler needs, and what is known about it beforehand.

A `Plan` has three parts: `Rounds`, what acts in every round; `Certificate`, what is
known about it before anything is transmitted; and `Context`, what it was made for.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import IO, Any, Self

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc.dynamics import OVERDAMPED, Array, Dynamics, Motion, from_constants
from wflmc.planning.solvers.closed_form import LIMITS, POLICY
from wflmc.privacy import Privacy, round_loss
from wflmc.support import notices, storage
from wflmc.support.errors import InputError, Shown
from wflmc.support.keys import digest
from wflmc.support.notices import Notice

PLAN_FILE = "plan.npz"
"""The usual name of a file that `Plan.save` writes."""
RoundValues = Any
"""Arrays of NumPy in a plan, of JAX in the sampler, which has None for zeros."""
RoundIndex = int | slice | NDArray[np.intp] | jax.Array
"""One round, or several."""
WRITTEN = "a plan as wflmc wrote it"
"""What such a file must be, for errors."""


@dataclass(frozen=True, eq=False)
class Rounds:
    """What acts in every round, as arrays with a leading round axis.

    It is a pytree, which can be sliced, stacked and scanned over. In a plan its arrays
    are NumPy's, in float64; in the sampler they are JAX's.
    """

    step_size: RoundValues
    """η[S], or h of kinetic dynamics."""
    gain: RoundValues
    """α[S]."""
    weight: RoundValues
    """Weight of each device's gradient in the update, [S, K].

    It is K/K_a, or 0 for a silent device.
    """
    server_noise: RoundValues
    """β[S], variance of the noise that the server adds.

    It is added to θ, or to the velocity of kinetic dynamics.
    """
    received: RoundValues | None = None
    """|h/ĥ|[S, K], the amplitude of a device at the server over the intended one.

    None where both are equal.
    """

    def __len__(self) -> int:
        """Return S."""
        return int(self.gain.shape[0])

    def __getitem__(self, index: RoundIndex) -> "Rounds":
        """Return one of the rounds, or a slice of them."""
        selected: Rounds = jax.tree.map(lambda values: values[index], self)
        return selected


jax.tree_util.register_dataclass(Rounds, [field.name for field in fields(Rounds)], [])


@dataclass(frozen=True, eq=False, kw_only=True)
class Certificate:
    """What is known of a plan before anything is transmitted."""

    threshold: Array
    """The smallest |h| with which a device transmits, [S].

    It is 0 where all devices do, and nan where there is no threshold.
    """
    bound: Array | None
    """B[1..S]; None where no bound is known, as for kinetic dynamics."""
    power_share: Array
    """Fraction of its transmit power limit that the weakest active device uses, [S].

    It is 0 on an ideal link.
    """
    limit: NDArray[np.intp]
    """The limit of every round, [S], as an index into LIMITS."""
    objective: float
    """The worst or the average of the bound after burn-in; nan where there is none.

    With the objective "exact" it is the worst W2² of the chain's law, and with
    "transcript" V, the variance of the noise in what the kept rounds together say about
    the gradient.
    """
    objective_name: str
    """worst, average, exact or transcript."""
    lower_bound: float | None
    """What no plan within the same limits can be below; None if nothing is proven."""
    regime: str | None
    """lmc-limited, power-limited, dp-limited or policy-limited.

    A plan is policy-limited where its policy reaches none of the other limits. None
    where the limit changes with the round.
    """
    gamma: float
    """The largest factor by which a kept round forgets the start.

    It is that of Proposition 1, or of the mean with kinetic dynamics.
    """
    noise_limit: float = np.inf
    """The limit on a round's noise, relative to what all clipped gradients can undo."""
    notices: tuple[Notice, ...] = ()
    """What the numbers of the plan do not cover."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Context:
    """What the plan was made for, the same in all rounds."""

    privacy: Privacy
    """The promise that the plan was made for."""
    clip: Array
    """ℓ[K]; infinite for a scheme that does not clip."""
    example_clip: Array
    """Bound on one example's gradient, [K]; infinite where examples are not clipped."""
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
    sizes: NDArray[np.intp]
    """N_k, the number of examples of every device, [K]."""
    initial_w2_sq: float
    """W2² between start and posterior."""
    ledger: Array
    """Privacy loss that each device had spent before this plan, [K]."""
    start: int = 0
    """The number of this plan's first round, where rounds came before it."""
    uncertainty: float = 1.0
    """The largest |h/ĥ| that the devices' knowledge of their channels leaves open."""
    enforced: bool = True
    """Whether the policy keeps to the budgets; the sampler then refuses all else."""
    dynamics: Dynamics = OVERDAMPED
    """Overdamped or kinetic."""
    downlink_noise: float = 0.0
    """Variance of the noise in every coordinate that a device receives of θ."""
    rounding: float = 0.0
    """e: clipping acts at ℓ/(1 + e) and c/(1 + e).

    Float32 sums are then no more sensitive than is paid for.
    """


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Shown):
    """Gains and active devices of every round, and what they imply.

    `wflmc.plan` makes plans, and `wflmc.sample` runs them. The fields that are needed
    most often are properties: `plan.gain` is `plan.rounds.gain`.
    """

    rounds: Rounds
    """What acts in every round."""
    certificate: Certificate
    """What is known of the plan before anything is transmitted."""
    context: Context
    """What the plan was made for."""

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "devices": self.devices,
            "parameters": self.dim,
            "rounds": len(self.rounds),
            "burn-in rounds": self.burn_in,
            "dynamics": self.dynamics.constants.get("dynamics"),
            "step_size": self.step_size,
            "gain": self.gain,
            "gap": self.gap,
            "regime": self.regime,
            "objective": None if np.isnan(self.objective) else self.objective,
        }
        if self.privacy.epsilon is not None:
            facts["epsilon"] = self.privacy.epsilon
            facts["delta"] = self.privacy.delta
            facts["adjacency"] = self.privacy.adjacency
        return facts

    # The rounds.

    @property
    def step_size(self) -> Array:
        """η[S], or h of kinetic dynamics."""
        return self.rounds.step_size

    @property
    def gain(self) -> Array:
        """α[S]."""
        return self.rounds.gain

    @property
    def weight(self) -> Array:
        """Weight of each device's gradient in the update, [S, K], as `Rounds.weight`."""
        return self.rounds.weight

    @property
    def server_noise(self) -> Array:
        """β[S], variance of the noise that the server adds."""
        return self.rounds.server_noise

    @property
    def received(self) -> Array | None:
        """|h/ĥ|[S, K], as `Rounds.received`."""
        return self.rounds.received

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
        """The weight with which each device's gradient enters the update, [S, K].

        It differs from `weight` where devices do not know their channels exactly.
        """
        return self.weight if self.received is None else self.weight * self.received

    @property
    def scale(self) -> Array:
        """The server's factor on the received sum, K/K_a, [S].

        It is the largest weight of each round.
        """
        return self.weight.max(-1)

    # The certificate.

    @property
    def threshold(self) -> Array:
        """The smallest |h| with which a device transmits, [S]."""
        return self.certificate.threshold

    @property
    def bound(self) -> Array | None:
        """B[1..S], the bound on W2²; None where none is known."""
        return self.certificate.bound

    @property
    def power_share(self) -> Array:
        """Fraction of its power limit that the weakest active device uses, [S]."""
        return self.certificate.power_share

    @property
    def limit(self) -> NDArray[np.intp]:
        """The limit of every round, [S], as an index into LIMITS."""
        return self.certificate.limit

    @property
    def objective(self) -> float:
        """What the policy minimizes, as `Certificate.objective`."""
        return self.certificate.objective

    @property
    def lower_bound(self) -> float | None:
        """What no plan within the same limits can be below, as in the certificate."""
        return self.certificate.lower_bound

    @property
    def regime(self) -> str | None:
        """What limits the whole plan, as `Certificate.regime`."""
        return self.certificate.regime

    @property
    def gamma(self) -> float:
        """The largest factor by which a kept round forgets the start."""
        return self.certificate.gamma

    @property
    def notices(self) -> tuple[Notice, ...]:
        """What the numbers of the plan do not cover, with codes."""
        return self.certificate.notices

    @property
    def warnings(self) -> tuple[str, ...]:
        """The same in sentences, without codes."""
        return notices.texts(self.certificate.notices)

    @property
    def gap(self) -> float | None:
        """(objective − lower_bound)/objective, where the policy claims an optimum."""
        if self.lower_bound is None:
            return None
        if self.objective <= self.lower_bound:
            return 0.0
        return 1 - self.lower_bound / self.objective

    @property
    def regime_share(self) -> dict[str, float]:
        """Fraction of the rounds at each limit; policy-limited only if it is not 0."""
        shares = {
            name: float(np.mean(self.limit == index))
            for index, name in enumerate(LIMITS)
        }
        if shares[POLICY] == 0:
            del shares[POLICY]
        return shares

    # The context.

    @property
    def privacy(self) -> Privacy:
        """The promise that the plan was made for."""
        return self.context.privacy

    @property
    def clip(self) -> Array:
        """ℓ[K]; infinite for a scheme that does not clip."""
        return self.context.clip

    @property
    def example_clip(self) -> Array:
        """Bound on one example's gradient, [K]; infinite without one."""
        return self.context.example_clip

    @property
    def noise_power(self) -> float:
        """N0."""
        return self.context.noise_power

    @property
    def burn_in(self) -> int:
        """S_b, rounds that are discarded."""
        return self.context.burn_in

    @property
    def init(self) -> str:
        """Where chains start: prior or zero."""
        return self.context.init

    @property
    def mu(self) -> float:
        """Strong convexity of the cost."""
        return self.context.mu

    @property
    def L(self) -> float:
        """Smoothness of the cost."""
        return self.context.L

    @property
    def dim(self) -> int:
        """m, the number of parameters."""
        return self.context.dim

    @property
    def initial_w2_sq(self) -> float:
        """W2² between start and posterior."""
        return self.context.initial_w2_sq

    @property
    def ledger(self) -> Array:
        """Privacy loss that each device had spent before this plan, [K]."""
        return self.context.ledger

    @property
    def start(self) -> int:
        """The number of this plan's first round, where rounds came before it."""
        return self.context.start

    @property
    def enforced(self) -> bool:
        """Whether the policy keeps to the budgets."""
        return self.context.enforced

    @property
    def dynamics(self) -> Dynamics:
        """Overdamped or kinetic."""
        return self.context.dynamics

    @property
    def downlink_noise(self) -> float:
        """Variance of the noise in every coordinate that a device receives of θ."""
        return self.context.downlink_noise

    @property
    def rounding(self) -> float:
        """e of `clips_at`."""
        return self.context.rounding

    # Noise.

    @property
    def kick(self) -> Array:
        """The factor of the gradient in the update, [S].

        It is η, or the factor on the velocity of kinetic dynamics.
        """
        return np.asarray(self.dynamics.kick(self.step_size))

    @property
    def langevin_noise(self) -> Array:
        """The variance of the noise that a round needs, [S].

        It is 2η, or 1 − e² of the velocity with e = exp(−γ_f h).
        """
        return np.asarray(self.dynamics.langevin_noise(self.step_size))

    @property
    def noise_variance(self) -> Array:
        """σ²[S] of the update of θ, or of the velocity.

        It is that of channel noise and server noise together.
        """
        channel_noise = self.noise_power * (self.kick * self.scale / self.gain) ** 2
        return channel_noise + self.server_noise

    @property
    def noise_ratio(self) -> float:
        """Noise of the kept rounds over what sampling needs, on average.

        Samples spread too widely by some √ of it.
        """
        ratio = self.noise_variance / self.langevin_noise
        return float(np.mean(ratio[self.burn_in :]))

    @property
    def excess_noise(self) -> Array:
        """Variance of the noise beyond what sampling needs, [S]."""
        return np.maximum(self.noise_variance - self.langevin_noise, 0.0)

    @property
    def motion(self) -> Motion:
        """How chains move by this plan, but for their noise."""
        return Motion(
            step_size=self.step_size,
            weight=self.weight_received,
            init=self.init,
            dynamics=self.dynamics,
            downlink=self.downlink_noise,
        )

    # Privacy.

    @property
    def clips_at(self) -> tuple[Array, Array]:
        """Where clipping acts, ℓ/(1 + e) and c/(1 + e), each [K]."""
        factor = 1 + self.rounding
        return self.clip / factor, self.example_clip / factor

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped; else no finite ε would be true."""
        return bool(np.all(np.isfinite(np.minimum(self.clip, self.example_clip))))

    @property
    def loss(self) -> Array:
        """Privacy loss of every round and device, [S, K].

        It is infinite where a device sends unclipped. Where devices do not know their
        channels exactly, it is the largest that the stated error leaves open, or that
        of what really arrived where this is more.
        """
        half_change = self.privacy.half_change(self.clip, self.example_clip)
        strength: float | Array = self.context.uncertainty
        if self.received is not None:
            strength = np.maximum(strength, self.received)
        amplitude = strength * self.weight / self.scale[:, None]
        return round_loss(self.gain, amplitude, half_change, self.noise_power)

    @property
    def spent(self) -> Array:
        """Total privacy loss of every device, [K]."""
        return self.loss.sum(-2)

    @property
    def epsilon_spent(self) -> float | None:
        """ε of the worst device at its δ, earlier spending included.

        None without clipping or without a δ.
        """
        if not self.clips:
            return None
        return self.privacy.epsilon_spent(self.spent + self.ledger)

    # Other plans made from this one.

    def with_rounds(self, **arrays: Array | None) -> "Plan":
        """Return the plan with other arrays of its rounds.

        The certificate stays that of the original plan.

        Args:
            **arrays: fields of `Rounds`.
        """
        changes: dict[str, Any] = dict(arrays)
        return replace(self, rounds=replace(self.rounds, **changes))

    def with_notices(self, given: Iterable[Notice]) -> "Plan":
        """Return the plan with these notices in the place of its own."""
        certificate = replace(self.certificate, notices=tuple(given))
        return replace(self, certificate=certificate)

    def rest(self, start: int) -> "Plan":
        """Return the plan from its round `start` on.

        Args:
            start: the first of its rounds, from 0.

        Returns:
            A plan whose ledger has what the rounds before have spent, and whose
            `initial_w2_sq` is the bound of the round before; nan where there is none.

        Raises:
            InputError: the plan has no such round.
        """
        count = len(self.rounds)
        if not 0 <= start < count:
            raise InputError("start", start, f"between 0 and {count - 1}")
        bound = self.bound
        distance = self.initial_w2_sq
        if start:
            distance = np.nan if bound is None else float(bound[start - 1])
        spent = self.loss[:start].sum(0) if self.clips else 0.0
        certificate = replace(
            self.certificate,
            threshold=self.threshold[start:],
            bound=None if bound is None else bound[start:],
            power_share=self.power_share[start:],
            limit=self.limit[start:],
        )
        context = replace(
            self.context,
            ledger=self.ledger + spent,
            initial_w2_sq=distance,
            start=self.start + start,
            burn_in=max(0, self.burn_in - start),
        )
        return Plan(self.rounds[start:], certificate, context)

    # Names and files.

    @property
    def digest(self) -> str:
        """A short name for all that the plan makes devices and server do."""
        numbers = [
            self.noise_power,
            self.start,
            self.burn_in,
            *jax.tree.leaves(self.dynamics),
        ]
        numbers += [value for value in (self.downlink_noise, self.rounding) if value]
        return digest(
            *jax.tree.leaves(self.rounds),
            self.clip,
            self.example_clip,
            np.array(numbers),
            self.init.encode(),
        )

    @property
    def checksum(self) -> str:
        """The SHA-256 of every field, certificate and context included."""
        return storage.arrays_digest(_plan_arrays(self))

    def save(self, path: str | Path, *, mode: int = 0o666) -> Path:
        """Write all fields to an .npz file, from which `load` reads the same plan.

        The file has an array for every field, by names such as `rounds.gain` and
        `context.privacy.epsilon`, and a digest of them. Fields that are None are left
        out.

        Args:
            path: of the file, which is written whole or not at all.
            mode: who may read a new file, before the umask.

        Returns:
            The path.
        """
        target = Path(path)
        with storage.replacing(target, mode=mode) as file:
            self.write(file)
        return target

    def write(self, file: IO[bytes]) -> None:
        """Write what `save` writes to a file that is open for writing."""
        storage.write_arrays(file, _plan_arrays(self))

    @classmethod
    def load(cls, path: str | Path, *, key: str = "plan") -> Self:
        """Read the plan that `save` has written.

        Args:
            path: of the file.
            key: the option that names the file, for errors.

        Returns:
            The plan, equal in every field. Lists of numbers in its promise are arrays.

        Raises:
            InputError: the file cannot be read, is damaged or has been changed.
        """
        arrays = storage.read_verified_arrays(path, key=key, allowed=WRITTEN)
        try:
            return cls(
                rounds=Rounds(**_fields_in(arrays, "rounds")),
                certificate=_certificate_in(arrays),
                context=_context_in(arrays),
            )
        except (TypeError, ValueError, KeyError):
            allowed = f"{WRITTEN} (it is another version's)"
            raise InputError(key, str(path), allowed) from None


def distinct(plans: Iterable[Plan]) -> list[Plan]:
    """Return every plan once, where several chains share one."""
    return list({id(plan): plan for plan in plans}.values())


def join_plans(first: Plan, added: Plan) -> Plan:
    """Return the plan of all rounds of a plan and of one that continues it.

    Nothing is planned again. The bound continues, the objective is that of all kept
    rounds, and no lower bound is proven: rounds that are planned later could not be
    taken into account by the first plan.

    Args:
        first: the plan of the rounds that came before.
        added: the plan of the rounds after them, without burn-in.

    Returns:
        The plan, with burn-in, start and ledger of the first one.

    Raises:
        InputError: the second plan does not continue the first.
    """
    continues = (
        added.start == first.start + len(first.rounds)
        and added.burn_in == 0
        and (added.devices, added.dim) == (first.devices, first.dim)
        and added.certificate.objective_name == first.certificate.objective_name
    )
    if not continues:
        raise InputError("added", "another plan", "a plan that continues the first one")
    bound = None
    if first.bound is not None and added.bound is not None:
        bound = np.concatenate([first.bound, added.bound])
    certificate = replace(
        first.certificate,
        threshold=np.concatenate([first.threshold, added.threshold]),
        bound=bound,
        power_share=np.concatenate([first.power_share, added.power_share]),
        limit=np.concatenate([first.limit, added.limit]),
        objective=_joined_objective(first, added),
        lower_bound=None,
        regime=first.regime if first.regime == added.regime else None,
        gamma=max(first.gamma, added.gamma),
        noise_limit=max(first.certificate.noise_limit, added.certificate.noise_limit),
        notices=tuple(dict.fromkeys((*first.notices, *added.notices))),
    )
    return Plan(_joined_rounds(first, added), certificate, first.context)


def _joined_rounds(first: Plan, added: Plan) -> Rounds:
    """Return the rounds of both plans, every field of them.

    Where one plan has None for |h/ĥ|, it is 1.
    """
    joined: dict[str, np.ndarray | None] = {}
    for field in fields(Rounds):
        parts = [getattr(plan.rounds, field.name) for plan in (first, added)]
        if all(part is None for part in parts):
            joined[field.name] = None
            continue
        if field.name == "received":
            pairs = zip(parts, (first, added), strict=True)
            parts = [
                np.ones_like(plan.weight) if part is None else part
                for part, plan in pairs
            ]
        joined[field.name] = np.concatenate(parts)
    return Rounds(**joined)


def _joined_objective(first: Plan, added: Plan) -> float:
    """Return the objective over the kept rounds of both plans."""
    match first.certificate.objective_name:
        case "average":
            counts = [len(first.rounds) - first.burn_in, len(added.rounds)]
            return float(np.average([first.objective, added.objective], weights=counts))
        case "transcript":  # 1/V is the sum over the rounds
            return 1 / (1 / first.objective + 1 / added.objective)
        case _:
            return float(np.maximum(first.objective, added.objective))


def _plan_arrays(plan: Plan) -> storage.Arrays:
    """Return all fields of a plan as arrays, by dotted names; None is left out."""
    certificate = vars(plan.certificate) | {
        "notices.code": np.array(notices.codes(plan.notices), dtype=str),
        "notices.text": np.array(plan.warnings, dtype=str),
    }
    del certificate["notices"]
    context = vars(plan.context) | {
        **{
            f"privacy.{field.name}": getattr(plan.privacy, field.name)
            for field in fields(Privacy)
        },
        "dynamics.name": plan.dynamics.name,
        **{
            f"dynamics.{name}": value
            for name, value in plan.dynamics.parameters.items()
        },
    }
    del context["privacy"], context["dynamics"]
    rounds = {field.name: getattr(plan.rounds, field.name) for field in fields(Rounds)}
    parts = {"rounds": rounds, "certificate": certificate, "context": context}
    return {
        f"{part}.{name}": np.asarray(value)
        for part, values in parts.items()
        for name, value in values.items()
        if value is not None
    }


def _fields_in(arrays: storage.Arrays, part: str) -> dict[str, Any]:
    """Return the values of one part, by the names behind its own."""
    prefix = f"{part}."
    return {
        name.removeprefix(prefix): array.item() if array.ndim == 0 else array
        for name, array in arrays.items()
        if name.startswith(prefix)
    }


def _certificate_in(arrays: storage.Arrays) -> Certificate:
    optional: dict[str, Any] = {"bound": None, "lower_bound": None, "regime": None}
    values = optional | _fields_in(arrays, "certificate")
    codes = values.pop("notices.code").tolist()
    texts = values.pop("notices.text").tolist()
    given = tuple(Notice(code, text) for code, text in zip(codes, texts, strict=True))
    return Certificate(**values, notices=given)


def _context_in(arrays: storage.Arrays) -> Context:
    values = {
        name: value
        for name, value in _fields_in(arrays, "context").items()
        if not name.startswith(("privacy.", "dynamics."))
    }
    privacy = Privacy(**_fields_in(arrays, "context.privacy"))
    dynamics = from_constants(_fields_in(arrays, "context.dynamics"))
    return Context(**values, privacy=privacy, dynamics=dynamics)
