"""Audits: all attacks on a plan, or those on a model; from their counted errors to what these prove, and a report."""

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Self

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from wflmc.apps.audit import attack as kinds
from wflmc.apps.audit.attack import (
    MAIN_SHARE,
    PARTS,
    Attack,
    AttackQuestion,
    Target,
    attack_target,
)
from wflmc.apps.audit.summation import Summation, attack_sums
from wflmc.planning import Plan
from wflmc.posterior import Posterior, Regression
from wflmc.privacy import epsilon_spent
from wflmc.support.errors import InputError
from wflmc.support.keys import named

Progress = Callable[[int, int], None]
Sums = tuple[Summation, ...]

ATTACKS = ("constant", "turning", "runs", "record", "devices", "model", "summation")
WORK = 2 * 10**8
"""Device-rounds that the smaller attacks may take; they make do with fewer trials where there are many devices."""
SCOPE = "This audits this software's simulation on this plan: it can find leaks, and cannot prove that there are none."


def rate_upper(errors: ArrayLike, trials: int, risk: float) -> NDArray[np.float64]:
    """Return Clopper and Pearson's upper bound on a rate: too low with a probability of at most `risk`.

    >>> round(float(rate_upper(0, 100, 0.05)), 4)  # the "rule of three"
    0.0295
    """
    seen = np.asarray(errors, dtype=float)
    return np.where(
        seen >= trials,
        1.0,
        special.betaincinv(seen + 1, np.maximum(trials - seen, 0.5), 1 - risk),
    )


def mu_lower(false_positive: float, false_negative: float) -> float:
    """Return the least μ of any Gaussian trade-off curve that allows a test with these error rates; 0 if all do."""
    return max(
        0.0,
        -float(special.ndtri(false_positive)) - float(special.ndtri(false_negative)),
    )


def epsilon_by_counting(
    false_positive: float, false_negative: float, delta: float
) -> float:
    """Return the least ε for which an (ε, δ)-private mechanism allows a test with these error rates, whatever its law.

    >>> round(epsilon_by_counting(1e-5, 1e-5, 0.01), 2)
    11.5
    """
    pairs = ((false_positive, false_negative), (false_negative, false_positive))
    return max(
        [
            0.0,
            *(
                float(np.log((1 - delta - one) / other))
                for one, other in pairs
                if one < 1 - delta
            ),
        ]
    )


def largest_mu(trials: int, risk: float) -> float:
    """Return the largest μ that a test can prove, by making no error in `trials` of each kind."""
    return mu_lower(*rate_upper([0, 0], trials, risk / 2))


def counting_threshold(mu: float, trials: int, delta: float, risk: float) -> float:
    """Return where to cut a statistic N(±μ/2, 1) so that counting alone is expected to prove most.

    The errors that μ leads one to expect decide, not those that are seen.
    """
    cuts = np.linspace(0.0, mu / 2 + 6, 601)
    bounds = [
        rate_upper(trials * special.ndtr(x), trials, risk / 2)
        for x in (-cuts - mu / 2, cuts - mu / 2)
    ]
    return float(cuts[np.argmax(np.maximum(1 - delta - bounds[1], 1e-300) / bounds[0])])


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
    def of(
        cls,
        test: AttackQuestion,
        wrong: NDArray[np.int_],
        trials: int,
        delta: float,
        risk: float,
    ) -> Self:
        """Return what errors prove at the balanced threshold and at the one for counting, half of the risk for each.

        Args:
            wrong: trials of − taken for +, and of + taken for −, at both thresholds, [2, 2].
            trials: of each data set.
        """
        rates, tail = rate_upper(
            wrong, trials, risk / 4
        )  # both rates of a threshold hold together
        upper, errors = (
            (float(rates[0]), float(rates[1])),
            (int(wrong[0, 0]), int(wrong[0, 1])),
        )
        lower, counted = (
            mu_lower(*upper),
            epsilon_by_counting(float(tail[0]), float(tail[1]), delta),
        )
        claimed, proven = epsilon_spent([test.mu**2 / 2, lower**2 / 2], delta).tolist()
        about = (test.name, test.device, test.rounds, 2 * trials)
        return cls(*about, *errors, *upper, test.mu, lower, claimed, proven, counted)


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
        return max(
            (
                test.epsilon_gaussian
                for test in self.tests
                if test.device == self.device
            ),
            default=0.0,
        )

    @property
    def epsilon_lower_counting(self) -> float:
        """The largest ε proven of the device with no assumption."""
        return max(
            (
                test.epsilon_counting
                for test in self.tests
                if test.device == self.device
            ),
            default=0.0,
        )

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
        claimed = {
            name: getattr(self, name)
            for name in ("epsilon", "delta", "loss", "device", "unit", "adjacency")
        }
        proven = (
            "epsilon_lower",
            "epsilon_lower_counting",
            "ratio",
            "consistent",
            "confidence",
        )
        return {
            "claimed": {**claimed, "accountant": "exact"},
            **{name: getattr(self, name) for name in proven},
            "trials": max((test.trials for test in self.tests), default=0),
            "tests": [{**asdict(test), "flagged": test.flagged} for test in self.tests],
            "sums": [
                {**asdict(result), "flagged": result.flagged, "text": str(result)}
                for result in self.sums
            ],
        }

    def __str__(self) -> str:
        return f"{self.verdict}\n{SCOPE}"


