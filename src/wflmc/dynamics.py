r"""How the server moves a chain by a received gradient: the update of θ.

Overdamped Langevin steps of size η, as in the paper, are

    θ ← θ − η ĝ(θ) + √(2η) ξ.

Kinetic (underdamped) Langevin dynamics, dθ = v dt, dv = −∇f dt − γ_f v dt + √(2γ_f) dW,
go in steps of h with one gradient each: half a drift, half a kick, friction, half a
kick with the same gradient, half a drift,

    θ ← θ + (h/2) v,
    v ← e v − (h/2)(1 + e) ĝ(θ) + √(1 − e²) ξ,    e = exp(−γ_f h),
    θ ← θ + (h/2) v.

The gradient is ĝ = (K/(α K_a)) y with y what the server receives. The channel's noise
in it is part of the 2η, or of the 1 − e². `overdamped()` and `kinetic(friction)` are
values with the same methods; how a velocity enters the step is known here alone.
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

MAX_RESPONSE_NUMBERS = 2**27
"""The most numbers of a `Response`: 1 GiB, of which the planner holds a few copies."""
MAX_DIRECTIONS = 64
"""The most directions of `diagonal_response`; more are merged by their precision."""
MIN_CONTRACTION = 1e-12
"""The least 1 − γ of a round; below it float64 cannot tell whether a chain forgets."""
UNSCALED_CONDITION = 1e-9
"""μ/L below this is a sign of features that are not scaled."""
FORGETTING_TIMES = 1.9
"""Diffusion times 1/μ that it takes at least to forget a start drawn from the prior.

