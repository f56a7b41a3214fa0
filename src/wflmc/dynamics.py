r"""How the server moves a chain by a received gradient: overdamped Langevin steps, or kinetic ones with a velocity.

Overdamped steps of size η are θ ← θ − η ĝ(θ) + √(2η) ξ. Kinetic (underdamped) Langevin dynamics, dθ = v dt,
dv = −∇f dt − γ_f v dt + √(2γ_f) dW, go in steps of h with one gradient each: half a drift, half a kick, friction, half
a kick with the same gradient, half a drift,

    θ ← θ + (h/2) v,    v ← e v − (h/2)(1 + e) ĝ(θ) + √(1 − e²) ξ,    θ ← θ + (h/2) v,    e = exp(−γ_f h).

The channel's noise in ĝ is part of the 2η, or of the 1 − e². `overdamped()` and `kinetic(friction)` are values with
the same methods; how a velocity enters the step is known here alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.support.errors import InputError, missing, unknown, without_data
from wflmc.support.notices import Notice, NoticeCode

Array = NDArray[np.float64]

MOST_NUMBERS = 2**27
"""Numbers in a response: 1 GiB, of which the planner holds a few copies."""
MOST_DIRECTIONS = 64
"""Directions of nearly the same precision are taken together until no more are left."""


ArrayT = TypeVar("ArrayT", jax.Array, Array)
"""Arrays of one library: of JAX in compiled loops, or of NumPy in float64."""
StepT = TypeVar("StepT", float, Array)
"""A step size, or one for every round, [..., S]."""
Scalar = float | jax.Array | Array
"""A number, or one for every chain, [chain, 1]."""


class PhasePoint(NamedTuple, Generic[ArrayT]):
    """A point of phase space: all that dynamics move of a chain, [..., m] each."""

    position: ArrayT
    """θ."""
    velocity: ArrayT | None = None
    """v of kinetic dynamics."""


class Contraction(NamedTuple):
    """How fast a Langevin step forgets: γ (Proposition 1), ρ = (1+γ)/2 and κ = 2(1+γ)/(1−γ), one for each step size."""

    gamma: Array
    rho: Array
    kappa: Array
    log_rho: Array


@dataclass(frozen=True)
class Overdamped:
    """Langevin steps of the parameters alone, as in the paper."""

    name: ClassVar[str] = "overdamped"
    has_velocity: ClassVar[bool] = False
    has_bound: ClassVar[bool] = True
    """Whether a bound on W2² is known (Proposition 1)."""

    @property
    def parameters(self) -> dict[str, float]:
        """The numbers of the dynamics beside the step size, by name."""
        return {}

    @property
    def constants(self) -> dict[str, str | float]:
        """What a document says of dynamics other than the paper's."""
        return {"dynamics": self.name, **self.parameters} if self.parameters else {}

    def notices(self, mu: float, L: float) -> list[Notice]:
        """Notices about constants that suit the posterior badly."""
        return []

    def largest_step(self, mu: float, L: float) -> float:
        """The largest step size worth a try."""
        return 2 / (mu + L)

    def stretching_step(self, step_size: Array) -> Array:
        """The factor of the Hessian in what a step does to an error: it is stable while |1 − factor λ| < 1."""
        return step_size

    def kick(self, step_size: StepT) -> StepT:
        """The factor of the gradient, η."""
        return step_size

    def langevin_noise(self, step_size: StepT) -> StepT:
        """Variance of the noise that a round needs, 2η (Lemma 3)."""
        return 2 * step_size

    def noise_step(self, step_size: StepT) -> StepT:
        """The overdamped step that needs as much noise in the gradient, 2/η."""
        return step_size

    def rounds_to_forget(self, step_size: float, mu: float, gamma: float) -> float:
        """Rounds in which a start drawn from the prior is forgotten where the data say nothing."""
        return 1.9 / (step_size * mu)

    def contraction(self, step_size: ArrayLike, mu: float, L: float) -> Contraction:
        """Constants of the bound for 0 < η < 2/L, one η or one per round; at η = 2/L the chain no longer contracts."""
        eta = np.asarray(step_size, dtype=float)
        _check_steps(
            eta, (eta > 0) & (eta < 2 / L), f"above 0 and below 2/L = {2 / L:.6g}"
        )
        # 1 − γ directly, not by subtraction: it is tiny for small steps and κ divides by it.
        distance = np.where(eta <= 2 / (mu + L), eta * mu, 2 - eta * L)
        least = f"large enough to contract: step_size × mu = {distance.min():.3g} is too small"
        if mu < 1e-9 * L:
            least += f" (L/mu = {L / mu:.1g}, as of features that are not scaled: standardise them)"
        _check_steps(eta, distance >= 1e-12, least)
        gamma = 1 - distance
        return Contraction(
            gamma, 1 - distance / 2, 2 * (1 + gamma) / distance, np.log1p(-distance / 2)
        )

    def draw_velocity(self, key: jax.Array, position: jax.Array) -> jax.Array | None:
        """Draw the velocity that a chain at θ[m] starts with; None without one."""
        return None

    def gradient_position(self, point: PhasePoint[ArrayT], step_size: Scalar) -> ArrayT:
        """Return where gradients are taken, [..., m]: at θ."""
        return point.position

    def step(
        self,
        point: PhasePoint[ArrayT],
        received: ArrayT,
        *,
        noise: ArrayT | None,
        step_size: Scalar,
        scale: Scalar,
        gain: Scalar,
    ) -> PhasePoint[ArrayT]:
        r"""Move a chain by what the server has received in a round.

        θ' = θ − η (K/(α K_a)) y + √β q. Arrays may be JAX's or NumPy's: compiled
        chains in float32 and protected ones in float64 have the same equation.

        Args:
            point: where the chain is, θ[..., m].
            received: y[..., m], noise included.
            noise: √β q[..., m] that the server adds; None where it adds none.
            step_size: η.
            scale: K/K_a, the largest weight of a device that transmitted.
            gain: α.

        Returns:
            Where the chain is after the round.
        """
        position = point.position - step_size * scale / gain * received
        if noise is not None:
            position = position + noise
        return PhasePoint(position)

    def linear_round(
        self, step_size: Array, hessian: Array, linear: Array
    ) -> tuple[Array, Array, Array]:
        """A round on θ with gradients Hθ − b: matrix [..., S, m, m], offset [..., S, m], how noise enters [m, m].

        Args:
            step_size: η[..., S]; hessian: H[..., S, m, m]; linear: b[..., S, m].
        """
        one = np.eye(hessian.shape[-1])
        return (
            one - step_size[..., None, None] * hessian,
            step_size[..., None] * linear,
            one,
        )

    def initial_law(self, mean: Array, covariance: Array) -> tuple[Array, Array]:
        """Mean and covariance of a chain's state at the start, from those of θ[0]."""
        return mean, covariance

    def readout(self, matrix: Array) -> Array:
        """The matrix that reads parameters off a chain's state, from that which reads them off θ."""
        return matrix


