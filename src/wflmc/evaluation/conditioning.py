r"""Posteriors that know the noise they were made with, given all received rounds.

A round receives $g = H\theta - b + n$ with $n \sim N(0, v I)$ and $v$ known from the
plan. With $H = G + \Lambda$ (data and prior) known, the rounds together give
$\hat b = \sum \omega (H\theta - g)$, $\omega \propto 1/v$, with noise of variance
$V = 1/\sum(1/v)$. Since $b|\theta \sim N(G\theta, G)$,

    θ | transcript ~ N(P⁻¹G A⁻¹b̂, P⁻¹),    A = (1 + c) G + V I,    P = Λ + G A⁻¹G,

where $c$ counts that silent devices make the sum over active ones itself noisy. A prior
with a mean other than 0 adds λ = Λ times that mean to b, see `_Estimate`. This is
post-processing: no privacy is spent. Rounds in which gradients are expected to be
clipped are left out, by what is public. `docs/explanation/noise_aware.md` has the
proofs.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from wflmc.planning import Plan
from wflmc.posterior import CustomPosterior, Gaussian, GaussianPosterior, Posterior
from wflmc.posterior.base import OptionalArray, check_posterior
from wflmc.posterior.coordinates import Affine, Array, Coordinates
from wflmc.posterior.custom.model import TracedModel
from wflmc.posterior.inputs import check_counts
from wflmc.posterior.regression import Regression
from wflmc.sampling import Trace, Transcript
from wflmc.sampling.groups import (
    ArvizData,
    NamedDraws,
    draws_to_arviz,
    name_draws,
)
from wflmc.support.errors import Fault, InputError, Shown, ShownValues, without_data

MAX_CLIPPED_FRACTION = 0.3
"""Rounds in which more of the gradients are expected to be clipped are left out."""
MAX_SELECTIONS = 20
"""The most times that rounds are selected again."""
DIAGONAL_FROM_DIM = 512
"""Parameters from which on covariances are returned by their diagonals."""
SECANT_STEP = 0.05
"""Half the length of the differences that give a Hessian: a fraction of the root mean
square of the position's coordinates, or of 1/√m where that is larger."""
SECANT_BYTES = 2.0**30
"""Memory for the gradients of which differences are taken."""
SMALLEST_CURVATURE = 1e-9
"""A direction in which data and prior together are less curved, in units of the
parameters' own curvatures, has no proper law."""
LARGEST_CLIP = 1e75
"""In the place of an infinite threshold: its square is finite."""
SMALLEST_PRECISION = 1e-300
"""In the place of zero, where nothing was received."""
KNOWN = "known moments"
"""The method where the moments of the data are known."""
UNCERTAIN = "uncertain moments"
"""The method where they are known up to a standard deviation."""
LOCAL = "local quadratic"
"""The method where the model is not linear."""
PRIVATE = (
    "noise_aware has taken the curvature from private data, which epsilon does not "
    "cover; give public moments."
)
"""What a result with moments of private data says of it."""


@without_data
class Moments(NamedTuple):
    """What `noise_aware` has to know of the data.

    Public or paid for, or taken from the data by `moments_of`. All are in the
    coordinates that chains move in.
    """

    gram: Array
    """G = Σ u uᵀ, the curvature of the data alone, without the prior, [m, m]; where the
    model is not linear, at every chain's mean, [chain, m, m]."""
    prior: Array
    """Λ, the precision of the prior, [m, m]; or that at every chain's mean, [chain, m,
    m]."""
    examples: int | NDArray[np.integer]
    """N; or N_k of every device, [K]."""
    deviation: float | Array | None = None
    """Standard deviation of every entry of `gram`, one number or [m, m]; None where G
    is known."""
    coordinates: Coordinates | Affine | None = None
    """The map to parameters, where chains move in other coordinates."""
    prior_linear: float | Array = 0.0
    """λ, the prior's precision times its mean, [m] or [chain, m]; 0 for a prior around
    0."""

    def parameters(self, phi: Array) -> Array:
        """Map coordinates that chains move in to parameters.

        Args:
            phi: φ, [..., m].

        Returns:
            θ, [..., m]; φ itself where chains move in the parameters.
        """
        return phi if self.coordinates is None else self.coordinates.parameters(phi)

    def covariance(self, phi: Array) -> Array:
        """Return the covariance of θ that belongs to one of φ.

        Where θ = W φ + a centre it is W C Wᵀ.

        Args:
            phi: the covariance C of φ, [chain, m, m].

        Returns:
            The covariance of θ, exactly symmetric, [chain, m, m].
        """
        theta = phi
        if self.coordinates is not None:
            rows = np.asarray(self.coordinates.linear(phi))
            theta = np.asarray(self.coordinates.linear(rows.swapaxes(1, 2)))
        # Rounding leaves the two halves unequal.
        return (theta + theta.swapaxes(1, 2)) / 2


