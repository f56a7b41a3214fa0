"""From counted errors of an attack to what it proves, and a report of all attacks on a plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from wflmc.audit.attack import Question
from wflmc.audit.summation import MORE, Summation
from wflmc.privacy import epsilon_spent

Array = NDArray[np.float64]


class Errors(NamedTuple):
    """Wrong guesses of a test between two neighbouring data sets, each tried `trials` times."""

    false_positives: int
    """Trials of − that were taken for +."""
    false_negatives: int
    """Trials of + that were taken for −."""
    trials: int
    """Of each of the two."""

    def upper(self, risk: float) -> tuple[float, float]:
        """Return upper bounds on both rates that hold together but for a probability of `risk`, half of it for each."""
        low, high = rate_upper([self.false_positives, self.false_negatives], self.trials, risk / 2).tolist()
        return low, high


def rate_upper(errors: ArrayLike, trials: int, risk: float) -> Array:
    """Return Clopper and Pearson's upper bound on a rate: too low with a probability of at most `risk`.

    >>> round(float(rate_upper(0, 100, 0.05)), 4)  # the "rule of three"
    0.0295
    """
    seen = np.asarray(errors, dtype=float)
    return np.where(seen >= trials, 1.0, special.betaincinv(seen + 1, np.maximum(trials - seen, 0.5), 1 - risk))


def mu_lower(false_positive: float, false_negative: float) -> float:
    """Return the least μ of any Gaussian trade-off curve that allows a test with these error rates; 0 if all do."""
    return max(0.0, -float(special.ndtri(false_positive)) - float(special.ndtri(false_negative)))


def epsilon_by_counting(false_positive: float, false_negative: float, delta: float) -> float:
    """Return the least ε for which an (ε, δ)-private mechanism allows a test with these error rates, whatever its law.

    >>> round(epsilon_by_counting(1e-5, 1e-5, 0.01), 2)
    11.5
    """
    pairs = ((false_positive, false_negative), (false_negative, false_positive))
    return max([0.0, *(float(np.log((1 - delta - one) / other)) for one, other in pairs if one < 1 - delta)])


def largest_mu(trials: int, risk: float) -> float:
    """Return the largest μ that a test can prove, by making no error in `trials` of each kind."""
    return mu_lower(*Errors(0, 0, trials).upper(risk))


def counting_threshold(mu: float, trials: int, delta: float, risk: float) -> float:
    """Return where to cut a statistic N(±μ/2, 1) so that counting alone is expected to prove most.

    The errors that μ leads one to expect decide, not those that are seen.
    """
    cuts = np.linspace(0.0, mu / 2 + 6, 601)
    bounds = [rate_upper(trials * special.ndtr(x), trials, risk / 2) for x in (-cuts - mu / 2, cuts - mu / 2)]
    proven = np.log(np.maximum(1 - delta - bounds[1], 1e-300) / bounds[0])
    return float(cuts[np.argmax(proven)])


SCOPE = "This audits this software's simulation on this plan: it can find leaks, and cannot prove that there are none."


@dataclass(frozen=True)
class Finding:
    """One attack on one device, and what its errors prove."""

    name: str
    device: int
    rounds: int
    """Rounds of the transcript that the attack uses."""
    trials: int
    """Half of them with +, half with −."""
    false_positives: int
    false_negatives: int
    fpr_upper: float
    fnr_upper: float
    mu_claimed: float
    """√(2 Σ loss) of this device over these rounds, by the plan."""
    mu_lower: float
    """What the error rates prove of it, given that its trade-off curve is Gaussian."""
    epsilon_claimed: float
    epsilon_gaussian: float
    """ε that belongs to `mu_lower`."""
    epsilon_counting: float
    """ε that the error rates at a second threshold prove with no assumption."""

    @property
    def flagged(self) -> bool:
        """Whether the attack proves more than the plan claims, by either bound."""
        counted = self.epsilon_counting > self.epsilon_claimed * (1 + 1e-9)
        return counted or self.mu_lower > self.mu_claimed * (1 + 1e-9)

    @property
    def excess(self) -> float:
        """How far above the claim the proof reaches; mostly negative."""
        return self.mu_lower - self.mu_claimed

    @classmethod
    def of(cls, test: Question, balanced: Errors, tail: Errors, delta: float, risk: float) -> Finding:
        """Return what errors prove at the balanced threshold and at the one for counting, half of the risk for each."""
        upper = balanced.upper(risk / 2)
        lower = mu_lower(*upper)
        claimed, proven = epsilon_spent([test.mu**2 / 2, lower**2 / 2], delta).tolist()
        errors = 2 * balanced.trials, balanced.false_positives, balanced.false_negatives
        counted = epsilon_by_counting(*tail.upper(risk / 2), delta)
        return cls(test.name, test.device, test.rounds, *errors, *upper, test.mu, lower, claimed, proven, counted)


@dataclass(frozen=True)
class AuditReport:
    """All attacks on a plan, against what it claims for its worst device.

    Both lower bounds hold together at the stated confidence, all attacks together.
    """

    device: int
    epsilon: float
    """ε that the plan claims for this device, by the exact accountant and without earlier spending."""
    delta: float
    loss: float
    unit: str
    adjacency: str
    confidence: float
    tests: tuple[Finding, ...]
    sums: tuple[Summation, ...] = ()

    @property
    def flagged(self) -> tuple[Finding, ...]:
        """The attacks that prove more than is claimed."""
        return tuple(test for test in self.tests if test.flagged)

    @property
    def consistent(self) -> bool:
        """Whether no attack proves more than is claimed, and no sum changes by more."""
        return not self.flagged and not any(result.flagged for result in self.sums)

    @property
    def epsilon_lower(self) -> float:
        """The largest ε proven of the device, given that its trade-off curve is Gaussian."""
        return max((test.epsilon_gaussian for test in self.tests if test.device == self.device), default=0.0)

    @property
    def epsilon_lower_counting(self) -> float:
        """The largest ε proven of the device with no assumption."""
        return max((test.epsilon_counting for test in self.tests if test.device == self.device), default=0.0)

    @property
    def ratio(self) -> float | None:
        """ε proven over ε claimed; None where nothing is claimed to leak."""
        return self.epsilon_lower / self.epsilon if self.epsilon > 0 else None

    @property
    def verdict(self) -> str:
        """One plain sentence."""
        sure = f"({self.adjacency}, {100 * self.confidence:g} % confidence)"
        if self.consistent:
            return f"No attack found more than ε ≥ {self.epsilon_lower:.4g} {sure}; the plan claims {self.epsilon:.4g}."
        if not self.flagged:
            sums = max(self.sums, key=lambda result: result.ratio)
            moved = f"one change of what is hidden moves what arrives {sums.ratio:.6g} times as far as the plan claims"
            return f"BROKEN: in the {sums.name}, {sums.terms:,} terms of float32, {moved} ({self.adjacency})."
        worst = max(self.flagged, key=lambda test: test.excess)
        return (
            f"BROKEN: the attack '{worst.name}' on device {worst.device} proves ε ≥ {worst.epsilon_gaussian:.4g} "
            f"{sure} in {worst.rounds} rounds, for which the plan claims {worst.epsilon_claimed:.4g}."
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, as `wflmc audit --json` prints it."""
        claimed = {name: getattr(self, name) for name in ("epsilon", "delta", "loss", "device", "unit", "adjacency")}
        proven = ("epsilon_lower", "epsilon_lower_counting", "ratio", "consistent", "confidence")
        return {
            "claimed": {**claimed, "accountant": "exact"},
            **{name: getattr(self, name) for name in proven},
            "trials": max((test.trials for test in self.tests), default=0),
            "tests": [{**asdict(test), "flagged": test.flagged} for test in self.tests],
            "sums": [{**asdict(result), "flagged": result.flagged, "text": str(result)} for result in self.sums],
        }

    def __str__(self) -> str:
        lines = [
            f"  {test.name}, device {test.device}, {test.rounds} rounds, {test.trials} trials: ε ≥ "
            f"{test.epsilon_gaussian:.4g} (counting alone {test.epsilon_counting:.4g}), claimed "
            f"{test.epsilon_claimed:.4g}{MORE * test.flagged}"
            for test in self.tests
        ]
        return "\n".join([self.verdict, *lines, *(f"  {result}" for result in self.sums), SCOPE])
