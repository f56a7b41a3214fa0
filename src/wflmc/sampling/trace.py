"""What a run leaves behind: the kept samples, how often gradients were clipped, and the plans behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from wflmc.errors import Shown
from wflmc.planning import Plan
from wflmc.posterior import CustomPosterior
from wflmc.posterior.regression import Regression
from wflmc.sampling.groups import DRAWS, Advance, Predictive, Request, groups, write_groups


@dataclass(frozen=True, eq=False, repr=False)
class Trace(Shown):
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
    warmup_clip_rate: NDArray[Any] | None = None
    """Like `clip_rate`, of burn-in, [chain, S_b], where it was asked for."""
    key: tuple[int, ...] | None = None
    """The key that seeded the chains, as numbers."""

    def _facts(self) -> dict[str, Any]:
        chains, draws, dim = self.theta.shape
        return {
            "chains": chains,
            "draws": draws,
            "parameters": dim,
            "plans": len(self.plans) if len(self.plans) > 1 else None,
            "kept burn-in rounds": None if self.warmup is None else self.warmup.shape[1],
            "clip_rate": self.clip_rate.mean(),
        }

    @property
    def plan(self) -> Plan:
        """The plan; the first one where each chain has its own."""
        return self.plans[0]

    def to_arviz(
        self,
        posterior: Regression | CustomPosterior | None = None,
        predictive: Predictive = False,
        features: Any = None,
        attributes: dict[str, Any] | None = None,
        *,
        log_likelihood: bool = False,
        outcome: str | Sequence[str] | None = None,
        draws: int | None = DRAWS,
        progress: Advance | None = None,
    ) -> Any:
        """The trace for ArviZ: InferenceData before ArviZ 1, a DataTree from then on.

        Its groups are posterior, sample_stats, and the same of burn-in where it was kept (warmup_…).

        Args:
            posterior: adds observed_data, the outcomes with the device that holds each, and constant_data, the
                covariates. These are the private data, which epsilon does not cover, as are the next two groups. The
                parameters of a custom model come by their names.
            predictive: adds posterior_predictive, what the model would have observed instead. For a model of one's
                own, a function of (key, parameters, example) that draws it, best as {name in the data: draw}.
            features: u[n, d]: adds predictions, outcomes drawn for these features, such as those of a test set, and
                the features as predictions_constant_data. For a custom model, a pytree [n, ...] of what its
                function `predictive` takes for an example.
            attributes: of every group, beside the version, the key that seeded the chains and the plan in short.
            log_likelihood: adds log_likelihood, log p(example|θ) of every example, for `arviz.loo`.
            outcome: for a custom model, the names of the outcomes among its data; by default what `predictive`
                draws, else y, where (X, y) is such a pair. Where neither tells, all data count as outcomes.
            draws: for how many draws of all chains together outcomes and log-likelihoods are computed, evenly spaced;
                None for all. The posterior group has all draws in any case.
            progress: called with (done, in all); by default a bar on a terminal.
        """
        import arviz
        import xarray as xr

        request = Request(posterior, predictive, features, log_likelihood, outcome, draws, progress)
        made = groups(self, attributes, request)
        if int(arviz.__version__.split(".")[0]) < 1:
            return arviz.InferenceData(**made)
        return xr.DataTree.from_dict(made)

    def save(self, path: str | Path, attributes: dict[str, Any] | None = None) -> None:
        """Write NetCDF that `arviz.from_netcdf` reads, whole or not at all; chain by chain, as for traces on disk."""
        write_groups(path, groups(self, attributes, Request()))
