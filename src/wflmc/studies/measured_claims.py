"""What the paper states of its measured figures (6 to 8), read off our own tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wflmc.studies.claims import Claim, like_the_paper
from wflmc.studies.engine import Tables
from wflmc.studies.rows import Row

Array = NDArray[np.float64]
HIGH_SNR = 20.0


def measured_claims(tables: Tables, posterior: Any = None) -> list[Claim]:
    """The outcomes stated of those of figures 6 to 8 that are among the tables.

    Args:
        posterior: the Gaussian posterior of figures 6 and 7; on data unlike the paper's its numbers need not hold.
    """
    makers: dict[str, Callable[[Tables], list[Claim]]] = {"fig6": _fig6, "fig7": _fig7, "fig8": _fig8}
    found = [claim for name, make in makers.items() if name in tables for claim in make(tables)]
    if posterior is None or like_the_paper(posterior):
        return found
    other = "other data than the paper's"
    return [c._replace(note=c.note if c.holds or c.figure == "fig8" else other) for c in found]


class _Curves:
    """The curves of a table: y and its standard error by scheme, on the common grid x."""

    def __init__(self, rows: list[Row]) -> None:
        self.x = np.array(sorted({row.x for row in rows}))
        self.y = {name: self._column(rows, name, "y") for name in dict.fromkeys(row.scheme for row in rows)}
        self.error = {name: self._column(rows, name, "y_se") for name in self.y}

    def _column(self, rows: list[Row], scheme: str, field: str) -> Array:
        return np.array([getattr(row, field) or 0.0 for row in rows if row.scheme == scheme], dtype=float)

    def ratio(self, above: str, below: str, at: NDArray[np.bool_]) -> float:
        """The geometric mean of one curve over another."""
        return float(np.exp(np.mean(np.log(self.y[above][at] / self.y[below][at]))))


def _fig6(tables: Tables) -> list[Claim]:
    curves, exact = _Curves(tables["fig6"]), _Curves(tables["fig6_exact"])
    high = curves.x >= HIGH_SNR
    gain, true_gain = (c.ratio("equal", "optimized", high) for c in (curves, exact))
    above_ideal, true_above = (c.ratio("optimized", "noiseless-dp", c.x >= 25) for c in (curves, exact))
    free, true_free = (float(c.y["no-dp"][c.x == HIGH_SNR][0] / c.y["noiseless"][0]) for c in (curves, exact))
    return [
        Claim(
            "fig6",
            "equal over optimized from 20 dB on: mean ratio",
            2.4,
            gain,
            1.8 < gain < 3.2,
            note=f"the ratio of the exact laws is {true_gain:.2f}; the estimator's floor hides part of it",
        ),
        Claim(
            "fig6",
            "optimized reaches noiseless-DP: mean ratio from 25 dB on",
            1.0,
            above_ideal,
            above_ideal < 1.1,
            note=f"{true_above:.2f} by the exact laws",
        ),
        Claim(
            "fig6",
            "without DP, noiseless LMC is reached by 20 dB: ratio",
            1.0,
            free,
            free < 1.25,
            note=f"only because of the estimator's floor: {true_free:.2f} by the exact laws",
        ),
    ]


def _fig7(tables: Tables) -> list[Claim]:
    curves, exact = _Curves(tables["fig7"]), _Curves(tables["fig7_exact"])

    def fall(found: _Curves) -> float:
        """The largest rise from one S_b to the next, in combined standard errors (relative where there are none)."""
        rises = []
        for name, y in found.y.items():
            error = np.hypot(found.error[name][1:], found.error[name][:-1])
            rises.append(np.max((y[1:] - y[:-1]) / np.where(error > 0, error, y[:-1])))
        return float(np.max(rises))

    later = curves.x >= 40
    least = float(np.min(curves.y["equal"][later] / curves.y["optimized"][later]))
    true_least = float(np.min(exact.y["equal"][later] / exact.y["optimized"][later]))
    return [
        Claim(
            "fig7",
            "all schemes fall with S_b: largest rise in standard errors",
            "≤ 0",
            fall(curves),
            fall(curves) < 1,
            note=f"largest relative rise of the exact laws {fall(exact):.1%}",
        ),
        Claim(
            "fig7",
            "equal over optimized from S_b = 40 on: smallest ratio",
            "> 1",
            least,
            least > 1,
            note=f"{true_least:.2f} by the exact laws",
        ),
    ]


def _fig8(tables: Tables) -> list[Claim]:
    ece = _Curves(tables["fig8"])
    langevin = [name for name in ece.y if name != "sbfl"]
    worst = np.max([ece.y[name] for name in langevin], axis=0)
    paired = _Curves(tables["fig8_paired"])
    over, error = paired.y["optimized - no-dp"], paired.error["optimized - no-dp"]
    high = ece.x >= HIGH_SNR
    gain, gain_error = paired.y["equal - optimized"][high], paired.error["equal - optimized"][high]
    # Too little to see or to be sure of; with many experiments paired errors are smaller than what can be seen.
    same = np.abs(over) < np.maximum(0.01 * ece.y["optimized"], 2 * error)
    level = ", ".join(f"{x:g}" for x in ece.x[same])
    return [
        Claim(
            "fig8",
            "SBFL is worse calibrated than every WFLMC scheme: smallest ratio of ECE",
            "> 1",
            float(np.min(ece.y["sbfl"] / worst)),
            bool(np.all(ece.y["sbfl"] > worst)),
            note="SBFL starts where the chains start; 20 iterations",
        ),
        Claim(
            "fig8",
            "without DP, ECE is the lowest: smallest margin of optimized over it",
            "≥ 0",
            float(np.min(over)),
            bool(np.all((over >= 0) | same)),
            note=f"within 1 % or two errors at {level or 'no'} dB; paired errors up to {error.max():.1g}",
        ),
        Claim(
            "fig8",
            "optimized is no worse than equal from 20 dB on: mean difference of ECE",
            "≥ 0",
            float(np.mean(gain)),
            bool(np.all(gain >= -2 * gain_error)),
            note=f"paired standard error {gain_error.max():.1g} at each SNR",
        ),
    ]
