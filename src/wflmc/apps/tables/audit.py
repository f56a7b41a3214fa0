"""An attack on a whole fit: scaling, choosing and sampling together, from all that a fitted estimator shows."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from wflmc.apps.audit.error_rates import epsilon_by_counting, rate_upper
from wflmc.apps.tables.estimators import PrivateClassifier, PrivateRegressor
from wflmc.dynamics import Array

Table = tuple[ArrayLike, ArrayLike, ArrayLike]
"""X, y and devices of a fit."""
PrivateEstimator: TypeAlias = PrivateClassifier | PrivateRegressor
THRESHOLDS = 41


class FitAudit(NamedTuple):
    """What the attack proves, and what was promised."""

    epsilon_lower: float
    """A lower bound on ε, by counting alone."""
    epsilon: float
    delta: float
    adjacency: str
    trials: int
    confidence: float

    @property
    def consistent(self) -> bool:
        """Whether the attack proves no more than was promised."""
        return self.epsilon_lower <= self.epsilon


def audit_fit(
    make: Callable[[int], PrivateEstimator],
    tables: tuple[Table, Table],
    trials: int = 1000,
    confidence: float = 0.99,
) -> FitAudit:
    """Tell two neighbouring tables apart by estimators that were fitted to them.

    A linear rule is learned from one half of the trials, and its errors are counted on the other.

    Args:
        make: from the number of a trial to an estimator that is not yet fitted, with a seed of its own.
        tables: two that differ in one row, or one device, as the estimator's unit and adjacency say.
        trials: fits to either table.
    """
    shown = [
        np.array([_shown(make(trial).fit(*table)) for trial in range(trials)])
        for table in tables
    ]
    half, model = trials // 2, make(0)
    X, side = np.concatenate([each[:half] for each in shown]), np.repeat([0, 1], half)
    rule = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, side)
    scored = [np.asarray(rule.decision_function(each)) for each in shown]
    learned, told = [each[:half] for each in scored], [each[half:] for each in scored]

    def bound(scores: list[Array], threshold: float, risk: float) -> float:
        errors = [np.sum(scores[0] > threshold), np.sum(scores[1] <= threshold)]
        false_positive, false_negative = rate_upper(errors, len(scores[0]), risk)
        return epsilon_by_counting(false_positive, false_negative, model.delta)

    possible = np.quantile(np.concatenate(learned), np.linspace(0, 1, THRESHOLDS))
    best = max(
        possible, key=lambda threshold: bound(learned, threshold, (1 - confidence) / 2)
    )
    found = bound(told, float(best), (1 - confidence) / 2)
    return FitAudit(
        found, model.epsilon, model.delta, model.adjacency, trials, confidence
    )


def _shown(estimator: PrivateEstimator) -> Array:
    """Return numbers that a fitted estimator shows."""
    model = estimator.model_
    theta = model.theta.astype(float)
    scales = model.scaling.center, np.log(model.scaling.scale)
    target = [model.center, np.log(model.spread), model.noise_scale]
    chosen = [estimator.settings_.clip, estimator.settings_.step_size]
    return np.concatenate([theta.mean(0), theta[0], theta[-1], *scales, target, chosen])