After 1.9 of them e^−3.8 = 0.02 of the variance between starts is left, at which R-hat
is about 1.01.
"""
SMALLEST_USUAL_FRICTION = 0.2
"""In units of √μ: with less the chain swings for many rounds."""
LARGEST_USUAL_FRICTION = 20
"""In units of √L: with more the chain creeps."""


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
    """How fast a step forgets, one number for each step size."""

    gamma: Array
    """γ of Proposition 1; of kinetic steps the factor by which the mean forgets."""
    rho: Array
    """ρ = (1 + γ)/2; nan where no bound is known."""
    kappa: Array
    """κ = 2(1 + γ)/(1 − γ); nan where no bound is known."""
    log_rho: Array
    """log ρ, without cancellation; nan where no bound is known."""


class LinearRound(NamedTuple):
    """A round of a chain with affine gradients: x' = A x + b + G ξ.

    The state x has n numbers: θ, or θ and v.
    """

    matrix: Array
    """A[..., S, n, n]."""
    offset: Array
    """b[..., S, n]."""
    noise_matrix: Array
    """G, by which the noise ξ enters, [..., S, n, m], or one [n, m] for all rounds."""


@dataclass(frozen=True)
class Overdamped:
    """Langevin steps of the parameters alone, as in the paper."""

    name: ClassVar[str] = "overdamped"
    """As scenarios have it."""
    has_velocity: ClassVar[bool] = False
    """Whether the state has a velocity beside θ."""
    has_bound: ClassVar[bool] = True
    """Whether a bound on W2² is known (Proposition 1)."""

    @property
    def parameters(self) -> dict[str, float]:
        """Return the numbers of the dynamics beside the step size, by name.

        Overdamped steps have none; kinetic ones have their friction.
        """
        return {}

    @property
    def constants(self) -> dict[str, str | float]:
        """Return what a document says of dynamics other than the paper's.

        It has the name and the parameters, and is empty for overdamped steps, which
        documents do not mention. `from_constants` reads it.
        """
        if not self.parameters:
            return {}
        return {"dynamics": self.name, **self.parameters}

    def notices(self, mu: float, L: float) -> list[Notice]:
        """Return notices about constants that suit the posterior badly.

        Overdamped steps have nothing but their size, whose limits are checked by
        `contraction`, so that there are none.

        Args:
            mu: μ, the smallest curvature of the cost.
            L: the largest one.

        Returns:
            An empty list.
        """
        return []

    def largest_step(self, mu: float, L: float) -> float:
        """Return the largest step size worth a try.

        At η = 2/(μ + L) a step forgets most: directions of curvature μ and L shrink by
        the same factor (L − μ)/(L + μ).

        Args:
            mu: μ, the smallest curvature of the cost.
            L: the largest one.

        Returns:
            η.
        """
        return 2 / (mu + L)

    def stretching_step(self, step_size: Array) -> Array:
        """Return the factor of the Hessian in what a step does to an error.

        Along a direction of curvature λ an overdamped step multiplies an error by
        1 − ηλ, so that the factor is η. A step is stable while |1 − factor λ| < 1.

        Args:
            step_size: η, of any shape.

        Returns:
            The factor, of the same shape.
        """
        return step_size

    def kick(self, step_size: StepT) -> StepT:
        """Return the factor of the gradient in the update, η.

        Noise of variance v in the gradient puts noise of variance kick² v on the
        update.

        Args:
            step_size: η, of any shape.

        Returns:
            The factor, of the same shape.
        """
        return step_size

    def langevin_noise(self, step_size: StepT) -> StepT:
        """Return the variance of the noise that a round needs, 2η (Lemma 3).

        With it, and with small steps, the chain samples the posterior. The channel
        supplies part of it, and the server adds what is missing.

        Args:
            step_size: η, of any shape.

        Returns:
            The variance in every coordinate of the update, of the same shape.
        """
        return 2 * step_size

    def noise_step(self, step_size: StepT) -> StepT:
        """Return the overdamped step that needs as much noise in the gradient.

        An overdamped step of η needs noise of variance 2/η in the gradient, so that
        this is η itself. By it caps on power are computed for all dynamics.

        Args:
            step_size: η, of any shape.

        Returns:
            η.
        """
        return step_size

    def rounds_to_forget(self, step_size: float, mu: float, gamma: float) -> float:
        """Return the fewest rounds that may forget a start drawn from the prior.

        A search for burn-in is refused where its limit is below this. In directions of
        which the data say nothing the curvature is μ, and a round takes the fraction ημ
        of an error away.

        Args:
            step_size: η.
            mu: μ, the smallest curvature of the cost.
            gamma: γ of a round, which overdamped steps do not need.

        Returns:
            A number of rounds, not a whole one.
        """
        return FORGETTING_TIMES / (step_size * mu)

    def contraction(self, step_size: ArrayLike, mu: float, L: float) -> Contraction:
        r"""Return the constants of the bound (Proposition 1).

        $\gamma = 1 - \eta\mu$ for $\eta \le 2/(\mu + L)$ and $\eta L - 1$ above,
        $\rho = (1 + \gamma)/2$ and $\kappa = 2(1 + \gamma)/(1 - \gamma)$. At η = 2/L
        the chain no longer contracts. 1 − γ is computed directly, not by subtraction:
        it is tiny for small steps, and κ divides by it.

        Args:
            step_size: η, above 0 and below 2/L: one, or one per round.
            mu: μ, strong convexity of the cost.
            L: its smoothness.

        Returns:
            The constants, of the shape of η.

        Raises:
            InputError: a step is out of range, or so near an end of it that nothing is
                forgotten.
        """
        eta = np.asarray(step_size, dtype=float)
        largest = 2 / L
        is_in_range = (eta > 0) & (eta < largest)
        _check_steps(eta, is_in_range, f"above 0 and below 2/L = {largest:.6g}")
        is_short = eta <= 2 / (mu + L)
        distance = np.where(is_short, eta * mu, 2 - eta * L)
        forgets = distance >= MIN_CONTRACTION
        expected = f"further below 2/L = {largest:.6g}, where no chain contracts"
        _check_steps(eta, forgets | is_short, expected)
        expected = (
            "large enough to contract: "
            f"step_size × mu = {distance.min():.3g} is too small"
        )
        if mu < UNSCALED_CONDITION * L:
            expected += (
                f" (L/mu = {L / mu:.1g}, as of features that are not scaled: "
                "standardise them)"
            )
        _check_steps(eta, forgets, expected)
        gamma = 1 - distance
        return Contraction(
            gamma=gamma,
            rho=1 - distance / 2,
            kappa=2 * (1 + gamma) / distance,
            log_rho=np.log1p(-distance / 2),
        )

    def draw_velocity(self, key: jax.Array, position: jax.Array) -> jax.Array | None:
        """Draw the velocity that a chain starts with; None without one.

        Args:
            key: of the draw.
            position: θ[m], where the chain starts.

        Returns:
            v[m] of kinetic dynamics, None of overdamped ones.
        """
        return None

    def gradient_position(self, point: PhasePoint[ArrayT], step_size: Scalar) -> ArrayT:
        """Return where gradients of a round are taken: at θ.

        It is what the server broadcasts to the devices.

        Args:
            point: where the chain is, θ[..., m].
            step_size: η, which overdamped steps do not need.

        Returns:
            θ[..., m].
        """
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

        $$\theta' = \theta - \eta \frac{K}{\alpha K_a} y + \sqrt{\beta}\, q$$

        Arrays may be JAX's or NumPy's: compiled chains in float32 and protected ones in
        float64 have the same equation.

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
    ) -> LinearRound:
        r"""Return the round of a chain with gradients Hθ − b as an affine map.

        $$\theta' = (I - \eta H)\,\theta + \eta b + \xi$$, the update of `step` while no
        gradient is clipped. ξ is the noise of channel and server.

        Args:
            step_size: η[..., S].
            hessian: H[..., S, m, m], the sum over devices with their weights.
            linear: b[..., S, m], the same sum.

        Returns:
            The map of every round, on θ.
        """
        identity = np.eye(hessian.shape[-1])
        return LinearRound(
            matrix=identity - step_size[..., None, None] * hessian,
            offset=step_size[..., None] * linear,
            noise_matrix=identity,
        )

    def initial_law(self, mean: Array, covariance: Array) -> tuple[Array, Array]:
        """Return mean and covariance of a chain's state at the start.

        The state of overdamped chains is θ.

        Args:
            mean: of θ[0], [m].
            covariance: of θ[0], [m, m].

        Returns:
            Mean [n] and covariance [n, n] of the state.
        """
        return mean, covariance

    def readout(self, matrix: Array) -> Array:
        """Return the matrix that reads parameters off a chain's state.

        Args:
            matrix: which reads them off θ, [..., m].

        Returns:
            The same for the state, [..., n].
        """
        return matrix


@dataclass(frozen=True)
class Kinetic(Overdamped):
    """Langevin steps of a velocity, by which the parameters drift.

    Methods are those of `Overdamped`, with e = exp(−γ_f h).
    """

    friction: float
    """γ_f; in compiled chains that differ in it, an array [..., 1]."""

    name: ClassVar[str] = "kinetic"
    has_velocity: ClassVar[bool] = True
    has_bound: ClassVar[bool] = False

    @property
    def parameters(self) -> dict[str, float]:
        """Return the friction, by its name."""
        return {"friction": self.friction}

    def notices(self, mu: float, L: float) -> list[Notice]:
        """Return a notice about a friction that makes the chain swing or creep.

        Below 0.2√μ the slowest direction swings for many rounds, and above 20√L all of
        them creep. 2√μ damps the slowest direction critically.

        Args:
            mu: μ, the smallest curvature of the cost.
            L: the largest one.

        Returns:
            One notice, or none where the friction is within these limits.
        """
        low = SMALLEST_USUAL_FRICTION * mu**0.5
        high = LARGEST_USUAL_FRICTION * L**0.5
        if low <= self.friction <= high:
            return []
        text = (
            f"friction = {self.friction:.3g} is outside {low:.3g} to {high:.3g} "
            "(0.2√mu to 20√L): the chain swings or creeps for many rounds. "
            "2√mu is a good choice."
        )
        return [Notice(NoticeCode.UNSUITABLE_FRICTION, text)]

    def largest_step(self, mu: float, L: float) -> float:
        """Return the largest step size worth a try, 1.5/√L.

        It is three quarters of 2/√L, where steps become unstable. Unlike that of
        overdamped steps it does not depend on μ.

        Args:
            mu: μ, the smallest curvature of the cost.
            L: the largest one.

        Returns:
            h.
        """
        return 1.5 / L**0.5

    def stretching_step(self, step_size: Array) -> Array:
        """Return h²/2, the factor of the Hessian in what a step does to an error.

        A kinetic step is stable while |1 − h²λ/2| < 1, that is for h√λ < 2, whatever
        the friction.

        Args:
            step_size: h, of any shape.

        Returns:
            The factor, of the same shape.
        """
        return step_size**2 / 2

    def kick(self, step_size: StepT) -> StepT:
        """Return the factor of the gradient in the velocity, (h/2)(1 + e).

        Half a kick comes before the friction, which takes its part of it, and half a
        kick after it, both with the same gradient.

        Args:
            step_size: h, of any shape.

        Returns:
            The factor, of the same shape.
        """
        return 0.5 * step_size * (1 + np.exp(-self.friction * step_size))

    def langevin_noise(self, step_size: StepT) -> StepT:
        """Return the variance of the noise that the velocity needs, 1 − e².

        It makes up for what friction takes from v ~ N(0, I). It is computed without
        cancellation, for small h as well.

        Args:
            step_size: h, of any shape.

        Returns:
            The variance in every coordinate of the velocity, of the same shape.
        """
        return -np.expm1(-2 * self.friction * step_size)

    def noise_step(self, step_size: StepT) -> StepT:
        r"""Return the overdamped step that needs as much noise in the gradient.

        $2/\eta = (1 - e^2)/\mathrm{kick}^2 = (4/h^2) \tanh(\gamma_f h/2)$, solved for
        η.

        Args:
            step_size: h, of any shape.

        Returns:
            η, of the same shape.
        """
        return step_size**2 / (2 * np.tanh(0.5 * self.friction * step_size))

    def rounds_to_forget(self, step_size: float, mu: float, gamma: float) -> float:
        """Return the fewest rounds that may forget a start drawn from the prior.

        They are −1/log γ, in which the mean shrinks by a factor of e in the long run; a
        kinetic chain may swing past the prior early.

        Args:
            step_size: h, which is not needed.
            mu: μ, which is not needed.
            gamma: γ of a round, by `contraction`.

        Returns:
            A number of rounds, not a whole one.
        """
        return float(-1 / np.log(gamma))

    def contraction(self, step_size: ArrayLike, mu: float, L: float) -> Contraction:
        r"""Return γ, the factor by which the mean forgets its start in the long run.

        Along an eigenvector of the Hessian with eigenvalue λ a round has eigenvalues z
        with $z^2 - (1 + e)(1 - h^2\lambda/2)\, z + e = 0$. Both are inside the unit
        circle while h²λ < 4, and the larger one is largest at λ = μ or λ = L. No bound
        on W2² is known, so that the other constants are nan.

        Args:
            step_size: h, above 0 and below 2/√L: one, or one per round.
            mu: μ, the smallest curvature of the cost.
            L: the largest one.

        Returns:
            The constants, of the shape of h.

        Raises:
            InputError: a step or the friction is out of range, or nothing is forgotten.
        """
        h = np.asarray(step_size, dtype=float)
        largest = 2 / L**0.5
        is_in_range = (h > 0) & (h < largest)
        _check_steps(h, is_in_range, f"above 0 and below 2/√L = {largest:.6g}")
        if not 0 < self.friction < np.inf:
            raise InputError(
                "friction", self.friction, "finite and above 0", section="sampler"
            )
        decay = np.exp(-self.friction * h)
        curvature = np.array([[mu], [L]])
        half_trace = 0.5 * (1 + decay) * (1 - 0.5 * h**2 * curvature)
        root = np.sqrt((half_trace**2 - decay).astype(complex))
        gamma = np.abs([half_trace + root, half_trace - root]).max((0, 1))
        expected = (
            "such that the start is forgotten: "
            f"with friction = {self.friction:.3g} it is not"
        )
        _check_steps(h, gamma < 1 - MIN_CONTRACTION, expected)
        no_bound = np.full_like(gamma, np.nan)
        return Contraction(gamma, rho=no_bound, kappa=no_bound, log_rho=no_bound)

    def draw_velocity(self, key: jax.Array, position: jax.Array) -> jax.Array | None:
        """Draw the velocity that a chain starts with, v ~ N(0, I).

        It is the stationary law of the velocity, and independent of θ.

        Args:
            key: of the draw.
            position: θ[m], which decides shape and dtype.

        Returns:
            v[m].
        """
        return jax.random.normal(key, position.shape, position.dtype)

    def gradient_position(self, point: PhasePoint[ArrayT], step_size: Scalar) -> ArrayT:
        """Return where gradients of a round are taken: θ + (h/2) v.

        It is half a drift ahead of θ.

        Args:
            point: where the chain is, θ and v, [..., m] each.
            step_size: h.

        Returns:
            The position, [..., m].

        Raises:
            InputError: the point has no velocity.
        """
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
        r"""Move a chain by what the server has received in a round.

        $$v' = e\,v - \frac{h}{2}(1 + e) \frac{K}{\alpha K_a} y + \sqrt{\beta}\, q,
        \qquad \theta' = \theta + \frac{h}{2}(v + v')$$

        At θ', and not where gradients were taken, the draws of a Gaussian posterior
        have exactly its law.

        Args:
            point: where the chain is, θ and v, [..., m] each.
            received: y[..., m], noise included, of gradients at `gradient_position`.
            noise: √β q[..., m] that the server adds to v; None where it adds none.
            step_size: h.
            scale: K/K_a, the largest weight of a device that transmitted.
            gain: α.

        Returns:
            Where the chain is after the round.

        Raises:
            InputError: the point has no velocity.
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
    ) -> LinearRound:
        r"""Return the round of a chain with gradients Hθ − b as an affine map.

        The state is (θ, v). With $k = \frac{h}{2}(1 + e)$ the round is
        $v' = -kH\theta + (e - \frac{h}{2} kH)\,v + kb + \xi$ and
        $\theta' = \theta + \frac{h}{2}(v + v')$.

        Args:
            step_size: h[..., S].
            hessian: H[..., S, m, m], the sum over devices with their weights.
            linear: b[..., S, m], the same sum.

        Returns:
            The map of every round, of n = 2m numbers.
        """
        half_step = 0.5 * step_size[..., None, None]
        decay = np.exp(-self.friction * step_size)[..., None, None]
        kick = half_step * (1 + decay)
        kicked_hessian = kick * hessian
        kicked_linear = kick[..., 0] * linear
        identity = np.broadcast_to(np.eye(hessian.shape[-1]), hessian.shape)
        velocity_of_velocity = decay * identity - half_step * kicked_hessian
        new_velocity = np.concatenate([-kicked_hessian, velocity_of_velocity], axis=-1)
        drift = np.concatenate([identity, half_step * identity], axis=-1)
        new_position = drift + half_step * new_velocity
        position_offset = half_step[..., 0] * kicked_linear
        return LinearRound(
            matrix=np.concatenate([new_position, new_velocity], axis=-2),
            offset=np.concatenate([position_offset, kicked_linear], axis=-1),
            noise_matrix=np.concatenate([half_step * identity, identity], axis=-2),
        )

    def initial_law(self, mean: Array, covariance: Array) -> tuple[Array, Array]:
        """Return mean and covariance of (θ, v) at the start.

        v ~ N(0, I) is independent of θ.

        Args:
            mean: of θ[0], [m].
            covariance: of θ[0], [m, m].

        Returns:
            Mean [2m] and covariance [2m, 2m] of the state.
        """
        zeros = np.zeros_like(covariance)
        identity = np.eye(mean.size)
        state_mean = np.concatenate([mean, np.zeros_like(mean)])
        return state_mean, np.block([[covariance, zeros], [zeros, identity]])

    def readout(self, matrix: Array) -> Array:
        """Return the matrix that reads parameters off (θ, v).

        The velocity is not read.

        Args:
            matrix: which reads them off θ, [..., m].

        Returns:
            The same for the state, [..., 2m].
        """
        return np.concatenate([matrix, np.zeros_like(matrix)], axis=-1)