def central_interval(draws: NDArray[np.floating], level: float) -> tuple[Array, Array]:
    """Return the central intervals of draws, between two of their quantiles.

    Args:
        draws: [chain, draw, m].
        level: the fraction of the draws that an interval contains, between 0 and 1.

    Returns:
        The lower and the upper ends, each [chain, m].
    """
    ends = [(1 - level) / 2, (1 + level) / 2]
    values = np.asarray(draws, dtype=float)
    lower, upper = np.quantile(values, ends, axis=1)
    return lower, upper


def exchangeable_interval(
    draws: NDArray[np.floating], level: float
) -> tuple[Array, Array]:
    """Return intervals that contain one more draw of the same law with probability p.

    Of n draws, the j-th and the k-th smallest contain one more with probability
    (k − j)/(n + 1), whatever the law. The ends are therefore at the ranks
    (1 ∓ p)/2 · (n + 1), between two draws by interpolation.

    Args:
        draws: independent draws, [chain, draw, ...].
        level: p, above 0 and below 1.

    Returns:
        The lower and the upper ends, each [chain, ...].

    Raises:
        InputError: if there are so few draws that the smallest and the largest contain
            less than `level`.
    """
    count = draws.shape[1]
    min_count = int(np.ceil((1 + level) / (1 - level) - 1e-9))
    if count < min_count:
        raise InputError(
            "draws", count, f"at least {min_count}, for intervals of level {level:g}"
        )
    ends = [(1 - level) / 2, (1 + level) / 2]
    values = np.asarray(draws, dtype=float)
    lower, upper = np.quantile(values, ends, axis=1, method="weibull")
    return lower, upper


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise InputError("level", level, "above 0 and below 1")


@dataclass(frozen=True, eq=False, repr=False)
class NoiseAware(Shown):
    """The posterior given everything that the server has received, for each chain.

    It is a normal law of the flat parameters θ[m], which are unconstrained where the
    model comes from NumPyro, or a mixture of such laws where the moments are uncertain.
    `sites`, `interval_by_site` and `to_arviz` have the parameters by the names of the
    model's sites, in the space of each site's support.
    """

    mean: Array
    """[chain, m]."""
    covariance: Array
    """[chain, m, m]; its diagonal [chain, m] where m is large."""
    draws: Array
    """Independent draws of the law, [chain, draw, m]."""
    method: str
    """known moments, uncertain moments, or local quadratic."""
    noise: Array
    """V, the variance of the noise in b̂, [chain]."""
    used: NDArray[np.bool_]
    """Which receptions of the transcript were used, [round, chain]."""
    clipped: Array
    """The fraction of gradients that is expected to be clipped, [round, chain]."""
    bias: Array
    """A bound on what clipping of whole devices may still add to b̂ in the used rounds,
    over the noise's norm √(mV), [chain]. Clipping of single records is not counted."""
    participation: Array
    """c, by which silent devices enlarge the variance of the data, [chain]."""
    named_draws: NamedDraws
    """The draws by site, with the names of their axes."""
    not_covered: tuple[str, ...] = ()
    """What epsilon does not cover."""

    @property
    def sites(self) -> dict[str, np.ndarray]:
        """Return the draws by the names of the model's sites, each [chain, draw, ...].

        They are in the space of the site's support, those of a scale above 0. Models
        without sites, and results of `Moments` alone, have all parameters as `theta`.
        """
        return {name: draws for name, (_, draws) in self.named_draws.variables.items()}

    def interval(self, level: float) -> tuple[Array, Array]:
        """Return central intervals of the flat parameters.

        They are those of the normal law; where the moments are uncertain, those of the
        draws.

        Args:
            level: the probability that an interval contains its parameter, above 0 and
                below 1.

        Returns:
            The lower and the upper ends, each [chain, m], unconstrained as `mean` is.

        Raises:
            InputError: for a level out of range, or too few draws for it.
        """
        _check_level(level)
        if self.method == UNCERTAIN:
            return exchangeable_interval(self.draws, level)
        variance = self.covariance
        if variance.ndim == 3:
            variance = np.diagonal(variance, axis1=1, axis2=2)
        half_width = ndtri((1 + level) / 2) * np.sqrt(variance)
        return self.mean - half_width, self.mean + half_width

    def interval_by_site(self, level: float) -> dict[str, tuple[Array, Array]]:
        """Return central intervals of the model's sites, from the draws.

        Args:
            level: the probability that an interval contains its value, above 0 and
                below 1.

        Returns:
            By the name of the site, the lower and the upper ends, each [chain, ...], in
            the space of the site's support: those of a scale are above 0.

        Raises:
            InputError: for a level out of range, or too few draws for it.
        """
        _check_level(level)
        return {
            name: exchangeable_interval(draws, level)
            for name, draws in self.sites.items()
        }

    def to_arviz(self) -> ArvizData:
        """Return the draws for ArviZ, by site as `trace.to_arviz(posterior)` has them.

        Returns:
            A data set of ArviZ's installed version with the group `posterior`. The
            method and what epsilon does not cover are attributes of the group.
        """
        attributes = {
            "method": self.method,
            "not_covered": " ".join(self.not_covered),
        }
        return draws_to_arviz(self.named_draws, attributes)

    def _facts(self) -> ShownValues:
        chains, draws, parameters = self.draws.shape
        return {
            "chains": chains,
            "draws": draws,
            "parameters": parameters,
            "method": self.method,
            "noise": self.noise,
            "bias": self.bias,
            "used": self.used.mean(),
        }


