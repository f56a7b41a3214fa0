r"""Privacy budgets, the loss a plan spends, and the (ε, δ) that a loss means.

A round in which the server receives a device's gradient at amplitude $\alpha$ in
Gaussian noise of variance $N_0$ costs that device the *loss*
$x = 2(\alpha s)^2/N_0$, where neighbouring data sets change the gradient by at most
$2s$: $s = \ell$ where gradients clipped to a norm of $\ell$ are replaced by any other.
Losses of successive rounds add up, also where a later round depends on what an earlier
one has released. A device is (ε, δ)-private as long as their sum stays within a budget
$R(\varepsilon, \delta)$. Two accountants give $R$:

- `exact`: Gaussian mechanisms compose to μ-GDP with $\mu^2 = 2 \sum x$, whose (ε, δ) is
  known in closed form (Balle & Wang 2018), so nothing is lost;
- `paper`: the sufficient condition of Liu & Simeone (Proposition 2). It is valid, but
  its R is smaller: by 22 % at (ε, δ) = (8, 0.01), by 55 % at (1, 0.01).

Neither covers mechanisms other than Gaussian ones, nor amplification by sampling: the
server knows which devices send. Adjacency enters through $s$ alone
(`wflmc.privacy.promise.Privacy.half_change`).

>>> round(float(budget(8, 0.01)), 6)
2.998315
>>> round(float(budget(8, 0.01, accountant="paper")), 6)
2.341635
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from wflmc.support.errors import InputError, unknown

Array = NDArray[np.float64]

LOG_2 = float(np.log(2.0))
SQRT_2 = float(np.sqrt(2.0))
BISECTIONS = 90
"""Halvings after which a bracket of logarithms is a pair of neighbouring floats."""
MU_RANGE = (1e-40, 1e12)
"""Where the μ of a budget is searched for.

The upper end stands for any larger μ; below the lower end the paper's budget is taken.
"""
SMALLEST_EPSILON = 1e-300
"""The lower end of the search for ε, on a scale of logarithms."""
SERIES_FROM = 60.0
"""Arguments of erfcx' from which its asymptotic series replaces its two terms, which
cancel there."""
SLOPE_BELOW = 1e-5
"""Distance of two arguments of erfcx, μ/√2, below which its slope gives the difference.

The plain difference of Φ(a) and e^ε Φ(b) would be rounding there.
"""
MAX_DISTRIBUTION_POINTS = 1e7
"""Of a tabulated privacy loss distribution; larger ones take minutes."""


class Accountant(NamedTuple):
    """Three views of one relation between a loss Σx, ε and δ."""

    budget: Callable[[Array, Array], Array]
    """(ε, δ) → the largest loss."""
    epsilon: Callable[[Array, Array], Array]
    """(loss, δ) → the smallest ε."""
    delta: Callable[[Array, Array], Array]
    """(loss, ε) → the smallest δ."""


def _bisect(
    is_above: Callable[[Array], NDArray[np.bool_]], low: Array, high: Array
) -> tuple[Array, Array]:
    """Shrink brackets [low, high] of increasing conditions to neighbouring floats."""
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        above = is_above(middle)
        low = np.where(above, low, middle)
        high = np.where(above, middle, high)
    return low, high


def _log_delta(epsilon: Array, mu: Array) -> Array:
    """Return log δ(ε) of a μ-GDP mechanism (Balle & Wang 2018, Theorem 8).

    δ = Φ(a) − e^ε Φ(b), a = −ε/μ + μ/2, b = −ε/μ − μ/2.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        a = -epsilon / mu + mu / 2
        b = -epsilon / mu - mu / 2
        scaled = _log_delta_by_erfcx(a, b, mu)
        body = special.log_ndtr(a)
        # log e^ε Φ(b), by the factor φ(a): a large ε and log Φ(b) would cancel.
        log_subtracted = -LOG_2 - a**2 / 2 + np.log(special.erfcx(-b / SQRT_2))
        log_ratio = np.minimum(log_subtracted - body, 0.0)
        body = body + np.log1p(-np.exp(log_ratio))
    is_cancelling = (a < 0) | (mu / SQRT_2 < SLOPE_BELOW)
    return np.where(is_cancelling, scaled, body)


