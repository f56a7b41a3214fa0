"""What a run leaves behind: kept draws, how often gradients were clipped, and the plans
behind them; with its export to ArviZ and NetCDF."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wflmc.planning import Plan
from wflmc.sampling.groups import (
    DRAW_AXES,
    LIBRARY,
    Attributes,
    Group,
    Groups,
    Variable,
    make_group,
    name_draws,
    to_arviz_data,
)
from wflmc.sampling.netcdf import write_groups
from wflmc.sampling.outcomes import (
    DEFAULT_DRAWS,
    ArvizOptions,
    Model,
    Predictive,
    ProgressCallback,
    outcome_groups,
)
from wflmc.sampling.recorders import Predictions
from wflmc.sampling.transcript import Transcript
from wflmc.support.errors import InputError, Shown, ShownValues
from wflmc.support.trees import ArrayTree, JsonValue

CHAIN_AXES = ("chain", "parameter")
"""Axes of an array with one vector of parameters for each chain."""


@dataclass(frozen=True, eq=False, repr=False)
class Trace(Shown):
    """Samples theta[chain, draw, m] of the kept rounds."""

    theta: np.ndarray
    """[chain, draw, m], of the kept rounds."""
    clip_rate: np.ndarray
    """Fraction of transmitting devices whose gradient was clipped, [chain, draw]."""
    burn_in_clip_rate: np.ndarray
    """The same per round of burn-in, over all chains, [S_b]."""
    warmup: np.ndarray | None
    """Samples of burn-in, [chain, S_b, m], with `keep_burn_in`."""
    plans: tuple[Plan, ...]
    """One plan for all chains, or one for each."""
    velocity: np.ndarray | None = None
    """v after the last round, [chain, m], with kinetic dynamics: what a run that
    continues this one needs beside θ."""
    warmup_clip_rate: np.ndarray | None = None
    """Like `clip_rate`, of burn-in, [chain, S_b], with `keep_burn_in`."""
    key: tuple[int, ...] | None = None
    """The key that seeded the chains, as numbers."""
    predictions: Predictions | None = None
    """Averages over the draws, where these were not kept; then `theta` is their mean,
    [chain, 1, m]."""
    transcript: Transcript | None = None
    """What the server has received in every round, with `transcript`."""

    def _facts(self) -> ShownValues:
        chains, draws, parameters = self.theta.shape
        plans = len(self.plans) if len(self.plans) > 1 else None
        burn_in = None if self.warmup is None else self.warmup.shape[1]
        return {
            "chains": chains,
            "draws": draws,
            "parameters": parameters,
            "plans": plans,
            "kept burn-in rounds": burn_in,
            "clip_rate": self.clip_rate.mean(),
        }

    @property
    def plan(self) -> Plan:
        """Return the plan of all chains; the first one where each chain has its own.

        Plans that ran together agree in rounds, burn-in, devices and dynamics, and may
        differ in everything else, such as step sizes and noise.
        """
        return self.plans[0]

    def to_arviz(
        self,
        posterior: Model | None = None,
        predictive: Predictive = False,
        features: ArrayTree = None,
        attributes: Attributes | None = None,
        *,
        log_likelihood: bool = False,
        outcome: str | Sequence[str] | None = None,
        draws: int | None = DEFAULT_DRAWS,
        progress: ProgressCallback | None = None,
    ) -> Any:  # ArviZ's own types do not know the groups of its data
        """Return the trace for ArviZ.

        Its groups are posterior, sample_stats, and the same of burn-in where that was
        kept (warmup_…). Clip rates, in sample_stats, look at the data, and epsilon does
        not cover them; nor does it cover the private data, and what is computed from
        them, that a posterior adds.

        Args:
            posterior: adds observed_data, the outcomes with the device that holds each,
                and constant_data, the covariates. These are the private data, which
                epsilon does not cover, as are the next two groups. The parameters of a
                custom model come by their names.
            predictive: adds posterior_predictive, what the model would have observed
                instead. For a custom model, a function of (key, parameters, example)
                that draws it, best as {name in the data: draw}.
            features: u[n, d]: adds predictions, outcomes drawn for these features, such
                as those of a test set, and the features as predictions_constant_data.
                For a custom model, a pytree [n, ...] of what its function `predictive`
                takes for an example.
            attributes: of every group, beside the version, the key that seeded the
                chains and a summary of the plan.
            log_likelihood: adds log_likelihood, log p(example|θ) of every example, for
                `arviz.loo`.
            outcome: for a custom model, the names of the outcomes among its data; by
                default what `predictive` draws, else y, where (X, y) is such a pair.
                Where there is neither, all data count as outcomes.
            draws: for how many draws of all chains together outcomes and
                log-likelihoods are computed, evenly spaced; None for all. The posterior
                group has all draws in any case.
            progress: called with (draws done, draws in all); by default there is a bar
                on a terminal.

        Returns:
            InferenceData before ArviZ 1, a DataTree of xarray from then on.

        Raises:
            InputError: if an option needs a posterior and there is none, or does not
                fit it.
        """
        options = ArvizOptions(
            posterior=posterior,
            predictive=predictive,
            features=features,
            log_likelihood=log_likelihood,
            outcome=outcome,
            draws=draws,
            progress=progress,
        )
        return to_arviz_data(_trace_groups(self, attributes, options))

    def save(self, path: str | Path, attributes: Attributes | None = None) -> None:
        """Write NetCDF that `arviz.from_netcdf` reads, completely or not at all.

        The file has the groups of `to_arviz` without a posterior. It is for the owner
        of the data: clip rates are computed from records, and epsilon does not cover
        them. `wflmc publish` writes a file that may be shown. Chains are written one by
        one; draws that lie in a file are never in memory as a whole.

        Args:
            path: of the file, which is replaced where it exists.
            attributes: of every group, beside the version, the key that seeded the
                chains and a summary of the plan.

        Raises:
            OSError: if the disk has no space for the file.
        """
        write_groups(path, _trace_groups(self, attributes, ArvizOptions()))


def _trace_groups(
    trace: Trace,
    attributes: Attributes | None,
    options: ArvizOptions,
) -> Groups:
    """Return the groups of a trace by name, those of `to_arviz` and of `save`.

    Every group has the same attributes; those of the caller replace ours.
    """
    groups = _draw_groups(trace, options.posterior)
    if trace.predictions is not None:
        groups |= _average_groups(trace.predictions)
    if trace.transcript is not None:
        groups["transcript"] = _transcript_group(trace.transcript)
    if options.posterior is not None:
        groups |= outcome_groups(trace.theta, options)
    elif options.needs_model:
        raise InputError("posterior", None, "given, for what it predicts")
    common: dict[str, JsonValue] = {**LIBRARY, "plan": _summarize_plan(trace.plan)}
    if trace.key is not None:
        common["key"] = list(trace.key)
    common.update(attributes or {})
    return {name: group.with_attributes(common) for name, group in groups.items()}


def _draw_groups(trace: Trace, posterior: Model | None) -> Groups:
    """Return draws and statistics of rounds, of burn-in as well where it was kept."""
    burn_in = trace.plan.burn_in
    statistics = _round_statistics(trace, trace.clip_rate, slice(burn_in, None))
    if trace.velocity is not None:
        last_velocity = (CHAIN_AXES, trace.velocity)
        variables = {**statistics.variables, "last_velocity": last_velocity}
        statistics = make_group(variables)
    groups = {
        "posterior": name_draws(trace.theta, posterior).group,
        "sample_stats": statistics,
    }
    if trace.warmup is not None:
        warmup_draws = name_draws(trace.warmup, posterior)
        groups["warmup_posterior"] = warmup_draws.group
    if trace.warmup_clip_rate is not None:
        groups["warmup_sample_stats"] = _round_statistics(
            trace,
            trace.warmup_clip_rate,
            slice(burn_in),
        )
    return groups


def _round_statistics(trace: Trace, clip_rate: np.ndarray, rounds: slice) -> Group:
    """Return what is known of rounds, [chain, draw].

    Chains that share a plan have equal values, except for the clip rate.
    """
    plans = trace.plans
    by_round: dict[str, list[np.ndarray]] = {
        "gain": [plan.gain for plan in plans],
        "active_devices": [plan.active_devices for plan in plans],
        "excess_noise": [plan.excess_noise for plan in plans],
    }
    if all(plan.clips for plan in plans):
        by_round["loss"] = [plan.loss.max(-1) for plan in plans]
    variables: dict[str, Variable] = {"clip_rate": (DRAW_AXES, clip_rate)}
    for name, by_plan in by_round.items():
        values = np.stack([of_plan[rounds] for of_plan in by_plan])
        variables[name] = (DRAW_AXES, np.broadcast_to(values, clip_rate.shape))
    return make_group(variables)


def _average_groups(predictions: Predictions) -> Groups:
    """Return averages over draws that were not kept: parameters and predictions."""
    moments = {
        "mean": (CHAIN_AXES, predictions.mean),
        "variance": (CHAIN_AXES, predictions.variance),
    }
    note = "averages over the kept draws, which were not kept themselves"
    probability_axes = ("chain", "observation", "class")
    probabilities = {"probability": (probability_axes, predictions.probability)}
    return {
        "posterior": make_group(moments, attributes={"about": note}),
        "predictions": make_group(probabilities),
    }


def _transcript_group(transcript: Transcript) -> Group:
    """Return a transcript as a group, its rounds numbered by their first one."""
    vector_axes = ("round", "chain", "parameter")
    number_axes = ("round", "chain")
    variables: dict[str, Variable] = {}
    variables["position"] = (vector_axes, transcript.position)
    variables["gradient"] = (vector_axes, transcript.gradient)
    variables["noise"] = (number_axes, transcript.noise)
    return make_group(
        variables,
        coords={"round": transcript.start},
        attributes={"rounds": transcript.rounds},
    )


def _summarize_plan(plan: Plan) -> str:
    """Return a summary of a plan as JSON.

    Step sizes and clipping thresholds are lists where they differ between rounds or
    devices, else one number.
    """
    summary: dict[str, JsonValue] = {
        "devices": plan.devices,
        "rounds": len(plan.rounds),
        "burn_in": plan.burn_in,
        "dynamics": plan.dynamics.name,
        "epsilon_spent": plan.epsilon_spent,
        "adjacency": plan.privacy.adjacency,
        "step_size": _shorten(plan.step_size),
    }
    if plan.clips:
        summary["clip"] = _shorten(plan.clip)
    return json.dumps(summary)


def _shorten(values: np.ndarray) -> JsonValue:
    """Return the one number of an array of equal numbers, else a list of all."""
    numbers = np.asarray(values).tolist()
    return numbers[0] if len(set(numbers)) == 1 else numbers
