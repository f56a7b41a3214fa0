"""What is recorded of chains: every draw, or averages over draws where these would be
too many."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.posterior import Posterior, SoftmaxPosterior
from wflmc.sampling.checkpoint import flush
from wflmc.support.errors import InputError, without_data

Floats = NDArray[np.floating]

WATCHED_ROWS = 20
"""Rows of the features whose logits are recorded of every draw, for R-hat."""


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
    """Of every draw at the first few features, less their mean over the classes,
    [chain, draw, rows · C]."""


class Recorder(Protocol):
    """What is recorded of the kept draws of all chains."""

    def add(self, first_draw: int, chains: slice, draws: Floats) -> None:
        """Record successive draws of some chains.

        Args:
            first_draw: how many draws of these chains were recorded before.
            chains: which chains.
            draws: parameters, [draw, chain, m].
        """

    def flush(self) -> None:
        """Write to the disk what goes to a file."""

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """What a checkpoint has to hold, by name."""

    @property
    def theta(self) -> NDArray[np.float32]:
        """The draws of the trace, [chain, draw, m]."""

    @property
    def predictions(self) -> Predictions | None:
        """Averages over the draws, where these were asked for."""


@dataclass(frozen=True, eq=False)
class DrawRecorder:
    """Records every draw, in a file or in memory."""

    draws: NDArray[np.float32]
    """[draw, chain, m]."""

    def add(self, first_draw: int, chains: slice, draws: Floats) -> None:
        """Record successive draws of some chains."""
        self.draws[first_draw : first_draw + len(draws), chains] = draws

    def flush(self) -> None:
        """Write the draws to their file."""
        flush(self.draws)

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """Nothing: draws are in a file of their own."""
        return {}

    @property
    def theta(self) -> NDArray[np.float32]:
        """All draws, [chain, draw, m]."""
        return self.draws.swapaxes(0, 1)

    @property
    def predictions(self) -> Predictions | None:
        """None: there are draws instead."""
        return None


@without_data
@dataclass(frozen=True, eq=False)
class AverageRecorder:
    """Records averages of predictions and parameters, updated draw by draw."""

    posterior: SoftmaxPosterior
    features: Floats
    """u[n, d], at which predictions are averaged."""
    probability: NDArray[np.float64]
    """Mean of p(class|u), [chain, n, C]."""
    mean: NDArray[np.float64]
    """Of the parameters, [chain, m]."""
    squared_deviation: NDArray[np.float64]
    """Σ (θ − mean)², [chain, m]."""
    logits: NDArray[np.float64]
    """Of every draw at the watched rows, [chain, draw, rows · C]."""

    def add(self, first_draw: int, chains: slice, draws: Floats) -> None:
        """Average over successive draws of some chains."""
        if not len(draws):
            return
        self._add_moments(first_draw, chains, draws)
        self._add_logits(first_draw, chains, draws)
        probability = self.probability[chains]
        predicted = self.posterior.predict(np.swapaxes(draws, 0, 1), self.features)
        difference = predicted.reshape(probability.shape) - probability
        probability += difference * (len(draws) / (first_draw + len(draws)))

    def _add_moments(self, first_draw: int, chains: slice, draws: Floats) -> None:
        """Update mean and squared deviation (Chan, Golub and LeVeque 1983)."""
        count = len(draws)
        total = first_draw + count
        mean = self.mean[chains]
        squared_deviation = self.squared_deviation[chains]
        draws_mean = draws.mean(0, dtype=float)
        within = ((draws - draws_mean.astype(draws.dtype)) ** 2).sum(0)
        difference = draws_mean - mean
        squared_deviation += within + difference**2 * first_draw * count / total
        mean += difference * count / total

    def _add_logits(self, first_draw: int, chains: slice, draws: Floats) -> None:
        """Record logits at the watched rows, less their mean over the classes."""
        watched = self.features[:WATCHED_ROWS]
        rows = self.posterior.design_matrix(watched).astype(draws.dtype)
        by_class = draws.reshape(*draws.shape[:2], -1, rows.shape[1])
        logits = by_class @ rows.T
        centred = logits - logits.mean(2, keepdims=True)
        flat = centred.reshape(*draws.shape[:2], -1)
        last_draw = first_draw + len(draws)
        self.logits[chains, first_draw:last_draw] = flat.swapaxes(0, 1)

    def flush(self) -> None:
        """Do nothing: a checkpoint holds the averages."""

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """The averages by name."""
        return {
            "probability": self.probability,
            "mean": self.mean,
            "squared_deviation": self.squared_deviation,
            "logits": self.logits,
        }

    @property
    def theta(self) -> NDArray[np.float32]:
        """The mean in place of draws, [chain, 1, m]."""
        return self.mean.astype(np.float32)[:, None]

    @property
    def predictions(self) -> Predictions:
        """The averages of all chains."""
        draws = self.logits.shape[1]
        squared_deviation = self.squared_deviation.astype(np.float32)
        return Predictions(
            probability=self.probability.astype(np.float32),
            mean=self.mean.astype(np.float32),
            variance=squared_deviation / np.float32(max(1, draws - 1)),
            logits=self.logits.astype(np.float32),
        )


def record_averages(
    posterior: Posterior,
    features: ArrayLike,
    *,
    chains: int,
    draws: int,
    saved: Mapping[str, NDArray[Any]],
) -> AverageRecorder:
    """Return a recorder of averages, over nothing yet or as a checkpoint held it.

    Args:
        posterior: a softmax regression, which predicts.
        features: u[n, d], at which predictions are averaged.
        chains: how many chains there are.
        draws: how many draws of each are kept in all.
        saved: averages of a checkpoint by name; empty where there is none.

    Raises:
        InputError: if the model predicts no classes.
    """
    if not isinstance(posterior, SoftmaxPosterior):
        allowed = "left out for a model that predicts no classes"
        raise InputError("predictions", type(posterior).__name__, allowed)
    rows = np.asarray(features)
    posterior.design_matrix(rows)
    watched = min(WATCHED_ROWS, len(rows))
    classes = posterior.classes
    shapes = {
        "probability": (chains, len(rows), classes),
        "mean": (chains, posterior.dim),
        "squared_deviation": (chains, posterior.dim),
        "logits": (chains, draws, watched * classes),
    }
    arrays = {name: np.zeros(shape) for name, shape in shapes.items()}
    for name, array in saved.items():
        arrays[name] = np.array(array, float)
    return AverageRecorder(posterior, rows, **arrays)
