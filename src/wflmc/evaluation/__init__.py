"""What a trace is worth: distance to the posterior, convergence diagnostics, clip rate and privacy spent."""

from wflmc.evaluation.burn_in import choose_burn_in
from wflmc.evaluation.diagnostics import diagnose, preload
from wflmc.evaluation.summary import Evaluation, evaluate
from wflmc.evaluation.wasserstein import estimate_w2_sq, exact_w2_sq

__all__ = ["Evaluation", "choose_burn_in", "diagnose", "estimate_w2_sq", "evaluate", "exact_w2_sq", "preload"]
