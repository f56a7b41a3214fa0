"""Audits: all attacks on a plan, or those on a model, from transcripts to a report."""

from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike

from wflmc.apps.audit import attack as attacks_on
from wflmc.apps.audit.attack import (
    MAIN_RISK_WEIGHT,
    MAIN_TRIALS_FACTOR,
    Attack,
    SideStatistics,
)
from wflmc.apps.audit.error_rates import counting_threshold, largest_mu
from wflmc.apps.audit.report import AuditReport, Finding
from wflmc.apps.audit.summation import Summation, attack_sums
from wflmc.apps.audit.target import Target, attack_target
from wflmc.dynamics import Array
from wflmc.planning import Plan
from wflmc.posterior import Posterior, Regression
from wflmc.privacy import epsilon_spent
from wflmc.support.errors import InputError
from wflmc.support.keys import named

Progress = Callable[[int, int], None]
"""Called with the number of trials that are done, and of all trials."""
Sums = tuple[Summation, ...]

ATTACKS = ("constant", "turning", "runs", "record", "devices", "model", "summation")
"""Names of the attacks, in the order of a report."""
MAX_DEVICE_ROUNDS = 2 * 10**8
"""Number of device-rounds, over all trials, that the smaller attacks may take. They
make do with fewer trials where there are many devices."""
MIN_TRIALS = 1000
"""Fewer trials prove hardly anything."""
MIN_EXPENSIVE_TRIALS = 500
"""Trials of each data set that the smaller attacks have at least."""
MAX_RUN_TRIALS = 50_000
"""Trials of each data set that attacks on whole runs have at most."""
MAX_DEVICES_TRIALS = 10_000
"""Trials of each data set that the attack on every device has at most."""
ATTACKED_FRACTION = 0.6
"""μ of the attacked part of the rounds over the largest one that could be proven: a
plan that leaks more than it claims is then found out before errors run out."""