class _ExpectedClipping(NamedTuple):
    """What clipping is expected to do in every round, each [chain, round]."""

    fraction: Array
    """Of gradients that are clipped."""
    bias: Array
    """A bound on the norm by which the sum of the gradients is off."""


class _GradientNorm(NamedTuple):
    """The norm of a device's gradient at every position, by moments of its square."""

    mean_square: Array
    """[chain, round]."""
    square_deviation: Array
    """Standard deviation of the squared norm, [chain, round]."""

    def probability_above(self, clip: float) -> Array:
        """Return the probability of a longer gradient; the square is taken as normal.

        Args:
            clip: ℓ.
        """
        return np.asarray(ndtr((self.mean_square - clip**2) / self.square_deviation))

    def total_excess(self, clip: float, devices: int) -> Array:
        """Return E Σ max(0, norm − ℓ) over devices; the norm is taken as normal.

        Args:
            clip: ℓ.
            devices: how many have this law.
        """
        mean = np.sqrt(self.mean_square)
        deviation = self.square_deviation / (2 * mean)
        z = (clip - mean) / deviation
        density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
        return np.asarray(devices * deviation * (density - z * ndtr(-z)))


@without_data
class _Reception(NamedTuple):
    """A transcript with chains first, in float64, and what is known of its devices."""

    position: Array
    """[chain, round, m]."""
    gradient: Array
    """[chain, round, m]."""
    precision: Array
    """1/v, [chain, round]."""
    device_weight: Array
    """w_k, the weight of a device's gradient in the update, [1 or chain, round, K]:
    about K/K_a where it is active (`Plan.weight_received`), 0 where it is silent."""
    clip: Array
    """Where clipping acts, [K]."""
    data_fraction: Array
    """Of the examples that each device holds, [K]."""

    @classmethod
    def of(
        cls, transcript: Transcript, plans: tuple[Plan, ...], moments: Moments
    ) -> "_Reception":
        """Return the reception of a transcript.

        Args:
            transcript: of all chains.
            plans: of the chains, one or one for each.
            moments: whose number of examples says how data are split.
        """
        weights = []
        for plan in plans:
            weights.append(transcript.group_means(plan.weight_received))
        device_clip, _ = plans[0].clips_at
        examples = np.asarray(moments.examples, dtype=float)
        sizes = np.broadcast_to(examples, plans[0].devices)
        precision = 1 / transcript.noise
        return cls(
            position=_chains_first(transcript.position),
            gradient=_chains_first(transcript.gradient),
            precision=_chains_first(precision),
            device_weight=np.stack(weights, dtype=float),
            clip=np.minimum(device_clip, LARGEST_CLIP),
            data_fraction=sizes / sizes.sum(),
        )

    def round_weights(self, used: NDArray[np.bool_]) -> Array:
        """Return ω, by which the used rounds are averaged.

        Args:
            used: which rounds are, [chain, round].

        Returns:
            Weights of sum 1 in every chain, 0 in rounds that are not used,
            [chain, round].
        """
        precision = np.where(used, self.precision, 0.0)
        return precision * self._noise(used)[:, None]

    def _noise(self, used: NDArray[np.bool_]) -> Array:
        """Return V of the used rounds, [chain]."""
        precision = np.where(used, self.precision, 0.0)
        return 1 / np.maximum(precision.sum(1), SMALLEST_PRECISION)

    def estimate(self, moments: Moments, used: NDArray[np.bool_]) -> "_Estimate":
        """Return what the used rounds say of the data together.

        b̂ = Σ ω (Hθ − g) with ω ∝ 1/v, and c = Σ_k q_k (Σ ω w_k − 1)² of devices with
        the fractions q_k of the data, which is 0 where all devices send in all rounds.
        H = G + Λ, as gradients contain the prior's.

        Args:
            moments: of the data.
            used: which rounds are used, [chain, round].
        """
        round_weight = self.round_weights(used)
        hessian = moments.gram + moments.prior
        linear = self.position @ hessian - self.gradient
        # [chain, K]
        mean_device_weight = (round_weight[:, None] @ self.device_weight)[:, 0]
        squared_error = (mean_device_weight - 1) ** 2
        return _Estimate(
            linear=np.einsum("cs,csm->cm", round_weight, linear),
            noise=self._noise(used),
            participation=squared_error @ self.data_fraction,
        )

    def clipping(self, moments: Moments, mean: Array) -> _ExpectedClipping:
        """Return what clipping is expected to do to gradients.

        At a distance d from θ, taken to be `mean`, the gradient of a device with a
        fraction q of the data has mean q H d and covariance
        q (G (1 + dᵀG d/N) + G d dᵀG/N), as of Gaussian features; in the last term H d
        stands for G d, from which it differs by the prior alone. The bias is at most
        what clipping takes off all norms together.

        Args:
            moments: of the data.
            mean: of the parameters, [chain, m].
        """
        distance = self.position - mean[:, None]
        examples = np.sum(moments.examples)
        of_data = distance @ moments.gram
        squared_distance = (distance * of_data).sum(-1)
        spread = 1 + np.maximum(squared_distance, 0.0) / examples
        gradient = of_data + distance @ moments.prior
        norm_sq = (gradient**2).sum(-1)
        curvature = (gradient * (gradient @ moments.gram)).sum(-1)
        gradient_curvature = np.maximum(curvature, 0.0)
        # Of one G for all chains, or of one for each: [1 or chain, 1].
        gram_trace = np.trace(moments.gram, 0, -2, -1).reshape(-1, 1)
        gram_norm_sq = (moments.gram**2).sum((-1, -2)).reshape(-1, 1)
        fraction = np.zeros_like(spread)
        bias = np.zeros_like(spread)
        device_kinds = np.stack([self.data_fraction, self.clip], 1)
        kinds, counts = np.unique(device_kinds, axis=0, return_counts=True)
        devices = self.data_fraction.size
        for (q, clip), count in zip(kinds, counts, strict=True):
            trace = spread * gram_trace + norm_sq / examples
            mean_square = q**2 * norm_sq + q * trace
            # Of a normal law the square has the variance 2 tr C² + 4 μᵀC μ.
            of_noise = 2 * (q * spread) ** 2 * gram_norm_sq
            of_both = 4 * q**3 * (spread * gradient_curvature + norm_sq**2 / examples)
            norm = _GradientNorm(mean_square, np.sqrt(of_noise + of_both))
            fraction += count / devices * norm.probability_above(clip)
            bias += norm.total_excess(clip, count)
        return _ExpectedClipping(fraction, bias)


