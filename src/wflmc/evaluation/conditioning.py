"""Posteriors that know the noise they were made with: what all received rounds say together.

A round receives g = Hθ − b + n, n ~ N(0, v I), with v known from the plan. With H = G + Λ (data and prior) known, the
rounds together give b̂ = Σ ω (Hθ − g), ω ∝ 1/v, with noise of variance V = 1/Σ(1/v). Since b|θ ~ N(Gθ, G),

    θ | transcript ~ N(P⁻¹G A⁻¹b̂, P⁻¹),    A = (1 + c) G + V I,    P = Λ + G A⁻¹G,

where c counts that silent devices make the sum over active ones itself noisy. A prior with a mean other than 0 adds
λ = Λ times that mean to b, see `_Estimate`. It is post-processing: no privacy is spent. Rounds in which gradients are
expected to be clipped are left out, by what is public. `docs/explanation/noise_aware.md` has the proofs.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

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
from wflmc.posterior.regression import Regression
from wflmc.sampling import Trace, Transcript
from wflmc.sampling.trace import NamedDraws, in_arviz, name_draws
from wflmc.support.errors import Found, InputError, Shown, ShownValues, without_data

LARGEST_SHARE = 0.3
"""Rounds in which a larger share of the gradients is expected to be clipped are left out."""
ITERATIONS = 20
"""The most times that rounds are chosen anew."""
LARGE = 512
"""Parameters from which on covariances are returned by their diagonals."""
SECANT_STEP = 0.05
"""Length of the differences that give a Hessian, of the position's own length or of 1."""
SMALLEST_CURVATURE = 1e-9
"""A direction in which data and prior together are less curved, in units of the parameters' own curvatures, has no
proper law."""
KNOWN, UNCERTAIN, LOCAL = "known moments", "uncertain moments", "local quadratic"
"""How a noise-aware posterior is computed."""
PRIVATE = "noise_aware has taken the curvature from private data, which epsilon does not cover; give public moments."


@without_data
class Moments(NamedTuple):
    """What is known of the data without looking at them, in the coordinates that chains move in."""

    gram: Array
    """G = Σ u uᵀ, the curvature of the data, [m, m]; where the model is not linear, at every chain's mean,
    [chain, m, m]."""
    prior: Array
    """Λ, the precision of the prior, [m, m]; or that at every chain's mean, [chain, m, m]."""
    examples: int | NDArray[np.integer]
    """N; or N_k of every device, [K]."""
    deviation: float | Array | None = None
    """Standard deviation of every entry of `gram`, one number or [m, m]; None where G is known."""
    coordinates: Coordinates | Affine | None = None
    """The map to parameters, where chains move in other coordinates."""
    prior_linear: float | Array = 0.0
    """λ, the prior's precision times its mean, [m] or [chain, m]; 0 for a prior around 0."""

    def parameters(self, phi: Array) -> Array:
        """Return θ[..., m] of the coordinates φ[..., m]."""
        return phi if self.coordinates is None else self.coordinates.parameters(phi)

    def covariance(self, phi: Array) -> Array:
        """Return the covariance[chain, m, m] of θ that belongs to one of φ: W C Wᵀ, where θ = W φ + a centre."""
        theta = phi
        if self.coordinates is not None:
            rows = np.asarray(self.coordinates.linear(phi))
            theta = np.asarray(self.coordinates.linear(rows.swapaxes(1, 2)))
        return (
            theta + theta.swapaxes(1, 2)
        ) / 2  # rounding leaves the two halves unequal


def central_interval(draws: NDArray[np.floating], level: float) -> tuple[Array, Array]:
    """Return the central interval of every chain's draws[chain, draw, m], each end [chain, m]."""
    lower, upper = np.quantile(
        np.asarray(draws, dtype=float), [(1 - level) / 2, (1 + level) / 2], axis=1
    )
    return lower, upper


