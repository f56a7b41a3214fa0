"""Audits: all attacks on a plan, or those on a model, counted and turned into a report."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial

import jax
import numpy as np
from numpy.typing import ArrayLike

from wflmc.audit import attack as kinds
from wflmc.audit.attack import MAIN_SHARE, PARTS, Attack
from wflmc.audit.report import AuditReport, Errors, Finding, counting_threshold, largest_mu
from wflmc.audit.summation import Summation, attack_sums
from wflmc.audit.target import Target, attack_target
from wflmc.errors import InputError
from wflmc.keys import named
from wflmc.planning import Plan
from wflmc.posterior.base import Posterior
from wflmc.posterior.regression import Regression
from wflmc.privacy import epsilon_spent

Progress = Callable[[int, int], None]
Sums = tuple[Summation, ...]

ATTACKS = ("constant", "turning", "runs", "record", "devices", "model", "summation")
WORK = 2 * 10**8
"""Device-rounds that the smaller attacks may take; they make do with fewer trials where there are many devices."""


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
    part, runs, each = -(-half // PARTS), _affordable(plan, half // 5, 50_000), _affordable(plan, half // 10, 10_000)
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
        sums = attack_sums(target, model) if "summation" in attacks else ()
    chosen = [possible[name] for name in ATTACKS if name in attacks and name in possible]
    return _report(key, target, [make(target, n, _mu_limit(n, r)) for make, n, r in chosen], risk, progress, sums)


def audit_model(
    key: jax.Array, plan: Plan, posterior: Posterior, *, trials: int = 100_000, confidence: float = 0.99
) -> AuditReport:
    """Attack a model's own gradients and clipping, in whole runs of `wflmc.sample` on two canary data sets.

    Args:
        posterior: says which kind of model, and how many devices; its data are not used.
        key, plan, trials, confidence: as of `audit`.
    """
    risk, half = _risk(trials, confidence), trials // 2
    target, model = attack_target(plan), _known_model(posterior, plan)
    return _report(key, target, [kinds.by_model(model, target, half, _mu_limit(half, risk))], risk, None)


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
    attack = kinds.by_pair(target, (plus, minus), reach, half, _mu_limit(half, risk), "pair of data sets")
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
        raise InputError("posterior", f"{posterior.devices} devices", f"one of the plan's {plan.devices} devices")


def _known_model(posterior: Posterior, plan: Plan) -> Regression:
    """Return the posterior, unless it is one for which no canary is known."""
    if not isinstance(posterior, Regression):
        allowed = "a Gaussian or a softmax posterior; for others use audit_pair"
        raise InputError("posterior", type(posterior).__name__, allowed)
    _check_devices(posterior, plan)
    return posterior


def _affordable(plan: Plan, wanted: int, most: int) -> int:
    """Return how many trials an attack with expensive ones has, at least 500."""
    return int(np.clip(WORK / (len(plan.rounds) * plan.devices), 500, min(most, max(wanted, 500))))


def _mu_limit(trials: int, risk: float) -> float:
    """Return the μ that a test of so many trials should have to deal with: one that leaves room to prove more."""
    return 0.6 * largest_mu(trials, risk / (2 * MAIN_SHARE))


def _report(
    key: jax.Array, target: Target, attacks: list[Attack], risk: float, progress: Progress | None, sums: Sums = ()
) -> AuditReport:
    """Run all attacks, share the probability to be wrong among their tests, and report."""
    shares = sum(test.share for attack in attacks for test in attack.tests)
    done, work, findings = 0, sum(attack.trials for attack in attacks), []
    for number, attack in enumerate(attacks):
        attack_key = jax.random.fold_in(named(key, "attack"), number)
        how = [(float(target.delta[test.device]), risk * test.share / shares) for test in attack.tests]
        cuts = np.zeros((2, 1, len(how)))  # the balanced threshold, and the one for counting
        for at, test in enumerate(attack.tests):
            cuts[1, 0, at] = counting_threshold(test.visible_mu, attack.trials, *how[at])
        wrong = np.zeros((2, 2, len(how)), dtype=int)
        for first in range(0, attack.trials, attack.chunk):
            plus, minus = attack.run(attack_key, first, attack.chunk)
            # Whatever cannot be compared counts as an error.
            wrong += np.stack([(~(minus <= cuts)).sum(1), (~(plus > cuts)).sum(1)], axis=1)
            done += attack.chunk
            if progress is not None:
                progress(done, work)
        results = []
        for at, test in enumerate(attack.tests):
            balanced, tail = (Errors(int(errors[0]), int(errors[1]), attack.trials) for errors in wrong[..., at])
            results.append(Finding.of(test, balanced, tail, *how[at]))
        if len({result.device for result in results}) > 1:  # of every device: those that prove too much, or the nearest
            nearest = max(results, key=lambda result: result.excess)
            results = [result for result in results if result.flagged] or [nearest]
        findings += results
    loss, delta = float(target.loss[:, target.device].sum()), float(target.delta[target.device])
    epsilon, privacy = float(epsilon_spent(loss, delta)), target.plan.privacy
    return AuditReport(
        target.device, epsilon, delta, loss, privacy.unit, privacy.adjacency, 1 - risk, tuple(findings), sums
    )
