"""Convergence diagnostics through ArviZ: rank-normalised split R-hat, bulk and tail ESS, and a burn-in from them."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.errors import InputError

RHAT_LIMIT = 1.01


class Diagnostics(NamedTuple):
    """Over all parameters: the largest R-hat, the smallest bulk and tail effective sample size."""

    rhat_max: float | None
    ess_min: float | None
    ess_tail_min: float | None


def _arviz() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces ArviZ 1 on import
        import arviz
    return arviz


def _dataset(theta: NDArray[Any]) -> Any:
    import xarray as xr

    return xr.Dataset({"theta": (("chain", "draw", "parameter"), np.asarray(theta, dtype=float))})


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def diagnose(theta: NDArray[Any]) -> Diagnostics:
    """Diagnostics of theta[chain, draw, m]; None where ArviZ is missing or fewer than 4 draws were kept."""
    if importlib.util.find_spec("arviz") is None or theta.shape[1] < 4:
        return Diagnostics(None, None, None)
    arviz, data = _arviz(), _dataset(theta)
    return Diagnostics(
        _number(arviz.rhat(data)["theta"].values.max()),
        _number(arviz.ess(data, method="bulk")["theta"].values.min()),
        _number(arviz.ess(data, method="tail")["theta"].values.min()),
    )


def choose_burn_in(pilot: Callable[[int], NDArray[Any]], limit: int) -> int:
    """The smallest S_b after which R-hat over the chains stays below 1.01, as the paper proposes.

    A pilot of T rounds is drawn, T doubling from 100 to `limit`. R(s) is the R-hat of rounds s+1..T. As soon
    as the second half has R(T/2) < 1.01 the answer is the smallest s with R(s') < 1.01 for all s' in [s, T/2].

    Args:
        pilot: gives theta[chain, T, m] of the first T rounds.
        limit: the longest pilot.
    """
    if importlib.util.find_spec("arviz") is None:
        raise InputError("burn_in", "auto", "a number unless ArviZ is installed, which computes R-hat")
    arviz = _arviz()
    rounds = min(100, limit)
    while True:
        theta = pilot(rounds)

        def settled(start: int, theta: NDArray[Any] = theta) -> bool:
            return bool(arviz.rhat(_dataset(theta[:, start:]))["theta"].values.max() < RHAT_LIMIT)

        half = rounds // 2
        if settled(half):
            return _smallest(settled, half)
        if rounds >= limit:
            raise InputError(
                "max_burn_in",
                limit,
                f"larger: R-hat over the chains is not yet below {RHAT_LIMIT} after {half} rounds (or give burn_in)",
            )
        rounds = min(2 * rounds, limit)


def _smallest(settled: Callable[[int], bool], known: int) -> int:
    """Walk down from a settled start, first in strides of 1 % and then one by one, to the last settled one."""
    for stride in (max(1, known // 50), 1):
        while known >= stride and settled(known - stride):
            known -= stride
    return known
