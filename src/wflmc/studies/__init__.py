"""Grids of points and who computes them; the paper's figures, and its stated outcomes as measured claims."""

from wflmc.studies.beyond import (
    EPSILONS,
    BeyondGaussian,
    BeyondMnist,
    RecordSetting,
    beyond_ablation,
    beyond_gaussian,
    beyond_mnist,
    record_study,
)
from wflmc.studies.engines import StudyError, open_engine
from wflmc.studies.paper import measured_claims
from wflmc.studies.paper.claim import Claim
from wflmc.studies.paper.fig2_to_fig5 import FIGURES, NAMES, Setting, claims, point, points, regime_map
from wflmc.studies.paper.fig6_fig7 import MultiSample, multi_sample_study
from wflmc.studies.paper.fig8 import Mnist, heterogeneity_study, mnist_study
from wflmc.studies.study import Row, Study, Tables, run_study

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
