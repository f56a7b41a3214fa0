"""Convergence diagnostics through ArviZ: rank-normalised split R-hat, bulk and tail effective sample size."""

import importlib.util
import tempfile
import threading
import warnings
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import NamedTuple
from unittest.mock import patch

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc.posterior.custom.model import shape_of
from wflmc.support.trees import ArrayTree, DrawFunction

CHUNK_BYTES = 2**27
FEWEST_DRAWS = 4
"""Draws of a chain below which ArviZ has no diagnostics."""
_IMPORTING = threading.Lock()


class Diagnostics(NamedTuple):
    """Over all parameters: the largest R-hat, the smallest bulk and tail effective sample size."""

    rhat_max: float | None
    """Of the parameters that move."""
    ess_min: float | None
    ess_tail_min: float | None
    frozen: tuple[int, ...] = ()
    """Parameters that never move in at least one chain, for which ArviZ would count all draws as effective."""


def _arviz() -> ModuleType | None:
    """ArviZ, or None where it is missing."""
    if importlib.util.find_spec("arviz") is None:
        return None
    with _IMPORTING:
        warnings.filterwarnings(
            "ignore", r"\s*ArviZ is undergoing", FutureWarning
        )  # 0.23 announces 1.0 on import
        try:
            import arviz
        except OSError:  # and keeps the date of that in the user's cache, which is full or cannot be written
            with (
                tempfile.TemporaryDirectory() as folder,
                patch("platformdirs.user_cache_dir", lambda *_: folder),
            ):
                import arviz
    return arviz


def preload(draws: int) -> None:
    """Import ArviZ in the background, if there will be draws to diagnose.

    It takes as long as compiling the sampler, and both can go on at once.

    Args:
        draws: of every chain.
    """
    if draws >= FEWEST_DRAWS:
        threading.Thread(target=_arviz, daemon=True).start()


def diagnose_functions(
    draws: ArrayTree,
    functions: Mapping[str, DrawFunction],
) -> dict[str, Diagnostics]:
    """Return diagnostics of functions of the parameters, by name: the worst of all numbers that each returns.

    Args:
        draws: parameters, a pytree of arrays [chain, draw, ...].
        functions: from the parameters of one draw to an array.
    """
    found, shape = {}, jax.tree.leaves(draws)[0].shape[:2]
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), draws)
    for name, function in functions.items():
        wanted, one = (
            "a JAX function of the parameters of one draw",
            jax.tree.map(lambda leaf: leaf[0], flat),
        )
        shape_of(f"functions: {name}", function, wanted, function, one)
        values = jax.jit(partial(jax.lax.map, function, batch_size=256))(flat)
        found[name] = diagnose(np.asarray(values).reshape(*shape, -1))
    return found


def diagnose(theta: NDArray[np.floating]) -> Diagnostics:
    """Return diagnostics of theta[chain, draw, m]; None where ArviZ is missing or draws (R-hat: chains) are too few."""
    chains, draws, dim = theta.shape
    if draws < FEWEST_DRAWS:
        return Diagnostics(None, None, None)
    frozen = np.flatnonzero((theta == theta[:, :1]).all(1).any(0))
    arviz = _arviz()
    if arviz is None:
        return Diagnostics(None, None, None, tuple(frozen.tolist()))
    import xarray as xr

    moving = np.delete(np.arange(dim), frozen)
    worst = np.array(
        [-np.inf, np.inf, np.inf]
    )  # R-hat, ESS in the bulk and in the tails
    at_once = max(1, CHUNK_BYTES // (8 * chains * draws))
    for at in range(
        0, moving.size, at_once
    ):  # some parameters at a time, which bounds memory
        some = np.asarray(theta[:, :, moving[at : at + at_once]], dtype=float)
        data = xr.Dataset({"theta": (("chain", "draw", "parameter"), some)})
        rhat = arviz.rhat(data)["theta"].values.max() if chains > 1 else np.nan
        bulk, tail = (
            arviz.ess(data, method=method)["theta"].values.min()
            for method in ("bulk", "tail")
        )
        worst = np.array(
            [max(worst[0], rhat), min(worst[1], bulk), min(worst[2], tail)]
        )
    if frozen.size:
        worst[1:] = 0.0
    rhat, bulk, tail = (float(value) if np.isfinite(value) else None for value in worst)
    return Diagnostics(rhat, bulk, tail, tuple(frozen.tolist()))