def exchangeable_interval(
    draws: NDArray[np.floating], level: float
) -> tuple[Array, Array]:
    """Return central intervals that hold one more draw of the same law with probability `level`.

    Of n draws, the j-th and the k-th smallest hold one more with probability (k − j)/(n + 1), whatever the law. The
    ends are therefore at the ranks (1 ∓ level)/2 · (n + 1), between two draws by interpolation.

    Args:
        draws: independent draws, [chain, draw, ...].
        level: above 0 and below 1.

    Returns:
        The lower and the upper ends, each [chain, ...].

    Raises:
        InputError: for so few draws that the smallest and the largest hold less than `level`.
    """
    count = draws.shape[1]
    fewest = int(np.ceil((1 + level) / (1 - level) - 1e-9))
    if count < fewest:
        raise InputError(
            "draws", count, f"at least {fewest}, for intervals of level {level:g}"
        )
    ends = [(1 - level) / 2, (1 + level) / 2]
    lower, upper = np.quantile(
        np.asarray(draws, dtype=float), ends, axis=1, method="weibull"
    )
    return lower, upper


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise InputError("level", level, "above 0 and below 1")


@dataclass(frozen=True, eq=False, repr=False)
class NoiseAware(Shown):
    """The posterior of the parameters given everything that the server has received, one for each chain.

    It is a normal law of the flat parameters θ[m], which are unconstrained where the model comes from NumPyro, or a
    mixture of such laws where the moments are uncertain. `sites`, `interval_by_site` and `to_arviz` have the parameters
    by the names of the model's sites, in the space of each site's support.
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
    """The share of gradients that is expected to be clipped, [round, chain]."""
    bias: Array
    """A bound on what clipping of whole devices may still add to b̂ in the used rounds, over the noise's length √(mV),
    [chain]. Clipping of single records is not counted."""
    participation: Array
    """c, by which silent devices enlarge the variance of the data, [chain]."""
    named_draws: NamedDraws
    """The draws by site, with the names of their axes."""
    not_covered: tuple[str, ...] = ()
    """What epsilon does not cover."""

    @property
    def sites(self) -> dict[str, np.ndarray]:
        """The draws by the names of the model's sites, each [chain, draw, ...]; of other models all as theta."""
        return {name: draws for name, (_, draws) in self.named_draws.variables.items()}

    def interval(self, level: float) -> tuple[Array, Array]:
        """Return central intervals of the flat parameters.

        They are those of the normal law; where the moments are uncertain, those of the draws.

        Args:
            level: the probability that an interval holds its parameter, above 0 and below 1.

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
        half = ndtri((1 + level) / 2) * np.sqrt(variance)
        return self.mean - half, self.mean + half

    def interval_by_site(self, level: float) -> dict[str, tuple[Array, Array]]:
        """Return central intervals of the model's sites, from the draws.

        Args:
            level: the probability that an interval holds its value, above 0 and below 1.

        Returns:
            By the name of the site, the lower and the upper ends, each [chain, ...], in the space of the site's
            support: those of a scale are above 0.

        Raises:
            InputError: for a level out of range, or too few draws for it.
        """
        _check_level(level)
        return {
            name: exchangeable_interval(draws, level)
            for name, draws in self.sites.items()
        }

    def to_arviz(self) -> Any:
        """Return the draws for ArviZ, by site as `trace.to_arviz(posterior)` has them.

        The method and what epsilon does not cover are attributes.
        """
        return in_arviz(
            self.named_draws,
            {"method": self.method, "not_covered": " ".join(self.not_covered)},
        )

    def _facts(self) -> ShownValues:
        sizes = dict(
            zip(("chains", "draws", "parameters"), self.draws.shape, strict=True)
        )
        return {
            **sizes,
            "method": self.method,
            "noise": self.noise,
            "bias": self.bias,
            "used": self.used.mean(),
        }


@without_data
class _Reception(NamedTuple):
    """A transcript with chains first, in float64, and what is known of its devices."""

    position: Array
    """[chain, round, m]."""
    gradient: Array
    """[chain, round, m]."""
    precision: Array
    """1/v, [chain, round]."""
    weight: Array
    """Of every device's gradient, [1 or chain, round, K]."""
    clip: Array
    """Where clipping acts, [K]."""
    share: Array
    """Of the examples that each device holds, [K]."""

    def estimate(
        self, moments: Moments, used: NDArray[np.bool_]
    ) -> tuple[Array, "_Estimate"]:
        """Return ω[chain, round] and what the used rounds say."""
        total = np.where(used, self.precision, 0.0)
        noise = 1 / np.maximum(total.sum(1), 1e-300)
        weight = total * noise[:, None]
        linear = self.position @ (moments.gram + moments.prior) - self.gradient
        off = (weight[:, None] @ self.weight)[:, 0] - 1
        return weight, _Estimate(
            np.einsum("cs,csm->cm", weight, linear), noise, off**2 @ self.share
        )

    def clipping(self, moments: Moments, mean: Array) -> tuple[Array, Array]:
        """Return the share of gradients that is expected to be clipped, and a bound on the bias of their sum.

        At a distance d from θ, taken to be `mean`, the gradient of a device with a share q of the data has mean q H d
        and covariance q (G (1 + dᵀG d/N) + G d dᵀG/N), as of Gaussian features. Its squared length is taken to be
        normal. The bias is at most what clipping takes off all lengths together. Both are [chain, round].
        """
        away = self.position - mean[:, None]
        pulled, examples = away @ moments.gram, np.sum(moments.examples)
        spread = 1 + np.maximum((away * pulled).sum(-1), 0.0) / examples
        pull = pulled + away @ moments.prior
        trace, square = (
            np.trace(moments.gram, 0, -2, -1),
            (moments.gram**2).sum((-1, -2)),
        )
        trace, square = np.reshape(trace, (-1, 1)), np.reshape(square, (-1, 1))
        size, along = (
            (pull**2).sum(-1),
            np.maximum((pull * (pull @ moments.gram)).sum(-1), 0.0),
        )
        clipped, bias = np.zeros_like(spread), np.zeros_like(spread)
        kinds, counts = np.unique(
            np.stack([self.share, self.clip], 1), axis=0, return_counts=True
        )
        for (q, limit), count in zip(kinds, counts, strict=True):
            middle = q**2 * size + q * (spread * trace + size / examples)
            error = np.sqrt(
                2 * (q * spread) ** 2 * square
                + 4 * q**3 * (spread * along + size**2 / examples)
            )
            deviation = error / (2 * np.sqrt(middle))
            u = (limit - np.sqrt(middle)) / deviation
            clipped += count / self.share.size * ndtr((middle - limit**2) / error)
            bias += (
                count
                * deviation
                * (np.exp(-(u**2) / 2) / np.sqrt(2 * np.pi) - u * ndtr(-u))
            )
        return clipped, bias


