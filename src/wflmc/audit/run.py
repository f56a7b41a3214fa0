"""Audits: all attacks on a plan, or those on a model, counted and turned into a report."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from wflmc.audit import attack as by
from wflmc.audit.attack import Attack, Statistics
from wflmc.audit.canary import canary_pair, check_kind
from wflmc.audit.report import AuditReport, Errors, Finding, counting_threshold, finding, largest_mu
from wflmc.audit.summation import Summation, attack_sums
from wflmc.audit.target import RAW, Target, aim
from wflmc.errors import InputError
from wflmc.keys import named
from wflmc.planning import Plan
from wflmc.privacy import epsilon_spent

Progress = Callable[[int, int], None]

MAIN_SHARE = 14.0
"""Share of the main test in the probability to be wrong, where each other attack's tests have 1."""
ATTACKS = ("constant", "turning", "runs", "record", "devices", "model", "summation")
WORK = 2 * 10**8
"""Device-rounds that the smaller attacks may take; they make do with fewer trials where there are many devices."""


def audit(
    key: jax.Array,
    plan: Plan,
    posterior: Any = None,
    *,
    trials: int = 1_000_000,
    confidence: float = 0.99,
    delta: ArrayLike | None = None,
    device: int | None = None,
    csi_error: float | None = None,
    attacks: Collection[str] = ATTACKS,
    progress: Progress | None = None,
) -> AuditReport:
    """Attack a plan as a server would that knows all but one device's data, and say what that proves.

    The canary's gradient is far above the clip, + in half of the trials and its neighbour's in the other half: −, or
    nothing where the promise is about devices or examples that are not there. Transcripts come from the sampler's own
    kernel. The main test listens to all rounds and has most of the probability to be wrong. Others
    let the canary's sign vary, take differences of rounds, listen while the device is said to be silent, try every
    device, and go through whole runs of `wflmc.sample`. One needs no noise: it looks for neighbours whose sums in
    floating point part by more than they may, see `wflmc.audit.summation`.

    Args:
        key: seeds signs and noise.
        posterior: attack a model of this kind as well, see `audit_model`.
        trials: of the main test; others take a tenth to a quarter of them.
        confidence: of both lower bounds together, all tests together.
        delta: where the plan has none, or to state ε at another one.
        device: whom to attack; by default the one that the plan claims to lose most.
        csi_error: audit the plan as if devices knew their channels no better than this, whatever it was made for.
        attacks: which of `ATTACKS`; all that the plan leaves room for by default.
        progress: called with (done, total).
    """
    risk = _check(trials, confidence)
    if not attacks or set(attacks) - set(ATTACKS):
        raise InputError("attacks", tuple(attacks), f"some of {', '.join(ATTACKS)}")
    target = aim(plan, delta, device, csi_error)
    if posterior is not None:
        _check_model(posterior, plan)
    half, k = trials // 2, target.device
    several, some = -(-half // by.PARTS), _whole_runs(plan, half)
    each = int(np.clip(WORK / (plan.rounds * plan.devices), 500, min(10_000, max(half // 10, 500))))
    made: dict[str, Callable[[], Attack]] = {
        "constant": lambda: by.constant(target, half, _limit(half, risk), MAIN_SHARE),
        "turning": lambda: by.turning(key, target, several, _limit(several, risk)),
        "runs": lambda: by.by_sampler(target, some, _limit(some, risk)),
        "record": lambda: by.full_device(target, several, _limit(several, risk)),
        "devices": lambda: by.every_device(target, each, _limit(each, risk / plan.devices)),
        "model": lambda: _model_attack(target, posterior, some, risk),
    }
    has_model = posterior is not None and bool(target.signal[:, k].any())
    pointless = {"record": not np.isfinite(plan.example_clip[k] + plan.clip[k]), "model": not has_model}
    listed = [make() for name, make in made.items() if name in attacks and not pointless.get(name)]
    sums = attack_sums(target, posterior) if has_model and "summation" in attacks else ()
    return _carry_out(key, target, listed, risk, progress, sums)


def audit_model(
    key: jax.Array,
    plan: Plan,
    posterior: Any,
    *,
    trials: int = 100_000,
    confidence: float = 0.99,
    delta: ArrayLike | None = None,
    device: int | None = None,
    csi_error: float | None = None,
    progress: Progress | None = None,
) -> AuditReport:
    """Attack a model's own gradients and clipping, in whole runs of `wflmc.sample` on two canary data sets.

    Args:
        posterior: says which kind of model, and how many devices; its data are not used.
    """
    risk = _check(trials, confidence)
    target = aim(plan, delta, device, csi_error)
    _check_model(posterior, plan)
    return _carry_out(key, target, [_model_attack(target, posterior, trials // 2, risk)], risk, progress)


def audit_pair(
    key: jax.Array,
    plan: Plan,
    plus: Any,
    minus: Any,
    *,
    device: int,
    trials: int = 100_000,
    confidence: float = 0.99,
    delta: ArrayLike | None = None,
    csi_error: float | None = None,
    reach: float = 1e-6,
    progress: Progress | None = None,
) -> AuditReport:
    """The same for two posteriors of one's own that differ in what `device` holds: for models we do not know.

    Args:
        reach: how far θ may go from 0; gradients should hardly change over this.
    """
    risk = _check(trials, confidence)
    target = aim(plan, delta, device, csi_error)
    for side in (plus, minus):
        _check_devices(side, plan)
    half = trials // 2
    attack = by.by_model(target, plus, minus, reach, half, _limit(half, risk), "pair of data sets")
    return _carry_out(key, target, [attack], risk, progress)


def _check(trials: int, confidence: float) -> float:
    if trials < 1000:
        raise InputError("trials", trials, "at least 1000")
    if not 0.5 <= confidence < 1:
        raise InputError("confidence", confidence, "at least 0.5 and below 1")
    return 1 - confidence


def _check_devices(posterior: Any, plan: Plan) -> None:
    if posterior.devices != plan.devices:
        raise InputError("posterior", f"{posterior.devices} devices", f"one of the plan's {plan.devices} devices")


def _check_model(posterior: Any, plan: Plan) -> None:
    check_kind(posterior)
    _check_devices(posterior, plan)


def _whole_runs(plan: Plan, half: int) -> int:
    """Trials for whole runs, which cost more."""
    return int(np.clip(WORK / (plan.rounds * plan.devices), 500, min(50_000, max(half // 5, 500))))


def _limit(trials: int, risk: float) -> float:
    """μ that a test of so many trials should have to deal with: one that leaves room to prove more."""
    return 0.6 * largest_mu(trials, risk / (2 * MAIN_SHARE))


def _model_attack(target: Target, posterior: Any, trials: int, risk: float) -> Attack:
    plan = target.plan
    size = RAW * float(np.where(np.isfinite(plan.clip), plan.clip, plan.example_clip).max())
    plus, minus = canary_pair(posterior, target.device, size, target.away, float(target.others[target.device]))
    name = type(posterior).__name__.removesuffix("Posterior").lower() + " model"
    # Even an unclipped canary must not go far enough to be learned.
    return by.by_model(target, plus, minus, 0.1 / (RAW * size), trials, _limit(trials, risk), name)


def _carry_out(
    key: jax.Array,
    target: Target,
    listed: Sequence[Attack],
    risk: float,
    progress: Progress | None,
    sums: tuple[Summation, ...] = (),
) -> AuditReport:
    """Run all attacks, share the probability to be wrong among their tests, and report."""
    shares = sum(test.share for attack in listed for test in attack.tests)
    works = [attack.trials for attack in listed]
    found: list[Finding] = []
    for number, attack in enumerate(listed):

        def advance(done: int, before: int = sum(works[:number])) -> None:
            if progress is not None:
                progress(before + done, sum(works))

        risks = [risk * test.share / shares for test in attack.tests]
        tails = [
            counting_threshold(test.reach, attack.trials, float(target.delta[test.device]), own)
            for test, own in zip(attack.tests, risks, strict=True)
        ]
        balanced, tail = _count(jax.random.fold_in(named(key, "attack"), number), attack, np.array(tails), advance)
        results = [
            finding(test.name, test.device, test.rounds, test.mu, *errors, float(target.delta[test.device]), own)
            for test, errors, own in zip(attack.tests, zip(balanced, tail, strict=True), risks, strict=True)
        ]
        found += _worth_telling(results)
    total, delta = float(target.loss[:, target.device].sum()), float(target.delta[target.device])
    return AuditReport(
        device=target.device,
        epsilon=float(epsilon_spent(total, delta)),
        delta=delta,
        loss=total,
        unit=target.plan.privacy.unit,
        adjacency=target.plan.privacy.adjacency,
        confidence=1 - risk,
        tests=tuple(found),
        sums=sums,
    )


def _worth_telling(results: list[Finding]) -> list[Finding]:
    """Of an attack on every device those that prove too much, else the one that comes nearest."""
    if len({result.device for result in results}) == 1:
        return results
    return [result for result in results if result.flagged] or [max(results, key=lambda result: result.excess)]


def _count(
    key: jax.Array, attack: Attack, tails: Statistics, advance: Callable[[int], None]
) -> tuple[list[Errors], list[Errors]]:
    """Errors of every test at threshold 0, and at the one for counting."""
    cuts = np.stack([np.zeros_like(tails), tails])[:, None]
    wrong = np.zeros((2, 2, len(attack.tests)), dtype=int)
    for first in range(0, attack.trials, attack.chunk):
        plus, minus = attack.run(key, first, attack.chunk)
        # Whatever cannot be compared counts as an error.
        wrong += np.stack([(~(minus <= cuts)).sum(1), (~(plus > cuts)).sum(1)], axis=1)
        advance(first + attack.chunk)
    balanced, tail = (
        [Errors(int(positive), int(negative), attack.trials) for positive, negative in counted.T] for counted in wrong
    )
    return balanced, tail