@dataclass(frozen=True)
class Kinetic(Overdamped):
    """Langevin steps of a velocity, by which the parameters drift; methods as of `Overdamped`."""

    friction: float
    """γ_f; in compiled chains that differ in it, an array [..., 1]."""

    name: ClassVar[str] = "kinetic"
    has_velocity: ClassVar[bool] = True
    has_bound: ClassVar[bool] = False

    @property
    def parameters(self) -> dict[str, float]:
        """The friction."""
        return {"friction": self.friction}

    def notices(self, mu: float, L: float) -> list[Notice]:
        """A notice about a friction that makes the chain swing or creep."""
        low, high = 0.2 * mu**0.5, 20 * L**0.5
        if low <= self.friction <= high:
            return []
        outside = f"friction = {self.friction:.3g} is outside {low:.3g} to {high:.3g} (0.2√mu to 20√L)"
        text = f"{outside}: the chain swings or creeps for many rounds. 2√mu is a good choice."
        return [Notice(NoticeCode.UNSUITABLE_FRICTION, text)]

    def largest_step(self, mu: float, L: float) -> float:
        """Three quarters of where steps become unstable."""
        return 1.5 / L**0.5

    def stretching_step(self, step_size: Array) -> Array:
        """h²/2: a kinetic step is stable while |1 − h²λ/2| < 1."""
        return step_size**2 / 2

    def kick(self, step_size: StepT) -> StepT:
        """The factor of the gradient in the velocity, (h/2)(1 + e)."""
        return 0.5 * step_size * (1 + np.exp(-self.friction * step_size))

    def langevin_noise(self, step_size: StepT) -> StepT:
        """Variance of the noise that the velocity needs, 1 − e²."""
        return -np.expm1(-2 * self.friction * step_size)

    def noise_step(self, step_size: StepT) -> StepT:
        """The overdamped step that needs as much noise in the gradient, 2/η = (4/h²) tanh(γ_f h/2)."""
        return step_size**2 / (2 * np.tanh(0.5 * self.friction * step_size))

    def rounds_to_forget(self, step_size: float, mu: float, gamma: float) -> float:
        """As of `Overdamped`, by the factor γ of a round; a kinetic chain may swing past the prior early."""
        return float(-1 / np.log(gamma))

    def contraction(self, step_size: ArrayLike, mu: float, L: float) -> Contraction:
        """γ[S]: the factor by which the mean forgets its start in a round, in the long run. No bound on W2² is known.

        Along an eigenvector of the Hessian with eigenvalue λ a round has eigenvalues z,
        z² − (1 + e)(1 − h²λ/2) z + e = 0. Both are inside the unit circle while h²λ < 4, and the larger one is largest
        at λ = μ or λ = L.
        """
        h = np.asarray(step_size, dtype=float)
        _check_steps(
            h, (h > 0) & (h < 2 / L**0.5), f"above 0 and below 2/√L = {2 / L**0.5:.6g}"
        )
        if not 0 < self.friction < np.inf:
            raise InputError(
                "friction", self.friction, "finite and above 0", section="sampler"
            )
        decay = np.exp(-self.friction * h)
        half_trace = 0.5 * (1 + decay) * (1 - 0.5 * h**2 * np.array([[mu], [L]]))
        root = np.sqrt((half_trace**2 - decay).astype(complex))
        gamma = np.abs([half_trace + root, half_trace - root]).max((0, 1))
        forgets = f"such that the start is forgotten: with friction = {self.friction:.3g} it is not"
        _check_steps(h, gamma < 1 - 1e-12, forgets)
        unknown = np.full_like(gamma, np.nan)
        return Contraction(gamma, unknown, unknown, unknown)

    def draw_velocity(self, key: jax.Array, position: jax.Array) -> jax.Array | None:
        """Draw v ~ N(0, I), [m]."""
        return jax.random.normal(key, position.shape, position.dtype)

    def gradient_position(self, point: PhasePoint[ArrayT], step_size: Scalar) -> ArrayT:
        """Return θ + (h/2) v, [..., m], half a drift ahead."""
        return point.position + step_size / 2 * _velocity(point)

    def step(
        self,
        point: PhasePoint[ArrayT],
        received: ArrayT,
        *,
        noise: ArrayT | None,
        step_size: Scalar,
        scale: Scalar,
        gain: Scalar,
    ) -> PhasePoint[ArrayT]:
        r"""Move a chain by what the server has received; arguments as of `Overdamped`.

        v' = e v − (h/2)(1 + e)(K/(α K_a)) y + √β q and θ' = θ + (h/2)(v + v'), with
        e = exp(−γ_f h). There, and not where gradients were taken, the draws of a
        Gaussian posterior have exactly its law.
        """
        velocity = _velocity(point)
        exp = jnp.exp if isinstance(velocity, jax.Array) else np.exp
        half_step = step_size / 2
        decay = exp(-self.friction * step_size)
        gradient = scale / gain * received
        new_velocity = decay * velocity - half_step * (1 + decay) * gradient
        if noise is not None:
            new_velocity = new_velocity + noise
        position = point.position + half_step * (velocity + new_velocity)
        return PhasePoint(position, new_velocity)

    def linear_round(
        self, step_size: Array, hessian: Array, linear: Array
    ) -> tuple[Array, Array, Array]:
        """A round on (θ, v): matrix [..., 2m, 2m], offset [..., 2m], how noise enters [..., 2m, m]."""
        half, decay = (
            0.5 * step_size[..., None, None],
            np.exp(-self.friction * step_size)[..., None, None],
        )
        kick = half * (1 + decay)
        pull, push = kick * hessian, kick[..., 0] * linear
        one = np.broadcast_to(np.eye(hessian.shape[-1]), hessian.shape)
        fresh = np.concatenate([-pull, decay * one - half * pull], axis=-1)
        matrix = np.concatenate(
            [np.concatenate([one, half * one], axis=-1) + half * fresh, fresh], axis=-2
        )
        offset = np.concatenate([half[..., 0] * push, push], axis=-1)
        return matrix, offset, np.concatenate([half * one, one], axis=-2)

    def initial_law(self, mean: Array, covariance: Array) -> tuple[Array, Array]:
        """The law of (θ, v) at the start: v ~ N(0, I), independent of θ."""
        none, one = np.zeros_like(covariance), np.eye(mean.size)
        return np.concatenate([mean, np.zeros_like(mean)]), np.block(
            [[covariance, none], [none, one]]
        )

    def readout(self, matrix: Array) -> Array:
        """As of `Overdamped`; the velocity is not read."""
        return np.concatenate([matrix, np.zeros_like(matrix)], axis=1)


