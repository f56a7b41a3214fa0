r"""Samples beside the law they should have: $W_2^2$ by round, moments, autocorrelation.

All distances are squared, as in the paper's figures. While no gradient is clipped the
law of a chain of the Gaussian study is known, and so is its distance; estimates from
chains have a floor that perfect samples show as well (`floor_w2_sq`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri, softmax

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


QUANTILE_95 = float(ndtri(0.95))
"""Of a standard normal: half the width of a central 90 % interval, in deviations."""
SMALLEST_USUAL_RATIO = 0.95
"""Of variances, below which a law counts as narrow."""
CHUNK_BYTES = 2**27
"""Of the moments, or the draws, that are computed at a time."""
WORST_ROUNDS = 200
"""Rounds that a bootstrap looks at: the worst one of a resample is hardly ever
elsewhere. Also the most draws of a chain that `with_floor` looks at, or simulates."""
REPLICAS = 50
"""Perfect experiments that `floor_w2_sq` is the mean of."""
LARGEST_HESSIAN = 1500
"""Parameters up to which the Hessian of a softmax posterior is inverted."""
FLOOR_REPLICAS = 20
"""Perfect experiments that `with_floor` is the mean of."""
FLOOR_CHAINS = 50
"""Chains of a trace that show how correlated draws are."""
LARGEST_CORRELATION = 1 - 1e-12
"""Of successive draws, below 1."""
SMALLEST_VARIANCE = 1e-300
"""In the place of the variance of a parameter that never moves."""


class DistanceEstimate(NamedTuple):
    """W2² (not its root) to the posterior, of each kept round and of the worst."""

    per_round: Array
    """[draw]."""
    worst: float
    """The largest of them."""
    worst_se: float
    """Bootstrap standard error over chains; of near-perfect samples it is about twice
    as large as it should be."""
    floor: float | None = None
    """The mean of `worst` for as many perfect chains, as correlated as these, over at
    most 200 draws; None where it was not computed."""
    floor_sd: float = 0.0
    """Standard deviation of that over repetitions."""

    @property
    def resolution(self) -> float:
        """Return how far above the truth `worst` may well be by chance alone.

        It is the floor, 0 where it was not computed, and five standard deviations of
        the larger of the two errors.
        """
        return (self.floor or 0.0) + 5 * max(self.worst_se, self.floor_sd)


class PerfectDistance(NamedTuple):
    """What an estimate of W2² shows for perfect samples."""

    mean: float
    """Over repetitions."""
    error: float
    """Standard error of the mean."""


class Spread(NamedTuple):
    """How wide a chain's law is beside the posterior, at the first and last kept round.

    Burn-in at a low temperature leaves it too narrow, and noise in excess of what
    sampling needs too wide.
    """

    variance_ratio: tuple[float, float]
    """The chain's variance over the posterior's, mean over all directions."""
    coverage_90: tuple[float, float]
    """The posterior's probability of the central 90 % interval of the chain's law, mean
    over parameters."""

    @property
    def is_narrow(self) -> bool:
        """Return whether the variance is more than 5 % below the posterior's."""
        return min(self.variance_ratio) < SMALLEST_USUAL_RATIO

    @property
    def words(self) -> str:
        """Return what a line of text says of it, without a name."""
        first_ratio, last_ratio = self.variance_ratio
        first_coverage, last_coverage = self.coverage_90
        return (
            f"{first_ratio:.3g} of the posterior's at first, {last_ratio:.3g} at last; "
            f"90 % intervals hold {first_coverage:.0%}, {last_coverage:.0%}"
        )


class ExactLaw(NamedTuple):
    """What is known of a plan's chains while no gradient is clipped.

    None for models whose law is not known.
    """

    w2_sq: tuple[float, ...] | None
    """W2² to the posterior, [S]."""
    ess_min: float | None
    """Effective sample size of one chain, the smallest of all parameters."""
    spread: Spread | None = None
    """Of the kept rounds; None also where the chain diverges."""


