"""Samples beside the law they should have: W2² per round with its standard error, moments, autocorrelation."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from wflmc.evaluation.diagnostics import diagnose
from wflmc.planning import Plan
from wflmc.posterior import (
    Gaussian,
    GaussianPosterior,
    HasLaw,
    Motion,
    Posterior,
    SoftmaxPosterior,
    pool,
    w2_squared,
)
from wflmc.support.errors import InputError
from wflmc.support.recursion import first_order

Array = NDArray[np.float64]


CHUNK_BYTES = 2**27
WORST_ROUNDS = 200
"""Rounds that a bootstrap looks at: the worst one of a resample is hardly ever elsewhere."""
REPLICAS = 50
"""Perfect experiments that `floor_w2_sq` is the mean of."""
LARGEST_HESSIAN = 1500
"""Parameters up to which the Hessian of a softmax posterior is inverted."""
FLOOR_REPLICAS, FLOOR_CHAINS = 20, 50
"""Perfect experiments that a floor is the mean of, and chains of the trace that say how correlated draws are."""


class DistanceEstimate(NamedTuple):
    """W2² (not its root) to the posterior of each kept round, and of the worst of them."""

    per_round: Array
    worst: float
    worst_se: float
    """Bootstrap standard error over chains; of near-perfect samples it is about twice as large as it should be."""
    floor: float | None = None
    """The mean of `worst` for as many perfect chains, as correlated as these; None where it was not asked for."""
    floor_sd: float = 0.0
    """Standard deviation of that."""

    @property
    def resolution(self) -> float:
        """How far above the truth the worst estimate may well be by chance alone."""
        return (self.floor or 0.0) + 5 * max(self.worst_se, self.floor_sd)


class ExactLaw(NamedTuple):
    """What is known of a plan's chains while no gradient is clipped; None for models whose law is not known."""

    w2_sq: tuple[float, ...] | None
    """W2² to the posterior, [S]."""
    ess_min: float | None
    """Effective sample size of one chain, the smallest of all parameters."""


def exact_law(posterior: object, plan: Plan | Sequence[Plan]) -> ExactLaw:
    """Return the exact law of a plan's chains, as far as it is known."""
    if not isinstance(posterior, HasLaw):
        return ExactLaw(None, None)
    return ExactLaw(
        tuple(exact_w2_sq(posterior, plan).tolist()),
        float(exact_ess(posterior, plan).min()),
    )


def _checked(posterior: object) -> HasLaw:
    if not isinstance(posterior, HasLaw):
        raise InputError(
            "posterior",
            type(posterior).__name__,
            "a model whose exact law is known, such as a Gaussian",
        )
    return posterior


def exact_w2_sq(posterior: object, plan: Plan | Sequence[Plan]) -> Array:
    """Return the true W2²[S] of the chain's law to the posterior while no gradient is clipped: no Monte Carlo error.

    Over several plans (one per channel realisation) it is that of their pooled mean and covariance.
    """
    plans = [plan] if isinstance(plan, Plan) else list(plan)
    names = ("step_size", "weight_received", "noise_variance")
    steps, weights, noise = (
        np.stack([getattr(p, name) for p in plans]) for name in names
    )
    dynamics = jax.tree.map(
        lambda *each: np.array(each)[:, None], *(p.dynamics for p in plans)
    )
    motion = Motion(
        steps,
        weights,
        plans[0].init,
        dynamics,
        np.array([[p.downlink_noise] for p in plans]),
    )
    known = _checked(posterior)
    return w2_squared(pool(known.chain(motion).law(noise)), known.exact)


def exact_ess(
    posterior: object, plan: Plan | Sequence[Plan], bias: bool = False
) -> Array:
    """Return the effective sample size [m] of the kept rounds of one chain while no gradient is clipped, exactly.

    It is Σ_ii/V_i: the posterior's variance of a parameter over that of the mean of its S_u kept samples, so many
    independent draws from the posterior have a mean that spreads as little. V_i is over repetitions of the whole
    chain, its start included, hence what all samples share counts as if it were one. Over several plans (one per
    channel realisation) V_i is the average.

    Args:
        bias: add the squared bias of that mean to its variance: so many draws have a mean that errs as little.
    """
    known, errors = _checked(posterior), []
    for one in [plan] if isinstance(plan, Plan) else plan:
        chain = known.chain(one.motion)
        error = chain.variance_of_mean(one.noise_variance, one.burn_in)
        if bias:
            mean = chain.law(one.noise_variance).mean[one.burn_in :].mean(0)
            error = error + (mean - known.exact.mean) ** 2
        errors.append(error)
    variance = np.mean(errors, axis=0)
    return np.where(
        np.isfinite(variance), np.diagonal(known.exact.covariance) / variance, 0.0
    )


