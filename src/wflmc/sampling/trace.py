"""What a run leaves behind: the kept samples, how often gradients were clipped, and the plans behind them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.errors import InputError
from wflmc.keys import host_generator
from wflmc.planning import Plan
from wflmc.version import __version__


@dataclass(frozen=True, eq=False)
class Trace:
    """Samples theta[chain, draw, m] of the kept rounds."""

    theta: NDArray[Any]
    """[chain, draw, m], of the kept rounds."""
    clip_rate: NDArray[Any]
    """Share of sending devices whose gradient was clipped, [chain, draw]."""
    burn_in_clip_rate: NDArray[Any]
    """The same per round of burn-in, over all chains, [S_b]."""
    warmup: NDArray[Any] | None
    """Samples of burn-in, [chain, S_b, m], where they were asked for."""
    plans: tuple[Plan, ...]
    """One plan for all chains, or one for each."""
    velocity: NDArray[Any] | None = None
    """After the last round, [chain, m], with kinetic dynamics: what a run that goes on needs beside θ."""

    @property
    def plan(self) -> Plan:
        """The plan; the first one where each chain has its own."""
        return self.plans[0]

    def datasets(
        self,
        attributes: dict[str, Any] | None = None,
        posterior: Any = None,
        predictive: bool = False,
        features: ArrayLike | None = None,
    ) -> dict[str, Any]:
        """xarray data sets by group, in ArviZ's schema: posterior, sample_stats, and warmup_posterior if kept.

        Args:
            attributes: of every group.
            posterior: adds observed_data, `y[observation]` with the device that holds it. These are the private data.
            predictive: adds posterior_predictive, what the model would have observed instead, for every draw.
            features: u[n, d]: adds predictions, outcomes drawn for these features, such as those of a test set.
        """
        import xarray as xr

        plan = self.plan
        about = {"inference_library": "wflmc", "inference_library_version": __version__, **(attributes or {})}
        chains, draws, dim = self.theta.shape
        coords = {"chain": np.arange(chains), "draw": np.arange(draws), "parameter": np.arange(dim)}
        dims = ("chain", "draw", "parameter")
        stats: dict[str, Any] = {"clip_rate": (dims[:2], self.clip_rate)}
        kept = slice(plan.burn_in, None)
        per_round: dict[str, list[NDArray[Any]]] = {
            "gain": [p.gain[kept] for p in self.plans],
            "active_devices": [p.active_devices[kept] for p in self.plans],
            "excess_noise": [p.excess_noise[kept] for p in self.plans],
        }
        if all(p.clips for p in self.plans):
            per_round["loss"] = [p.loss.max(-1)[kept] for p in self.plans]
        for name, rows in per_round.items():
            stats[name] = (dims[:2], np.broadcast_to(np.stack(rows), (chains, draws)))
        stat_coords = {name: coords[name] for name in dims[:2]}
        if self.velocity is not None:
            stats["last_velocity"] = (("chain", "parameter"), self.velocity)
            stat_coords = coords
        groups = {
            "posterior": xr.Dataset({"theta": (dims, self.theta)}, coords=coords, attrs=about),
            "sample_stats": xr.Dataset(stats, coords=stat_coords, attrs=about),
        }
        if self.warmup is not None:
            warm = {**coords, "draw": np.arange(self.warmup.shape[1])}
            groups["warmup_posterior"] = xr.Dataset({"theta": (dims, self.warmup)}, coords=warm, attrs=about)
        if posterior is not None:
            extra = self._outcomes(posterior, predictive, features)
            groups |= {name: group.assign_attrs(about) for name, group in extra.items()}
        elif predictive or features is not None:
            raise InputError("posterior", None, "given, for what it predicts")
        return groups

    def _outcomes(self, posterior: Any, predictive: bool, features: ArrayLike | None) -> dict[str, Any]:
        """The groups of what was observed, and of what the model draws for every sample: the same draws every time."""
        import xarray as xr

        if not hasattr(posterior, "simulate") or posterior.dim != self.theta.shape[-1]:
            raise InputError("posterior", type(posterior).__name__, "the model of these samples, for what it predicts")
        chains, draws, _ = self.theta.shape
        drawn = {"chain": np.arange(chains), "draw": np.arange(draws)}

        def predicted(group: str, rows: ArrayLike | None, coords: dict[str, Any]) -> Any:
            generator = host_generator(jax.random.key(0), group)
            y = np.stack([posterior.simulate(generator, theta, rows) for theta in self.theta])
            return xr.Dataset({"y": ((*drawn, "observation"), y)}, coords={**drawn, **coords})

        y, device = posterior.observed
        held = {"observation": np.arange(y.size), "device": ("observation", device)}
        groups = {"observed_data": xr.Dataset({"y": ("observation", y)}, coords=held)}
        if predictive:
            groups["posterior_predictive"] = predicted("posterior_predictive", None, held)
        if features is not None:
            given = {"observation": np.arange(len(np.atleast_1d(features)))}
            groups["predictions"] = predicted("predictions", features, given)
        return groups

    def to_arviz(self, posterior: Any = None, predictive: bool = False, features: ArrayLike | None = None) -> Any:
        """The trace for ArviZ: InferenceData before ArviZ 1, a DataTree from then on.

        Args:
            posterior, predictive, features: more groups, as of `datasets`.
        """
        import arviz
        import xarray as xr

        groups = self.datasets(None, posterior, predictive, features)
        if int(arviz.__version__.split(".")[0]) < 1:
            return arviz.InferenceData(**groups)
        return xr.DataTree.from_dict(groups)

    def save(self, path: str | Path, attributes: dict[str, Any] | None = None) -> None:
        """Write NetCDF that `arviz.from_netcdf` reads; chain by chain, so that traces may be larger than memory."""
        import h5netcdf
        import xarray as xr

        groups = self.datasets(attributes)
        large = {name: groups[name]["theta"] for name in groups if "theta" in groups[name]}
        rest = {name: group.drop_vars("theta", errors="ignore") for name, group in groups.items()}
        xr.DataTree.from_dict(rest).to_netcdf(path, engine="h5netcdf")
        with h5netcdf.File(path, "a") as file:
            for name, theta in large.items():
                variable = file[name].create_variable("theta", theta.dims, theta.dtype)
                for chain in range(theta.sizes["chain"]):
                    variable[chain] = theta.values[chain]