def _log_delta_by_erfcx(a: Array, b: Array, mu: Array) -> Array:
    """Return log δ by scaled error functions, without cancellation for any μ.

    As e^ε φ(b) = φ(a), both terms share the factor φ(a), and their difference is one of
    scaled error functions. These overflow for large a, where Φ(a) is far from both
    other terms.
    """
    upper = -a / SQRT_2
    lower = -b / SQRT_2
    gap = mu / SQRT_2
    middle = 0.5 * (upper + lower)
    # −erfcx' at the middle: by its two terms, and by its asymptotic series.
    by_terms = 2 / np.sqrt(np.pi) - 2 * middle * special.erfcx(middle)
    by_series = (1 - 1.5 / middle**2) / (np.sqrt(np.pi) * middle**2)
    slope = np.where(middle > SERIES_FROM, by_series, by_terms)
    exact_difference = special.erfcx(upper) - special.erfcx(lower)
    difference = np.where(gap < SLOPE_BELOW, gap * slope, exact_difference)
    return np.asarray(-LOG_2 - a**2 / 2 + np.log(difference))


def _exact_budget(epsilon: Array, delta: Array) -> Array:
    """Return R = μ²/2 by bisection for μ, the largest one with δ(ε) within δ.

    Where even the smallest μ of `MU_RANGE` is too large, it is the budget of `paper`.
    """
    log_target = np.log(delta)
    smallest, largest = np.log(MU_RANGE)

    def is_above(log_mu: Array) -> NDArray[np.bool_]:
        return _log_delta(epsilon, np.exp(log_mu)) > log_target

    low = np.full(epsilon.shape, smallest)
    high = np.full(epsilon.shape, largest)
    log_mu, _ = _bisect(is_above, low, high)
    exact_budget = 0.5 * np.exp(2 * log_mu)
    # `low` is still the lower end of the search.
    is_below_range = is_above(low)
    return np.where(is_below_range, _paper_budget(epsilon, delta), exact_budget)


def _exact_epsilon(loss: Array, delta: Array) -> Array:
    mu = np.sqrt(2 * loss)
    log_target = np.log(delta)

    def is_enough(log_epsilon: Array) -> NDArray[np.bool_]:
        return _log_delta(np.exp(log_epsilon), mu) <= log_target

    # μ²/2 + μ √(2 log 1/δ) is always enough: the tail bound on Φ(a) alone.
    sufficient = mu**2 / 2 + mu * np.sqrt(-2 * log_target)
    low = np.full(loss.shape, np.log(SMALLEST_EPSILON))
    high = np.log(sufficient + SMALLEST_EPSILON)
    _, log_epsilon = _bisect(is_enough, low, high)
    delta_at_zero = special.erf(mu / (2 * SQRT_2))
    return np.where(delta_at_zero <= delta, 0.0, np.exp(log_epsilon))


def _exact_delta(loss: Array, epsilon: Array) -> Array:
    return np.exp(_log_delta(epsilon, np.sqrt(2 * loss)))


def _paper_constant(delta: Array) -> Array:
    """Return c = C⁻¹(1/δ) with C(x) = √π x exp(x²) (Proposition 2).

    2c² is the Wright omega function of log 2 − 2 log δ − log π.
    """
    argument = LOG_2 - 2 * np.log(delta) - np.log(np.pi)
    return np.sqrt(special.wrightomega(argument) / 2)


def _paper_budget(epsilon: Array, delta: Array) -> Array:
    c = _paper_constant(delta)
    return (epsilon / (np.sqrt(epsilon + c**2) + c)) ** 2


def _paper_epsilon(loss: Array, delta: Array) -> Array:
    return loss + 2 * _paper_constant(delta) * np.sqrt(loss)


