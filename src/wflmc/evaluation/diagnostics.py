"""Convergence diagnostics through ArviZ: rank-normalised split R-hat, bulk and tail effective sample size."""

from __future__ import annotations

import importlib.util
import tempfile
import threading
import warnings
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

CHUNK_BYTES = 2**27
_IMPORTING = threading.Lock()


class Diagnostics(NamedTuple):
    """Over all parameters: the largest R-hat, the smallest bulk and tail effective sample size."""

    rhat_max: float | None
    """Of the parameters that move."""
    ess_min: float | None
    ess_tail_min: float | None
    frozen: tuple[int, ...] = ()
    """Parameters that never move in at least one chain, for which ArviZ would count all draws as effective."""


def _arviz() -> Any:
    """ArviZ, or None where it is missing."""
    if importlib.util.find_spec("arviz") is None:
        return None
    with _IMPORTING:
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)  # 0.23 announces 1.0 on import
        try:
            import arviz
        except OSError:  # and keeps the date of that in the user's cache, which is full or cannot be written
            import platformdirs

            with (
                tempfile.TemporaryDirectory() as folder,
                patch.object(platformdirs, "user_cache_dir", lambda *_: folder),
            ):
                import arviz
    return arviz


def preload() -> None:
    """Import ArviZ in the background: it takes as long as compiling the sampler, and both can go on at once."""
    threading.Thread(target=_arviz, daemon=True).start()


def _dataset(theta: NDArray[Any]) -> Any:
    import xarray as xr

    return xr.Dataset({"theta": (("chain", "draw", "parameter"), np.asarray(theta, dtype=float))})


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def diagnose(theta: NDArray[Any]) -> Diagnostics:
    """Diagnostics of theta[chain, draw, m]; None where ArviZ is missing or draws (R-hat: chains) are too few."""
    arviz = _arviz() if theta.shape[1] >= 4 else None
    frozen = np.flatnonzero((theta == theta[:, :1]).all(1).any(0)) if theta.shape[1] >= 4 else np.zeros(0, int)
    if arviz is None:
        return Diagnostics(None, None, None, tuple(frozen.tolist()))
    moving = np.delete(np.arange(theta.shape[2]), frozen)
    several = theta.shape[0] > 1
    rhat, bulk, tail = [], [], []
    at_once = max(1, CHUNK_BYTES // (8 * theta.shape[0] * theta.shape[1]))
    for at in range(0, moving.size, at_once):  # some parameters at a time, which bounds memory
        data = _dataset(theta[:, :, moving[at : at + at_once]])
        rhat.append(arviz.rhat(data)["theta"].values.max() if several else np.nan)
        bulk.append(arviz.ess(data, method="bulk")["theta"].values.min())
        tail.append(arviz.ess(data, method="tail")["theta"].values.min())
    if frozen.size:
        return Diagnostics(_number(max(rhat, default=np.nan)), 0.0, 0.0, tuple(frozen.tolist()))
    return Diagnostics(_number(max(rhat)), _number(min(bulk)), _number(min(tail)))
