"""ε by dp-accounting, to compare with: an independent implementation, by two other methods."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from wflmc.privacy.accountants import epsilon_spent


def epsilon_by_dp_accounting(losses: NDArray[np.float64], delta: float) -> dict[str, float | None]:
    """Return ε of rounds with these losses, by privacy loss distributions (`pld`) and by Rényi divergences (`rdp`).

    Rényi divergences are added up round by round. The loss distribution is that of one Gaussian mechanism with the
    sum of the losses, which is what Gaussian rounds compose to. None where dp-accounting is not installed, or where it
    has no finite answer.
    """
    total = float(losses.sum())
    if total == 0:
        return {"pld": 0.0, "rdp": 0.0}
    try:
        from dp_accounting import dp_event, rdp
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError:
        return {"pld": None, "rdp": None}
    interval = min(1e-2, max(1e-4, float(epsilon_spent(total, delta)) / 5000))
    if total / interval < 1e7:
        law = privacy_loss_distribution.from_gaussian_mechanism(
            1 / math.sqrt(2 * total), sensitivity=1.0, value_discretization_interval=interval
        )
        pld = float(law.get_epsilon_for_delta(delta))
    else:
        pld = math.inf
    accountant = rdp.RdpAccountant()
    values, counts = np.unique(losses, return_counts=True)
    for loss, count in zip(values, counts, strict=True):
        accountant.compose(dp_event.GaussianDpEvent(1 / math.sqrt(2 * loss)), int(count))
    found = {"pld": pld, "rdp": float(accountant.get_epsilon(delta))}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}