Dynamics = Overdamped
"""The type of all dynamics: `Kinetic` derives from `Overdamped`."""
OVERDAMPED = Overdamped()
"""The dynamics of the paper."""
jax.tree_util.register_dataclass(Overdamped, data_fields=[], meta_fields=[])
jax.tree_util.register_dataclass(Kinetic, data_fields=["friction"], meta_fields=[])


def overdamped() -> Dynamics:
    """Return Langevin steps of the parameters alone, as in the paper.

    θ ← θ − η ĝ(θ) + √(2η) ξ. A bound on W2² is known for them (Proposition 1).
    """
    return OVERDAMPED


def kinetic(friction: float = 2.0) -> Dynamics:
    """Return Langevin steps with a velocity: fewer rounds where μ and L are far apart.

    A friction of 2√μ damps the slowest direction critically and is a good choice. No
    bound on W2² is known, so that plans need another objective, or a policy that needs
    none. Whether the friction is in range is checked with the steps.

    Args:
        friction: γ_f, finite and above 0.

    Returns:
        The dynamics.

    Raises:
        InputError: the friction is not a number.
    """
    if not isinstance(friction, int | float):
        raise InputError("friction", friction, "a number", section="sampler")
    return Kinetic(friction)


def by_name(name: str | Dynamics, friction: float) -> Dynamics:
    """Return the dynamics that options or a scenario name.

    Dynamics that are already a value are returned as they are. A friction that is not a
    number is refused for overdamped dynamics too, which have none.

    Args:
        name: "overdamped" or "kinetic", or dynamics.
        friction: γ_f of kinetic dynamics.

    Returns:
        The dynamics.

    Raises:
        InputError: no dynamics have that name, or the friction is not a number.
    """
    if isinstance(name, Dynamics):
        return name
    choices = {"overdamped": OVERDAMPED, "kinetic": kinetic(friction)}
    if name not in choices:
        raise unknown("dynamics", name, choices, section="sampler")
    return choices[name]