def audit(
    key: jax.Array,
    plan: Plan,
    posterior: Posterior | None = None,
    *,
    trials: int = 1_000_000,
    confidence: float = 0.99,
    delta: ArrayLike | None = None,
    device: int | None = None,
    csi_error: float | None = None,
    attacks: Collection[str] = ATTACKS,
    progress: Progress | None = None,
) -> AuditReport:
    """Attack a plan as a server would that knows all but one device's data, and report what that proves.

    The canary's gradient is far above the clip, + in half of the trials and its neighbour's in the other half: −, or
    nothing where the promise is about devices or examples that are not there. Transcripts come from the sampler's own
    kernel. The main test uses all rounds and has most of the probability to be wrong. Others let the canary's sign
    vary, take differences of rounds, look at rounds in which the device is said to be silent, try every device, and go
    through whole runs of `wflmc.sample`. One needs no noise: it searches for neighbours whose sums in floating point
    part by more than they may, see `wflmc.audit.summation`.

    Args:
        key: seeds signs and noise.
        plan: what is attacked.
        posterior: attack a model of this kind as well, see `audit_model`.
        trials: of the main test; others take a tenth to a quarter of them.
        confidence: of both lower bounds together, all tests together.
        delta: where the plan has none, or to state ε at another one.
        device: whom to attack; by default the one that the plan claims to lose most.
        csi_error: audit the plan as if devices knew their channels no better than this, whatever it was made for.
        attacks: which of `ATTACKS`; all that the plan leaves room for by default.
        progress: called with (done, total).

    Returns:
        What every attack proves, and a verdict.
    """
    risk = _risk(trials, confidence)
    if not attacks or set(attacks) - set(ATTACKS):
        raise InputError("attacks", tuple(attacks), f"some of {', '.join(ATTACKS)}")
    target = attack_target(plan, delta, device, csi_error)
    half, k = trials // 2, target.device
    part, runs, each = (
        -(-half // PARTS),
        _affordable(plan, half // 5, 50_000),
        _affordable(plan, half // 10, 10_000),
    )
    possible: dict[str, tuple[Callable[[Target, int, float], Attack], int, float]] = {
        "constant": (kinds.constant, half, risk),
        "turning": (partial(kinds.turning, key), part, risk),
        "runs": (kinds.by_sampler, runs, risk),
        "devices": (kinds.every_device, each, risk / plan.devices),
    }
    sums: Sums = ()
    if np.isfinite(plan.example_clip[k] + plan.clip[k]):
        possible["record"] = kinds.full_device, part, risk
    model = None if posterior is None else _known_model(posterior, plan)
    if model is not None and target.signal[:, k].any():
        possible["model"] = partial(kinds.by_model, model), runs, risk
        sums = tuple(attack_sums(target, model)) if "summation" in attacks else ()
    chosen = [
        possible[name] for name in ATTACKS if name in attacks and name in possible
    ]
    return _report(
        key,
        target,
        [make(target, n, _mu_limit(n, r)) for make, n, r in chosen],
        risk,
        progress,
        sums,
    )


def audit_model(
    key: jax.Array,
    plan: Plan,
    posterior: Posterior,
    *,
    trials: int = 100_000,
    confidence: float = 0.99,
) -> AuditReport:
    """Attack a model's own gradients and clipping, in whole runs of `wflmc.sample` on two canary data sets.

    Args:
        posterior: says which kind of model, and how many devices; its data are not used.
        key, plan, trials, confidence: as of `audit`.
    """
    risk, half = _risk(trials, confidence), trials // 2
    target, model = attack_target(plan), _known_model(posterior, plan)
    return _report(
        key,
        target,
        [kinds.by_model(model, target, half, _mu_limit(half, risk))],
        risk,
        None,
    )


def audit_pair(
    key: jax.Array,
    plan: Plan,
    plus: Posterior,
    minus: Posterior,
    *,
    device: int,
    trials: int = 100_000,
    confidence: float = 0.99,
    delta: ArrayLike | None = None,
    reach: float = 1e-6,
    progress: Progress | None = None,
) -> AuditReport:
    """Attack two custom posteriors that differ in what `device` holds: for models that wflmc does not know.

    Args:
        plus, minus: the neighbours.
        reach: how far θ may go from 0; gradients should hardly change over this.
        key, plan, device, trials, confidence, delta, progress: as of `audit`.
    """
    risk, half = _risk(trials, confidence), trials // 2
    target = attack_target(plan, delta, device)
    for side in (plus, minus):
        _check_devices(side, plan)
    attack = kinds.by_pair(
        target, (plus, minus), reach, half, _mu_limit(half, risk), "pair of data sets"
    )
    return _report(key, target, [attack], risk, progress)


def _risk(trials: int, confidence: float) -> float:
    """Check what was asked for; return the probability to be wrong."""
    if trials < 1000:
        raise InputError("trials", trials, "at least 1000")
    if not 0.5 <= confidence < 1:
        raise InputError("confidence", confidence, "at least 0.5 and below 1")
    return 1 - confidence


def _check_devices(posterior: Posterior, plan: Plan) -> None:
    if posterior.devices != plan.devices:
        raise InputError(
            "posterior",
            f"{posterior.devices} devices",
            f"one of the plan's {plan.devices} devices",
        )


def _known_model(posterior: Posterior, plan: Plan) -> Regression:
    """Return the posterior, unless it is one for which no canary is known."""
    if not isinstance(posterior, Regression):
        raise InputError(
            "posterior",
            type(posterior).__name__,
            "Gaussian or softmax; for others use audit_pair",
        )
    _check_devices(posterior, plan)
    return posterior


def _affordable(plan: Plan, wanted: int, most: int) -> int:
    """Return how many trials an attack with expensive ones has, at least 500."""
    return int(
        np.clip(
            WORK / (len(plan.rounds) * plan.devices), 500, min(most, max(wanted, 500))
        )
    )


def _mu_limit(trials: int, risk: float) -> float:
    """Return the μ that a test of so many trials should have to deal with: one that leaves room to prove more."""
    return 0.6 * largest_mu(trials, risk / (2 * MAIN_SHARE))


def _report(
    key: jax.Array,
    target: Target,
    attacks: list[Attack],
    risk: float,
    progress: Progress | None,
    sums: Sums = (),
) -> AuditReport:
    """Run all attacks, share the probability to be wrong among their tests, and report."""
    shares = sum(test.share for attack in attacks for test in attack.tests)
    done, work, findings = 0, sum(attack.trials for attack in attacks), []
    for number, attack in enumerate(attacks):
        attack_key = jax.random.fold_in(named(key, "attack"), number)
        how = [
            (float(target.delta[test.device]), risk * test.share / shares)
            for test in attack.tests
        ]
        cuts = np.zeros(
            (2, 1, len(how))
        )  # the balanced threshold, and the one for counting
        for at, test in enumerate(attack.tests):
            cuts[1, 0, at] = counting_threshold(
                test.visible_mu, attack.trials, *how[at]
            )
        wrong = np.zeros((2, 2, len(how)), dtype=int)
        for first in range(0, attack.trials, attack.chunk):
            plus, minus = attack.run(attack_key, first, attack.chunk)
            # Whatever cannot be compared counts as an error.
            wrong += np.stack(
                [(~(minus <= cuts)).sum(1), (~(plus > cuts)).sum(1)], axis=1
            )
            done += attack.chunk
            if progress is not None:
                progress(done, work)
        results = [
            Finding.of(test, wrong[..., at], attack.trials, *how[at])
            for at, test in enumerate(attack.tests)
        ]
        if (
            len({result.device for result in results}) > 1
        ):  # of every device: those that prove too much, or the nearest
            nearest = max(results, key=lambda result: result.excess)
            results = [result for result in results if result.flagged] or [nearest]
        findings += results
    loss, delta = (
        float(target.loss[:, target.device].sum()),
        float(target.delta[target.device]),
    )
    claimed, promise = (
        (target.device, float(epsilon_spent(loss, delta)), delta, loss),
        target.plan.privacy,
    )
    return AuditReport(
        *claimed, promise.unit, promise.adjacency, 1 - risk, tuple(findings), sums
    )