@without_data
class _Estimate(NamedTuple):
    """b̂[chain, m], the variance V[chain] of its noise, and c[chain] of silent devices."""

    linear: Array
    noise: Array
    extra: Array

    def posterior(self, moments: Moments) -> Gaussian:
        """Return N(P⁻¹(G A⁻¹(b̂ − λ) + λ), P⁻¹) with P = Λ + G A⁻¹G and A = (1 + c) G + V I, one for each chain."""
        gram = moments.gram
        identity = np.eye(self.linear.shape[1])
        spread = (1 + self.extra)[:, None, None] * gram + self.noise[
            :, None, None
        ] * identity
        pull = np.linalg.solve(spread, identity @ gram)
        covariance = np.linalg.inv(moments.prior + gram @ pull)
        of_data = pull.swapaxes(1, 2) @ (self.linear - moments.prior_linear)[..., None]
        information = of_data[..., 0] + moments.prior_linear
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
    """Return the posterior given all that the server has received, and the noise under which it has received it.

    Args:
        trace: of `sample(…, transcript=True)`.
        moments: public or paid-for moments; or a posterior, whose Hessian is used (at the chain's mean, where the model
            is not linear). That of private data is listed in `not_covered`, unless the data are `public`.
        draws: independent draws of the law, for every chain; intervals by site are their quantiles.
        public: whether the posterior is one of public data, a stand-in for those of the devices, in the coordinates
            that the chains moved in.
        seed: of the draws.

    Returns:
        Mean, covariance, intervals and draws of the parameters, for every chain.

    Raises:
        InputError: for a trace without a transcript, or a posterior that has no curvature in some direction.
    """
    if not isinstance(trace, Trace) or trace.transcript is None:
        raise InputError(
            "trace", type(trace).__name__, "a trace of wflmc.sample(…, transcript=True)"
        )
    posterior = None if isinstance(moments, Moments) else moments
    known = moments if isinstance(moments, Moments) else moments_of(moments, trace)
    generator = np.random.default_rng(seed)

    reception = _reception(trace.transcript, trace.plans, known)
    used, clipped = _choose(
        reception, known, trace.transcript.start >= trace.plan.burn_in
    )
    weight, estimate = reception.estimate(known, used)
    law = estimate.posterior(known)
    lost_length = (weight * reception.clipping(known, law.mean)[1]).sum(1)
    bias = lost_length / np.sqrt(estimate.noise * law.mean.shape[1])

    method = LOCAL if np.ndim(known.gram) == 3 else KNOWN
    if known.deviation is not None:
        method = UNCERTAIN
        law, drawn = _joint(reception, known, weight, estimate, draws, generator)
    else:
        drawn = _drawn(generator, law, draws)
    mean, covariance = _in_parameters(known, law)
    theta = np.asarray(known.parameters(drawn))
    return NoiseAware(
        mean=mean,
        covariance=covariance,
        draws=theta,
        method=method,
        noise=estimate.noise,
        used=used.T,
        clipped=clipped.T,
        bias=bias,
        participation=estimate.extra,
        named_draws=name_draws(theta, posterior),
        not_covered=() if public or posterior is None else (PRIVATE,),
    )