def exact_law(posterior: object, plan: Plan | Sequence[Plan]) -> ExactLaw:
    """Return the exact law of a plan's chains, as far as it is known.

    Args:
        posterior: any; only Gaussian ones have a known law.
        plan: one, or several that chains follow in turns.

    Returns:
        `exact_w2_sq` of every round, the smallest `exact_ess` and `exact_spread`; None
        for all of them where the law is not known.
    """
    if not isinstance(posterior, HasLaw):
        return ExactLaw(None, None)
    law = _pooled_law(posterior, plan)
    distances = w2_squared(law, posterior.exact)
    ess = exact_ess(posterior, plan)
    burn_in = _as_list(plan)[0].burn_in
    return ExactLaw(
        w2_sq=tuple(distances.tolist()),
        ess_min=float(ess.min()),
        spread=_spread(law, posterior.exact, burn_in),
    )


def _require_law(posterior: object) -> HasLaw:
    """Return a posterior whose law is known; refuse any other."""
    if not isinstance(posterior, HasLaw):
        raise InputError(
            "posterior",
            type(posterior).__name__,
            "a model whose exact law is known, such as a Gaussian",
        )
    return posterior


def _as_list(plan: Plan | Sequence[Plan]) -> list[Plan]:
    return [plan] if isinstance(plan, Plan) else list(plan)


def exact_w2_sq(posterior: object, plan: Plan | Sequence[Plan]) -> Array:
    r"""Return the true $W_2^2$ of the chain's law to the posterior, without sampling.

    Gradients of a linear regression are affine, so that mean and covariance follow from
    round to round: $C \leftarrow A C A^\top + \sigma^2 I$. They are those of a chain
    whose gradients are never clipped; whether any are is not checked.

    Args:
        posterior: whose law is known, such as a `GaussianPosterior`.
        plan: one, or several (one per channel realization) of equal length, of which
            the mean and the covariance are pooled.

    Returns:
        The distance after every round, [S]; infinite where the chain diverges.

    Raises:
        InputError: for a model whose law is not known.
    """
    law_of_model = _require_law(posterior)
    return w2_squared(_pooled_law(law_of_model, plan), law_of_model.exact)


def exact_spread(posterior: object, plan: Plan | Sequence[Plan]) -> Spread | None:
    """Return how wide the law of a chain is beside the posterior, without sampling.

    A mean of `variance_ratio` near 1 may hide a direction that is too narrow and
    another that is too wide; `coverage_90` tells also of a mean that is off. Both are
    those of `exact_w2_sq`'s law, so that clipping is ignored.

    Args:
        posterior: whose law is known, such as a `GaussianPosterior`.
        plan: one, or several of equal length, whose laws are pooled.

    Returns:
        The spread at the first and the last kept round; None where the chain diverges.

    Raises:
        InputError: for a model whose law is not known.
    """
    law_of_model = _require_law(posterior)
    law = _pooled_law(law_of_model, plan)
    return _spread(law, law_of_model.exact, _as_list(plan)[0].burn_in)


def _spread(law: Gaussian, exact: Gaussian, burn_in: int) -> Spread | None:
    """Return `exact_spread` of a law by round, mean[S, m] and covariance[S, m, m]."""
    ends = [burn_in, -1]
    mean = law.mean[ends]
    covariance = law.covariance[ends]
    if not np.isfinite(covariance).all():
        return None
    ratio = np.trace(np.linalg.solve(exact.covariance, covariance), axis1=1, axis2=2)
    half_width = QUANTILE_95 * np.sqrt(np.diagonal(covariance, axis1=1, axis2=2))
    exact_deviation = np.sqrt(np.diagonal(exact.covariance))
    upper = ndtr((mean + half_width - exact.mean) / exact_deviation)
    lower = ndtr((mean - half_width - exact.mean) / exact_deviation)
    first_ratio, last_ratio = (ratio / exact.mean.size).tolist()
    first_coverage, last_coverage = (upper - lower).mean(-1).tolist()
    return Spread(
        variance_ratio=(first_ratio, last_ratio),
        coverage_90=(first_coverage, last_coverage),
    )


