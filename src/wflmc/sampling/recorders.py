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
    """Of every draw at the first `WATCHED_ROWS` features, less their mean over the
    classes, [chain, draw, rows · C]."""


class Recorder(Protocol):
    """What is recorded of the kept draws of all chains."""

    def add(self, first_draw: int, chains: slice, draws: Floats) -> None:
        """Record successive draws of a chunk of chains.

        Blocks arrive in order, each exactly once; a block may hold no draw, as those
        of burn-in do.

        Args:
            first_draw: how many draws of these chains were recorded before.
            chains: which chains, a slice of all.
            draws: parameters as users see them, [draw, chain, m].
        """

    def flush(self) -> None:
        """Write to the disk what goes to a file.

        It is called before progress is saved, as a checkpoint must not count draws that
        a crash could take away. Recorders without a file do nothing.
        """

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """Return what a checkpoint has to hold, by name.

        Values are arrays of all chains as they are at the moment, not copies. They are
        passed back as `saved` when the run continues; empty where a file of its own
        holds everything.
        """

    @property
    def theta(self) -> NDArray[np.float32]:
        """Return the draws of the trace, [chain, draw, m], burn-in included.

        Where only averages are recorded, it is the mean of every chain as its only
        draw, [chain, 1, m]. Chains that have not run yet have undefined values, or
        zeros in averages.
        """

    @property
    def predictions(self) -> Predictions | None:
        """Return averages over the draws, or None where draws are recorded.

        They are complete once all blocks of all chains were added; in between they are
        averages over the draws so far.
        """


@dataclass(frozen=True, eq=False)
class DrawRecorder:
    """Records every draw, in a file or in memory."""

    draws: NDArray[np.float32]
    """[draw, chain, m]."""

    def add(self, first_draw: int, chains: slice, draws: Floats) -> None:
        """Store successive draws of a chunk of chains.

        Args:
            first_draw: how many draws of these chains were stored before.
            chains: which chains, a slice of all.
            draws: parameters, [draw, chain, m].
        """
        self.draws[first_draw : first_draw + len(draws), chains] = draws

    def flush(self) -> None:
        """Write the draws to their file; those in memory stay there.

        Progress that is saved afterwards can count on all draws that were added.
        """
        flush(self.draws)

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """Return no arrays: draws are in a file of their own.

        A checkpoint maps that file from its folder, so that draws are not written a
        second time with every block.
        """
        return {}

    @property
    def theta(self) -> NDArray[np.float32]:
        """Return all draws, [chain, draw, m], burn-in included where it is kept.

        It is a view of what is stored by round, [draw, chain, m]; of a file no more is
        read than the caller looks at.
        """
        return self.draws.swapaxes(0, 1)

    @property
    def predictions(self) -> Predictions | None:
        """Return None: with all draws at hand, any average can be computed later."""
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
        """Include successive draws of a chunk of chains in the averages.

        Args:
            first_draw: how many draws of these chains were included before.
            chains: which chains, a slice of all.
            draws: parameters, [draw, chain, m]; nothing changes where there is none.
        """
        if not len(draws):
            return
        self._add_moments(first_draw, chains, draws)
        self._add_logits(first_draw, chains, draws)
        self._add_probability(first_draw, chains, draws)

    def _add_probability(self, first_draw: int, chains: slice, draws: Floats) -> None:
        """Update the mean prediction of every chain."""
        probability = self.probability[chains]
        by_chain = np.swapaxes(draws, 0, 1)
        predicted = self.posterior.predict(by_chain, self.features)
        difference = predicted.reshape(probability.shape) - probability
        total = first_draw + len(draws)
        probability += difference * (len(draws) / total)

    def _add_moments(self, first_draw: int, chains: slice, draws: Floats) -> None:
        """Update mean and squared deviation (Chan, Golub and LeVeque 1983)."""
        count = len(draws)
        total = first_draw + count
        mean = self.mean[chains]
        squared_deviation = self.squared_deviation[chains]
        draws_mean = draws.mean(0, dtype=float)
        deviations = draws - draws_mean.astype(draws.dtype)
        within = (deviations**2).sum(0)
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
        """Do nothing: averages have no file; a checkpoint holds them, see `arrays`."""

    @property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """Return the averages by name, in float64, as `record_averages` takes them.

        They are not rounded to float32, so that a run that continues from a checkpoint
        ends with the same averages as one that was never stopped.
        """
        return {
            "probability": self.probability,
            "mean": self.mean,
            "squared_deviation": self.squared_deviation,
            "logits": self.logits,
        }

    @property
    def theta(self) -> NDArray[np.float32]:
        """Return the mean of the parameters as the only draw, [chain, 1, m].

        It lets a trace without draws have the shape of one with draws; its spread is
        zero, and `predictions` has the variance.
        """
        return self.mean.astype(np.float32)[:, None]

    @property
    def predictions(self) -> Predictions:
        """Return the averages of all chains, rounded to float32.

        The variance is the unbiased one, Σ (θ − mean)² / (draws − 1); of a single draw
        it is 0.
        """
        draws = self.logits.shape[1]
        degrees_of_freedom = np.float32(max(1, draws - 1))
        probability = self.probability.astype(np.float32)
        mean = self.mean.astype(np.float32)
        squared_deviation = self.squared_deviation.astype(np.float32)
        variance = squared_deviation / degrees_of_freedom
        logits = self.logits.astype(np.float32)
        return Predictions(
            probability=probability,
            mean=mean,
            variance=variance,
            logits=logits,
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

    Averages are accumulated in float64. Logits of every draw are recorded at the first
    `WATCHED_ROWS` rows only.

    Args:
        posterior: a softmax regression, which predicts.
        features: u[n, d], at which predictions are averaged.
        chains: how many chains there are.
        draws: how many draws of each are kept in all.
        saved: averages of a checkpoint by name; empty where there is none.

    Returns:
        A recorder to which all blocks of draws are added.

    Raises:
        InputError: if the model predicts no classes, or the features do not fit it.
    """
    if not isinstance(posterior, SoftmaxPosterior):
        requirement = "left out for a model that predicts no classes"
        raise InputError("predictions", type(posterior).__name__, requirement)
    rows = np.asarray(features)
    posterior.design_matrix(rows)  # raises for features of another shape
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