def _chains_first(values: NDArray[np.floating]) -> Array:
    """Return [round, chain, ...] as float64[chain, round, ...]."""
    return np.asarray(values, dtype=float).swapaxes(0, 1)


@without_data
class _Estimate(NamedTuple):
    """What some rounds say of the data together."""

    linear: Array
    """b̂, [chain, m]."""
    noise: Array
    """V, the variance of its noise, [chain]."""
    participation: Array
    """c, by which silent devices enlarge the variance of the data, [chain]."""

    def posterior(self, moments: Moments) -> Gaussian:
        """Return N(P⁻¹(G A⁻¹(b̂ − λ) + λ), P⁻¹), one for each chain.

        P = Λ + G A⁻¹G and A = (1 + c) G + V I.
        """
        gram = moments.gram
        identity = np.eye(self.linear.shape[1])
        of_data = (1 + self.participation)[:, None, None] * gram
        spread = of_data + self.noise[:, None, None] * identity  # A
        gain = np.linalg.solve(spread, identity @ gram)  # A⁻¹ G
        covariance = np.linalg.inv(moments.prior + gram @ gain)
        surprise = self.linear - moments.prior_linear
        learned = (gain.swapaxes(1, 2) @ surprise[..., None])[..., 0]
        information = learned + moments.prior_linear
        mean = (covariance @ information[..., None])[..., 0]
        return Gaussian(mean, np.asarray(covariance, dtype=float))


