"""An attack on a whole fit, from the numbers that a fitted estimator shows.

Scaling, choosing and sampling are attacked together.
"""

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
"""Quantiles of the learned scores that are tried as thresholds."""


class FitAudit(NamedTuple):
    """What the attack proves, and what was promised."""

    epsilon_lower: float
    """A lower bound on ε, by counting alone."""
    epsilon: float
    """ε, as promised."""
    delta: float
    """δ, as promised."""
    adjacency: str
    """Which tables count as neighbours: replace or add-remove."""
    trials: int
    """Fits to either table."""
    confidence: float
    """Probability with which the lower bound holds."""

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
    """Try to tell two neighbouring tables apart by estimators fitted to them.

    A linear rule is learned from one half of the trials, with the threshold that
    separates that half best; its errors are counted on the other half. It sees the
    mean, the first and the last draw, the scales, those of noise and residuals, the
    clip and the step size of an estimator, not every draw. The error rates give a lower
    bound on ε that holds with the given confidence, whatever the mechanism is.

    Args:
        make: from the number of a trial to an estimator that is not yet fitted, with a
            seed of its own; both tables may share it.
        tables: two that differ in one row, or one device, as the estimator's unit and
            adjacency say.
        trials: fits to either table, at least 2; half of them learn, half count.
        confidence: probability with which the bound holds.

    Returns:
        The bound beside the promise. A bound above the promise refutes it; one below
        proves nothing.
    """
    numbers = [
        np.array([_shown(make(trial).fit(*table)) for trial in range(trials)])
        for table in tables
    ]
    half = trials // 2
    promised = make(0)  # unfitted: only its ε, δ and adjacency are read
    X = np.concatenate([rows[:half] for rows in numbers])
    side = np.repeat([0, 1], half)
    rule = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, side)
    scores = [np.asarray(rule.decision_function(rows)) for rows in numbers]
    learned_scores = [values[:half] for values in scores]
    fresh_scores = [values[half:] for values in scores]
    # Half for each of the two error rates.
    risk = (1 - confidence) / 2

    def bound(scores_of_tables: list[Array], threshold: float) -> float:
        """Return the ε that a threshold proves.

        Args:
            scores_of_tables: of either table, [trial] each.
            threshold: above which a score is taken for the second table.
        """
        first_scores, second_scores = scores_of_tables
        false_positives = np.sum(first_scores > threshold)
        false_negatives = np.sum(second_scores <= threshold)
        errors = [false_positives, false_negatives]
        false_positive, false_negative = rate_upper(errors, len(first_scores), risk)
        return epsilon_by_counting(false_positive, false_negative, promised.delta)

    quantiles = np.linspace(0, 1, THRESHOLDS)
    thresholds = np.quantile(np.concatenate(learned_scores), quantiles)
    best = max(thresholds, key=lambda threshold: bound(learned_scores, threshold))
    return FitAudit(
        epsilon_lower=bound(fresh_scores, float(best)),
        epsilon=promised.epsilon,
        delta=promised.delta,
        adjacency=promised.adjacency,
        trials=trials,
        confidence=confidence,
    )


def _shown(estimator: PrivateEstimator) -> Array:
    """Return the numbers of a fitted estimator that the rule is learned on."""
    model = estimator.model_
    theta = model.theta.astype(float)
    log_scale = np.log(model.scaling.scale)
    target = [model.center, np.log(model.spread)]
    target += [model.noise_scale, model.residual_scale]
    settings = [estimator.settings_.clip, estimator.settings_.step_size]
    draws = (theta.mean(0), theta[0], theta[-1])
    scales = (model.scaling.center, log_scale)
    return np.concatenate([*draws, *scales, target, settings])
