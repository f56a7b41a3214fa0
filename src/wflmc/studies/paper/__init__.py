"""The figures of the paper, and its stated outcomes as measured claims."""

from collections.abc import Callable
from typing import Any

from wflmc.studies.paper.claim import Claim, like_the_paper
from wflmc.studies.paper.fig6_fig7 import claims_fig6, claims_fig7
from wflmc.studies.paper.fig8 import claims_fig8
from wflmc.studies.study import Tables


def measured_claims(tables: Tables, posterior: Any = None) -> list[Claim]:
    """The outcomes stated of those of figures 6 to 8 that are among the tables.

    Args:
        posterior: the Gaussian posterior of figures 6 and 7; on data unlike the paper's its numbers need not hold.
    """
    makers: dict[str, Callable[[Tables], list[Claim]]] = {"fig6": claims_fig6, "fig7": claims_fig7, "fig8": claims_fig8}
    found = [claim for name, make in makers.items() if name in tables for claim in make(tables)]
    if posterior is None or like_the_paper(posterior):
        return found
    other = "other data than the paper's"
    return [c._replace(note=c.note if c.holds or c.figure == "fig8" else other) for c in found]