def noise_aware(
    trace: Trace,
    moments: Moments | Posterior,
    *,
    draws: int = 1000,
    public: bool = False,
    seed: int = 0,
) -> NoiseAware:
    """Return the posterior given all that the server has received, with its noise.

    Chains treat the noise that they receive as that of Langevin sampling. Here it is
    conditioned on, so that intervals contain the parameters as often as they should
    whatever the noise. This is post-processing of what the server has seen, and spends
    no privacy, as long as the moments are public or paid for.

    Args:
        trace: of `sample(…, transcript=True)`.
        moments: public or paid-for moments; or a posterior, whose Hessian is used (at
            the chain's mean, where the model is not linear). That of private data is
            listed in `not_covered`, unless the data are `public`.
        draws: independent draws of the law, for every chain; intervals by site are
            their quantiles.
        public: whether the posterior is one of public data, a stand-in for those of the
            devices, in the coordinates that the chains moved in.
        seed: of the draws.

    Returns:
        Mean, covariance, intervals and draws of the parameters, for every chain.

    Raises:
        InputError: for a trace without a transcript, no draws, or a posterior that has
            no curvature in some direction; and for moments of another size, or a
            deviation that is not above 0, or so large that no draw of G is positive
            definite.
    """
    check_counts(draws=draws)
    if not isinstance(trace, Trace) or trace.transcript is None:
        raise InputError(
            "trace", type(trace).__name__, "a trace of wflmc.sample(…, transcript=True)"
        )
    posterior: Posterior | None = None
    if isinstance(moments, Moments):
        moments_of_data = moments
        _check_moments(moments, trace.transcript.position.shape[-1], draws)
    else:
        posterior = moments
        moments_of_data = moments_of(posterior, trace)
    generator = np.random.default_rng(seed)

    reception = _Reception.of(trace.transcript, trace.plans, moments_of_data)
    is_after_burn_in = trace.transcript.start >= trace.plan.burn_in
    used, clipped = _select_rounds(reception, moments_of_data, is_after_burn_in)
    round_weight = reception.round_weights(used)
    estimate = reception.estimate(moments_of_data, used)
    law = estimate.posterior(moments_of_data)
    expected = reception.clipping(moments_of_data, law.mean)
    bias_norm = (round_weight * expected.bias).sum(1)
    noise_norm = np.sqrt(estimate.noise * law.mean.shape[1])

    if moments_of_data.deviation is None:
        is_local = np.ndim(moments_of_data.gram) == 3
        method = LOCAL if is_local else KNOWN
        drawn = _draw(generator, law, draws)
    else:
        method = UNCERTAIN
        law, drawn = _mix_over_moments(
            reception,
            moments_of_data,
            round_weight=round_weight,
            estimate=estimate,
            draws=draws,
            generator=generator,
        )
    law_of_parameters = _in_parameters(moments_of_data, law)
    theta = np.asarray(moments_of_data.parameters(drawn))
    is_covered = public or posterior is None
    return NoiseAware(
        mean=law_of_parameters.mean,
        covariance=law_of_parameters.covariance,
        draws=theta,
        method=method,
        noise=estimate.noise,
        used=used.T,
        clipped=clipped.T,
        bias=bias_norm / noise_norm,
        participation=estimate.participation,
        named_draws=name_draws(theta, posterior),
        not_covered=() if is_covered else (PRIVATE,),
    )


def _check_moments(moments: Moments, dim: int, draws: int) -> None:
    """Refuse moments of another size than m, and deviations that are not above 0."""
    for name, matrix in (("gram", moments.gram), ("prior", moments.prior)):
        if np.shape(matrix)[-2:] != (dim, dim):
            fault = Fault(f"has the shape {np.shape(matrix)}")
            raise InputError(name, fault, f"a matrix [{dim}, {dim}]")
    if moments.deviation is None:
        return
    deviation = np.asarray(moments.deviation, dtype=float)
    if deviation.shape not in ((), (dim, dim)) or not np.all(deviation > 0):
        requirement = f"one number, or a matrix [{dim}, {dim}], above 0"
        raise InputError("deviation", moments.deviation, requirement)
    if draws < 2:
        requirement = "at least 2 where the moments are uncertain: a covariance of them"
        raise InputError("draws", draws, requirement)