Dynamics = Overdamped  # a kinetic chain is one with more to it
OVERDAMPED = Overdamped()
jax.tree_util.register_dataclass(Overdamped, data_fields=[], meta_fields=[])
jax.tree_util.register_dataclass(Kinetic, data_fields=["friction"], meta_fields=[])


def overdamped() -> Dynamics:
    """Langevin steps of the parameters alone, as in the paper."""
    return OVERDAMPED


def kinetic(friction: float = 2.0) -> Dynamics:
    """Langevin steps with a velocity and friction γ_f: fewer rounds where μ and L are far apart."""
    if not isinstance(friction, int | float):
        raise InputError("friction", friction, "a number", section="sampler")
    return Kinetic(friction)


def by_name(name: str | Dynamics, friction: float) -> Dynamics:
    """The dynamics that options or a scenario name; friction is for kinetic ones alone."""
    if isinstance(name, Dynamics):
        return name
    known = {
        "overdamped": OVERDAMPED,
        "kinetic": kinetic(friction),
    }  # a bad friction is refused in any case
    if name not in known:
        raise unknown("dynamics", name, known, section="sampler")
    return known[name]


def from_constants(constants: Mapping[str, str | float | None]) -> Dynamics:
    """The dynamics of a document with such `constants`."""
    friction = constants.get("friction")
    return overdamped() if friction is None else kinetic(float(friction))