def _pooled_law(posterior: HasLaw, plan: Plan | Sequence[Plan]) -> Gaussian:
    """Return the law of every round, mean[S, m] and covariance[S, m, m]."""
    plans = _as_list(plan)
    noise = np.stack([plan.noise_variance for plan in plans])
    return pool(posterior.chain(_motion_of(plans)).law(noise))


def _motion_of(plans: Sequence[Plan]) -> Motion:
    """Return how the chains of all plans move, with an axis of plans in front.

    Numbers that a plan has one of, such as the friction of kinetic dynamics, become
    [plan, 1], so that they broadcast against its rounds.
    """

    def column(*values: float) -> Array:
        return np.array(values)[:, None]

    step_sizes = [plan.step_size for plan in plans]
    weights = [plan.weight_received for plan in plans]
    dynamics = [plan.dynamics for plan in plans]
    downlink_noise = [plan.downlink_noise for plan in plans]
    return Motion(
        step_size=np.stack(step_sizes),
        weight=np.stack(weights),
        init=plans[0].init,
        dynamics=jax.tree.map(column, *dynamics),
        downlink=column(*downlink_noise),
    )


def exact_ess(
    posterior: object, plan: Plan | Sequence[Plan], bias: bool = False
) -> Array:
    """Return the effective sample size of one chain's rounds after burn-in, exactly.

    It is min(Σ_ii, C_i)/V_i. Here V_i is the variance of the mean of a chain's S_u
    draws, Σ_ii the posterior's variance of a parameter, and C_i that of a draw, mean
    over the S_u draws. So many independent draws have a mean that spreads as little,
    if they are from the posterior, or from the chain's own law where that is narrower.
    Narrow draws, as after burn-in that is too cold, would otherwise count for more than
    there are of them. It exceeds S_u only where the covariances between draws add up to
    less than 0: kinetic dynamics of little friction swing around the mode.

    Variances are over repetitions of the whole chain, its start included, hence what
    all draws have in common counts as if it were one. Like `exact_w2_sq`, it ignores
    clipping.

    Args:
        posterior: whose law is known, such as a `GaussianPosterior`.
        plan: one, or several (one per channel realization), over which C_i and V_i are
            averaged.
        bias: add the squared bias of the mean to its variance V_i.

    Returns:
        The effective sample size of every parameter, [m]; 0 where the chain diverges,
        or never moves from one point.

    Raises:
        InputError: for a model whose law is not known.
    """
    law_of_model = _require_law(posterior)
    draw_variances = []
    mean_variances = []
    for plan_of_chain in _as_list(plan):
        chain = law_of_model.chain(plan_of_chain.motion)
        noise = plan_of_chain.noise_variance
        burn_in = plan_of_chain.burn_in
        law = chain.law(noise)
        mean_variance = chain.variance_of_mean(noise, burn_in)
        if bias:
            mean = law.mean[burn_in:].mean(0)
            mean_variance = mean_variance + (mean - law_of_model.exact.mean) ** 2
        covariances = law.covariance[burn_in:]
        # Variances of a chain that diverges may overflow in a sum.
        with np.errstate(over="ignore", invalid="ignore"):
            draw_variance = np.diagonal(covariances, axis1=1, axis2=2).mean(0)
        draw_variances.append(draw_variance)
        mean_variances.append(mean_variance)
    variance = np.mean(mean_variances, axis=0)
    posterior_variance = np.diagonal(law_of_model.exact.covariance)
    narrower = np.fmin(posterior_variance, np.mean(draw_variances, axis=0))
    has_ess = np.isfinite(variance) & (variance > 0)
    return np.divide(narrower, variance, out=np.zeros_like(variance), where=has_ess)