def moments_of(posterior: Posterior, trace: Trace) -> Moments:
    """Return the moments of a posterior's own data, where no public ones are given.

    This looks at the data, and ε does not cover it. Of a linear model the moments are
    exact. Of others the curvature at every chain's mean is a secant: differences of
    gradients whose examples are clipped as the plan clips them.

    Args:
        posterior: of the data; private unless the data are public.
        trace: of chains on it; their means are the places of the curvature.

    Returns:
        The moments, in the coordinates that the chains move in.

    Raises:
        InputError: for what is not a posterior, or has a direction without curvature.
    """
    check_posterior(posterior)
    if isinstance(posterior, GaussianPosterior):
        prior = np.asarray(posterior.prior_precision)
        return Moments(
            gram=posterior.hessian.sum(0) - prior,
            prior=prior,
            examples=posterior.sizes,
            coordinates=posterior.coordinates,
            prior_linear=posterior.devices * posterior.prior_linear,
        )
    mean = posterior.coordinates_of(np.asarray(trace.theta, dtype=float).mean(1))
    prior, prior_linear = _prior_quadratic(posterior, mean)
    gram = _without_negative(_secants(posterior, trace.plan, mean) - prior)
    _check_curvature(gram + prior)
    return Moments(
        gram=gram,
        prior=prior,
        examples=posterior.sizes,
        coordinates=posterior.coordinates,
        prior_linear=prior_linear,
    )


def _check_curvature(hessian: Array) -> None:
    """Refuse hessian[chain, m, m] of which a direction is not curved.

    Curvatures are compared whatever the scales of the parameters.
    """
    diagonal = np.diagonal(hessian, axis1=1, axis2=2)
    positive = np.maximum(diagonal, np.finfo(float).tiny)
    scale = 1 / np.sqrt(positive)
    scaled = hessian * scale[:, :, None] * scale[:, None]
    eigenvalues = np.linalg.eigvalsh(scaled)
    if not np.all(eigenvalues[:, 0] > SMALLEST_CURVATURE):
        raise InputError(
            "posterior",
            Fault("has a direction without curvature at the mean of a chain"),
            "curved in all directions there: give its parameters proper priors",
        )


def _without_negative(matrices: Array) -> Array:
    """Return symmetric matrices[chain, m, m] with negative eigenvalues set to 0."""
    values, vectors = np.linalg.eigh(matrices)
    return (vectors * np.maximum(values, 0.0)[:, None]) @ vectors.swapaxes(1, 2)


def _prior_quadratic(posterior: Posterior, middle: Array) -> tuple[Array, Array]:
    """Return Λ[..., m, m] and λ[..., m] with −log p(φ) ≈ φᵀΛφ/2 − λᵀφ + constant.

    Regressions have a normal prior, and so has any other model, around 0 and with the
    variance `prior_power`. Of a custom model, Λ is the Hessian of −log p at
    middle[chain, m], and λ makes the gradient there that of the prior.
    """
    if isinstance(posterior, CustomPosterior):
        positions = jnp.asarray(middle, jnp.float32)
        derivatives = _prior_derivatives(posterior.model, positions)
        gradient, hessian = (np.asarray(part, dtype=float) for part in derivatives)
        precision = _without_negative((hessian + hessian.swapaxes(1, 2)) / 2)
        return precision, (precision @ middle[..., None])[..., 0] - gradient
    if not isinstance(posterior, Regression):
        return np.eye(posterior.dim) / posterior.prior_power, np.zeros(posterior.dim)
    by_class = np.eye(max(1, posterior.classes))
    of_classes = np.kron(by_class, posterior.prior_precision)
    precision = np.asarray(of_classes, dtype=float)
    return precision, precision @ posterior.start_mean("prior-mean")


