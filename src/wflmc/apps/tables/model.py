"""What a fit leaves behind: draws, scales and names.

ε covers all of it; records and keys are not in it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from wflmc.apps.tables.scaling import Array, Scaling
from wflmc.evaluation.scores import mean_probabilities
from wflmc.posterior.inputs import with_intercept
from wflmc.support.errors import InputError
from wflmc.support.storage import Arrays, read_arrays, replacing


class PredictedTargets(NamedTuple):
    """Predictions of new targets.

    Args:
        mean: [n].
        std: standard deviation of a new target about it, [n].
    """

    mean: Array
    std: Array


class Interval(NamedTuple):
    """Intervals of new targets.

    Args:
        lower: [n].
        upper: [n].
    """

    lower: Array
    upper: Array


@dataclass(frozen=True, eq=False)
class FittedModel:
    """A fitted model, for rows of features in their own units.

    Args:
        theta: parameters of the kept rounds, for scaled features and a constant,
            [draw, m]; for C classes m = C (d + 1), class after class.
        scaling: of the features.
        classes: C; 0 where targets are numbers.
        center: targets were fitted as (y − center) / spread.
        spread: see `center`.
        noise_scale: standard deviation of a target about its mean, in its own unit,
            where that is public; else 0.
        residual_scale: standard deviation of targets about the mean over draws, in
            their own unit, where it was paid for; else 0.
    """

    theta: NDArray[np.floating]
    scaling: Scaling
    classes: int = 0
    center: float = 0.0
    spread: float = 1.0
    noise_scale: float = 0.0
    residual_scale: float = 0.0

    def rows(self, X: ArrayLike) -> Array:
        """Return rows as the parameters take them.

        Args:
            X: features in their own units, [n, d].

        Returns:
            The features scaled, and cut to the limit of scaled values, with a constant
            of 1 behind them, [n, d + 1].
        """
        return with_intercept(self.scaling(np.asarray(X, dtype=float)))

    def probabilities(self, X: ArrayLike) -> Array:
        """Predict the probability of every class.

        Args:
            X: features in their own units, [n, d].

        Returns:
            Softmax probabilities averaged over draws, [n, C], in the order of the
            classes; each row sums to 1.
        """
        return mean_probabilities(self.theta, self.rows(X), self.classes)

    def mean_and_spread(self, X: ArrayLike) -> PredictedTargets:
        """Predict targets of a regression.

        The variance of a new target is that of the noise, where it is public, plus that
        of the mean over draws. Residuals that were paid for have the error of the mean
        in them already: where draws disagree by less, their variance is taken.

        Args:
            X: features in their own units, [n, d].

        Returns:
            Means and standard deviations, in the unit of the target.
        """
        means_of_draws = self.rows(X) @ self.theta.T.astype(float)
        mean = self.center + self.spread * means_of_draws.mean(1)
        disagreement = self.spread**2 * means_of_draws.var(1)
        variance = self.noise_scale**2 + disagreement
        of_residuals = self.residual_scale**2
        return PredictedTargets(mean, np.sqrt(np.maximum(variance, of_residuals)))

    def interval(self, X: ArrayLike, level: float = 0.9) -> Interval:
        """Return intervals that new targets lie in with a probability.

        They are those of a normal law with the predicted mean and standard deviation,
        symmetric about the mean.

        Args:
            X: features in their own units, [n, d].
            level: the probability, above 0 and below 1.

        Returns:
            The ends of an interval for each row.

        Raises:
            InputError: the level is out of range.
        """
        if not 0 < level < 1:
            raise InputError("level", level, "above 0 and below 1")
        predicted = self.mean_and_spread(X)
        half_width = ndtri((1 + level) / 2) * predicted.std
        return Interval(predicted.mean - half_width, predicted.mean + half_width)

    def save(self, path: Path) -> None:
        """Write the model as an .npz file, whole or not at all.

        Args:
            path: of the file, which is replaced if it exists.

        Raises:
            OSError: the file cannot be written.
        """
        with replacing(path) as file:
            np.savez(
                file,
                theta=self.theta,
                classes=self.classes,
                center=self.center,
                spread=self.spread,
                noise_scale=self.noise_scale,
                residual_scale=self.residual_scale,
                scaling_center=self.scaling.center,
                scaling_scale=self.scaling.scale,
            )

    @classmethod
    def load(cls, path: Path) -> "FittedModel":
        """Read a model that `save` has written.

        Nothing in the file is unpickled, and shapes and values are checked, so that it
        may come from anywhere.

        Args:
            path: of the file.

        Returns:
            The model.

        Raises:
            InputError: if the file is damaged, or its arrays do not fit each other.
        """
        requirement = "a model as `wflmc fit` wrote it"
        arrays = read_arrays(path, key="DIR", requirement=requirement)
        try:
            model = cls._from_arrays(arrays)
        except (ValueError, KeyError, TypeError, OverflowError):
            raise InputError("DIR", str(path), requirement) from None
        if not model._is_consistent():
            raise InputError("DIR", str(path), requirement)
        return model

    @classmethod
    def _from_arrays(cls, arrays: Arrays) -> "FittedModel":
        """Return the model of a file's arrays, which may be of any shape."""
        scaling = Scaling(
            center=arrays["scaling_center"].astype(float),
            scale=arrays["scaling_scale"].astype(float),
        )
        return cls(
            theta=arrays["theta"],
            scaling=scaling,
            classes=int(arrays["classes"]),
            center=float(arrays["center"]),
            spread=float(arrays["spread"]),
            noise_scale=float(arrays["noise_scale"]),
            residual_scale=float(arrays["residual_scale"]),
        )

    def _is_consistent(self) -> bool:
        """Return whether shapes fit each other and all numbers are finite."""
        parameters = (self.features + 1) * max(1, self.classes)
        is_matrix = self.theta.ndim == 2 and self.theta.dtype.kind == "f"
        if not is_matrix or len(self.theta) == 0 or self.theta.shape[1] != parameters:
            return False
        if any(part.shape != (self.features,) for part in self.scaling):
            return False
        target = [self.center, self.spread, self.noise_scale, self.residual_scale]
        numbers = (self.theta, *self.scaling, np.array(target))
        return all(bool(np.isfinite(values).all()) for values in numbers)

    @property
    def features(self) -> int:
        """How many features a row has in its own units, without the constant."""
        return int(np.size(self.scaling.center))
