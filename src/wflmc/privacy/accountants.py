r"""Privacy budgets, the loss a plan spends, and the (ε, δ) that a loss means.

One round in which the server receives a device's gradient at amplitude α in Gaussian noise of variance N0 costs that
device the *loss* x = 2(αs)²/N0, where neighbouring data sets change the gradient by at most 2s: s = ℓ where gradients
clipped to a norm of ℓ are replaced by any other. Losses of successive rounds add up, and a device is (ε, δ)-private
as long as their sum stays within a budget R(ε, δ). Two accountants give R:

- `exact`: Gaussian mechanisms compose to μ-GDP with μ² = 2 Σx, whose (ε, δ) is known in closed form
  (Balle & Wang 2018), so nothing is lost;
- `paper`: the sufficient condition of Liu & Simeone (Proposition 2): valid, and smaller: 22 % at
  (ε, δ) = (8, 0.01), half at (1, 0.01).

>>> round(float(budget(8, 0.01)), 6), round(float(budget(8, 0.01, accountant="paper")), 6)
(2.998315, 2.341635)
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from wflmc.support.errors import InputError, unknown

Array = NDArray[np.float64]

_LOG_2 = float(np.log(2.0))
_SQRT_2 = float(np.sqrt(2.0))


class Accountant(NamedTuple):
    """Three views of one relation between a loss Σx, ε and δ."""

    budget: Callable[[Array, Array], Array]
    """(ε, δ) → the largest loss."""
    epsilon: Callable[[Array, Array], Array]
    """(loss, δ) → the smallest ε."""
    delta: Callable[[Array, Array], Array]
    """(loss, ε) → the smallest δ."""


def _bisect(
    above: Callable[[Array], NDArray[np.bool_]], low: Array, high: Array
) -> tuple[Array, Array]:
    """Shrink the brackets [low, high] of increasing conditions `above` to neighbouring floats."""
    for _ in range(90):
        middle = 0.5 * (low + high)
        over = above(middle)
        low, high = np.where(over, low, middle), np.where(over, middle, high)
    return low, high


def _log_delta(epsilon: Array, mu: Array) -> Array:
    """Return log δ(ε) of a μ-GDP mechanism: log[Φ(a) − e^ε Φ(b)], a = −ε/μ + μ/2, b = −ε/μ − μ/2.

    e^ε φ(b) = φ(a), so for a < 0 the two terms share the factor φ(a) and their difference is one of
    scaled error functions: no overflow, and no cancellation worth mentioning down to μ ~ 1e-9.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore", divide="ignore"):
        a, b = -epsilon / mu + mu / 2, -epsilon / mu - mu / 2
        u, v, gap = -a / _SQRT_2, -b / _SQRT_2, mu / _SQRT_2
        middle = 0.5 * (u + v)
        # −erfcx' at the middle; far out its two terms cancel, and the asymptotic series takes over.
        near = 2 / np.sqrt(np.pi) - 2 * middle * special.erfcx(middle)
        far = (1 - 1.5 / middle**2) / (np.sqrt(np.pi) * middle**2)
        slope = np.where(middle > 60, far, near)
        difference = np.where(
            gap < 1e-5, gap * slope, special.erfcx(u) - special.erfcx(v)
        )
        tail = -_LOG_2 - a**2 / 2 + np.log(difference)
        body = special.log_ndtr(a)
        body = body + np.log1p(
            -np.exp(np.minimum(epsilon + special.log_ndtr(b) - body, 0.0))
        )
    return np.where(a < 0, tail, body)


def _exact_budget(epsilon: Array, delta: Array) -> Array:
    target = np.log(delta)
    brackets = (np.full(epsilon.shape, np.log(value)) for value in (1e-40, 1e12))
    low, _ = _bisect(
        lambda log_mu: _log_delta(epsilon, np.exp(log_mu)) > target, *brackets
    )
    return 0.5 * np.exp(2 * low)


def _exact_epsilon(loss: Array, delta: Array) -> Array:
    mu = np.sqrt(2 * loss)
    target = np.log(delta)
    # μ²/2 + μ √(2 log 1/δ) is always enough: the tail bound on Φ(a) alone.
    enough = np.log(mu**2 / 2 + mu * np.sqrt(-2 * target) + 1e-300)
    least = np.full(loss.shape, np.log(1e-300))
    _, high = _bisect(
        lambda log_epsilon: _log_delta(np.exp(log_epsilon), mu) <= target, least, enough
    )
    return np.where(special.erf(mu / (2 * _SQRT_2)) <= delta, 0.0, np.exp(high))


def _exact_delta(loss: Array, epsilon: Array) -> Array:
    return np.exp(_log_delta(epsilon, np.sqrt(2 * loss)))


def _paper_constant(delta: Array) -> Array:
    """Return C⁻¹(1/δ) with C(x) = √π x exp(x²): 2x² is the Wright omega function of log 2 − 2 log δ − log π."""
    return np.sqrt(special.wrightomega(_LOG_2 - 2 * np.log(delta) - np.log(np.pi)) / 2)