def _moments(theta: Array, counts: Array) -> Gaussian:
    """Return mean and covariance per round of theta[chain, draw, m] with every chain counts[b, chain] times."""
    total = counts.sum(-1)[:, None, None]
    mean = np.einsum("bc,cdm->bdm", counts, theta) / total
    second = np.einsum("bc,cdm,cdn->bdmn", counts, theta, theta, optimize=True)
    covariance = (
        second - total[..., None] * mean[..., :, None] * mean[..., None, :]
    ) / (total[..., None] - 1)
    return Gaussian(mean, covariance)


def estimate_w2_sq(
    theta: NDArray[np.floating], exact: Gaussian, *, resamples: int = 100, seed: int = 0
) -> DistanceEstimate:
    """Return the plug-in W2² of chains: theta[chain, draw, m] against the exact posterior.

    The estimate is biased upwards (a floor near 1e-4 for 100 chains of the paper's study), and so is its
    maximum over rounds; the exact law has no such floor.
    """
    target = Gaussian(np.zeros_like(exact.mean), exact.covariance)
    chains, draws, dim = theta.shape

    def centred(rounds: slice | NDArray[np.intp]) -> Array:
        """Some rounds in float64, without the posterior's mean: second moments stay free of cancellation."""
        return np.asarray(theta[:, rounds], dtype=float) - exact.mean

    at_once, once = (
        max(1, CHUNK_BYTES // (8 * dim * (chains + 4 * dim))),
        np.ones((1, chains)),
    )
    parts = (
        _moments(centred(slice(at, at + at_once)), once)
        for at in range(0, draws, at_once)
    )
    per_round = np.concatenate([w2_squared(part, target)[0] for part in parts])
    candidates = centred(np.sort(np.argsort(per_round)[-WORST_ROUNDS:]))
    generator, alike = np.random.default_rng(seed), np.full(chains, 1 / chains)
    often = (
        generator.multinomial(chains, alike, size=1).astype(float)
        for _ in range(resamples)
    )
    worst = [
        w2_squared(_moments(candidates, counts), target)[0].max() for counts in often
    ]
    return DistanceEstimate(
        per_round, float(per_round.max()), float(np.std(worst, ddof=1))
    )


def with_floor(
    distance: DistanceEstimate, theta: NDArray[np.floating], exact: Gaussian
) -> DistanceEstimate:
    """Add the floor of an estimate: what theta[chain, draw, m] would give if its law were exactly the posterior.

    Perfect samples with a correlation r between successive draws change by 2 (1 − r) times the posterior's variance
    from draw to draw, which tells r along every eigenvector of the posterior's covariance. Where noise is too strong
    it may be taken for too small, and the floor, that of independent draws then, errs upwards.
    """
    variance, directions = np.linalg.eigh(exact.covariance)
    chains, draws, dim = theta.shape
    rounds = int(min(draws, WORST_ROUNDS, max(1, CHUNK_BYTES // (8 * chains * dim))))
    memory = np.zeros(dim)
    if draws > 1:
        moved = (
            np.diff(
                np.asarray(theta[:FLOOR_CHAINS, -WORST_ROUNDS:], dtype=float), axis=1
            )
            @ directions
        )
        memory = np.clip(
            1 - np.mean(moved**2, axis=(0, 1)) / (2 * variance), 0.0, 1 - 1e-12
        )
    generator = np.random.default_rng(0)
    worst = [
        _perfect(generator, variance, memory, 1, chains, rounds)[0]
        for _ in range(FLOOR_REPLICAS)
    ]
    return distance._replace(
        floor=float(np.mean(worst)), floor_sd=float(np.std(worst, ddof=1))
    )


def floor_w2_sq(
    exact: Gaussian,
    step_size: float,
    chains: int,
    draws: int,
    *,
    replicas: int = REPLICAS,
    seed: int = 0,
) -> tuple[float, float]:
    """Return what `estimate_w2_sq(...).worst` gives for perfect samples: its mean over replicas and its error.

    The chains are those of an ideal sampler: every draw has exactly the posterior's law, and successive draws are as
    correlated as in continuous Langevin dynamics, exp(−η λ) along an eigenvector of the Hessian with eigenvalue λ.
    """
    variance: Array = np.asarray(np.linalg.eigvalsh(exact.covariance), dtype=float)
    worst = _perfect(
        np.random.default_rng(seed),
        variance,
        np.exp(-step_size / variance),
        replicas,
        chains,
        draws,
    )
    return float(worst.mean()), float(worst.std(ddof=1) / replicas**0.5)


def _perfect(
    rng: np.random.Generator,
    variance: Array,
    memory: Array,
    replicas: int,
    chains: int,
    draws: int,
) -> Array:
    """Return the worst estimate of every replica of perfect chains, whose draws are correlated by memory[m]."""
    shocks = rng.standard_normal((draws, replicas * chains, variance.size))
    shocks[1:] *= np.sqrt(1 - memory**2)
    paths = [first_order(shocks[..., i], memory[i]) for i in range(variance.size)]
    theta = (np.sqrt(variance) * np.stack(paths, axis=-1)).reshape(
        draws, replicas, chains, -1
    )
    away = theta - theta.mean(-2, keepdims=True)
    moments = Gaussian(theta.mean(-2), np.swapaxes(away, -1, -2) @ away / (chains - 1))
    return np.asarray(
        w2_squared(moments, Gaussian(np.zeros(variance.size), np.diag(variance))).max(0)
    )


class Comparison(NamedTuple):
    """Samples of every parameter, [m], beside the law they should have; nan where something is not known."""

    mean: Array
    error: Array
    """Standard error of the mean."""
    deviation: Array
    """Standard deviation of the samples."""
    law: Gaussian | None
    expected: Array
    """Standard deviations of the law."""
    shift: Array
    """Means of the samples less those of the law."""

    @property
    def z(self) -> Array:
        """The shift in standard errors of the mean."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.error > 0, self.shift / self.error, np.nan)


def compare(theta: Array, law: Gaussian | None) -> Comparison:
    """Return means and deviations of theta[chain, draw, m] beside a law.

    Standard errors are over chains, which are independent; of one chain, by its effective sample size.
    """
    chains, draws, dim = theta.shape
    mean, deviation = (
        theta.mean((0, 1)),
        theta.std((0, 1), ddof=1 if chains * draws > 1 else 0),
    )
    if chains > 1:
        error = theta.mean(1).std(0, ddof=1) / np.sqrt(chains)
    else:
        error = deviation / np.sqrt(
            diagnose(theta).ess_min or np.nan
        )  # the smallest, which errs on the safe side
    target = law or Gaussian(np.full(dim, np.nan), np.full((dim, dim), np.nan))
    return Comparison(
        mean,
        error,
        deviation,
        law,
        np.sqrt(np.diagonal(target.covariance)),
        mean - target.mean,
    )


def law_of(posterior: Posterior) -> Gaussian | None:
    """Return the exact law of a posterior, or its Laplace approximation; None where neither is known."""
    if isinstance(posterior, GaussianPosterior):
        return posterior.exact
    if isinstance(posterior, SoftmaxPosterior) and posterior.dim <= LARGEST_HESSIAN:
        return laplace_law(posterior)
    return None


def laplace_law(posterior: SoftmaxPosterior) -> Gaussian:
    """Return the Gaussian of the parameters at a softmax posterior's mode, with the inverse of the full Hessian."""
    mode, space, classes = (
        posterior.laplace[0],
        posterior.coordinates,
        posterior.classes,
    )
    rows = posterior.real_rows(posterior.features)
    features = rows.shape[1]
    p = softmax(rows @ mode.reshape(classes, -1).T, axis=1)
    prior = (
        np.eye(features) / posterior.prior_std**2
        if space is None
        else np.asarray(space.precision)
    )
    hessian = np.kron(np.eye(classes), prior).reshape(
        classes, features, classes, features
    )
    for one in range(classes):
        for other in range(classes):
            weight = p[:, one] * ((one == other) - p[:, other])
            hessian[one, :, other] += rows.T @ (weight[:, None] * rows)
    covariance = np.linalg.inv(hessian.reshape(posterior.dim, posterior.dim))
    moved = posterior.parameters(posterior.parameters(covariance).T).T
    return Gaussian(np.asarray(posterior.parameters(mode)), np.asarray(moved))


def autocorrelation(theta: Array, lags: int) -> Array:
    """Return the autocorrelation of theta[chain, draw, ...] at lags 0 to `lags`, about the mean over all chains."""
    away = theta - theta.mean((0, 1))
    draws = away.shape[1]
    products = np.array(
        [
            np.mean(away[:, : draws - lag] * away[:, lag:], axis=(0, 1))
            for lag in range(lags + 1)
        ]
    )
    products[0] = np.maximum(products[0], 1e-300)  # of a parameter that never moves
    return np.asarray(products / products[0])