def moments_of(posterior: Posterior, trace: Trace) -> Moments:
    """Return the moments of a posterior's own data: of a linear model, else its curvature at every chain's mean.

    That is a secant: differences of gradients whose examples are clipped as the plan clips them.
    """
    check_posterior(posterior)
    if isinstance(posterior, GaussianPosterior):
        prior = np.asarray(posterior.prior_precision)
        gram = posterior.hessian.sum(0) - prior
        return Moments(
            gram=gram,
            prior=prior,
            examples=posterior.sizes,
            coordinates=posterior.coordinates,
        )
    middle = posterior.coordinates_of(np.asarray(trace.theta, dtype=float).mean(1))
    prior, prior_linear = _prior_quadratic(posterior, middle)
    gram = _without_negative(_secants(posterior, trace.plan, middle) - prior)
    _check_curvature(gram + prior)
    return Moments(
        gram=gram,
        prior=prior,
        examples=posterior.sizes,
        coordinates=posterior.coordinates,
        prior_linear=prior_linear,
    )


def _check_curvature(hessian: Array) -> None:
    """Refuse hessian[chain, m, m] of which a direction is not curved, whatever the scales of the parameters."""
    diagonal = np.diagonal(hessian, axis1=1, axis2=2)
    scale = 1 / np.sqrt(np.maximum(diagonal, np.finfo(float).tiny))
    least = np.linalg.eigvalsh(hessian * scale[:, :, None] * scale[:, None])[:, 0]
    if not np.all(least > SMALLEST_CURVATURE):
        found = Found("has a direction without curvature at the mean of a chain")
        raise InputError(
            "posterior",
            found,
            "curved in all directions there: give its parameters proper priors",
        )


def _without_negative(matrices: Array) -> Array:
    """Return symmetric matrices[chain, m, m] with 0 in place of negative eigenvalues."""
    values, vectors = np.linalg.eigh(matrices)
    return (vectors * np.maximum(values, 0.0)[:, None]) @ vectors.swapaxes(1, 2)


def _prior_quadratic(posterior: Posterior, middle: Array) -> tuple[Array, Array]:
    """Return Λ[..., m, m] and λ[..., m] with −log p(φ) ≈ φᵀΛφ/2 − λᵀφ around middle[chain, m], up to a constant.

    Regressions have a normal prior around 0. Of a custom model, Λ is the Hessian of −log p at the middle and λ makes
    the gradient there that of the prior.
    """
    if isinstance(posterior, CustomPosterior):
        derivatives = _prior_derivatives(
            posterior.model, jnp.asarray(middle, jnp.float32)
        )
        gradient, hessian = (np.asarray(part, dtype=float) for part in derivatives)
        precision = _without_negative((hessian + hessian.swapaxes(1, 2)) / 2)
        return precision, (precision @ middle[..., None])[..., 0] - gradient
    precision = np.eye(posterior.dim) / posterior.prior_power
    if isinstance(posterior, Regression):
        by_class = np.eye(max(1, posterior.classes))
        precision = np.asarray(
            np.kron(by_class, posterior.prior_precision), dtype=float
        )
    return precision, np.zeros(posterior.dim)


