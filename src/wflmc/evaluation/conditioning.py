"""Posteriors that know the noise they were made with: what all received rounds say together.

A round receives g = Hθ − b + n, n ~ N(0, v I), with v known from the plan. With H = G + Λ (data and prior) known, the
rounds together give b̂ = Σ ω (Hθ − g), ω ∝ 1/v, with noise of variance V = 1/Σ(1/v). Since b|θ ~ N(Gθ, G),

    θ | transcript ~ N(P⁻¹G A⁻¹b̂, P⁻¹),    A = (1 + c) G + V I,    P = Λ + G A⁻¹G,

where c counts that silent devices make the sum over active ones itself noisy. It is post-processing: no privacy is
spent. Rounds in which gradients are expected to be clipped are left out, by what is public. `docs/noise_aware.md`
has the proofs.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from wflmc.errors import InputError, Shown, without_data
from wflmc.planning import Plan
from wflmc.posterior import Gaussian, GaussianPosterior, Posterior
from wflmc.posterior.base import check_posterior
from wflmc.posterior.coordinates import Array, Coordinates
from wflmc.posterior.regression import Regression
from wflmc.sampling import Trace, Transcript
from wflmc.sampling.trace import in_arviz

LARGEST_SHARE = 0.3
"""Rounds in which a larger share of the gradients is expected to be clipped are left out."""
ITERATIONS = 20
"""The most times that rounds are chosen anew."""
LARGE = 512
"""Parameters from which on covariances are returned by their diagonals."""
PRIVATE = "noise_aware has taken the curvature from private data, which epsilon does not cover; give public moments."


@without_data
class Moments(NamedTuple):
    """What is known of the data without looking at them, in the coordinates that chains move in."""

    gram: Any
    """G = Σ u uᵀ, the curvature of the data, [m, m]; where the model is not linear, at every chain's mean,
    [chain, m, m]."""
    prior: Any
    """Λ, the precision of the prior, [m, m]."""
    examples: Any
    """N; or N_k of every device, [K]."""
    deviation: Any = None
    """Standard deviation of every entry of `gram`, one number or [m, m]; None where G is known."""
    coordinates: Coordinates | None = None
    """The map to parameters, where chains move in other coordinates."""

    def parameters(self, phi: Any) -> Any:
        """Return θ[..., m] of the coordinates φ[..., m]."""
        return phi if self.coordinates is None else self.coordinates.parameters(phi)


def central_interval(draws: NDArray[Any], level: float) -> tuple[Array, Array]:
    """Return the central interval of every chain's draws[chain, draw, m], each end [chain, m]."""
    lower, upper = np.quantile(np.asarray(draws, dtype=float), [(1 - level) / 2, (1 + level) / 2], axis=1)
    return lower, upper


