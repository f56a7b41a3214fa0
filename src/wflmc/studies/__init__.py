"""Grids of points and who computes them; the paper's figures, and its stated outcomes as measured claims."""

from wflmc.studies.beyond import BeyondGaussian, BeyondMnist, beyond_ablation, beyond_gaussian, beyond_mnist
from wflmc.studies.claims import Claim, claims
from wflmc.studies.engine import Study, Tables, run_study
from wflmc.studies.engines import StudyError, open_engine
from wflmc.studies.measured_claims import measured_claims
from wflmc.studies.mnist import Mnist, heterogeneity_study, mnist_study
from wflmc.studies.multi_sample import MultiSample, multi_sample_study
from wflmc.studies.record import EPSILONS, RecordSetting, record_study
from wflmc.studies.rows import Row
from wflmc.studies.single_sample import FIGURES, NAMES, Setting, point, points, regime_map

__all__ = [
    "EPSILONS",
    "FIGURES",
    "NAMES",
    "BeyondGaussian",
    "BeyondMnist",
    "Claim",
    "Mnist",
    "MultiSample",
    "RecordSetting",
    "Row",
    "Setting",
    "Study",
    "StudyError",
    "Tables",
    "beyond_ablation",
    "beyond_gaussian",
    "beyond_mnist",
    "claims",
    "heterogeneity_study",
    "measured_claims",
    "mnist_study",
    "multi_sample_study",
    "open_engine",
    "point",
    "points",
    "record_study",
    "regime_map",
    "run_study",
]