@partial(jax.jit, static_argnums=0)
def _prior_derivatives(
    model: TracedModel, middle: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradient[chain, m] and the Hessian[chain, m, m] of −log p(φ) at middle[chain, m]."""
    slope = jax.grad(model.prior_cost)
    return jax.lax.map(lambda phi: (slope(phi), jax.jacfwd(slope)(phi)), middle)


def _secants(posterior: Posterior, plan: Plan, middle: Array) -> Array:
    """Return the symmetric part of the derivative of the gradients' sum at middle[chain, m], [chain, m, m]."""
    dim = middle.shape[1]
    by_example = bool(np.isfinite(plan.example_clip).any())
    example_clip = jnp.asarray(plan.clips_at[1], jnp.float32) if by_example else None
    ready = posterior.on_accelerator(2 * dim, 2.0**30, by_example)
    directions = np.vstack([np.eye(dim), -np.eye(dim)])
    slopes = []
    for position in middle:
        step = SECANT_STEP * max(1.0, float(np.linalg.norm(position))) / dim**0.5
        points = jnp.asarray(position + step * directions, jnp.float32)
        sums = np.asarray(_gradient_sums(ready, points, example_clip), dtype=float)
        slopes.append((sums[:dim] - sums[dim:]) / (2 * step))
    slope = np.stack(slopes)
    return (slope + slope.swapaxes(1, 2)) / 2


@jax.jit
def _gradient_sums(
    posterior: Posterior, points: jax.Array, example_clip: OptionalArray
) -> jax.Array:
    """Return the sum of all devices' gradients at points[point, m], examples clipped and devices not, [point, m]."""
    weight = jnp.ones(posterior.devices)
    clip = jnp.full(posterior.devices, jnp.inf)
    return jax.vmap(
        lambda phi: posterior.clipped_sum(phi, weight, clip, None, example_clip)[0]
    )(points)


def _reception(
    told: Transcript, plans: tuple[Plan, ...], moments: Moments
) -> _Reception:
    parts = (told.position, told.gradient, 1 / told.noise)
    position, gradient, precision = (
        np.asarray(values, dtype=float).swapaxes(0, 1) for values in parts
    )
    weight = np.stack([told.share(plan.weight_received) for plan in plans], dtype=float)
    sizes = np.broadcast_to(
        np.asarray(moments.examples, dtype=float), (plans[0].devices,)
    )
    clip = np.minimum(plans[0].clips_at[0], 1e75)
    return _Reception(position, gradient, precision, weight, clip, sizes / sizes.sum())


def _choose(
    reception: _Reception, moments: Moments, kept: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], Array]:
    """Return the rounds to use, beginning with the kept ones, and the share of gradients expected to be clipped.

    A round is used if few gradients are expected to be clipped at its position, given what the used rounds say; the
    one with the fewest in any case. Of a model that is not linear only kept rounds are: a quadratic around the chain's
    mean does not reach where burn-in began. Which burn-in rounds it reaches cannot be told from the estimate, as their
    noise is in the estimate, and the noise of rounds that are chosen by it is no longer that of the plan. Both results
    are [chain, round].
    """
    used = np.broadcast_to(kept, reception.precision.shape)
    is_local = np.ndim(moments.gram) == 3
    candidates = used if is_local and kept.any() else np.ones_like(used)
    for _ in range(ITERATIONS):
        mean = reception.estimate(moments, used)[1].posterior(moments).mean
        clipped, _ = reception.clipping(moments, mean)
        fewest = np.where(candidates, clipped, np.inf).min(1, keepdims=True)
        chosen = candidates & ((clipped <= LARGEST_SHARE) | (clipped == fewest))
        if np.array_equal(chosen, used):
            break
        used = chosen
    return used, clipped


