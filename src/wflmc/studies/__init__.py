"""Grids of points and who computes them; the paper's figures, and its stated outcomes as measured claims."""

from wflmc.studies.beyond import BeyondGaussian, BeyondMnist, beyond_ablation, beyond_gaussian, beyond_mnist
from wflmc.studies.engines import StudyError, open_engine
from wflmc.studies.paper import measured_claims
from wflmc.studies.paper.claim import Claim
from wflmc.studies.paper.fig2_to_fig5 import FIGURES, NAMES, Setting, claims, point, points, regime_map
from wflmc.studies.paper.fig6_fig7 import MultiSample, multi_sample_study
from wflmc.studies.paper.fig8 import Mnist, heterogeneity_study, mnist_study
from wflmc.studies.reproduction import FURTHER_FIGURES, GAUSSIAN_FIGURES, MNIST_FIGURES, PAPER_FIGURES, Reproduction
from wflmc.studies.study import Row, Study, Tables, run_study

__all__ = [
    "FIGURES",
    "FURTHER_FIGURES",
    "GAUSSIAN_FIGURES",
    "MNIST_FIGURES",
    "NAMES",
    "PAPER_FIGURES",
    "BeyondGaussian",
    "BeyondMnist",
    "Claim",
    "Mnist",
    "MultiSample",
    "Reproduction",
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
    "regime_map",
    "run_study",
]
