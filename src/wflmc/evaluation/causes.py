"""One diagnosis of a plan or a run: what keeps its samples from the posterior, worst first, and what would help.

Causes are ranked by what each of them costs in a forecast of the chains (`wflmc.evaluation.clipped_law`). A change is
named only after a plan with it was made and its forecast was better. Plan, chains and diagnostics are looked at, test
scores are not: settings that these choose would be chosen by the test set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from wflmc.channel import Link
from wflmc.errors import InputError
from wflmc.evaluation.clipped_law import Forecast, Model, forecast, model_of
from wflmc.evaluation.summary import Evaluation
from wflmc.planning import Plan
from wflmc.planning import plan as make_plan
from wflmc.planning.advice import expansion
from wflmc.planning.solvers.single_sample import REGIMES
from wflmc.privacy import Privacy

GOOD = 0.05
"""W2² in posterior variances below which nothing is said to be wrong, and a change is large enough."""
FEW_DRAWS = 0.1
"""1/ESS of one chain from which on its draws are few."""
BETTER, CHEAPER = 0.8, 0.3
"""A change must lower the forecast to this part; one that costs privacy or power, to this part of any that does not."""
NARROW_PRIOR = 3.0
"""How much farther from 0 than the prior expects the data may put parameters."""
MOST_ROUNDS = 1000
"""More rounds than these are only suggested to twice as many."""
LARGEST_TRIAL = 2**19
"""Rounds times devices above which no other plans are made."""
DRAWS = "too few draws"
SHOWN = 2
"""Causes for which changes are tried and that are shown; lists have them all."""
TOGETHER = {"sampler.burn_in": "rounds", "sampler.samples": "rounds", "privacy.example_clip": "privacy.clip"}
"""Keys of which one diagnosis does not name one to be raised and another to be lowered."""

FREE = {
    "noise": ("privacy.clip", "privacy.example_clip", "policy.max_round_noise", "sampler.step_size", "sampler.burn_in",
              "sampler.samples", "policy.power"),
    "clipping": ("privacy.clip", "privacy.example_clip", "policy.max_round_noise", "sampler.step_size",
                 "sampler.burn_in"),
    "start": ("sampler.step_size", "sampler.burn_in", "sampler.init", "privacy.clip", "privacy.example_clip"),
    "step": ("sampler.step_size",),
    "draws": ("sampler.step_size", "sampler.samples"),
}  # fmt: skip
"""Keys that may help against each cause and cost neither privacy nor power, those to prefer first."""
PAID = {"noise": ("link.snr_db", "privacy.epsilon", "privacy.unit")}
"""Keys that may help and do cost it."""
WEAKER = {
    "privacy.epsilon": " (a weaker promise)",
    "privacy.unit": " (a weaker promise: it hides an example, not a device)",
}
QUICK = {"policy.objective": "worst", "policy.csi": "full"}
"""Of plans that are made in milliseconds."""


class Change(NamedTuple):
    """A setting to try."""

    key: str
    """Of a scenario, such as `privacy.clip`."""
    value: float | int | str
    direction: str
    """up or down; to, where the value is not a number."""
    others: Mapping[str, float | int | str]
    """Keys that must be set with it."""
    expected: tuple[float, float] | None = None
    """W2² in posterior variances before and after, or 1/ESS for too few draws; None where it cannot be forecast."""
    exact: bool = False
    """Whether these are numbers to rely on: without clipping, by the law of the chains."""
    then: bool = False
    """Whether it was tried together with the change of the cause before."""


class Cause(NamedTuple):
    """One reason why samples are not those of the posterior."""

    cause: str
    evidence: str
    cost: float
    """W2² in posterior variances that it accounts for; 1/ESS for too few draws."""
    change: Change | None
    """The change that helps most against it; None where none was found."""
    instead: Change | None = None
    """Where that one costs privacy or power, the best that does not."""

    def __str__(self) -> str:
        said = f"{self.cause[:1].upper()}{self.cause[1:]}: {self.evidence}."
        if self.change is None:
            return said
        settings = {self.change.key: self.change.value, **self.change.others}
        said += (" Then try " if self.change.then else " Try ") + " with ".join(
            f"{key} = {_shown(value)}" for key, value in settings.items()
        )
        said += WEAKER.get(self.change.key, "")
        if self.change.expected is None:
            return f"{said}."
        before, after = self.change.expected
        of = "1/ESS of a chain" if self.cause == DRAWS else "W2² in posterior variances"
        numbers = f"expected {of} falls from {before:.2g} to {after:.2g}"
        said += f": {numbers if self.change.exact else 'better samples in a forecast'}."
        if self.instead is not None:
            said += f" Without it, {self.instead.key} = {_shown(self.instead.value)} helps."
        return said


class Setting(NamedTuple):
    """What a plan was made with, and how to make it with other values."""

    snr_db: Any
    power: Any
    replan: Callable[[Mapping[str, Any]], Plan]
    """Make the plan with some keys changed; raises InputError where that is not possible."""
    slow: bool = False
    """Whether that takes long: changes are then looked for with `QUICK`."""


def advise(
    posterior: Any, link: Link, privacy: Privacy, *, evaluation: Evaluation | None = None, **keywords: Any
) -> tuple[Cause, ...]:
    """Say what keeps samples from the posterior, worst first, and which setting would help against each cause.

    Args:
        posterior, link, privacy, keywords: those of `plan`.
        evaluation: of a trace of that plan, where there is one: what was measured is then the evidence.

    Returns:
        The causes; none where samples are expected to be good. Their keys are those of scenario files, which are the
        arguments of `Link`, `Privacy` and `plan` behind the point. Clips are suggested by the size of the devices'
        gradients: epsilon does not cover the advice.
    """

    def replan(changes: Mapping[str, Any]) -> Plan:
        parts: dict[str, dict[str, Any]] = {"link": {}, "privacy": {}, "sampler": {}, "policy": {}}
        for key, value in changes.items():
            section, _, name = key.partition(".")
            parts[section][name] = value
        other_link, other = dataclasses.replace(link, **parts["link"]), dataclasses.replace(privacy, **parts["privacy"])
        return make_plan(posterior, other_link, other, **keywords | parts["sampler"] | parts["policy"])

    slow = keywords.get("objective") == "exact" or keywords.get("csi") == "causal"
    plan = replan({})
    if keywords.get("step_schedule") == "planned":  # which takes some seventy plans
        keywords |= {"step_size": plan.step_size, "step_schedule": "constant"}
    setting = Setting(link.snr_db, keywords.get("power", "optimized"), replan, slow)
    return find_causes(plan, posterior, setting, evaluation)


def find_causes(
    plan: Plan, posterior: Any, setting: Setting | None = None, evaluation: Evaluation | None = None
) -> tuple[Cause, ...]:
    """The same for a plan that is made already; without its setting no changes are tried."""
    model = model_of(plan, posterior)
    now, ideal = forecast(plan, model), forecast(plan, model, clipping=False, excess=False, start=False)
    trials = _Trials(plan, posterior, model, now, setting)
    # A warning about the data themselves, such as features of unlike scale, would come first here.
    causes = [*_unlike_devices(plan, posterior, setting), *_narrow_prior(model, posterior)]
    rhat = None if evaluation is None else evaluation.rhat_max
    seen = "" if rhat is None else f" (R-hat is {rhat:.3g})"
    for kind, cost in _costs(plan, model, now, ideal):
        change, instead = trials.best(kind) if len(causes) < SHOWN else (None, None)
        turn = "" if change is None else f"{change.key} {change.direction}"
        match kind:
            case "noise":
                name, evidence = _noise(plan)
            case "clipping":
                small = turn in ("privacy.clip up", "privacy.example_clip up")
                name = "clip too small" if small else "clipped gradients"
                evidence = _clipped(plan, model, now, evaluation)
            case "start":
                why = {"sampler.step_size up": "step size too small", "sampler.burn_in up": "burn-in too short"}
                name = why.get(turn, "start not forgotten")
                evidence = f"after {plan.burn_in} rounds chains are {cost**0.5:.2g} posterior standard deviations"
                evidence += f" from where they should be{seen}"
            case _:
                scale, unit = plan.dynamics.step_scale(plan.mu, plan.L), plan.dynamics.unit
                name = "step size too large"
                evidence = f"{plan.step_size[-1] * scale:.3g}/{unit} alone spreads samples too widely"
        causes.append(Cause(name, evidence, cost, change, instead))
    draws = len(plan.rounds) - plan.burn_in
    if draws > 1 and ideal.error > FEW_DRAWS and now.alike < 1:  # else they are too bad to ask for more of them
        evidence = f"{draws} draws of a chain are worth {1 / ideal.error:.2g} independent ones"
        more, _ = trials.best("draws") if len(causes) < SHOWN else (None, None)
        causes.append(Cause(DRAWS, evidence + seen, ideal.error, more))
    return tuple(causes)


def _costs(plan: Plan, model: Model, now: Forecast, ideal: Forecast) -> list[tuple[str, float]]:
    """What each cause costs, the largest first; none where samples are good."""
    if now.alike < GOOD:
        return []

    def lost(without: Forecast) -> float:
        if np.isfinite(now.alike):
            return now.alike - without.alike
        return np.inf if np.isfinite(without.alike) else 0.0

    costs = {
        "noise": lost(forecast(plan, model, excess=False)),
        "clipping": lost(forecast(plan, model, clipping=False)),
        "start": lost(forecast(plan, model, start=False)),
        "step": ideal.alike,
    }
    return sorted(((kind, cost) for kind, cost in costs.items() if cost >= 0.1 * now.alike), key=lambda each: -each[1])


def _noise(plan: Plan) -> tuple[str, str]:
    """What makes noise too strong, and how strong it is."""
    power = plan.limit[plan.burn_in :] == REGIMES.index("power-limited")
    name, by = ("channel noise", "transmit power") if np.mean(power) > 0.5 else ("privacy noise", "privacy")
    if plan.noise_ratio > 1.05:
        return name, f"{plan.noise_ratio:.3g} times what Langevin sampling needs after burn-in, limited by {by}"
    most = float((plan.noise_variance / plan.langevin_noise).max())
    return "noise of burn-in", f"up to {most:.3g} times what Langevin sampling needs in early rounds"


def _clipped(plan: Plan, model: Model, now: Forecast, evaluation: Evaluation | None) -> str:
    """How many gradients are clipped, and what would be at the posterior: else noise or the start keep chains away."""
    told, one = (None, None) if evaluation is None else (evaluation.clip_rate["samples"], evaluation.example_clip_rate)
    left = forecast(plan, model, excess=False, start=False).shortened
    if np.isfinite(plan.example_clip).any():
        share = "" if one is None else f"{one:.0%} of the examples' gradients were clipped after burn-in; "
        return f"{share}at the posterior clipping leaves {left:.0%} of the examples' gradients"
    share = f"{now.clipped:.0%} of gradients are expected to be" if told is None else f"{told:.0%} of gradients were"
    return f"{share} clipped after burn-in; at the posterior itself clipping would leave {left:.0%} of them"


def _unlike_devices(plan: Plan, posterior: Any, setting: Setting | None) -> list[Cause]:
    """Devices that send in some rounds are so unlike the others that a step stretches errors."""
    factor, change = expansion(posterior, plan), None
    if factor <= 1:
        return []
    if setting is not None:
        with suppress(InputError):
            if expansion(posterior, setting.replan({"policy.schedule": "all"})) <= 1:
                change = Change("policy.schedule", "all", "to", {})
    return [Cause("unlike devices", f"a round in which some send stretches errors {factor:.3g} times", factor, change)]


def _narrow_prior(model: Model, posterior: Any) -> list[Cause]:
    """Data that contradict the prior. What another would bring cannot be forecast: the posterior changes with it.

    The most likely parameters are m λ/(λ − p) for a mode m, and under a prior of precision p have a variance of
    1/p + 1/(λ − p).
    """
    std = getattr(posterior, "prior_std", None)
    if std is None or posterior.coordinates is not None:
        return []
    told = np.maximum(model.cost.precision - std**-2, 1e-6 * model.cost.precision)  # by the data, λ − p
    likely = model.cost.away * model.cost.precision / told
    away = float(np.sqrt(np.mean(likely**2 / (std**2 + 1 / told))))
    if away <= NARROW_PRIOR:
        return []
    change = Change("posterior.prior_std", _rounded(np.sqrt(np.mean(likely**2))), "up", {})
    said = f"the data put parameters {away:.2g} times as far from 0 as the prior expects"
    return [Cause("prior too narrow", said, away, change)]


class _Trials:
    """Plans with one key changed, and what is to be expected of them."""

    def __init__(self, plan: Plan, posterior: Any, model: Model, now: Forecast, setting: Setting | None) -> None:
        self.plan, self.posterior, self.model, self.now, self.setting = plan, posterior, model, now, setting
        self.made: dict[str, Any] = {}
        """What the causes before have suggested: the next change is tried on top of it."""
        quick = self._forecast(QUICK) if setting is not None and setting.slow else None
        self.begun, self.quick = (now, {}) if quick is None else (quick, QUICK)
        self.seen: dict[Any, Forecast | None] = {}
        self.used: dict[str, str] = {}

    def best(self, kind: str) -> tuple[Change | None, Change | None]:
        """The change that helps most against a cause, of a key that no cause before it has named.

        Where it costs privacy or power, also the best that does not.
        """
        if self.setting is None or len(self.plan.rounds) * self.plan.devices > LARGEST_TRIAL:
            return None, None
        if kind != "draws" and self.begun.alike < GOOD:
            return None, None  # the change before is enough
        free = self._first(FREE[kind], kind)
        paid = None if free is not None and _after(free) <= GOOD else self._first(PAID.get(kind, ()), kind)
        best = free is None or (paid is not None and _after(paid) < CHEAPER * _after(free))
        asked = (paid, free) if best else (free, None)
        chosen = [change for change in (self._confirmed(change, kind) for change in asked) if change is not None]
        for change in chosen:
            self.used |= {change.key: "", TOGETHER.get(change.key, change.key): change.direction}
        if not chosen:
            return None, None
        first = chosen[0]._replace(then=bool(self.made))
        self._make(first)
        return first, chosen[1] if len(chosen) > 1 else None

    def _make(self, change: Change) -> None:
        """Go on from the plan with a change."""
        self.made |= {change.key: change.value, **change.others}
        self.seen.clear()
        self.begun = self._forecast(self.quick) or self.begun
        self.now = (self._forecast({}) or self.now) if self.quick else self.begun

    def _confirmed(self, change: Change | None, kind: str) -> Change | None:
        """The change, if it helps the plan as it is made and not only the quick one."""
        if change is None or not self.quick:
            return change
        then = self._forecast({change.key: change.value, **change.others})
        return None if then is None else _helped(change, self.now, then, kind)

    def _first(self, keys: Iterable[str], kind: str) -> Change | None:
        """The first key that brings nearly as much as the best of them."""
        found: list[Change] = []
        for key in keys:
            change = self._smallest(key, kind) if key not in self.used else None
            found += [] if change is None else [change]
            if change is not None and _after(change) <= GOOD:
                break
        enough = max(GOOD, 2 * min(map(_after, found), default=0.0))
        return next((change for change in found if _after(change) <= enough), None)

    def _smallest(self, key: str, kind: str) -> Change | None:
        """The smallest change of a key that brings nearly all that it can."""
        found, before = [], self.used.get(TOGETHER.get(key, key))
        for change in self._changes(key):
            helpful = self._tried(change, kind) if before in (None, change.direction) else None
            found += [] if helpful is None else [helpful]
            if helpful is not None and _after(helpful) <= GOOD:
                break
        enough = max(GOOD, 1.25 * min(map(_after, found), default=0.0))
        return next((change for change in found if _after(change) <= enough), None)

    def _tried(self, change: Change, kind: str) -> Change | None:
        """The change with what is expected of it; None where it does not help or cannot be made."""
        name = change.key, change.value, *change.others.values()
        if name not in self.seen:
            self.seen[name] = self._forecast({**self.quick, change.key: change.value, **change.others})
        then = self.seen[name]
        return None if then is None else _helped(change, self.begun, then, kind)

    def _forecast(self, changes: Mapping[str, Any]) -> Forecast | None:
        assert self.setting is not None
        try:
            plan = self.setting.replan({**self.made, **changes})
        except InputError:
            return None
        return forecast(plan, self.model if plan.init == self.plan.init else model_of(plan, self.posterior))

    def _changes(self, key: str) -> Iterator[Change]:
        """What to try for a key, the smallest changes first."""
        plan, setting = self.plan, self.setting
        assert setting is not None
        factors = 2.0 ** np.array([1, -1, 2, -2, 3, -3, 4, -4])
        epsilon, unit, examples = plan.privacy.epsilon, plan.privacy.unit, self.model.examples
        match key:
            case "sampler.step_size" if _one(plan.step_size):
                now, limit = plan.step_size[0], plan.dynamics.largest_step(plan.mu, plan.L)
                return _numbers(key, now, (value for value in now * factors if value < limit))
            case "sampler.burn_in" | "sampler.samples":
                now = plan.burn_in if key.endswith("burn_in") else len(plan.rounds) - plan.burn_in
                values = np.rint(max(now, 8) * factors).astype(int)
                return _numbers(key, now, values[(values >= 8) & (values <= max(MOST_ROUNDS, 2 * now))])
            case "privacy.clip" if plan.clips and _one(plan.clip):
                typical = float(np.sqrt((self.model.cost.pull**2).sum(-1).mean()))
                return _numbers(key, plan.clip[0], typical * np.geomspace(0.5, 8, 9))
            case "privacy.example_clip" if unit == "record" and examples is not None and _one(plan.example_clip):
                return _numbers(key, plan.example_clip[0], np.quantile(examples, [0.5, 0.75, 0.9]))
            case "privacy.unit" if unit == "device" and epsilon is not None and examples is not None:
                clips = [{"privacy.example_clip": _rounded(norm)} for norm in np.quantile(examples, [0.9, 0.75])]
                return (Change(key, "record", "to", clip) for clip in clips)
            case "privacy.epsilon" if epsilon is not None and np.ndim(epsilon) == 0:
                return _numbers(key, float(np.asarray(epsilon)), float(np.asarray(epsilon)) * np.array([2, 4]))
            case "link.snr_db" if np.ndim(setting.snr_db) == 0:
                return (Change(key, float(setting.snr_db) + more, "up", {}) for more in (5, 10, 20, 30, 40))
            case "policy.max_round_noise" if plan.noise_limit == np.inf and setting.power != "equal":
                return (Change(key, limit, "down", {}) for limit in (2.0, 1.0))
            case "policy.power" if setting.power == "equal":
                return iter([Change(key, "optimized", "to", {})])
            case "sampler.init" if plan.init == "prior":
                return iter([Change(key, "zero", "to", {})])
        return iter(())


def _helped(change: Change, now: Forecast, then: Forecast, kind: str) -> Change | None:
    """The change with what is expected of it; None where it does not help."""
    if kind == "draws":
        helps = then.error < BETTER * now.error and then.alike < max(1.1 * now.alike, GOOD / 2)
        return change._replace(expected=(now.error, then.error), exact=now.exact and then.exact) if helps else None
    helps = then.alike < BETTER * now.alike and then.w2_sq < now.w2_sq
    helps = helps and then.w2_sq + then.error < now.w2_sq + now.error
    return change._replace(expected=(now.alike, then.alike), exact=now.exact and then.exact) if helps else None


def _one(values: Any) -> bool:
    return bool(np.all(values == values.flat[0]))


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _after(change: Change) -> float:
    return np.inf if change.expected is None else change.expected[1]


def _rounded(value: Any) -> float | int:
    """To two digits, as a plain number."""
    return int(value) if isinstance(value, int | np.integer) else float(f"{value:.2g}")


def _numbers(key: str, now: float, values: Iterable[Any]) -> Iterator[Change]:
    """Changes to numbers, those nearest to the one now first."""
    others = {_rounded(value) for value in values} - {_rounded(now)}
    for value in sorted(sorted(others), key=lambda value: abs(np.log(value / max(now, 1e-9)))):
        yield Change(key, value, "up" if value > now else "down", {})
