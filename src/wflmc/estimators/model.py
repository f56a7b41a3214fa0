"""What a fit leaves behind: draws, scales and names. ε covers all of it; records and keys are not in it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from wflmc.errors import InputError
from wflmc.evaluation.scores import mean_probabilities
from wflmc.posterior.inputs import with_intercept
from wflmc.scaling import Array, Scaling
from wflmc.storage import replacing


@dataclass(frozen=True, eq=False)
class Model:
    """A fitted model, for rows of features as they were given."""

    theta: NDArray[Any]
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
        numbers = {name: getattr(self, name) for name in ("theta", "classes", "center", "spread", "noise_scale")}
        with replacing(path) as file:
            np.savez(file, **numbers, **{f"scaling_{name}": part for name, part in self.scaling._asdict().items()})

    @classmethod
    def load(cls, path: Path) -> "Model":
        """Read it again."""
        try:
            with np.load(path, allow_pickle=False) as file:
                scaling = Scaling(*(file[f"scaling_{name}"] for name in Scaling._fields))
                numbers = (float(file[name]) for name in ("center", "spread", "noise_scale"))
                return cls(file["theta"], scaling, int(file["classes"]), *numbers)
        except (OSError, ValueError, KeyError):
            raise InputError("DIR", str(path), "a model as `wflmc fit` wrote it") from None
