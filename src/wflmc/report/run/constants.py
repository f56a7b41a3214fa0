"""What the explorer starts from: the constants of a run."""

from __future__ import annotations

from typing import Any

import numpy as np

from wflmc.report.run.files import Run


def constants(run: Run) -> dict[str, Any] | None:
    """What a reader may change, as plain data: of unlike devices the least; None where plan or scenario are missing."""
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
        "step_size": c.step_size,
        "clip": _least(privacy.clip),
        "example_clip": _least(privacy.example_clip),
        "epsilon": _least(privacy.epsilon),
        "delta": _least(privacy.delta),
        "snr_db": _least(link.snr_db),
        "power": _least(link.power),
        "noise_power": link.noise_power,
        "accountant": privacy.accountant,
        "bound": run.scenario.policy.bound,
        "unit": privacy.unit,
    }


def _least(values: float | list[float] | None) -> float | None:
    return None if values is None else float(np.min(values))
