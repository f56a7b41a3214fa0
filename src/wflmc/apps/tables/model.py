"""What a fit leaves behind: draws, scales and names. ε covers all of it; records and keys are not in it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from wflmc.apps.tables.scaling import Array, Scaling
from wflmc.evaluation.scores import mean_probabilities
from wflmc.posterior.inputs import with_intercept
from wflmc.support.errors import InputError
from wflmc.support.storage import read_arrays, replacing


@dataclass(frozen=True, eq=False)
class FittedModel:
    """A fitted model, for rows of features as they were given."""

    theta: NDArray[np.floating]
    """Parameters of the kept rounds for scaled features and a constant, [draw, m]."""
    scaling: Scaling
    classes: int = 0
    """0 where targets are numbers."""
    center: float = 0.0
    spread: float = 1.0
    """Targets were fitted as (y − center) / spread."""
    noise_scale: float = 0.0
    """Standard deviation of a target about its mean."""

    def rows(self, X: ArrayLike) -> Array:
        """Return features[n, d] scaled, with the constant."""
        return with_intercept(self.scaling(np.asarray(X, dtype=float)))

    def probabilities(self, X: ArrayLike) -> Array:
        """Return the probability of every class, [n, C]."""
        return mean_probabilities(self.theta, self.rows(X), self.classes)

    def mean_and_spread(self, X: ArrayLike) -> tuple[Array, Array]:
        """Return the mean and the standard deviation of a new target, [n] each."""
        each = self.rows(X) @ self.theta.T.astype(float)
        variance = self.noise_scale**2 + self.spread**2 * each.var(1)
        return self.center + self.spread * each.mean(1), np.sqrt(variance)

    def interval(self, X: ArrayLike, level: float = 0.9) -> tuple[Array, Array]:
        """Return the ends of intervals that a new target lies in with probability `level`, [n] each."""
        if not 0 < level < 1:
            raise InputError("level", level, "above 0 and below 1")
        mean, spread = self.mean_and_spread(X)
        reach = ndtri((1 + level) / 2) * spread
        return mean - reach, mean + reach

    def save(self, path: Path) -> None:
        """Write it as .npz."""
        numbers = {
            name: getattr(self, name)
            for name in ("theta", "classes", "center", "spread", "noise_scale")
        }
        with replacing(path) as file:
            np.savez(
                file,
                **numbers,
                **{
                    f"scaling_{name}": part
                    for name, part in self.scaling._asdict().items()
                },
            )

    @classmethod
    def load(cls, path: Path) -> "FittedModel":
        """Read it again.

        Raises:
            InputError: if the file is damaged, or its arrays do not fit each other.
        """
        allowed = "a model as `wflmc fit` wrote it"
        arrays = read_arrays(path, key="DIR", allowed=allowed)
        try:
            scaling = Scaling(
                *(arrays[f"scaling_{name}"].astype(float) for name in Scaling._fields)
            )
            model = cls(
                theta=arrays["theta"],
                scaling=scaling,
                classes=int(arrays["classes"]),
                center=float(arrays["center"]),
                spread=float(arrays["spread"]),
                noise_scale=float(arrays["noise_scale"]),
            )
        except (ValueError, KeyError, TypeError, OverflowError):
            raise InputError("DIR", str(path), allowed) from None
        parameters = (model.features + 1) * max(1, model.classes)
        is_consistent = (
            model.theta.ndim == 2
            and model.theta.dtype.kind == "f"
            and len(model.theta) > 0
            and model.theta.shape[1] == parameters
            and all(
                part.shape == (model.features,) and np.isfinite(part).all()
                for part in scaling
            )
            and bool(np.isfinite(model.theta).all())
            and bool(np.isfinite([model.center, model.spread, model.noise_scale]).all())
        )
        if not is_consistent:
            raise InputError("DIR", str(path), allowed)
        return model

    @property
    def features(self) -> int:
        """How many features a row has, without the constant."""
        return int(np.size(self.scaling.center))
