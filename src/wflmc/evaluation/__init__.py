"""Evaluation of a trace: distances, calibration, convergence and privacy spent."""

from wflmc.evaluation.burn_in import choose_burn_in
from wflmc.evaluation.conditioning import Moments, NoiseAware, noise_aware
from wflmc.evaluation.coverage import Coverage, simulated_coverage
from wflmc.evaluation.diagnostics import diagnose, preload
from wflmc.evaluation.scores import (
    Calibration,
    calibration,
    predictive_scores,
    regression_scores,
    reliability,
)
from wflmc.evaluation.summary import Evaluation, evaluate
from wflmc.evaluation.wasserstein import (
    ExactLaw,
    Spread,
    estimate_w2_sq,
    exact_ess,
    exact_law,
    exact_spread,
    exact_w2_sq,
    floor_w2_sq,
)

__all__ = [
    "Calibration",
    "Coverage",
    "Evaluation",
    "ExactLaw",
    "Moments",
    "NoiseAware",
    "Spread",
    "calibration",
    "choose_burn_in",
    "diagnose",
    "estimate_w2_sq",
    "evaluate",
    "exact_ess",
    "exact_law",
    "exact_spread",
    "exact_w2_sq",
    "floor_w2_sq",
    "noise_aware",
    "predictive_scores",
    "preload",
    "regression_scores",
    "reliability",
    "simulated_coverage",
]
