"""What clipping the examples one by one buys: the same (ε, δ) for one example replaced, instead of a whole device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wflmc import channel
from wflmc.channel import Link
from wflmc.evaluation import exact_w2_sq
from wflmc.planning import plan_many
from wflmc.privacy import Privacy
from wflmc.studies.rows import Row


@dataclass(frozen=True)
class RecordSetting:
    """Figure 6's setting at 30 dB, with δ = 0.01 and a clip of 9 per example beside ℓ = 30 per device."""

    posterior: Any
    snr_db: float = 30.0
    delta: float = 0.01
    clip: float = 30.0
    example_clip: float = 9.0
    burn_in: int = 50
    samples: int = 50
    channels: int = 10

    def promises(self, epsilon: float) -> dict[str, Privacy]:
        """The promises that are compared, by the name of their curve."""
        given = epsilon, self.delta, self.clip
        return {
            "device, paper": Privacy(*given, "paper"),
            "device, exact": Privacy(*given),
            "record, exact": Privacy(*given, unit="record", example_clip=self.example_clip),
        }


EPSILONS: NDArray[np.float64] = np.arange(1.0, 20.5, 1.0)


def record_study(setting: RecordSetting, advance: Callable[[int], None]) -> dict[str, list[Row]]:
    """`record`: exact W2², worst after burn-in, mean over channels; `record_budget`: Σ 2(αℓ)²/N0 that may be spent."""
    posterior, K = setting.posterior, setting.posterior.devices
    links = [Link(channel.rayleigh(0.01), setting.snr_db, seed=seed) for seed in range(setting.channels)]
    distances, budgets = [], []
    for done, epsilon in enumerate(map(float, EPSILONS), 1):
        for name, promise in setting.promises(epsilon).items():
            plans = plan_many(
                posterior,
                links,
                promise,
                step_size=0.4 / (posterior.mu + posterior.L),
                burn_in=setting.burn_in,
                samples=setting.samples,
            )
            worst = np.array([exact_w2_sq(posterior, plan)[setting.burn_in :].max() for plan in plans])
            error = float(worst.std(ddof=1) / np.sqrt(worst.size)) if worst.size > 1 else None
            distances.append(Row("record", name, epsilon, float(worst.mean()), error))
            reach = (setting.clip / promise.sensitivity(K)[0]) ** 2
            budgets.append(Row("record_budget", name, epsilon, float(promise.budget(K)[0] * reach), None))
        advance(done)
    return {"record": distances, "record_budget": budgets}