def _drawn(generator: np.random.Generator, law: Gaussian, draws: int) -> Array:
    """Return draws[chain, draw, m] of a law."""
    shocks = generator.standard_normal((len(law.mean), draws, law.mean.shape[1]))
    return np.asarray(
        law.mean[:, None] + shocks @ np.linalg.cholesky(law.covariance).swapaxes(1, 2)
    )


def _joint(
    heard: _Reception,
    moments: Moments,
    weight: Array,
    found: _Estimate,
    draws: int,
    rng: np.random.Generator,
) -> tuple[Gaussian, Array]:
    """Return the law of θ where G is uncertain, a mixture over draws of G given the transcript, and its draws.

    Given G all is as if it were known. With a flat prior on b, the entries of G are a linear regression of g − Λθ on θ,
    both about their means; its draws are weighted by p(b̂|G). The transcript's likelihood is that of independent
    rounds, although θ depends on earlier noise.
    """
    gram, dim = np.asarray(moments.gram, dtype=float), heard.position.shape[2]
    rows, columns = np.tril_indices(dim)
    prior = (
        np.broadcast_to(np.asarray(moments.deviation, dtype=float), gram.shape)[
            rows, columns
        ]
        ** -2.0
    )
    unfold = np.zeros((dim, dim, rows.size))
    unfold[rows, columns, np.arange(rows.size)] = unfold[
        columns, rows, np.arange(rows.size)
    ] = 1.0
    prior_linear = np.broadcast_to(moments.prior_linear, dim)
    prior_mean = np.linalg.solve(moments.prior, prior_linear)
    laws, made = [], []
    for theta, gradient, omega, noise, extra in zip(
        *heard[:2], weight, *found[1:], strict=True
    ):
        g = gradient - theta @ moments.prior
        middle, pull, w = omega @ theta, omega @ g, (omega / noise)[:, None]
        away = theta - middle
        squares, products = away.T @ (w * away), away.T @ (w * (g - pull))
        precision = np.einsum(
            "ija,kjb,ik->ab", unfold, unfold, squares, optimize=True
        ) + np.diag(prior)
        centre = np.linalg.solve(
            precision,
            np.einsum("ija,ij->a", unfold, products) + prior * gram[rows, columns],
        )
        shocks = np.linalg.solve(
            np.linalg.cholesky(precision).T, rng.standard_normal((rows.size, draws))
        )
        grams = np.moveaxis(unfold @ (centre[:, None] + shocks), 2, 0)
        grams = grams[np.linalg.eigvalsh(grams)[:, 0] > 0]
        linear, same = grams @ middle - pull, np.ones(len(grams))
        each = _Estimate(linear, noise * same, extra * same).posterior(
            moments._replace(gram=grams)
        )
        spread = (
            grams @ np.linalg.solve(moments.prior, grams)
            + (1 + extra) * grams
            + noise * np.eye(dim)
        )
        surprise = linear - prior_linear - grams @ prior_mean
        size = (surprise * np.linalg.solve(spread, surprise[..., None])[..., 0]).sum(
            1
        ) + np.linalg.slogdet(spread)[1]
        chance = np.exp((size.min() - size) / 2)
        picked = rng.choice(len(grams), draws, p=chance / chance.sum())
        one = Gaussian(each.mean[picked], each.covariance[picked])
        made.append(_drawn(rng, one, 1)[:, 0])
        laws.append((one.mean.mean(0), one.covariance.mean(0) + np.cov(one.mean.T)))
    return Gaussian(*map(np.stack, zip(*laws, strict=True))), np.stack(made)


def _in_parameters(moments: Moments, law: Gaussian) -> Gaussian:
    """Return a law of φ as one of the parameters; of many, the covariance's diagonal."""
    covariance = moments.covariance(law.covariance)
    if covariance.shape[1] >= LARGE:
        covariance = np.diagonal(covariance, axis1=1, axis2=2)
    return Gaussian(np.asarray(moments.parameters(law.mean)), covariance)