def _velocity(point: PhasePoint[ArrayT]) -> ArrayT:
    """Return the velocity of a kinetic chain, which must have one."""
    if point.velocity is None:
        raise missing("state.velocity", "with kinetic dynamics; kernel.init draws one")
    return point.velocity


def _check_steps(step_size: Array, holds: NDArray[np.bool_], allowed: str) -> None:
    """Refuse the first step size that does not hold, and say of which round it is where they differ."""
    if not np.all(holds):
        at = int(np.argmin(np.ravel(holds)))
        where = (
            ""
            if np.all(step_size == step_size.flat[0])
            else f" in every round, also in round {at + 1}"
        )
        raise InputError(
            "step_size", float(step_size.flat[at]), allowed + where, section="sampler"
        )


class Motion(NamedTuple):
    """How a chain moves, but for its noise."""

    step_size: ArrayLike
    """η[..., S], or h of kinetic dynamics."""
    weight: ArrayLike
    """Of every device's gradient in the update, [..., S, K]."""
    init: str = "prior"
    dynamics: Dynamics = OVERDAMPED
    """With kinetic dynamics noise is that of the velocity."""
    downlink: ArrayLike = 0.0
    """Variance of the noise in what every device receives of θ, [..., 1] or one number."""


@without_data
class Response(NamedTuple):
    """C[s'] = covariance[s'] + Σ_s v[s] effect[s', s] in the S_u kept rounds s', for noise of variance v[S].

    Where all matrices share their eigenvectors, d eigenvalues stand in place of every [m, m].
    """

    covariance: Array
    """From the start alone, [S_u, m, m]."""
    effect: Array
    """Of noise of unit variance in round s, [S_u, S, m, m]: Φ Φᵀ if Φ takes it to θ[s']; zero for s > s'."""
    shift: Array
    """‖mean − posterior mean‖², which no noise changes, [S_u]."""
    target: Array
    """The posterior's covariance, [m, m]."""
    multiplicity: Array | None = None
    """How many directions of the m have these eigenvalues, [d]; None for matrices."""


@without_data
class Quadratic(NamedTuple):
    """A cost as a quadratic around its mode, along the main directions of its Hessian there."""

    precision: Array
    """Eigenvalues of the Hessian, [d]; directions that no prediction depends on may be left out."""
    away: Array
    """The mean of the start, seen from the mode, [d]."""
    start: Array
    """The variance of the start, [d]."""
    pull: Array
    """Every device's gradient at the mode, [K, d]."""
    mode: Array
    """In parameters, [m]."""