def from_constants(constants: Mapping[str, str | float | None]) -> Dynamics:
    """Return the dynamics that a document describes by their constants.

    It reads what `Overdamped.constants` wrote: dynamics with a friction are kinetic,
    all others overdamped. Other entries of the document do not matter.

    Args:
        constants: by name.

    Returns:
        The dynamics, equal to those that were written.
    """
    friction = constants.get("friction")
    return overdamped() if friction is None else kinetic(float(friction))


def _velocity(point: PhasePoint[ArrayT]) -> ArrayT:
    """Return the velocity of a kinetic chain, which must have one."""
    if point.velocity is None:
        raise missing("state.velocity", "with kinetic dynamics; kernel.init draws one")
    return point.velocity


def _check_steps(
    step_size: Array, is_allowed: NDArray[np.bool_], expected: str
) -> None:
    """Refuse the first step size that is not allowed.

    The error names its round where steps differ.
    """
    if np.all(is_allowed):
        return
    index = int(np.argmin(np.ravel(is_allowed)))
    if np.any(step_size != step_size.flat[0]):
        expected += f" in every round, also in round {index + 1}"
    value = float(step_size.flat[index])
    raise InputError("step_size", value, expected, section="sampler")


class Motion(NamedTuple):
    """How a chain moves, but for the noise of channel and server."""

    step_size: ArrayLike
    """η[..., S], or h of kinetic dynamics."""
    weight: ArrayLike
    """Of every device's gradient in the update, [..., S, K]."""
    init: str = "prior"
    """Where the chain starts: prior, prior-mean or zero."""
    dynamics: Dynamics = OVERDAMPED
    """With kinetic dynamics noise is that of the velocity."""
    downlink: ArrayLike = 0.0
    """Variance of the noise in what every device receives of θ, [..., 1] or one
    number."""