@dataclass(frozen=True, eq=False, repr=False)
class NoiseAware(Shown):
    """The posterior of the parameters given everything that the server has received, one for each chain."""

    mean: Array
    """[chain, m]."""
    covariance: Array
    """[chain, m, m]; its diagonal [chain, m] where m is large."""
    draws: Array
    """[chain, draw, m]."""
    method: str
    """known moments, uncertain moments, or local quadratic."""
    noise: Array
    """V, the variance of the noise in b̂, [chain]."""
    used: NDArray[np.bool_]
    """Which receptions of the transcript were used, [round, chain]."""
    clipped: Array
    """The share of gradients that is expected to be clipped, [round, chain]."""
    bias: Array
    """A bound on what clipping may still add to b̂ in the used rounds, over the noise's length √(mV), [chain]."""
    participation: Array
    """c, by which silent devices enlarge the variance of the data, [chain]."""
    not_covered: tuple[str, ...] = ()
    """What epsilon does not cover."""

    def interval(self, level: float) -> tuple[Array, Array]:
        """Return the lower and the upper end of every parameter's central interval, each [chain, m]."""
        if not 0 < level < 1:
            raise InputError("level", level, "above 0 and below 1")
        if self.method != "known moments":
            return central_interval(self.draws, level)
        variance = self.covariance if self.covariance.ndim == 2 else np.diagonal(self.covariance, axis1=1, axis2=2)
        half = ndtri((1 + level) / 2) * np.sqrt(variance)
        return self.mean - half, self.mean + half

    def to_arviz(self) -> Any:
        """Return the draws for ArviZ, with the method and what epsilon does not cover as attributes."""
        return in_arviz(self.draws, {"method": self.method, "not_covered": " ".join(self.not_covered)})

    def _facts(self) -> dict[str, Any]:
        sizes = dict(zip(("chains", "draws", "parameters"), self.draws.shape, strict=True))
        return {**sizes, "method": self.method, "noise": self.noise, "bias": self.bias, "used": self.used.mean()}


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

    def estimate(self, moments: Moments, used: NDArray[np.bool_]) -> tuple[Array, "_Estimate"]:
        """Return ω[chain, round] and what the used rounds say."""
        total = np.where(used, self.precision, 0.0)
        noise = 1 / np.maximum(total.sum(1), 1e-300)
        weight = total * noise[:, None]
        linear = self.position @ (moments.gram + moments.prior) - self.gradient
        off = (weight[:, None] @ self.weight)[:, 0] - 1
        return weight, _Estimate(np.einsum("cs,csm->cm", weight, linear), noise, off**2 @ self.share)

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
        trace, square = np.trace(moments.gram, 0, -2, -1), (moments.gram**2).sum((-1, -2))
        trace, square = np.reshape(trace, (-1, 1)), np.reshape(square, (-1, 1))
        size, along = (pull**2).sum(-1), np.maximum((pull * (pull @ moments.gram)).sum(-1), 0.0)
        clipped, bias = np.zeros_like(spread), np.zeros_like(spread)
        kinds, counts = np.unique(np.stack([self.share, self.clip], 1), axis=0, return_counts=True)
        for (q, limit), count in zip(kinds, counts, strict=True):
            middle = q**2 * size + q * (spread * trace + size / examples)
            error = np.sqrt(2 * (q * spread) ** 2 * square + 4 * q**3 * (spread * along + size**2 / examples))
            deviation = error / (2 * np.sqrt(middle))
            u = (limit - np.sqrt(middle)) / deviation
            clipped += count / self.share.size * ndtr((middle - limit**2) / error)
            bias += count * deviation * (np.exp(-(u**2) / 2) / np.sqrt(2 * np.pi) - u * ndtr(-u))
        return clipped, bias


@without_data
class _Estimate(NamedTuple):
    """b̂[chain, m], the variance V[chain] of its noise, and c[chain] of silent devices."""

    linear: Array
    noise: Array
    extra: Array

    def posterior(self, moments: Moments) -> Gaussian:
        """Return N(P⁻¹G A⁻¹b̂, P⁻¹) with P = Λ + G A⁻¹G and A = (1 + c) G + V I, one for each chain."""
        gram, one = moments.gram, np.eye(self.linear.shape[1])
        pull = np.linalg.solve((1 + self.extra)[:, None, None] * gram + self.noise[:, None, None] * one, one @ gram)
        covariance = np.linalg.inv(moments.prior + gram @ pull)
        return Gaussian((covariance @ pull.swapaxes(1, 2) @ self.linear[..., None])[..., 0], covariance)


def noise_aware(
    trace: Trace, moments: Moments | Posterior, *, draws: int = 1000, public: bool = False, seed: int = 0
) -> NoiseAware:
    """Return the posterior given all that the server has received, and the noise under which it has received it.

    Args:
        trace: of `sample(…, transcript=True)`.
        moments: public or paid-for moments; or a posterior, whose Hessian is used (at the chain's mean, where the model
            is not linear). That of private data is listed in `not_covered`, unless the data are `public`.
        draws: draws of every chain.
        public: whether the posterior is one of public data, a stand-in for those of the devices.
        seed: of the draws.
    """
    if not isinstance(trace, Trace) or trace.transcript is None:
        raise InputError("trace", type(trace).__name__, "a trace of wflmc.sample(…, transcript=True)")
    given = moments if isinstance(moments, Moments) else moments_of(moments, trace)
    heard, generator = _reception(trace.transcript, trace.plans, given), np.random.default_rng(seed)
    used, clipped = _choose(heard, given, trace.transcript.start >= trace.plan.burn_in)
    weight, found = heard.estimate(given, used)
    law = found.posterior(given)
    bias = (weight * heard.clipping(given, law.mean)[1]).sum(1) / np.sqrt(found.noise * law.mean.shape[1])
    if np.ndim(given.gram) == 3:
        theta = np.asarray(trace.theta, dtype=float)
        own = theta if given.coordinates is None else given.coordinates.of(theta)
        method, made = "local quadratic", _corrected(own, law, draws)
    elif given.deviation is not None:
        method, (law, made) = "uncertain moments", _joint(heard, given, weight, found, draws, generator)
    else:
        method, made = "known moments", _drawn(generator, law, draws)
    covered = () if public or isinstance(moments, Moments) else (PRIVATE,)
    law, made = _in_parameters(given, law), np.asarray(given.parameters(made))
    return NoiseAware(*law, made, method, found.noise, used.T, clipped.T, bias, found.extra, covered)