class PlannedAttack(NamedTuple):
    """An attack that a plan leaves room for."""

    build: Callable[[Target, int, float], Attack]
    """From the target, the trials and the largest μ of the rounds that are used."""
    trials: int
    """Of each data set."""
    risk: float
    """Probability to be wrong of the whole audit; of attacks on every device, that over
    their number. It decides how large a μ is attacked."""

    def on(self, target: Target) -> Attack:
        """Return the attack on a target.

        Args:
            target: the plan and the device that is attacked.
        """
        return self.build(target, self.trials, _mu_limit(self.trials, self.risk))


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
    """Attack a plan as a server that knows all data but one device's, and report.

    The canary's gradient is far above the clip, + in half of the trials and its
    neighbour's in the other half: −, or nothing where the promise is about devices or
    examples that are not there. Transcripts come from the sampler's own kernel. The
    main test uses all rounds and has most of the probability to be wrong. Others let
    the canary's sign vary, take differences of rounds, look at rounds in which the
    device is claimed to be silent, try every device, and go through whole runs of
    `wflmc.sample`. One needs no noise: it searches for neighbours whose sums in
    floating point part by more than they may (`wflmc.apps.audit.summation`).

    Args:
        key: seeds signs and noise.
        plan: what is attacked.
        posterior: attacks a model of this kind as well, see `audit_model`.
        trials: of the main test, of both data sets together; others take a quarter of
            them or fewer.
        confidence: of both lower bounds together, all tests together.
        delta: δ at which ε is stated; None for that of the plan.
        device: which device to attack; None for the one that the plan claims to lose
            most.
        csi_error: audits the plan as if devices knew their channels no better than
            this, whatever it was made for.
        attacks: which of `ATTACKS`; all that the plan leaves room for by default.
        progress: called with (trials that are done, all trials).

    Returns:
        What every attack proves, and a verdict.

    Raises:
        InputError: if an argument is outside its range, or if the plan promises nothing
            because its scheme does not clip.
    """
    risk = _checked_risk(trials, confidence)
    if not attacks or set(attacks) - set(ATTACKS):
        raise InputError("attacks", tuple(attacks), f"some of {', '.join(ATTACKS)}")
    target = attack_target(plan, delta, device, csi_error)
    possible = _plan_attacks(key, target, trials // 2, risk)
    sums: Sums = ()
    model = None if posterior is None else _checked_model(posterior, plan)
    if model is not None and target.signal[:, target.device].any():
        runs = possible["runs"]
        build = partial(attacks_on.by_model, model)
        possible["model"] = PlannedAttack(build, runs.trials, risk)
        if "summation" in attacks:
            sums = tuple(attack_sums(target, model))
    chosen = [
        possible[name].on(target)
        for name in ATTACKS
        if name in attacks and name in possible
    ]
    return _report(key, target, chosen, risk=risk, progress=progress, sums=sums)


def audit_model(
    key: jax.Array,
    plan: Plan,
    posterior: Posterior,
    *,
    trials: int = 100_000,
    confidence: float = 0.99,
) -> AuditReport:
    """Attack a model's own gradients and clipping.

    Whole runs of `wflmc.sample` go through the model's code, on two canary data sets
    that differ in one row of the device that the plan claims to lose most.

    Args:
        key: seeds the noise.
        plan: what is attacked.
        posterior: Gaussian or softmax; says which kind of model, and how many devices.
            Its data are not used.
        trials: of both data sets together.
        confidence: of both lower bounds together.

    Returns:
        What the attack proves, and a verdict.

    Raises:
        InputError: if an argument is outside its range, or for another model.
    """
    risk = _checked_risk(trials, confidence)
    target = attack_target(plan)
    model = _checked_model(posterior, plan)
    build = partial(attacks_on.by_model, model)
    attack = PlannedAttack(build, trials // 2, risk).on(target)
    return _report(key, target, [attack], risk=risk)


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
    """Attack two custom posteriors that differ in the data of one device.

    This is the audit of models for which wflmc knows no canary. Whoever calls it
    chooses the neighbours: the further apart their clipped gradients at θ = 0 are, the
    more the audit can prove.

    Args:
        key: seeds the noise.
        plan: what is attacked.
        plus: one of the neighbours.
        minus: the other neighbour.
        device: index of the device in which they differ.
        trials: of both posteriors together.
        confidence: of both lower bounds together.
        delta: δ at which ε is stated; None for that of the plan.
        reach: how far θ may go from 0; gradients should hardly change over this.
        progress: called with (trials that are done, all trials).

    Returns:
        What the attack proves, and a verdict.

    Raises:
        InputError: if an argument is outside its range, or if the gradients of the
            neighbours do not differ or are not finite.
    """
    risk = _checked_risk(trials, confidence)
    target = attack_target(plan, delta, device)
    for posterior in (plus, minus):
        _check_devices(posterior, plan)
    side_trials = trials // 2
    attack = attacks_on.by_pair(
        target,
        (plus, minus),
        reach=reach,
        trials=side_trials,
        mu_limit=_mu_limit(side_trials, risk),
        name="pair of data sets",
    )
    return _report(key, target, [attack], risk=risk, progress=progress)


def _plan_attacks(
    key: jax.Array,
    target: Target,
    main_trials: int,
    risk: float,
) -> dict[str, PlannedAttack]:
    """Return the attacks that need no model, by name.

    Args:
        key: seeds signs that vary.
        target: the plan and the device that is attacked.
        main_trials: of each data set, of the main test.
        risk: probability to be wrong, of the whole audit.
    """
    plan = target.plan
    kernel_trials = -(-main_trials // MAIN_TRIALS_FACTOR)
    run_trials = _affordable_trials(plan, main_trials // 5, max_trials=MAX_RUN_TRIALS)
    devices_trials = _affordable_trials(
        plan, main_trials // 10, max_trials=MAX_DEVICES_TRIALS
    )
    turning = partial(attacks_on.turning, key)
    planned = {
        "constant": PlannedAttack(attacks_on.constant, main_trials, risk),
        "turning": PlannedAttack(turning, kernel_trials, risk),
        "runs": PlannedAttack(attacks_on.by_sampler, run_trials, risk),
        "devices": PlannedAttack(
            attacks_on.every_device, devices_trials, risk / plan.devices
        ),
    }
    clips = plan.example_clip[target.device] + plan.clip[target.device]
    if np.isfinite(clips):
        planned["record"] = PlannedAttack(attacks_on.full_device, kernel_trials, risk)
    return planned


def _checked_risk(trials: int, confidence: float) -> float:
    """Check what was asked for; return the probability to be wrong."""
    if trials < MIN_TRIALS:
        raise InputError("trials", trials, f"at least {MIN_TRIALS}")
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


def _checked_model(posterior: Posterior, plan: Plan) -> Regression:
    """Return the posterior; raise for one for which no canary is known."""
    if not isinstance(posterior, Regression):
        raise InputError(
            "posterior",
            type(posterior).__name__,
            "Gaussian or softmax; for others use audit_pair",
        )
    _check_devices(posterior, plan)
    return posterior


def _affordable_trials(plan: Plan, trials: int, *, max_trials: int) -> int:
    """Return how many trials an attack with expensive ones has, at least 500."""
    device_rounds = len(plan.rounds) * plan.devices
    affordable = MAX_DEVICE_ROUNDS / device_rounds
    needed = max(trials, MIN_EXPENSIVE_TRIALS)
    upper = min(max_trials, needed)
    return int(np.clip(affordable, MIN_EXPENSIVE_TRIALS, upper))


def _mu_limit(trials: int, risk: float) -> float:
    """Return the largest μ of a test that leaves room to prove more than is claimed.

    The weights of all tests of an audit add up to less than 2 MAIN_RISK_WEIGHT: a test
    of weight 1 gets a larger part of the risk than is assumed here.

    Args:
        trials: of each data set.
        risk: probability to be wrong, of the whole audit.
    """
    return ATTACKED_FRACTION * largest_mu(trials, risk / (2 * MAIN_RISK_WEIGHT))


def _report(
    key: jax.Array,
    target: Target,
    attacks: list[Attack],
    *,
    risk: float,
    progress: Progress | None = None,
    sums: Sums = (),
) -> AuditReport:
    """Run all attacks, divide the probability to be wrong among their tests, report."""
    all_tests = [test for attack in attacks for test in attack.tests]
    total_risk_weight = sum(test.risk_weight for test in all_tests)
    total_trials = sum(attack.trials for attack in attacks)
    finished_trials = 0

    def count_trials(trials: int) -> None:
        nonlocal finished_trials
        finished_trials += trials
        if progress is not None:
            progress(finished_trials, total_trials)

    findings: list[Finding] = []
    for attack_index, attack in enumerate(attacks):
        attack_key = jax.random.fold_in(named(key, "attack"), attack_index)
        risks = [risk * test.risk_weight / total_risk_weight for test in attack.tests]
        findings += _run_attack(attack_key, attack, target, risks, count_trials)
    loss = float(target.loss[:, target.device].sum())
    delta = float(target.delta[target.device])
    privacy = target.plan.privacy
    return AuditReport(
        device=target.device,
        epsilon=float(epsilon_spent(loss, delta)),
        delta=delta,
        loss=loss,
        unit=privacy.unit,
        adjacency=privacy.adjacency,
        confidence=1 - risk,
        tests=tuple(findings),
        sums=sums,
    )


def _run_attack(
    key: jax.Array,
    attack: Attack,
    target: Target,
    risks: list[float],
    count_trials: Callable[[int], None],
) -> list[Finding]:
    """Run an attack in chunks, and return what its tests prove.

    Args:
        key: of the attack.
        attack: and its tests.
        target: says δ of every device.
        risks: probability to be wrong of every test.
        count_trials: called with the number of trials after every chunk.
    """
    deltas = [float(target.delta[test.device]) for test in attack.tests]
    # The balanced threshold, which is 0, and the one for counting.
    cuts = np.zeros((2, 1, len(attack.tests)))
    for column, test in enumerate(attack.tests):
        cuts[1, 0, column] = counting_threshold(
            test.visible_mu, attack.trials, deltas[column], risks[column]
        )
    errors = np.zeros((2, 2, len(attack.tests)), dtype=int)
    for first in range(0, attack.trials, attack.chunk):
        statistics = attack.run(key, first, attack.chunk)
        errors += _count_errors(statistics, cuts)
        count_trials(attack.chunk)
    findings = []
    for column, test in enumerate(attack.tests):
        finding = Finding.of(
            test,
            errors[..., column],
            attack.trials,
            delta=deltas[column],
            risk=risks[column],
        )
        findings.append(finding)
    return _without_unremarkable_devices(findings)


def _count_errors(statistics: SideStatistics, cuts: Array) -> np.ndarray:
    """Return the numbers of trials of − taken for +, and of + taken for −.

    Whatever cannot be compared, such as NaN, counts as an error.

    Args:
        statistics: of + and of −, [trial, test].
        cuts: thresholds [threshold, 1, test].

    Returns:
        [threshold, kind of error, test].
    """
    plus, minus = statistics
    false_positives = ~(minus <= cuts)
    false_negatives = ~(plus > cuts)
    return np.stack([false_positives.sum(1), false_negatives.sum(1)], axis=1)


def _without_unremarkable_devices(findings: list[Finding]) -> list[Finding]:
    """Return, of tests on several devices, the flagged ones or else the nearest."""
    if len({finding.device for finding in findings}) <= 1:
        return findings
    flagged = [finding for finding in findings if finding.flagged]
    return flagged or [max(findings, key=lambda finding: finding.excess)]