@without_data
class Response(NamedTuple):
    """How the law of the kept rounds depends on the noise of all rounds.

    C[s'] = covariance[s'] + Σ_s v[s] effect[s', s] in the S_u kept rounds s', for noise
    of variance v[S]. Where all matrices share their eigenvectors, d eigenvalues stand
    in place of every [m, m].
    """

    covariance: Array
    """Without the plan's noise, [S_u, m, m]: from the start, and from other noise, as
    that of the downlink."""
    effect: Array
    """Of noise of unit variance in round s, [S_u, S, m, m].

    It is Φ Φᵀ if Φ takes the noise to θ[s'], and zero for s > s'.
    """
    shift: Array
    """‖mean − posterior mean‖², which no noise changes, [S_u]."""
    target: Array
    """The posterior's covariance, [m, m]."""
    multiplicity: Array | None = None
    """How many directions of the m have these eigenvalues, [d]; None for matrices."""


@without_data
class Quadratic(NamedTuple):
    """A cost as a quadratic around its mode.

    Its coordinates are the main directions of its Hessian there.
    """

    precision: Array
    """Eigenvalues of the Hessian, [d]; directions that no prediction depends on may be
    left out."""
    start_mean: Array
    """The mean of the start less the mode, [d]."""
    start_variance: Array
    """The variance of the start, [d]."""
    gradients_at_mode: Array
    """Every device's gradient at the mode, [K, d]."""
    mode: Array
    """In parameters, [m]."""


