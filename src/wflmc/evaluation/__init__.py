"""Evaluation of a trace: distance to the posterior, calibration, convergence diagnostics, privacy spent."""

from wflmc.evaluation.burn_in import choose_burn_in as choose_burn_in
from wflmc.evaluation.causes import Cause as Cause
from wflmc.evaluation.causes import Change as Change
from wflmc.evaluation.causes import advise as advise
from wflmc.evaluation.diagnostics import diagnose as diagnose
from wflmc.evaluation.diagnostics import preload as preload
from wflmc.evaluation.scores import Calibration as Calibration
from wflmc.evaluation.scores import calibration as calibration
from wflmc.evaluation.scores import predictive_scores as predictive_scores
from wflmc.evaluation.scores import regression_scores as regression_scores
from wflmc.evaluation.scores import reliability as reliability
from wflmc.evaluation.summary import Evaluation as Evaluation
from wflmc.evaluation.summary import evaluate as evaluate
from wflmc.evaluation.wasserstein import ExactLaw as ExactLaw
from wflmc.evaluation.wasserstein import estimate_w2_sq as estimate_w2_sq
from wflmc.evaluation.wasserstein import exact_ess as exact_ess
from wflmc.evaluation.wasserstein import exact_law as exact_law
from wflmc.evaluation.wasserstein import exact_w2_sq as exact_w2_sq
from wflmc.evaluation.wasserstein import floor_w2_sq as floor_w2_sq
