"""What is kept of chains: every draw, or averages over draws where these would be too many."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.posterior import Posterior, SoftmaxPosterior
from wflmc.support.errors import InputError, without_data

WATCHED = 20
"""Rows whose logits are kept of every draw, for R-hat."""


@without_data
class Predictions(NamedTuple):
    """Averages over the kept draws of every chain."""

    probability: NDArray[np.float32]
    """p(class|u) at the given features, [chain, n, C]."""
    mean: NDArray[np.float32]
    """Of the parameters, [chain, m]."""
    variance: NDArray[np.float32]
    """Of the parameters, [chain, m]."""
    logits: NDArray[np.float32]
    """Of every draw at the first few features, less their mean over the classes, [chain, draw, rows · C]."""


class Draws(NamedTuple):
    """Every draw, in a file or in memory."""

    room: Any
    """[draw, chain, m]."""

    def add(self, first: int, own: slice, draws: NDArray[Any]) -> None:
        """Keep draws[draw, chain, m] of some chains, of which `first` came before."""
        self.room[first : first + len(draws), own] = draws

    @property
    def numbers(self) -> NDArray[np.float64]:
        """What a checkpoint has to hold beside the draws, [chain, numbers]: nothing."""
        return np.zeros((self.room.shape[1], 0))

    def flush(self) -> None:
        """Write the draws to their file."""
        self.room.flush()


@without_data
class Averages(NamedTuple):
    """Averages of predictions and parameters, brought up to date draw by draw; methods as of `Draws`."""

    posterior: SoftmaxPosterior
    features: NDArray[Any]
    numbers: NDArray[np.float64]
    """All that is averaged, one after the other, [chain, numbers]."""
    draws: int
    """That are kept of a chain in all."""

    def add(self, first: int, own: slice, draws: NDArray[Any]) -> None:
        """Average over draws[draw, chain, m] of some chains, of which `first` came before."""
        if not len(draws):
            return
        probability, mean, squares, logits = (part[own] for part in self._parts)
        total, centre = first + len(draws), draws.mean(0, dtype=float)
        seen = self.posterior.predict(np.swapaxes(draws, 0, 1), self.features)
        probability += (seen.reshape(probability.shape) - probability) * (len(draws) / total)
        away = centre - mean  # of Chan, Golub and LeVeque
        squares += ((draws - centre.astype(draws.dtype)) ** 2).sum(0) + away**2 * first * len(draws) / total
        mean += away * len(draws) / total
        rows = self.posterior.design_matrix(self.features[:WATCHED]).astype(draws.dtype)
        each = draws.reshape(*draws.shape[:2], -1, rows.shape[1]) @ rows.T
        watched = (each - each.mean(2, keepdims=True)).reshape(*draws.shape[:2], -1)
        logits.reshape(len(logits), self.draws, -1)[:, first:total] = watched.swapaxes(0, 1)

    def flush(self) -> None:
        """Do nothing: a checkpoint holds `numbers`."""

    @property
    def result(self) -> Predictions:
        """The averages of all chains."""
        probability, mean, squares, logits = (part.astype(np.float32) for part in self._parts)
        variance = squares / np.float32(max(1, self.draws - 1))
        by_row = probability.reshape(len(mean), len(self.features), -1)
        return Predictions(by_row, mean, variance, logits.reshape(len(mean), self.draws, -1))

    @property
    def _parts(self) -> list[NDArray[np.float64]]:
        return np.split(self.numbers, np.cumsum(_widths(self.posterior, self.features, self.draws))[:-1], axis=1)


def averages(posterior: Posterior, features: ArrayLike, chains: int, draws: int, numbers: Any = None) -> Averages:
    """Return averages of nothing yet, or those that a checkpoint held.

    Args:
        features: u[n, d], at which predictions are kept.
        numbers: of the checkpoint, [chain, numbers].
    """
    if not isinstance(posterior, SoftmaxPosterior):
        raise InputError("predictions", type(posterior).__name__, "left out for a model that predicts no classes")
    rows = np.asarray(features)
    posterior.design_matrix(rows)
    width = sum(_widths(posterior, rows, draws))
    return Averages(posterior, rows, np.zeros((chains, width)) if numbers is None else numbers, draws)


def _widths(posterior: SoftmaxPosterior, features: NDArray[Any], draws: int) -> tuple[int, ...]:
    classes = posterior.classes
    return len(features) * classes, posterior.dim, posterior.dim, draws * min(WATCHED, len(features)) * classes