def moments_of(posterior: Posterior, trace: Trace) -> Moments:
    """Return the moments of a posterior's own data: of a linear model, else its curvature at every chain's mean.

    That is a secant: differences of gradients whose examples are clipped as the plan clips them.
    """
    check_posterior(posterior)
    prior = np.eye(posterior.dim) / posterior.prior_power
    if isinstance(posterior, Regression):
        prior = np.kron(np.eye(max(1, posterior.classes)), posterior.prior_precision)
    if isinstance(posterior, GaussianPosterior):
        return Moments(posterior.hessian.sum(0) - prior, prior, posterior.sizes, None, posterior.coordinates)
    middle = posterior.coordinates_of(np.asarray(trace.theta, dtype=float).mean(1))
    curvature = np.stack([_secant(posterior, trace.plan, one) for one in middle])
    values, vectors = np.linalg.eigh(curvature - prior)
    gram = (vectors * np.maximum(values, 0.0)[:, None]) @ vectors.swapaxes(1, 2)
    return Moments(gram, prior, posterior.sizes, None, posterior.coordinates)


def _secant(posterior: Posterior, plan: Plan, middle: Array) -> Array:
    """Return the symmetric part of the derivative of the gradients' sum at `middle`, [m, m]."""
    by_example = bool(np.isfinite(plan.example_clip).any())
    ready = posterior.on_accelerator(2 * middle.size, 2.0**30, by_example)
    step = 0.05 * max(1.0, float(np.linalg.norm(middle))) / middle.size**0.5
    points = jnp.asarray(middle + step * np.vstack([np.eye(middle.size), -np.eye(middle.size)]), jnp.float32)
    one, examples = jnp.ones(posterior.devices), jnp.asarray(plan.clips_at[1], jnp.float32) if by_example else None
    sums = jax.vmap(lambda at: ready.clipped_sum(at, one, jnp.inf * one, None, examples)[0])(points)
    rise = np.asarray(sums, dtype=float).reshape(2, middle.size, -1)
    slope = (rise[0] - rise[1]) / (2 * step)
    return np.asarray((slope + slope.T) / 2)


def _reception(told: Transcript, plans: tuple[Plan, ...], moments: Moments) -> _Reception:
    parts = (told.position, told.gradient, 1 / told.noise)
    position, gradient, precision = (np.asarray(values, dtype=float).swapaxes(0, 1) for values in parts)
    weight: Any = np.stack([told.share(plan.weight_received) for plan in plans])
    sizes = np.broadcast_to(np.asarray(moments.examples, dtype=float), (plans[0].devices,))
    clip = np.minimum(plans[0].clips_at[0], 1e75)
    return _Reception(position, gradient, precision, weight, clip, sizes / sizes.sum())


def _choose(heard: _Reception, moments: Moments, kept: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], Array]:
    """Return the rounds to use, beginning with the kept ones, and the share of gradients expected to be clipped.

    A round is used if few gradients are expected to be clipped at its position, given what the used rounds say; the
    one with the fewest in any case. Both are [chain, round].
    """
    used = np.broadcast_to(kept, heard.precision.shape)
    for _ in range(ITERATIONS):
        clipped, _ = heard.clipping(moments, heard.estimate(moments, used)[1].posterior(moments).mean)
        chosen = (clipped <= LARGEST_SHARE) | (clipped == clipped.min(1, keepdims=True))
        if np.array_equal(chosen, used):
            break
        used = chosen
    return used, clipped