def effects(matrix: Array, noise_matrix: Array, readout: Array, burn_in: int) -> Array:
    r"""Return the covariance that unit noise in each round puts on later parameters.

    $\Phi\Phi^\top$ with $\Phi = R\, A[s'] \cdots A[s+1]\, G[s]$, for all kept rounds s'
    and all rounds s; zero for s > s'.

    Args:
        matrix: A[S, n, n] of every round, as of `LinearRound`.
        noise_matrix: G[S, n, m], by which noise enters the state.
        readout: R[m, n], by which parameters are read off the state.
        burn_in: S_b; rounds s' up to it are left out.

    Returns:
        [S_u, S, m, m].

    Raises:
        InputError: the result would not fit into memory.
    """
    rounds = len(matrix)
    dim = len(readout)
    effect = _zero_effects(burn_in, rounds, dim, dim)
    carried = np.zeros(noise_matrix.shape)
    for s in range(rounds):
        carried[:s] = matrix[s] @ carried[:s]
        carried[s] = noise_matrix[s]
        if s >= burn_in:
            phi = readout @ carried[: s + 1]
            effect[s - burn_in, : s + 1] = phi @ np.swapaxes(phi, -1, -2)
    return effect


def _zero_effects(burn_in: int, rounds: int, *shape: int) -> Array:
    """Return zeros[S_u, S, *shape]; refuse more than `MAX_RESPONSE_NUMBERS`."""
    kept_rounds = rounds - burn_in
    if kept_rounds * rounds * int(np.prod(shape)) > MAX_RESPONSE_NUMBERS:
        expected = "worst or average for so many rounds or parameters: memory"
        raise InputError("objective", "exact", expected, section="policy")
    return np.zeros((kept_rounds, rounds, *shape))