def effects(matrix: Array, enters: Array, readout: Array, burn_in: int) -> Array:
    """Φ Φᵀ for Φ = R A[s'] ⋯ A[s+1] G[s], all s' > burn_in and all s: A[S, n, n] -> [S_u, S, m, m]."""
    found, carried = (
        _no_effects(burn_in, len(matrix), len(readout), len(readout)),
        np.zeros(enters.shape),
    )
    for s in range(matrix.shape[0]):
        carried[:s] = matrix[s] @ carried[:s]
        carried[s] = enters[s]
        if s >= burn_in:
            seen = readout @ carried[: s + 1]
            found[s - burn_in, : s + 1] = seen @ np.swapaxes(seen, -1, -2)
    return found


def _no_effects(burn_in: int, rounds: int, *shape: int) -> Array:
    """Return zeros[S_u, S, ...], if there is memory for them."""
    if (rounds - burn_in) * rounds * int(np.prod(shape)) > MOST_NUMBERS:
        allowed = "worst or average for so many rounds or parameters: memory"
        raise InputError("objective", "exact", allowed, section="policy")
    return np.zeros((rounds - burn_in, rounds, *shape))


def diagonal_response(
    precision: Array, mean_sq: Array, start: ArrayLike, motion: Motion, burn_in: int
) -> Response:
    """A chain on a Gaussian posterior to whose Hessian all devices contribute alike.

    Args:
        precision: eigenvalues of the Hessian, [m]; mean_sq: squares of the posterior mean along them, [m].
        start: variance of θ[0] along each, [m] or one number; its mean is zero.
    """
    if motion.dynamics.has_velocity:
        allowed = "worst with power = 'equal' for kinetic dynamics of this model, whose law is not known"
        raise InputError("objective", "exact", allowed, section="policy")
    eta, weight = (
        np.asarray(motion.step_size, dtype=float),
        np.asarray(motion.weight, dtype=float),
    )
    precision, mean_sq, begun, times = _merged(
        precision, mean_sq, np.broadcast_to(start, precision.shape)
    )
    share = eta * weight.mean(-1)
    factor = (1 - share[:, None] * precision) ** 2
    found, carried = (
        _no_effects(burn_in, share.size, times.size),
        np.zeros((share.size, times.size)),
    )
    for s in range(share.size):
        carried[:s] *= factor[s]
        carried[s] = 1.0
        if s >= burn_in:
            found[s - burn_in, : s + 1] = carried[: s + 1]
    kept = np.cumprod(factor, axis=0)[burn_in:]
    covariance = begun * kept
    if np.any(motion.downlink):
        spread = (eta**2 * (weight**2).sum(-1) / weight.shape[1] ** 2)[:, None]
        covariance = covariance + np.einsum(
            "usd,sd->ud", found, motion.downlink * spread * precision**2
        )
    return Response(covariance, found, kept @ mean_sq, 1 / precision, times)


def _merged(
    precision: Array, mean_sq: Array, start: Array
) -> tuple[Array, Array, Array, Array]:
    """Alike precisions and starts, or if there are too many nearly alike precisions, as one, with how many they are."""
    order = np.lexsort((start, precision))
    precision, mean_sq, start, log = (
        precision[order],
        mean_sq[order],
        start[order],
        np.log(precision[order]),
    )
    first = np.append(
        True, (np.diff(log) > 1e-12) | (np.diff(start) > 1e-12 * start.max())
    )
    if first.sum() > MOST_DIRECTIONS:
        bins = np.floor(
            (log - log[0]) / (log[-1] - log[0]) * MOST_DIRECTIONS * (1 - 1e-12)
        )
        first = np.append(True, np.diff(bins) > 0)
    at = np.flatnonzero(first)
    times = np.diff(np.append(at, precision.size)).astype(float)
    total = [np.add.reduceat(values, at) for values in (log, mean_sq, start)]
    return np.exp(total[0] / times), total[1], total[2] / times, times


def continued(response: Response, noise: Array) -> Response:
    """The response of the rounds after the first ones, whose noise[n] is settled."""
    done = np.einsum("s,us...->u...", noise, response.effect[:, : noise.size])
    return response._replace(
        covariance=response.covariance + done, effect=response.effect[:, noise.size :]
    )