def _paper_delta(loss: Array, epsilon: Array) -> Array:
    c = np.maximum(epsilon - loss, 0.0) / (2 * np.sqrt(loss))
    with np.errstate(divide="ignore"):
        log_inverse = 0.5 * np.log(np.pi) + np.log(c) + c**2
        return np.minimum(1.0, np.exp(-log_inverse))


ACCOUNTANTS: dict[str, Accountant] = {
    "exact": Accountant(_exact_budget, _exact_epsilon, _exact_delta),
    "paper": Accountant(_paper_budget, _paper_epsilon, _paper_delta),
}


def accountant_named(name: str) -> Accountant:
    """Return an accountant by its name.

    Args:
        name: a key of `ACCOUNTANTS`, `exact` or `paper`.

    Returns:
        Its three views of the relation between loss, ε and δ.

    Raises:
        InputError: for any other name; the sentence names the nearest valid one.
    """
    if name not in ACCOUNTANTS:
        raise unknown("accountant", name, ACCOUNTANTS, section="privacy")
    return ACCOUNTANTS[name]


def positive(name: str, values: ArrayLike, below: float = np.inf) -> Array:
    """Return numbers as a float64 array, and refuse any that are out of range.

    They must be above 0 and below the limit, both excluded, as are nan and, with the
    default limit, infinity. An empty array passes.

    Args:
        name: of the argument, for the error.
        values: numbers, of any shape.
        below: the upper limit.

    Returns:
        The numbers, in the shape of `values`.

    Raises:
        InputError: if a number is not between 0 and the limit.
    """
    array = np.asarray(values, dtype=float)
    if np.all((array > 0) & (array < below)):
        return array
    requirement = "a finite number above 0"
    if below != np.inf:
        requirement = f"a number above 0 and below {below:g}"
    raise InputError(name, values, requirement)


def budget(epsilon: ArrayLike, delta: ArrayLike, accountant: str = "exact") -> Array:
    r"""Return the largest total loss $R(\varepsilon, \delta)$ that is (ε, δ)-private.

    A device whose rounds cost it $\sum_s 2(\alpha_s s)^2/N_0 \le R$ is
    (ε, δ)-differentially private against a server that sees everything it receives,
    for the adjacency that its sensitivity $s$ belongs to. `exact` is exact but for
    rounding for ε from 1e-6 to 1e4 and δ down to 1e-300, and beyond that not too large
    either: it stops at 5e23, and is that of `paper` below 5e-81. `paper` is smaller.

    Args:
        epsilon: ε, above 0, of any shape.
        delta: δ, above 0 and below 1; broadcast with ε.
        accountant: `exact` or `paper`.

    Returns:
        The budgets, in the common shape.

    Raises:
        InputError: for ε or δ out of range, or an unknown accountant.

    Examples:
        >>> budget([1, 8], 0.01).round(4).tolist()
        [0.1418, 2.9983]
    """
    epsilons = positive("epsilon", epsilon)
    deltas = positive("delta", delta, below=1)
    return accountant_named(accountant).budget(*np.broadcast_arrays(epsilons, deltas))


def epsilon_spent(
    loss: ArrayLike, delta: ArrayLike, accountant: str = "exact"
) -> Array:
    """Return the smallest ε for which a total loss is (ε, δ)-private.

    The inverse of `budget` in ε: what the accountant can prove. A loss of zero costs
    nothing, and an infinite loss has an infinite ε. By `exact`, ε is 0 where δ alone
    covers the loss; by `paper` it is above the loss.

    Args:
        loss: Σx of all rounds of a device, at least 0, of any shape.
        delta: δ, above 0 and below 1; broadcast with the loss.
        accountant: `exact` or `paper`.

    Returns:
        ε, in the common shape.

    Raises:
        InputError: for a negative loss, δ out of range, or an unknown accountant.
    """
    deltas = positive("delta", delta, below=1)
    view = accountant_named(accountant).epsilon
    return _spent(view, loss, deltas, of_infinite_loss=np.inf)


