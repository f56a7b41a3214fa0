"""Grids of points, the engines that compute them and their cache; the paper's figures, and studies past the paper."""

from wflmc.studies.engines import open_engine
from wflmc.studies.paper.common import Claim
from wflmc.studies.paper.fig2_to_fig5 import FIGURES, NAMES, Setting, point, regime_map
from wflmc.studies.reproduction import FURTHER_FIGURES, GAUSSIAN_FIGURES, MNIST_FIGURES, PAPER_FIGURES, Reproduction
from wflmc.studies.study import Row, Tables, run_study

__all__ = [
    "FIGURES",
    "FURTHER_FIGURES",
    "GAUSSIAN_FIGURES",
    "MNIST_FIGURES",
    "NAMES",
    "PAPER_FIGURES",
    "Claim",
    "Reproduction",
    "Row",
    "Setting",
    "Tables",
    "open_engine",
    "point",
    "regime_map",
    "run_study",
]
