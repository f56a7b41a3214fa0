"""What an audit reports: the findings of all tests, against what the plan claims."""

from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from wflmc.apps.audit.attack import AttackQuestion
from wflmc.apps.audit.error_rates import epsilon_by_counting, mu_lower, rate_upper
from wflmc.apps.audit.summation import Summation
from wflmc.privacy import epsilon_spent

CLAIM_TOLERANCE = 1e-9
"""Relative, of what a proven number may be above the claimed one by rounding alone."""
SCOPE = (
    "This audits this software's simulation on this plan: it can find leaks, and "
    "cannot prove that there are none."
)
"""Printed below every report."""


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
    """Trials of − taken for +, at the balanced threshold."""
    false_negatives: int
    """Trials of + taken for −, at the balanced threshold."""
    fpr_upper: float
    """Upper bound on the rate of false positives."""
    fnr_upper: float
    """Upper bound on the rate of false negatives."""
    mu_claimed: float
    """√(2 Σ loss) of this device over these rounds, by the plan."""
    mu_lower: float
    """What the error rates prove of it, given that its trade-off curve is Gaussian."""
    epsilon_claimed: float
    """ε that belongs to `mu_claimed`."""
    epsilon_gaussian: float
    """ε that belongs to `mu_lower`."""
    epsilon_counting: float
    """ε that the error rates at a second threshold prove with no assumption."""

    @property
    def flagged(self) -> bool:
        """Return whether the attack proves more than the plan claims.

        Either bound suffices: that on μ, which takes the trade-off curve to be
        Gaussian, or that on ε by counting, which assumes nothing. A relative excess of
        1e-9 is taken for rounding.
        """
        largest_epsilon = self.epsilon_claimed * (1 + CLAIM_TOLERANCE)
        largest_mu = self.mu_claimed * (1 + CLAIM_TOLERANCE)
        return self.epsilon_counting > largest_epsilon or self.mu_lower > largest_mu

    @property
    def excess(self) -> float:
        """Return how far above the claim the proof reaches, in units of μ.

        It is the proven less the claimed μ, and mostly negative. It ranks findings of
        several devices, of which the largest excess is the one that a report names; a
        flag does not depend on it.
        """
        return self.mu_lower - self.mu_claimed

    @classmethod
    def of(
        cls,
        test: AttackQuestion,
        errors: NDArray[np.int_],
        trials: int,
        *,
        delta: float,
        risk: float,
    ) -> Self:
        """Return what the errors of a test prove.

        A quarter of the risk is for each of four rates: both rates of a threshold hold
        together, and both thresholds do.

        Args:
            test: and what the plan claims of it.
            errors: numbers of trials [threshold, kind]: at the balanced threshold and
                at the one for counting, − taken for + and + taken for −.
            trials: of each data set.
            delta: δ at which ε is stated.
            risk: probability to be wrong.
        """
        rates = rate_upper(errors, trials, risk / 4)
        balanced_rates, counting_rates = rates
        fpr_upper = float(balanced_rates[0])
        fnr_upper = float(balanced_rates[1])
        proven_mu = mu_lower(fpr_upper, fnr_upper)
        false_positive = float(counting_rates[0])
        false_negative = float(counting_rates[1])
        counted_epsilon = epsilon_by_counting(false_positive, false_negative, delta)
        losses = [test.mu**2 / 2, proven_mu**2 / 2]
        claimed_epsilon, proven_epsilon = epsilon_spent(losses, delta).tolist()
        return cls(
            name=test.name,
            device=test.device,
            rounds=test.rounds,
            trials=2 * trials,
            false_positives=int(errors[0, 0]),
            false_negatives=int(errors[0, 1]),
            fpr_upper=fpr_upper,
            fnr_upper=fnr_upper,
            mu_claimed=test.mu,
            mu_lower=proven_mu,
            epsilon_claimed=claimed_epsilon,
            epsilon_gaussian=proven_epsilon,
            epsilon_counting=counted_epsilon,
        )


