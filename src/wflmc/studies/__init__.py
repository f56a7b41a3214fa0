"""The paper's figures as grids of points, and its stated outcomes as measured claims."""

from wflmc.studies.claims import Claim, claims
from wflmc.studies.rows import Row
from wflmc.studies.single_sample import FIGURES, NAMES, Setting, point, points, regime_map

__all__ = ["FIGURES", "NAMES", "Claim", "Row", "Setting", "claims", "point", "points", "regime_map"]