def diagonal_response(
    precision: Array, mean_sq: Array, start: ArrayLike, motion: Motion, burn_in: int
) -> Response:
    r"""Return the response of a chain to whose Hessian all devices contribute alike.

    The posterior is Gaussian, and every direction moves by itself: an error shrinks by
    $1 - \eta w \lambda$ in a round, where w is the mean weight of the devices. The
    noise of the downlink adds its part. Directions of equal precision and start are
    taken as one, and if there are more than `MAX_DIRECTIONS`, those of nearly equal
    precision too.

    Args:
        precision: λ, eigenvalues of the Hessian, [m].
        mean_sq: squares along them of the way from the mean of the start to that of the
            posterior, [m].
        start: variance of θ[0] along each, [m] or one number.
        motion: how the chain moves; overdamped dynamics alone.
        burn_in: S_b; the response is that of the rounds after it.

    Returns:
        The response, by eigenvalues.

    Raises:
        InputError: dynamics are kinetic, or the result would not fit into memory.
    """
    if motion.dynamics.has_velocity:
        expected = (
            "worst with power = 'equal' for kinetic dynamics of this model, "
            "whose law is not known"
        )
        raise InputError("objective", "exact", expected, section="policy")
    step_size = np.asarray(motion.step_size, dtype=float)
    weight = np.asarray(motion.weight, dtype=float)
    initial_variance = np.broadcast_to(start, precision.shape)
    directions = _merge_directions(precision, mean_sq, initial_variance)
    step_of_mean = step_size * weight.mean(-1)
    factor = (1 - step_of_mean[:, None] * directions.precision) ** 2
    effect = _diagonal_effects(factor, burn_in)
    remaining = np.cumprod(factor, axis=0)[burn_in:]
    covariance = directions.initial_variance * remaining
    if np.any(motion.downlink):
        squared_weights = (weight**2).sum(-1)
        spread = step_size**2 * squared_weights / weight.shape[1] ** 2
        noise = motion.downlink * spread[:, None] * directions.precision**2
        covariance = covariance + np.einsum("usd,sd->ud", effect, noise)
    return Response(
        covariance=covariance,
        effect=effect,
        shift=remaining @ directions.mean_sq,
        target=1 / directions.precision,
        multiplicity=directions.multiplicity,
    )