def _paper_budget(epsilon: Array, delta: Array) -> Array:
    c = _paper_constant(delta)
    return (epsilon / (np.sqrt(epsilon + c**2) + c)) ** 2


def _paper_epsilon(loss: Array, delta: Array) -> Array:
    return loss + 2 * _paper_constant(delta) * np.sqrt(loss)


def _paper_delta(loss: Array, epsilon: Array) -> Array:
    c = np.maximum(epsilon - loss, 0.0) / (2 * np.sqrt(loss))
    with np.errstate(divide="ignore"):
        return np.minimum(1.0, np.exp(-(0.5 * np.log(np.pi) + np.log(c) + c**2)))


ACCOUNTANTS: dict[str, Accountant] = {
    "exact": Accountant(_exact_budget, _exact_epsilon, _exact_delta),
    "paper": Accountant(_paper_budget, _paper_epsilon, _paper_delta),
}


def accountant_named(name: str) -> Accountant:
    """Return an accountant by its name."""
    if name not in ACCOUNTANTS:
        raise unknown("accountant", name, ACCOUNTANTS, section="privacy")
    return ACCOUNTANTS[name]


def positive(
    name: str, values: ArrayLike, below: float = np.inf, above: float = 0.0
) -> Array:
    """Return numbers as an array; refuse any that are not between two limits."""
    array = np.asarray(values, dtype=float)
    if not np.all((array > above) & (array < below)):
        end = f"a number above {above:g} and below {below:g}"
        raise InputError(
            name, values, f"a finite number above {above:g}" if below == np.inf else end
        )
    return array


def budget(epsilon: ArrayLike, delta: ArrayLike, accountant: str = "exact") -> Array:
    """Return the largest total loss Σ 2(αℓ)²/N0 that is (ε, δ)-private. Broadcasts over its arguments."""
    wanted, chance = np.broadcast_arrays(
        positive("epsilon", epsilon), positive("delta", delta, 1)
    )
    return accountant_named(accountant).budget(wanted, chance)


def epsilon_spent(
    loss: ArrayLike, delta: ArrayLike, accountant: str = "exact"
) -> Array:
    """Return the smallest ε for which a total loss is (ε, δ)-private; infinite for an infinite loss."""
    return _spent(
        accountant_named(accountant).epsilon, loss, positive("delta", delta, 1), np.inf
    )


def delta_spent(
    loss: ArrayLike, epsilon: ArrayLike, accountant: str = "exact"
) -> Array:
    """Return the smallest δ for which a total loss is (ε, δ)-private."""
    return _spent(
        accountant_named(accountant).delta, loss, positive("epsilon", epsilon), 1.0
    )


def _spent(
    view: Callable[[Array, Array], Array],
    loss: ArrayLike,
    other: Array,
    unbounded: float,
) -> Array:
    """Return an accountant's view of losses, 0 for no loss and `unbounded` for an infinite one."""
    total, given = np.broadcast_arrays(np.asarray(loss, dtype=float), other)
    if not np.all(total >= 0):
        raise InputError("loss", loss, "a number of at least 0")
    inside = (total > 0) & np.isfinite(total)
    return np.where(
        inside,
        view(np.where(inside, total, 1.0), given),
        np.where(total > 0, unbounded, 0.0),
    )


def epsilon_by_dp_accounting(losses: Array, delta: float) -> dict[str, float | None]:
    """Return ε of rounds with these losses, by privacy loss distributions (`pld`) and by Rényi divergences (`rdp`).

    Rényi divergences are added up round by round. The loss distribution is that of one Gaussian mechanism with the
    sum of the losses, which is what Gaussian rounds compose to. None where dp-accounting is not installed, or where it
    has no finite answer.
    """
    total = float(losses.sum())
    if total == 0:
        return {"pld": 0.0, "rdp": 0.0}
    try:
        from dp_accounting import dp_event, rdp
        from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
    except ImportError:
        return {"pld": None, "rdp": None}
    interval, pld = (
        min(1e-2, max(1e-4, float(epsilon_spent(total, delta)) / 5000)),
        math.inf,
    )
    if total / interval < 1e7:
        law = from_gaussian_mechanism(
            1 / math.sqrt(2 * total),
            sensitivity=1.0,
            value_discretization_interval=interval,
        )
        pld = float(law.get_epsilon_for_delta(delta))
    accountant = rdp.RdpAccountant()
    values, counts = np.unique(losses, return_counts=True)
    for loss, count in zip(values, counts, strict=True):
        accountant.compose(
            dp_event.GaussianDpEvent(1 / math.sqrt(2 * loss)), int(count)
        )
    found = {"pld": pld, "rdp": float(accountant.get_epsilon(delta))}
    return {
        name: value if math.isfinite(value) else None for name, value in found.items()
    }
