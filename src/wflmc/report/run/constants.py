"""What the explorer starts from: the constants of a run."""

from __future__ import annotations

from typing import Any

import numpy as np

from wflmc.report.run.files import Run


def constants(run: Run) -> dict[str, Any] | None:
    """The numbers of a run that a reader may change, as plain data; None where plan or scenario are missing.

    Where devices differ it is the mean (clip, power, SNR in dB) or the strictest (ε, δ) of them.
    """
    if run.plan is None or run.scenario is None:
        return None
    c, privacy, link = run.plan.constants, run.scenario.privacy, run.scenario.link
    return {
        "mu": c.mu,
        "L": c.L,
        "dim": c.dim,
        "initial_w2_sq": c.initial_w2_sq,
        "devices": c.devices,
        "rounds": c.rounds,
        "burn_in": c.burn_in,
        "step_size": c.step_size,
        "clip": _mean(privacy.clip),
        "example_clip": None if privacy.unit == "device" else _mean(privacy.example_clip),
        "epsilon": _least(privacy.epsilon),
        "delta": _least(privacy.delta),
        "snr_db": _mean(link.snr_db),
        "power": _mean(link.power),
        "noise_power": link.noise_power,
        "fading": link.fading,
        "accountant": privacy.accountant,
        "bound": run.scenario.policy.bound,
        "unit": privacy.unit,
    }


def _mean(values: float | list[float] | None) -> float | None:
    return None if values is None else float(np.mean(values))


def _least(values: float | list[float] | None) -> float | None:
    return None if values is None else float(np.min(values))