def _drawn(generator: np.random.Generator, law: Gaussian, draws: int) -> Array:
    """Return draws[chain, draw, m] of a law."""
    shocks = generator.standard_normal((len(law.mean), draws, law.mean.shape[1]))
    return np.asarray(law.mean[:, None] + shocks @ np.linalg.cholesky(law.covariance).swapaxes(1, 2))


def _corrected(theta: Array, law: Gaussian, draws: int) -> Array:
    """Return the chain's own draws theta[chain, draw, m], shifted to a law's mean and scaled to its deviations.

    They are scaled along the main directions of the law, and otherwise keep their shape.
    """
    kept = theta[:, :: -(-theta.shape[1] // draws)]
    values, vectors = np.linalg.eigh(law.covariance)
    along = (kept - kept.mean(1, keepdims=True)) @ vectors
    along *= np.sqrt(np.maximum(values, 0.0))[:, None] / np.maximum(along.std(1, keepdims=True), 1e-300)
    return np.asarray(law.mean[:, None] + along @ vectors.swapaxes(1, 2))


def _joint(
    heard: _Reception, moments: Moments, weight: Array, found: _Estimate, draws: int, rng: np.random.Generator
) -> tuple[Gaussian, Array]:
    """Return the law of θ where G is uncertain, a mixture over draws of G given the transcript, and its draws.

    Given G all is as if it were known. With a flat prior on b, the entries of G are a linear regression of g − Λθ on θ,
    both about their means; its draws are weighted by p(b̂|G). The transcript's likelihood is that of independent
    rounds, although θ depends on earlier noise.
    """
    gram, dim = np.asarray(moments.gram, dtype=float), heard.position.shape[2]
    rows, columns = np.tril_indices(dim)
    prior = np.broadcast_to(np.asarray(moments.deviation, dtype=float), gram.shape)[rows, columns] ** -2.0
    unfold = np.zeros((dim, dim, rows.size))
    unfold[rows, columns, np.arange(rows.size)] = unfold[columns, rows, np.arange(rows.size)] = 1.0
    laws, made = [], []
    for theta, gradient, omega, noise, extra in zip(*heard[:2], weight, *found[1:], strict=True):
        g = gradient - theta @ moments.prior
        middle, pull, w = omega @ theta, omega @ g, (omega / noise)[:, None]
        away = theta - middle
        squares, products = away.T @ (w * away), away.T @ (w * (g - pull))
        precision = np.einsum("ija,kjb,ik->ab", unfold, unfold, squares, optimize=True) + np.diag(prior)
        centre = np.linalg.solve(precision, np.einsum("ija,ij->a", unfold, products) + prior * gram[rows, columns])
        shocks = np.linalg.solve(np.linalg.cholesky(precision).T, rng.standard_normal((rows.size, draws)))
        grams = np.moveaxis(unfold @ (centre[:, None] + shocks), 2, 0)
        grams = grams[np.linalg.eigvalsh(grams)[:, 0] > 0]
        linear, same = grams @ middle - pull, np.ones(len(grams))
        each = _Estimate(linear, noise * same, extra * same).posterior(moments._replace(gram=grams))
        spread = grams @ np.linalg.solve(moments.prior, grams) + (1 + extra) * grams + noise * np.eye(dim)
        size = (linear * np.linalg.solve(spread, linear[..., None])[..., 0]).sum(1) + np.linalg.slogdet(spread)[1]
        chance = np.exp((size.min() - size) / 2)
        picked = rng.choice(len(grams), draws, p=chance / chance.sum())
        one = Gaussian(each.mean[picked], each.covariance[picked])
        made.append(_drawn(rng, one, 1)[:, 0])
        laws.append((one.mean.mean(0), one.covariance.mean(0) + np.cov(one.mean.T)))
    return Gaussian(*map(np.stack, zip(*laws, strict=True))), np.stack(made)


def _in_parameters(moments: Moments, law: Gaussian) -> Gaussian:
    """Return a law of φ as one of the parameters; of many, the covariance's diagonal."""
    covariance = np.asarray(moments.parameters(moments.parameters(law.covariance).swapaxes(1, 2)))
    covariance = np.diagonal(covariance, axis1=1, axis2=2) if covariance.shape[1] >= LARGE else covariance
    return Gaussian(np.asarray(moments.parameters(law.mean)), covariance)
