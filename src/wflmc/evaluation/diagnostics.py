"""Convergence diagnostics by ArviZ: rank-normalized split R-hat, bulk and tail ESS."""

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
"""Of the draws that ArviZ diagnoses at a time."""
MIN_DRAWS = 4
"""Draws of a chain below which ArviZ has no diagnostics."""
FUNCTION_BATCH = 256
"""Draws that a function of the parameters is computed for at a time."""
_IMPORTING = threading.Lock()


class Diagnostics(NamedTuple):
    """The worst diagnostics over all parameters; None where they do not exist."""

    rhat_max: float | None
    """The largest R-hat of the parameters that move."""
    ess_min: float | None
    """The smallest effective sample size in the bulk, over all chains."""
    ess_tail_min: float | None
    """The smallest effective sample size in the tails."""
    frozen: tuple[int, ...] = ()
    """Parameters that never move in at least one chain, for which ArviZ would count all
    draws as effective."""


def _arviz() -> ModuleType | None:
    """Return ArviZ, or None where it is missing."""
    if importlib.util.find_spec("arviz") is None:
        return None
    with _IMPORTING:
        # ArviZ 0.23 announces 1.0 on import.
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
        try:
            import arviz
        except OSError:
            # It stores the date of that in the user's cache, which may be full or
            # impossible to write to.
            with (
                tempfile.TemporaryDirectory() as folder,
                patch("platformdirs.user_cache_dir", lambda *_: folder),
            ):
                import arviz
    return arviz


def preload(draws: int) -> None:
    """Import ArviZ in the background, if there will be draws to diagnose.

    The import takes as long as compiling the sampler, and both can go on at once.

    Args:
        draws: of every chain.
    """
    if draws >= MIN_DRAWS:
        threading.Thread(target=_arviz, daemon=True).start()


def diagnose_functions(
    draws: ArrayTree,
    functions: Mapping[str, DrawFunction],
) -> dict[str, Diagnostics]:
    """Return diagnostics of functions of the parameters, such as predictions.

    Where hidden units can change places, these tell whether chains agree while
    parameters do not.

    Args:
        draws: parameters, a pytree of arrays [chain, draw, ...].
        functions: by name, from the parameters of one draw to an array; JAX compiles
            them.

    Returns:
        By name, the worst diagnostics of all numbers that a function returns.

    Raises:
        InputError: if JAX cannot trace a function for one draw.
    """
    chains_and_draws = jax.tree.leaves(draws)[0].shape[:2]
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), draws)
    first_draw = jax.tree.map(lambda leaf: leaf[0], flat)
    requirement = "a JAX function of the parameters of one draw"
    diagnostics = {}
    for name, function in functions.items():
        shape_of(f"functions: {name}", function, requirement, function, first_draw)
        map_draws = partial(jax.lax.map, function, batch_size=FUNCTION_BATCH)
        values = np.asarray(jax.jit(map_draws)(flat))
        diagnostics[name] = diagnose(values.reshape(*chains_and_draws, -1))
    return diagnostics


def diagnose(theta: NDArray[np.floating]) -> Diagnostics:
    """Return the worst R-hat and effective sample sizes over all parameters.

    R-hat is rank-normalized and split (Vehtari et al. 2021). Effective sample sizes are
    0 where a parameter never moves in some chain, which R-hat leaves out.

    Args:
        theta: draws, [chain, draw, m], of any real numbers.

    Returns:
        The diagnostics. All numbers are None where ArviZ is missing or there are fewer
        than four draws; R-hat is None for a single chain; and each is None where it is
        not finite. `frozen` needs no ArviZ, and is empty for fewer than four draws.
    """
    chains, draws, dim = theta.shape
    if draws < MIN_DRAWS:
        return Diagnostics(None, None, None)
    is_constant = (theta == theta[:, :1]).all(1)
    frozen = np.flatnonzero(is_constant.any(0))
    frozen_indices = tuple(frozen.tolist())
    arviz = _arviz()
    if arviz is None:
        return Diagnostics(None, None, None, frozen_indices)
    moving = np.delete(np.arange(dim), frozen)
    rhat_max = -np.inf
    bulk_min = np.inf
    tail_min = np.inf
    # A few parameters at a time, which bounds memory.
    chunk = max(1, CHUNK_BYTES // (8 * chains * draws))
    for first in range(0, moving.size, chunk):
        part = np.asarray(theta[:, :, moving[first : first + chunk]], dtype=float)
        rhat, bulk, tail = _diagnose_part(arviz, part)
        # Unlike max and min of Python, these pass nan on.
        rhat_max = np.maximum(rhat_max, rhat)
        bulk_min = np.minimum(bulk_min, bulk)
        tail_min = np.minimum(tail_min, tail)
    if frozen.size:
        bulk_min = 0.0
        tail_min = 0.0
    return Diagnostics(
        rhat_max=_finite_or_none(rhat_max),
        ess_min=_finite_or_none(bulk_min),
        ess_tail_min=_finite_or_none(tail_min),
        frozen=frozen_indices,
    )


def _diagnose_part(
    arviz: ModuleType, theta: NDArray[np.float64]
) -> tuple[float, float, float]:
    """Return the largest R-hat, the smallest bulk ESS and the smallest tail ESS."""
    import xarray as xr

    data = xr.Dataset({"theta": (("chain", "draw", "parameter"), theta)})
    rhat = np.nan
    if len(theta) > 1:
        rhat = arviz.rhat(data)["theta"].values.max()
    bulk = arviz.ess(data, method="bulk")["theta"].values.min()
    tail = arviz.ess(data, method="tail")["theta"].values.min()
    return rhat, bulk, tail


def _finite_or_none(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