@dataclass(frozen=True)
class AuditReport:
    """All attacks on a plan, against what it claims for its worst device.

    Both lower bounds hold together at the stated confidence, all attacks together.
    """

    device: int
    """The device that most attacks are on."""
    epsilon: float
    """ε that the plan claims for this device, by the exact accountant and without
    earlier spending."""
    delta: float
    """δ at which ε is stated."""
    loss: float
    """Privacy loss that the plan claims for this device, all rounds together."""
    unit: str
    """What is hidden: a device or a record."""
    adjacency: str
    """What neighbouring data sets are."""
    confidence: float
    tests: tuple[Finding, ...]
    sums: tuple[Summation, ...] = ()
    """What searches for float32 sums that part by too much have found."""

    @property
    def flagged(self) -> tuple[Finding, ...]:
        """Return the findings that prove more than is claimed.

        Sums without noise are not among them: whether these change by more than is
        claimed is in `sums`, and `consistent` takes both into account. For correct code
        there is a flag with a probability of at most one minus the confidence.
        """
        return tuple(finding for finding in self.tests if finding.flagged)

    @property
    def consistent(self) -> bool:
        """Return whether nothing contradicts what the plan claims.

        No attack proves more than is claimed, and no float32 sum changes by more than
        the sensitivity that noise is scaled to. It does not mean that there are no
        leaks: another attack may find one.
        """
        has_flagged_sum = any(summation.flagged for summation in self.sums)
        return not self.flagged and not has_flagged_sum

    @property
    def epsilon_lower(self) -> float:
        """Return the largest ε proven of the attacked device.

        It holds given that the trade-off curve is Gaussian, and for all tests together
        at the stated confidence. Findings on other devices do not count; without any
        finding on this one it is 0.
        """
        return self._largest("epsilon_gaussian")

    @property
    def epsilon_lower_counting(self) -> float:
        """Return the largest ε proven of the attacked device with no assumption.

        Counting alone cannot prove more than about 12 with a million trials, however
        much leaks. Findings on other devices do not count; without any finding on this
        one it is 0.
        """
        return self._largest("epsilon_counting")

    @property
    def ratio(self) -> float | None:
        """Return ε proven over ε claimed.

        Close to 1 the claim is tight; above 1 it is refuted. Below 1 the claim about a
        part of the rounds, or about another device, may still be refuted: `consistent`
        says whether one is. None where nothing is claimed to leak.
        """
        return self.epsilon_lower / self.epsilon if self.epsilon > 0 else None

    @property
    def verdict(self) -> str:
        """Return the result in one sentence, as the command line prints it.

        If something contradicts the plan it begins with BROKEN, and names the attack
        with the largest excess, or else the float32 sum that changes by most.
        """
        percent = 100 * self.confidence
        conditions = f"({self.adjacency}, {percent:g} % confidence)"
        if self.consistent:
            proven = f"ε ≥ {self.epsilon_lower:.4g} {conditions}"
            claimed = f"the plan claims {self.epsilon:.4g}"
            return f"No attack found more than {proven}; {claimed}."
        if not self.flagged:
            return self._broken_sum()
        worst = max(self.flagged, key=lambda finding: finding.excess)
        attack = f"the attack '{worst.name}' on device {worst.device}"
        proven = f"ε ≥ {worst.epsilon_gaussian:.4g} {conditions}"
        claimed = f"for which the plan claims {worst.epsilon_claimed:.4g}"
        return f"BROKEN: {attack} proves {proven} in {worst.rounds} rounds, {claimed}."

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, as `wflmc audit --json` prints it.

        `claimed` has what the plan claims of the attacked device, `tests` and `sums`
        the fields of every finding and whether it is flagged; `trials` is the largest
        number of trials of a test.
        """
        claimed = {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "loss": self.loss,
            "device": self.device,
            "unit": self.unit,
            "adjacency": self.adjacency,
            "accountant": "exact",
        }
        tests = []
        for finding in self.tests:
            fields = asdict(finding)
            fields["flagged"] = finding.flagged
            tests.append(fields)
        trials = [finding.trials for finding in self.tests]
        sums = []
        for summation in self.sums:
            fields = asdict(summation)
            fields["flagged"] = summation.flagged
            fields["text"] = str(summation)
            sums.append(fields)
        return {
            "claimed": claimed,
            "epsilon_lower": self.epsilon_lower,
            "epsilon_lower_counting": self.epsilon_lower_counting,
            "ratio": self.ratio,
            "consistent": self.consistent,
            "confidence": self.confidence,
            "trials": max(trials, default=0),
            "tests": tests,
            "sums": sums,
        }

    def __str__(self) -> str:
        return f"{self.verdict}\n{SCOPE}"

    def _largest(self, field: str) -> float:
        """Return the largest value of a field, over findings on the attacked device."""
        own_tests = [test for test in self.tests if test.device == self.device]
        return max((getattr(test, field) for test in own_tests), default=0.0)

    def _broken_sum(self) -> str:
        """Return the verdict on the sum that changes by most."""
        worst = max(self.sums, key=lambda summation: summation.ratio)
        terms = f"{worst.terms:,} terms of float32"
        change = f"{worst.ratio:.6g} times as far as the plan claims"
        return (
            f"BROKEN: in the {worst.name}, {terms}, one change of what is hidden moves "
            f"what arrives {change} ({self.adjacency})."
        )