def _diagonal_effects(factor: Array, burn_in: int) -> Array:
    """Return what unit noise in each round adds to later variances, [S_u, S, d].

    Args:
        factor: by which a round multiplies a variance, [S, d].
        burn_in: S_b.
    """
    rounds, directions = factor.shape
    effect = _zero_effects(burn_in, rounds, directions)
    carried = np.zeros((rounds, directions))
    for s in range(rounds):
        carried[:s] *= factor[s]
        carried[s] = 1.0
        if s >= burn_in:
            effect[s - burn_in, : s + 1] = carried[: s + 1]
    return effect


class _Directions(NamedTuple):
    """Eigenvectors of a Hessian, those that are alike as one, [d] each."""

    precision: Array
    mean_sq: Array
    """Added up over those taken as one."""
    initial_variance: Array
    multiplicity: Array
    """How many are taken as one."""


def _merge_directions(
    precision: Array, mean_sq: Array, initial_variance: Array
) -> _Directions:
    """Take directions of equal precision and start as one.

    If more than `MAX_DIRECTIONS` are left, those within one of as many equal ranges of
    log precision are taken as one, with the mean of their log precisions and of their
    variances at the start.
    """
    order = np.lexsort((initial_variance, precision))
    log_precision = np.log(precision[order])
    mean_sq = mean_sq[order]
    initial_variance = initial_variance[order]
    precision_differs = np.diff(log_precision) > 1e-12
    smallest_difference = 1e-12 * initial_variance.max()
    start_differs = np.diff(initial_variance) > smallest_difference
    is_first = np.append(True, precision_differs | start_differs)
    if is_first.sum() > MAX_DIRECTIONS:
        lowest = log_precision[0]
        relative = (log_precision - lowest) / (log_precision[-1] - lowest)
        bins = np.floor(relative * MAX_DIRECTIONS * (1 - 1e-12))
        is_first = np.append(True, np.diff(bins) > 0)
    first = np.flatnonzero(is_first)
    multiplicity = np.diff(np.append(first, precision.size)).astype(float)
    total_log = np.add.reduceat(log_precision, first)
    total_variance = np.add.reduceat(initial_variance, first)
    return _Directions(
        precision=np.exp(total_log / multiplicity),
        mean_sq=np.add.reduceat(mean_sq, first),
        initial_variance=total_variance / multiplicity,
        multiplicity=multiplicity,
    )


def continued(response: Response, noise: Array) -> Response:
    """Return the response of the rounds after the first ones, whose noise is settled.

    It serves plans that continue another one (`Sampler.before`). What the settled noise
    adds to the covariance becomes part of what no later noise changes; the effects of
    the later rounds are left.

    Args:
        response: of all rounds; the kept ones come after the first ones.
        noise: v of the first n rounds, [n].

    Returns:
        The response to the noise of the other S − n rounds.
    """
    settled_effect = response.effect[:, : noise.size]
    settled = np.einsum("s,us...->u...", noise, settled_effect)
    return response._replace(
        covariance=response.covariance + settled,
        effect=response.effect[:, noise.size :],
    )