def _moments(theta: Array, counts: Array) -> Gaussian:
    """Return mean and covariance of every round, for some resamples of the chains.

    Args:
        theta: [chain, draw, m].
        counts: how often every chain is in a resample, [resample, chain].

    Returns:
        mean[resample, draw, m] and covariance[resample, draw, m, m].
    """
    total = counts.sum(-1)[:, None, None]
    mean = np.einsum("bc,cdm->bdm", counts, theta) / total
    squares = np.einsum("bc,cdm,cdn->bdmn", counts, theta, theta, optimize=True)
    total = total[..., None]
    squares_of_mean = total * mean[..., :, None] * mean[..., None, :]
    covariance = (squares - squares_of_mean) / (total - 1)
    return Gaussian(mean, covariance)


def estimate_w2_sq(
    theta: NDArray[np.floating], exact: Gaussian, *, resamples: int = 100, seed: int = 0
) -> DistanceEstimate:
    """Estimate W2² of chains to the exact posterior, round by round.

    The plug-in estimate takes the chains of a round for a Gaussian of their mean and
    covariance. It is biased upwards (a floor near 1e-4 for 100 chains of the paper's
    study), and so is its maximum over rounds; `exact_w2_sq` has no such floor.

    Args:
        theta: draws, [chain, draw, m], of at least two chains.
        exact: the posterior of the parameters.
        resamples: of the chains, for the standard error.
        seed: of the resampling; results repeat with it.

    Returns:
        The distances, the worst of them and its standard error; without a floor.
    """
    target = Gaussian(np.zeros_like(exact.mean), exact.covariance)
    chains, draws, dim = theta.shape

    def centred(rounds: slice | NDArray[np.intp]) -> Array:
        """Return rounds without the posterior's mean.

        So second moments stay free of cancellation.
        """
        return np.asarray(theta[:, rounds], dtype=float) - exact.mean

    chunk = max(1, CHUNK_BYTES // (8 * dim * (chains + 4 * dim)))
    equal_counts = np.ones((1, chains))
    parts = []
    for first in range(0, draws, chunk):
        moments = _moments(centred(slice(first, first + chunk)), equal_counts)
        parts.append(w2_squared(moments, target)[0])
    per_round = np.concatenate(parts)

    worst_rounds = np.sort(np.argsort(per_round)[-WORST_ROUNDS:])
    candidates = centred(worst_rounds)
    generator = np.random.default_rng(seed)
    probabilities = np.full(chains, 1 / chains)
    resampled = []
    for _ in range(resamples):
        counts = generator.multinomial(chains, probabilities, size=1).astype(float)
        distances = w2_squared(_moments(candidates, counts), target)[0]
        resampled.append(distances.max())
    return DistanceEstimate(
        per_round=per_round,
        worst=float(per_round.max()),
        worst_se=float(np.std(resampled, ddof=1)),
    )


def with_floor(
    distance: DistanceEstimate, theta: NDArray[np.floating], exact: Gaussian
) -> DistanceEstimate:
    """Add the floor of an estimate: what it would be if the law were the posterior.

    Perfect samples with a correlation r between successive draws change from draw to
    draw by 2 (1 − r) times the posterior's variance, in mean square, which shows r
    along every eigenvector of the posterior's covariance. Where noise is too strong, r may be taken
    for too small, and the floor, that of independent draws then, errs upwards. At most
    200 draws are simulated; of longer chains the worst would be a little higher.

    Args:
        distance: `estimate_w2_sq` of the same draws.
        theta: draws, [chain, draw, m].
        exact: the posterior of the parameters.

    Returns:
        The estimate with `floor` and `floor_sd`, over 20 repetitions.
    """
    variance, directions = np.linalg.eigh(exact.covariance)
    chains, draws, dim = theta.shape
    draws_in_chunk = max(1, CHUNK_BYTES // (8 * chains * dim))
    simulated_draws = int(min(draws, WORST_ROUNDS, draws_in_chunk))
    correlation = np.zeros(dim)
    if draws > 1:
        last_draws = np.asarray(theta[:FLOOR_CHAINS, -WORST_ROUNDS:], dtype=float)
        changes = np.diff(last_draws, axis=1) @ directions
        mean_square = np.mean(changes**2, axis=(0, 1))
        estimated = 1 - mean_square / (2 * variance)
        correlation = np.clip(estimated, 0.0, LARGEST_CORRELATION)
    generator = np.random.default_rng(0)
    worst = []
    for _ in range(FLOOR_REPLICAS):
        replica = _worst_of_perfect_chains(
            generator,
            variance,
            correlation,
            replicas=1,
            chains=chains,
            draws=simulated_draws,
        )
        worst.append(replica[0])
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
) -> PerfectDistance:
    """Return what `estimate_w2_sq(...).worst` is for perfect samples, on average.

    The chains are those of an ideal sampler: every draw has exactly the posterior's
    law, and successive draws are as correlated as in continuous Langevin dynamics,
    exp(−η λ) along an eigenvector of the Hessian with eigenvalue λ. Differences below
    this floor mean nothing.

    Args:
        exact: the posterior of the parameters.
        step_size: η.
        chains: of an experiment, at least two.
        draws: of every chain.
        replicas: experiments that are simulated.
        seed: of the simulation; results repeat with it.

    Returns:
        The mean over the experiments, and its standard error.
    """
    eigenvalues = np.linalg.eigvalsh(exact.covariance)
    variance: Array = np.asarray(eigenvalues, dtype=float)
    correlation = np.exp(-step_size / variance)
    generator = np.random.default_rng(seed)
    worst = _worst_of_perfect_chains(
        generator,
        variance,
        correlation,
        replicas=replicas,
        chains=chains,
        draws=draws,
    )
    error = worst.std(ddof=1) / replicas**0.5
    return PerfectDistance(mean=float(worst.mean()), error=float(error))


def _worst_of_perfect_chains(
    generator: np.random.Generator,
    variance: Array,
    correlation: Array,
    *,
    replicas: int,
    chains: int,
    draws: int,
) -> Array:
    """Return the worst estimate of every replica of perfect chains, [replica].

    Args:
        generator: of the draws.
        variance: of the posterior along its axes, [m].
        correlation: of successive draws, [m].
        replicas: how many experiments.
        chains: of an experiment.
        draws: of every chain.
    """
    dim = variance.size
    shocks = generator.standard_normal((draws, replicas * chains, dim))
    shocks[1:] *= np.sqrt(1 - correlation**2)
    paths = [first_order(shocks[..., i], correlation[i]) for i in range(dim)]
    scaled = np.sqrt(variance) * np.stack(paths, axis=-1)
    theta = scaled.reshape(draws, replicas, chains, dim)
    centred = theta - theta.mean(-2, keepdims=True)
    squares = np.swapaxes(centred, -1, -2) @ centred
    moments = Gaussian(theta.mean(-2), squares / (chains - 1))
    target = Gaussian(np.zeros(dim), np.diag(variance))
    distances = w2_squared(moments, target)
    return np.asarray(distances.max(0))


class Comparison(NamedTuple):
    """Samples of every parameter beside the law they should have.

    Each is [m]; nan where something is not known.
    """

    mean: Array
    """Of the samples."""
    error: Array
    """Standard error of the mean."""
    deviation: Array
    """Standard deviation of the samples."""
    law: Gaussian | None
    """The law; None where it is not known."""
    expected: Array
    """Standard deviations of the law."""
    shift: Array
    """Means of the samples less those of the law."""

    @property
    def z(self) -> Array:
        """Return the shift in standard errors, [m]; nan where the error is 0."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.error > 0, self.shift / self.error, np.nan)


def compare(theta: Array, law: Gaussian | None) -> Comparison:
    """Return means and deviations of samples beside a law.

    Standard errors are over chains, which are independent; of one chain they are by its
    smallest effective sample size, which errs on the safe side.

    Args:
        theta: draws, [chain, draw, m].
        law: that the draws should have; None where it is not known.

    Returns:
        The comparison, with nan for what needs a law that is not known.
    """
    chains, draws, dim = theta.shape
    has_several_samples = chains * draws > 1
    mean = theta.mean((0, 1))
    deviation = theta.std((0, 1), ddof=1 if has_several_samples else 0)
    if chains > 1:
        means_of_chains = theta.mean(1)
        error = means_of_chains.std(0, ddof=1) / np.sqrt(chains)
    else:
        ess = diagnose(theta).ess_min or np.nan
        error = deviation / np.sqrt(ess)
    unknown = Gaussian(np.full(dim, np.nan), np.full((dim, dim), np.nan))
    target = law or unknown
    return Comparison(
        mean=mean,
        error=error,
        deviation=deviation,
        law=law,
        expected=np.sqrt(np.diagonal(target.covariance)),
        shift=mean - target.mean,
    )


def law_of(posterior: Posterior) -> Gaussian | None:
    """Return the law of a posterior's parameters.

    Args:
        posterior: any.

    Returns:
        The exact law of a linear regression, the Laplace approximation of a softmax
        model of at most 1500 parameters; None for all others.
    """
    if isinstance(posterior, GaussianPosterior):
        return posterior.exact
    if isinstance(posterior, SoftmaxPosterior) and posterior.dim <= LARGEST_HESSIAN:
        return laplace_law(posterior)
    return None


def laplace_law(posterior: SoftmaxPosterior) -> Gaussian:
    """Return the Laplace approximation of a softmax posterior.

    Args:
        posterior: whose mode is computed, and whose full Hessian
            Σ_n (diag(p_n) − p_n p_nᵀ) ⊗ u_n u_nᵀ + Λ is inverted there.

    Returns:
        The Gaussian of the parameters, also where chains move in other coordinates.
    """
    mode = posterior.laplace.mode
    classes = posterior.classes
    rows = posterior.real_rows(posterior.features)
    dim = rows.shape[1]
    p = softmax(rows @ mode.reshape(classes, -1).T, axis=1)
    if posterior.coordinates is None:
        prior = np.eye(dim) / posterior.prior_std**2
    else:
        prior = np.asarray(posterior.coordinates.precision)
    hessian = np.kron(np.eye(classes), prior).reshape(classes, dim, classes, dim)
    for row_class in range(classes):
        for column_class in range(classes):
            is_diagonal = row_class == column_class
            weight = p[:, row_class] * (is_diagonal - p[:, column_class])
            hessian[row_class, :, column_class] += rows.T @ (weight[:, None] * rows)
    covariance = np.linalg.inv(hessian.reshape(posterior.dim, posterior.dim))
    # Wᵀ C W, where the parameters are Wᵀφ.
    of_parameters = posterior.parameters(posterior.parameters(covariance).T).T
    return Gaussian(np.asarray(posterior.parameters(mode)), np.asarray(of_parameters))


def autocorrelation(theta: Array, lags: int) -> Array:
    """Return the autocorrelation of draws, about the mean over all chains.

    Args:
        theta: draws, [chain, draw, ...].
        lags: the largest lag, below the number of draws.

    Returns:
        The autocorrelation at lags 0 to `lags`, [lag, ...]; it is 1 at lag 0, and 0 for
        a parameter that never moves.
    """
    centred = theta - theta.mean((0, 1))
    draws = centred.shape[1]
    products = []
    for lag in range(lags + 1):
        earlier = centred[:, : draws - lag]
        later = centred[:, lag:]
        products.append(np.mean(earlier * later, axis=(0, 1)))
    covariance = np.array(products)
    covariance[0] = np.maximum(covariance[0], SMALLEST_VARIANCE)
    return np.asarray(covariance / covariance[0])