def delta_spent(
    loss: ArrayLike, epsilon: ArrayLike, accountant: str = "exact"
) -> Array:
    """Return the smallest δ for which a total loss is (ε, δ)-private.

    The inverse of `budget` in δ: what the accountant can prove. A loss of zero has
    δ = 0, and an infinite loss δ = 1, which promises nothing. By `paper`, δ is 1 for
    all losses of at least ε.

    Args:
        loss: Σx of all rounds of a device, at least 0, of any shape.
        epsilon: ε, above 0; broadcast with the loss.
        accountant: `exact` or `paper`.

    Returns:
        δ, in the common shape.

    Raises:
        InputError: for a negative loss, ε out of range, or an unknown accountant.
    """
    epsilons = positive("epsilon", epsilon)
    view = accountant_named(accountant).delta
    return _spent(view, loss, epsilons, of_infinite_loss=1.0)


def _spent(
    view: Callable[[Array, Array], Array],
    loss: ArrayLike,
    parameter: Array,
    of_infinite_loss: float,
) -> Array:
    """Return an accountant's view of losses, which knows neither zero nor infinity."""
    losses = np.asarray(loss, dtype=float)
    total, parameters = np.broadcast_arrays(losses, parameter)
    if not np.all(total >= 0):
        raise InputError("loss", loss, "a number of at least 0")
    is_regular = (total > 0) & np.isfinite(total)
    regular = view(np.where(is_regular, total, 1.0), parameters)
    at_limits = np.where(total > 0, of_infinite_loss, 0.0)
    return np.where(is_regular, regular, at_limits)


def epsilon_by_dp_accounting(losses: Array, delta: float) -> dict[str, float | None]:
    """Return ε of rounds as Google's dp-accounting computes it, for comparison.

    Rényi divergences are added up round by round. The privacy loss distribution is
    that of one Gaussian mechanism with the sum of the losses, which is what Gaussian
    rounds compose to; it rounds ε up by a few of its intervals. No decision of this
    package rests on these numbers.

    Args:
        losses: of the rounds of one device, each above 0, [rounds]; empty for none.
        delta: δ, above 0 and below 1.

    Returns:
        ε by privacy loss distributions (`pld`) and by Rényi divergences (`rdp`). None
        where dp-accounting is not installed, or has no finite answer.
    """
    total = float(losses.sum())
    if total == 0:
        return {"pld": 0.0, "rdp": 0.0}
    try:
        by_distribution = _epsilon_by_loss_distribution(total, delta)
        by_renyi = _epsilon_by_renyi(losses, delta)
    except ImportError:
        return {"pld": None, "rdp": None}
    return {"pld": _finite_or_none(by_distribution), "rdp": _finite_or_none(by_renyi)}


def _epsilon_by_loss_distribution(loss: float, delta: float) -> float:
    """Return ε of a Gaussian mechanism; infinite where the table would be too long."""
    from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism

    resolution = float(epsilon_spent(loss, delta)) / 5000
    interval = min(1e-2, max(1e-4, resolution))
    if loss / interval >= MAX_DISTRIBUTION_POINTS:
        return math.inf
    distribution = from_gaussian_mechanism(
        1 / math.sqrt(2 * loss),
        sensitivity=1.0,
        value_discretization_interval=interval,
    )
    return float(distribution.get_epsilon_for_delta(delta))


def _epsilon_by_renyi(losses: Array, delta: float) -> float:
    """Return ε of successive Gaussian mechanisms."""
    from dp_accounting import dp_event, rdp

    accountant = rdp.RdpAccountant()
    values, counts = np.unique(losses, return_counts=True)
    for loss, count in zip(values, counts, strict=True):
        event = dp_event.GaussianDpEvent(1 / math.sqrt(2 * loss))
        accountant.compose(event, int(count))
    return float(accountant.get_epsilon(delta))


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