@partial(jax.jit, static_argnums=0)
def _prior_derivatives(
    model: TracedModel, middle: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return gradient and Hessian of −log p at middle[chain, m]."""
    slope = jax.grad(model.prior_cost)
    return jax.lax.map(lambda phi: (slope(phi), jax.jacfwd(slope)(phi)), middle)


def _secants(posterior: Posterior, plan: Plan, middle: Array) -> Array:
    """Return the symmetric part of the derivative of the gradients' sum, [chain, m, m].

    Args:
        posterior: whose gradients they are.
        plan: that says how examples are clipped.
        middle: where the derivative is taken, [chain, m].
    """
    dim = middle.shape[1]
    by_example = bool(np.isfinite(plan.example_clip).any())
    example_clip = jnp.asarray(plan.clips_at[1], jnp.float32) if by_example else None
    ready = posterior.on_accelerator(2 * dim, SECANT_BYTES, by_example)
    directions = np.vstack([np.eye(dim), -np.eye(dim)])
    slopes = []
    for position in middle:
        length = max(1.0, float(np.linalg.norm(position)))
        step = SECANT_STEP * length / dim**0.5
        points = jnp.asarray(position + step * directions, jnp.float32)
        sums = np.asarray(_gradient_sums(ready, points, example_clip), dtype=float)
        slopes.append((sums[:dim] - sums[dim:]) / (2 * step))
    slope = np.stack(slopes)
    return (slope + slope.swapaxes(1, 2)) / 2


@jax.jit
def _gradient_sums(
    posterior: Posterior, points: jax.Array, example_clip: OptionalArray
) -> jax.Array:
    """Return the sum of all devices' gradients at points[point, m], [point, m].

    Examples are clipped, devices are not.
    """
    weight = jnp.ones(posterior.devices)
    clip = jnp.full(posterior.devices, jnp.inf)

    def gradient_sum(phi: jax.Array) -> jax.Array:
        total, _ = posterior.clipped_sum(phi, weight, clip, None, example_clip)
        return total

    return jax.vmap(gradient_sum)(points)


def _select_rounds(
    reception: _Reception, moments: Moments, is_after_burn_in: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], Array]:
    """Return the rounds to use, and the fraction of gradients expected to be clipped.

    A round is used if few gradients are expected to be clipped at its position, given
    what the used rounds say, beginning with those after burn-in; the one with the
    fewest is in any case. Of a model that is not linear only rounds after burn-in are:
    a quadratic around the chain's mean does not reach where burn-in began. Which
    burn-in rounds it reaches cannot be seen from the estimate, as their noise is in the
    estimate, and the noise of rounds that are chosen by it is no longer that of the
    plan. Both results are [chain, round].
    """
    used = np.broadcast_to(is_after_burn_in, reception.precision.shape)
    is_local = np.ndim(moments.gram) == 3
    candidates = np.ones_like(used)
    if is_local and is_after_burn_in.any():
        candidates = used
    for _ in range(MAX_SELECTIONS):
        mean = reception.estimate(moments, used).posterior(moments).mean
        clipped = reception.clipping(moments, mean).fraction
        of_candidates = np.where(candidates, clipped, np.inf)
        smallest = of_candidates.min(1, keepdims=True)
        is_hardly_clipped = clipped <= MAX_CLIPPED_FRACTION
        is_least_clipped = clipped == smallest
        selected = candidates & (is_hardly_clipped | is_least_clipped)
        if np.array_equal(selected, used):
            break
        used = selected
    return used, clipped


def _draw(generator: np.random.Generator, law: Gaussian, draws: int) -> Array:
    """Return draws[chain, draw, m] of a law."""
    chains, dim = law.mean.shape
    shocks = generator.standard_normal((chains, draws, dim))
    root = np.linalg.cholesky(law.covariance)
    deviations = shocks @ root.swapaxes(1, 2)
    return np.asarray(law.mean[:, None] + deviations)


@without_data
class _ChainReception(NamedTuple):
    """What one chain has received in all rounds."""

    position: Array
    """[round, m]."""
    slope: Array
    """The part g − Λθ of the gradients that is due to data, [round, m]."""
    round_weight: Array
    """ω, [round]."""
    noise: np.float64
    """V."""
    participation: np.float64
    """c."""


def _mix_over_moments(
    reception: _Reception,
    moments: Moments,
    *,
    round_weight: Array,
    estimate: _Estimate,
    draws: int,
    generator: np.random.Generator,
) -> tuple[Gaussian, Array]:
    """Return the law of θ where G is uncertain, and draws[chain, draw, m] of it.

    It is a mixture over draws of G given the transcript; its mean and covariance are
    returned. Given G all is as if it were known. The transcript's likelihood is that of
    independent rounds, although θ depends on earlier noise.
    """
    means = []
    covariances = []
    drawn = []
    for index in range(len(round_weight)):
        position = reception.position[index]
        chain = _ChainReception(
            position=position,
            slope=reception.gradient[index] - position @ moments.prior,
            round_weight=round_weight[index],
            noise=estimate.noise[index],
            participation=estimate.participation[index],
        )
        components = _draw_components(chain, moments, draws, generator)
        drawn.append(_draw(generator, components, 1)[:, 0])
        means.append(components.mean.mean(0))
        within = components.covariance.mean(0)
        covariances.append(within + np.cov(components.mean.T))
    return Gaussian(np.stack(means), np.stack(covariances)), np.stack(drawn)


def _draw_components(
    chain: _ChainReception,
    moments: Moments,
    draws: int,
    generator: np.random.Generator,
) -> Gaussian:
    """Return laws of θ given draws of G, which are weighted by p(b̂|G), [draw, ...]."""
    grams = _draw_grams(chain, moments, draws, generator)
    mean_position = chain.round_weight @ chain.position
    mean_slope = chain.round_weight @ chain.slope
    linear = grams @ mean_position - mean_slope
    for_all = np.ones(len(grams))
    estimates = _Estimate(
        linear=linear,
        noise=chain.noise * for_all,
        participation=chain.participation * for_all,
    )
    laws = estimates.posterior(moments._replace(gram=grams))
    cost = _evidence_cost(chain, moments, grams, linear)
    probability = np.exp((cost.min() - cost) / 2)
    probability = probability / probability.sum()
    picked = generator.choice(len(grams), draws, p=probability)
    return Gaussian(laws.mean[picked], laws.covariance[picked])


def _draw_grams(
    chain: _ChainReception,
    moments: Moments,
    draws: int,
    generator: np.random.Generator,
) -> Array:
    """Return draws of G given the rounds, [draw, m, m]; only positive definite ones.

    With a flat prior on b, the entries of G are a linear regression of g − Λθ on θ,
    both about their means.

    Raises:
        InputError: where no draw is positive definite.
    """
    gram = np.asarray(moments.gram, dtype=float)
    dim = gram.shape[0]
    rows, columns = np.tril_indices(dim)
    entries = np.arange(rows.size)
    deviation = np.asarray(moments.deviation, dtype=float)
    prior_precision = np.broadcast_to(deviation, gram.shape)[rows, columns] ** -2.0
    # [i, j, a]: 1 where a is the entry of the lower triangle that stands in (i, j).
    unfold = np.zeros((dim, dim, rows.size))
    unfold[rows, columns, entries] = 1.0
    unfold[columns, rows, entries] = 1.0

    # 1/v of the used rounds, 0 of the others.
    round_precision = (chain.round_weight / chain.noise)[:, None]
    position = chain.position - chain.round_weight @ chain.position
    slope = chain.slope - chain.round_weight @ chain.slope
    squares = position.T @ (round_precision * position)
    products = position.T @ (round_precision * slope)
    of_rounds = np.einsum("ija,kjb,ik->ab", unfold, unfold, squares, optimize=True)
    precision = of_rounds + np.diag(prior_precision)
    of_products = np.einsum("ija,ij->a", unfold, products)
    information = of_products + prior_precision * gram[rows, columns]
    mean = np.linalg.solve(precision, information)
    shocks = generator.standard_normal((rows.size, draws))
    noise = np.linalg.solve(np.linalg.cholesky(precision).T, shocks)
    grams = np.moveaxis(unfold @ (mean[:, None] + noise), 2, 0)
    is_positive = np.linalg.eigvalsh(grams)[:, 0] > 0
    if not is_positive.any():
        raise InputError(
            "deviation",
            Fault(f"leaves none of {draws} draws of gram positive definite"),
            "smaller beside the eigenvalues of gram",
        )
    return grams[is_positive]


def _evidence_cost(
    chain: _ChainReception, moments: Moments, grams: Array, linear: Array
) -> Array:
    """Return −2 log p(b̂|G) up to a constant, for b̂ of every G, [draw]."""
    dim = grams.shape[1]
    prior_linear = np.broadcast_to(moments.prior_linear, dim)
    prior_mean = np.linalg.solve(moments.prior, prior_linear)
    # Given G, b̂ is normal with this mean and the covariance GΛ⁻¹G + (1 + c)G + V I.
    expected = grams @ prior_mean
    of_parameters = grams @ np.linalg.solve(moments.prior, grams)
    of_data = (1 + chain.participation) * grams
    of_noise = chain.noise * np.eye(dim)
    covariance = of_parameters + of_data + of_noise
    surprise = linear - prior_linear - expected
    scaled = np.linalg.solve(covariance, surprise[..., None])
    square = (surprise * scaled[..., 0]).sum(1)
    _, log_determinant = np.linalg.slogdet(covariance)
    return square + log_determinant


def _in_parameters(moments: Moments, law: Gaussian) -> Gaussian:
    """Return a law of φ as one of θ; of many parameters, the covariance's diagonal."""
    covariance = moments.covariance(law.covariance)
    if covariance.shape[1] >= DIAGONAL_FROM_DIM:
        covariance = np.diagonal(covariance, axis1=1, axis2=2)
    return Gaussian(np.asarray(moments.parameters(law.mean)), covariance)
