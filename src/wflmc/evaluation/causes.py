"""One diagnosis of a plan or a run: what keeps its samples from the posterior, worst first, and what would help.

Causes are ranked by what each of them costs in a forecast of the chains (`wflmc.evaluation.clipped_law`). A change is
named only after a plan with it was made and its forecast was better. The diagnosis uses the plan, the chains and their
diagnostics, not test scores: settings chosen by these would be fitted to the test set.
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
from wflmc.planning.options import plan_arguments
from wflmc.planning.solvers.closed_form import REGIMES
from wflmc.posterior import GaussianPosterior, SoftmaxPosterior
from wflmc.posterior.base import Posterior
from wflmc.privacy import Privacy

GOOD = 0.05
"""W2² in posterior variances below which samples count as good, and a change as large enough."""
FEW_DRAWS = 0.1
"""1/ESS of one chain above which its draws are too few."""
BETTER, CHEAPER = 0.8, 0.3
"""A change must lower the forecast to this part; one that costs privacy or power, to this part of any that does not."""
NARROW_PRIOR = 3.0
"""How much farther from 0 than the prior expects the data may put parameters."""
MOST_ROUNDS = 1000
"""A larger number of rounds is only suggested up to twice as many."""
LARGEST_TRIAL = 2**19
"""Rounds times devices above which no other plans are made."""
DRAWS = "too few draws"
SHOWN = 2
"""Causes for which changes are tried and that are shown; lists have them all."""
CONFLICTS = {"sampler.burn_in": "rounds", "sampler.samples": "rounds", "privacy.example_clip": "privacy.clip"}
"""Groups of keys of which one diagnosis does not raise one and lower another."""

CLIPS = ("privacy.clip", "privacy.example_clip")
RAISED_CLIPS = tuple(f"{key} up" for key in CLIPS)
QUIETER = (*CLIPS, "policy.max_round_noise", "sampler.step_size", "sampler.burn_in")
FREE = {
    "noise": (*QUIETER, "sampler.samples", "policy.power"),
    "clipping": QUIETER,
    "start": ("sampler.step_size", "sampler.burn_in", "sampler.init", *CLIPS),
    "step": ("sampler.step_size",),
    "draws": ("sampler.step_size", "sampler.samples"),
}
"""Keys that may help against each cause and cost neither privacy nor power, the preferred ones first."""
PAID = {"noise": ("link.snr_db", "privacy.epsilon", "privacy.unit")}
"""Keys that may help and do cost it."""
WEAKER = {
    "privacy.epsilon": " (a weaker promise)",
    "privacy.unit": " (a weaker promise: it hides an example, not a device)",
}
QUICK = {"policy.objective": "worst", "policy.csi": "full"}
"""Settings of plans that are made in milliseconds."""


class Change(NamedTuple):
    """A setting to try."""

    key: str
    """Of a scenario, such as `privacy.clip`."""
    value: float | int | str
    direction: str
    """up or down; to, where the value is not a number."""
    others: Mapping[str, float | int | str] = {}
    """Keys that must be set with it."""
    expected: tuple[float, float] | None = None
    """W2² in posterior variances before and after, or 1/ESS for too few draws; None where it cannot be forecast."""
    exact: bool = False
    """Whether these are numbers to rely on: without clipping, by the law of the chains."""
    then: bool = False
    """Whether it was tried together with the change of the cause before."""

    @property
    def values(self) -> dict[str, Any]:
        """Return the new value of every key."""
        return {self.key: self.value, **self.others}

    @property
    def after(self) -> float:
        """Return what is expected after the change."""
        return np.inf if self.expected is None else self.expected[1]


class Cause(NamedTuple):
    """One reason why samples are not those of the posterior."""

    cause: str
    evidence: str
    cost: float
    """W2² in posterior variances that it accounts for; 1/ESS for too few draws."""
    change: Change | None
    """The change that helps most against it; None where there is none."""
    instead: Change | None = None
    """Where that one costs privacy or power, the best that does not."""

    def __str__(self) -> str:
        text = f"{self.cause[:1].upper()}{self.cause[1:]}: {self.evidence}."
        if self.change is None:
            return text
        settings = " with ".join(_assignment(key, value) for key, value in self.change.values.items())
        text += f" {'Then try' if self.change.then else 'Try'} {settings}{WEAKER.get(self.change.key, '')}"
        if self.change.expected is None:
            return f"{text}."
        quantity = "1/ESS of a chain" if self.cause == DRAWS else "W2² in posterior variances"
        numbers = "expected {} falls from {:.2g} to {:.2g}".format(quantity, *self.change.expected)
        text += f": {numbers if self.change.exact else 'better samples in a forecast'}."
        if self.instead is not None:
            text += f" Without it, {_assignment(self.instead.key, self.instead.value)} helps."
        return text


def _assignment(key: str, value: float | int | str) -> str:
    return f"{key} = {value if isinstance(value, str) else f'{value:g}'}"


class Setting(NamedTuple):
    """What a plan was made with, and how to make it with other values."""

    snr_db: Any
    power: Any
    replan: Callable[[Mapping[str, Any]], Plan]
    """Make the plan with some keys changed; raises InputError where that is not possible."""
    slow: bool = False
    """Whether that takes long: the search for changes then uses `QUICK`."""


def advise(
    posterior: Posterior, link: Link, privacy: Privacy, *, evaluation: Evaluation | None = None, **keywords: Any
) -> tuple[Cause, ...]:
    """Say what keeps samples from the posterior, worst first, and which setting would help against each cause.

    Args:
        posterior, link, privacy, keywords: those of `plan`.
        evaluation: of a trace of that plan, where there is one; it then provides the evidence.

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
        arguments = plan_arguments(keywords | parts["sampler"] | parts["policy"])
        return make_plan(posterior, other_link, other, **arguments)

    sampler, policy = (plan_arguments(keywords)[part] for part in ("sampler", "policy"))
    plan = replan({})
    if sampler.step_schedule == "planned":  # which takes some seventy plans
        keywords |= {"step_size": plan.step_size, "step_schedule": "constant"}
    slow = policy.objective == "exact" or policy.csi == "causal"
    setting = Setting(link.snr_db, policy.power, replan, slow)
    return find_causes(plan, posterior, setting, evaluation)


def find_causes(
    plan: Plan, posterior: Posterior | None, setting: Setting | None = None, evaluation: Evaluation | None = None
) -> tuple[Cause, ...]:
    """Return the causes of a plan that is made already, as `advise` does; without its setting no changes are tried."""
    model = model_of(plan, posterior)
    now, ideal = forecast(plan, model), forecast(plan, model, clipping=False, excess=False, start=False)
    search = _Search(plan, posterior, model, now, setting)
    # A warning about the data themselves, such as features of unlike scale, would come first here.
    causes = [*_unlike_devices(plan, posterior, setting), *_narrow_prior(model, posterior)]
    rhat = None if evaluation is None else evaluation.rhat_max
    measured = "" if rhat is None else f" (R-hat is {rhat:.3g})"
    for kind, cost in _costs(plan, model, now, ideal):
        change, instead = search.best(kind) if len(causes) < SHOWN else (None, None)
        turn = "" if change is None else f"{change.key} {change.direction}"
        match kind:
            case "noise":
                name, evidence = _noise(plan)
            case "clipping":
                name = "clip too small" if turn in RAISED_CLIPS else "clipped gradients"
                evidence = _clipped(plan, model, now, evaluation)
            case "start":
                why = {"sampler.step_size up": "step size too small", "sampler.burn_in up": "burn-in too short"}
                name = why.get(turn, "start not forgotten")
                evidence = f"after {plan.burn_in} rounds chains are {cost**0.5:.2g} posterior standard deviations"
                evidence += f" from where they should be{measured}"
            case _:
                name, scaled = "step size too large", plan.step_size[-1] * plan.dynamics.step_scale(plan.mu, plan.L)
                evidence = f"{scaled:.3g}/{plan.dynamics.unit} alone spreads samples too widely"
        causes.append(Cause(name, evidence, cost, change, instead))
    draws = len(plan.rounds) - plan.burn_in
    if draws > 1 and ideal.error > FEW_DRAWS and now.alike < 1:  # else they are too bad to ask for more of them
        evidence = f"{draws} draws of a chain are worth {1 / ideal.error:.2g} independent ones{measured}"
        change, _ = search.best("draws") if len(causes) < SHOWN else (None, None)
        causes.append(Cause(DRAWS, evidence, ideal.error, change))
    return tuple(causes)


def _costs(plan: Plan, model: Model, now: Forecast, ideal: Forecast) -> list[tuple[str, float]]:
    """Return what each cause costs, the largest first; none where samples are good."""
    if now.alike < GOOD:
        return []

    def cost(**without: bool) -> float:
        alike = forecast(plan, model, **without).alike
        if np.isfinite(now.alike):
            return now.alike - alike
        return np.inf if np.isfinite(alike) else 0.0

    costs = [("noise", cost(excess=False)), ("clipping", cost(clipping=False)), ("start", cost(start=False))]
    large = [each for each in (*costs, ("step", ideal.alike)) if each[1] >= 0.1 * now.alike]
    return sorted(large, key=lambda each: -each[1])


def _noise(plan: Plan) -> tuple[str, str]:
    """Return what makes noise too strong, and how strong it is."""
    power = plan.limit[plan.burn_in :] == REGIMES.index("power-limited")
    name, by = ("channel noise", "transmit power") if np.mean(power) > 0.5 else ("privacy noise", "privacy")
    if plan.noise_ratio > 1.05:
        return name, f"{plan.noise_ratio:.3g} times what Langevin sampling needs after burn-in, limited by {by}"
    most = float((plan.noise_variance / plan.langevin_noise).max())
    return "noise of burn-in", f"up to {most:.3g} times what Langevin sampling needs in early rounds"


def _clipped(plan: Plan, model: Model, now: Forecast, evaluation: Evaluation | None) -> str:
    """Return how many gradients are clipped, and how many would be at the posterior, without noise and start."""
    left = forecast(plan, model, excess=False, start=False).shortened
    if np.isfinite(plan.example_clip).any():
        rate = None if evaluation is None else evaluation.example_clip_rate
        share = "" if rate is None else f"{rate:.0%} of the examples' gradients were clipped after burn-in; "
        return f"{share}at the posterior clipping leaves {left:.0%} of the examples' gradients"
    rate = None if evaluation is None else evaluation.clip_rate["samples"]
    share = f"{now.clipped:.0%} of gradients are expected to be" if rate is None else f"{rate:.0%} of gradients were"
    return f"{share} clipped after burn-in; at the posterior itself clipping would leave {left:.0%} of them"


def _unlike_devices(plan: Plan, posterior: Posterior | None, setting: Setting | None) -> list[Cause]:
    """Return the cause that active devices are so unlike the others that a step stretches errors."""
    factor, change = 1.0 if posterior is None else expansion(posterior, plan), None
    if posterior is None or factor <= 1:
        return []
    if setting is not None:
        with suppress(InputError):
            if expansion(posterior, setting.replan({"policy.schedule": "all"})) <= 1:
                change = Change("policy.schedule", "all", "to")
    return [Cause("unlike devices", f"a round in which some send stretches errors {factor:.3g} times", factor, change)]


def _narrow_prior(model: Model, posterior: Posterior | None) -> list[Cause]:
    """Return the cause that data contradict the prior; another prior cannot be forecast, as the posterior changes too.

    The most likely parameters are m λ/(λ − p) for a mode m, and under a prior of precision p have a variance of
    1/p + 1/(λ − p).
    """
    if not isinstance(posterior, GaussianPosterior | SoftmaxPosterior) or posterior.coordinates is not None:
        return []
    precision, std = model.cost.precision, posterior.prior_std
    of_data = np.maximum(precision - std**-2, 1e-6 * precision)  # λ − p
    likely = model.cost.away * precision / of_data
    away = float(np.sqrt(np.mean(likely**2 / (std**2 + 1 / of_data))))
    if away <= NARROW_PRIOR:
        return []
    change = Change("posterior.prior_std", _rounded(np.sqrt(np.mean(likely**2))), "up")
    evidence = f"the data put parameters {away:.2g} times as far from 0 as the prior expects"
    return [Cause("prior too narrow", evidence, away, change)]


class _Search:
    """The search for changes that help: plans with one key changed, on top of the changes that were accepted before."""

    def __init__(
        self, plan: Plan, posterior: Posterior | None, model: Model, now: Forecast, setting: Setting | None
    ) -> None:
        self.plan, self.posterior, self.model, self.now, self.setting = plan, posterior, model, now, setting
        self.accepted: dict[str, Any] = {}
        self.directions: dict[str, str] = {}
        """Of the keys, and groups of keys, that causes before have named."""
        self.forecasts: dict[Any, Forecast | None] = {}
        quick = self._forecast(QUICK) if setting is not None and setting.slow else None
        self.base, self.quick = (now, {}) if quick is None else (quick, QUICK)

    def best(self, kind: str) -> tuple[Change | None, Change | None]:
        """Return the change that helps most against a cause, of a key that no cause before it has named.

        Where it costs privacy or power, also the best that does not.
        """
        if self.setting is None or len(self.plan.rounds) * self.plan.devices > LARGEST_TRIAL:
            return None, None
        if kind != "draws" and self.base.alike < GOOD:
            return None, None  # the change before is enough
        free = self._preferred(FREE[kind], kind)
        paid = None if free is not None and free.after <= GOOD else self._preferred(PAID.get(kind, ()), kind)
        pays = free is None or (paid is not None and paid.after < CHEAPER * free.after)
        asked = (paid, free) if pays else (free,)
        chosen = [change for each in asked if each is not None and (change := self._confirmed(each, kind)) is not None]
        for change in chosen:
            self.directions |= {change.key: "", CONFLICTS.get(change.key, change.key): change.direction}
        if not chosen:
            return None, None
        first = chosen[0]._replace(then=bool(self.accepted))
        self.accepted |= first.values
        self.base = self._forecast(self.quick) or self.base
        self.now = (self._forecast({}) or self.now) if self.quick else self.base
        return first, chosen[1] if len(chosen) > 1 else None

    def _confirmed(self, change: Change, kind: str) -> Change | None:
        """Return the change if it helps the plan itself and not only the quick one."""
        return _helped(change, self.now, self._forecast(change.values), kind) if self.quick else change

    def _preferred(self, keys: Iterable[str], kind: str) -> Change | None:
        """Return the first key's change that brings nearly as much as the best one."""
        return _nearly_best((self._smallest(key, kind) for key in keys if key not in self.directions), 2)

    def _smallest(self, key: str, kind: str) -> Change | None:
        """Return the smallest change of a key that brings nearly all that it can."""
        before = self.directions.get(CONFLICTS.get(key, key))
        allowed = (change for change in self._changes(key) if before in (None, change.direction))
        tried = (_helped(each, self.base, self._forecast({**self.quick, **each.values}), kind) for each in allowed)
        return _nearly_best(tried, 1.25)

    def _forecast(self, changes: Mapping[str, Any]) -> Forecast | None:
        """Return the forecast of the plan with further changes; None where it cannot be made."""
        assert self.setting is not None
        values = {**self.accepted, **changes}
        name = tuple(values.items())
        if name not in self.forecasts:
            self.forecasts[name] = None
            with suppress(InputError):
                plan = self.setting.replan(values)
                model = self.model if plan.init == self.plan.init else model_of(plan, self.posterior)
                self.forecasts[name] = forecast(plan, model)
        return self.forecasts[name]

    def _changes(self, key: str) -> Iterator[Change]:
        """Return what to try for a key, the smallest changes first."""
        plan, setting = self.plan, self.setting
        assert setting is not None
        factors = 2.0 ** np.array([1, -1, 2, -2, 3, -3, 4, -4])
        epsilon, unit, examples = plan.privacy.epsilon, plan.privacy.unit, self.model.examples
        match key:
            case "sampler.step_size" if _uniform(plan.step_size):
                now, limit = plan.step_size[0], plan.dynamics.largest_step(plan.mu, plan.L)
                return _numbers(key, now, (value for value in now * factors if value < limit))
            case "sampler.burn_in" | "sampler.samples":
                now = plan.burn_in if key.endswith("burn_in") else len(plan.rounds) - plan.burn_in
                values = np.rint(max(now, 8) * factors).astype(int)
                return _numbers(key, now, values[(values >= 8) & (values <= max(MOST_ROUNDS, 2 * now))])
            case "privacy.clip" if plan.clips and _uniform(plan.clip):
                typical = float(np.sqrt((self.model.cost.pull**2).sum(-1).mean()))
                return _numbers(key, plan.clip[0], typical * np.geomspace(0.5, 8, 9))
            case "privacy.example_clip" if unit == "record" and examples is not None and _uniform(plan.example_clip):
                return _numbers(key, plan.example_clip[0], np.quantile(examples, [0.5, 0.75, 0.9]))
            case "privacy.unit" if unit == "device" and epsilon is not None and examples is not None:
                clips = [{"privacy.example_clip": _rounded(norm)} for norm in np.quantile(examples, [0.9, 0.75])]
                return (Change(key, "record", "to", clip) for clip in clips)
            case "privacy.epsilon" if epsilon is not None and np.ndim(epsilon) == 0:
                return _numbers(key, float(np.asarray(epsilon)), float(np.asarray(epsilon)) * np.array([2, 4]))
            case "link.snr_db" if np.ndim(setting.snr_db) == 0:
                return (Change(key, float(setting.snr_db) + more, "up") for more in (5, 10, 20, 30, 40))
            case "policy.max_round_noise" if plan.noise_limit == np.inf and setting.power != "equal":
                return (Change(key, limit, "down") for limit in (2.0, 1.0))
            case "policy.power" if setting.power == "equal":
                return iter([Change(key, "optimized", "to")])
            case "sampler.init" if plan.init == "prior":
                return iter([Change(key, "zero", "to")])
        return iter(())


def _nearly_best(changes: Iterable[Change | None], slack: float) -> Change | None:
    """Return the first change that brings nearly as much as the best; one that is good enough ends the search."""
    helpful: list[Change] = []
    for change in changes:
        helpful += [] if change is None else [change]
        if change is not None and change.after <= GOOD:
            break
    enough = max(GOOD, slack * min((change.after for change in helpful), default=0.0))
    return next((change for change in helpful if change.after <= enough), None)


def _helped(change: Change, now: Forecast, then: Forecast | None, kind: str) -> Change | None:
    """Return the change with what is expected of it; None where it does not help or cannot be made."""
    if then is None:
        return None
    if kind == "draws":
        expected = now.error, then.error
        helps = then.error < BETTER * now.error and then.alike < max(1.1 * now.alike, GOOD / 2)
    else:
        expected = now.alike, then.alike
        helps = then.alike < BETTER * now.alike and then.w2_sq < now.w2_sq
        helps = helps and then.w2_sq + then.error < now.w2_sq + now.error
    return change._replace(expected=expected, exact=now.exact and then.exact) if helps else None


def _uniform(values: Any) -> bool:
    return bool(np.all(values == values.flat[0]))


def _rounded(value: Any) -> float | int:
    """Return a plain number of two digits; whole numbers as they are."""
    return int(value) if isinstance(value, int | np.integer) else float(f"{value:.2g}")


def _numbers(key: str, now: float, values: Iterable[Any]) -> Iterator[Change]:
    """Return changes to numbers, the nearest to the present one first."""
    others = sorted({_rounded(value) for value in values} - {_rounded(now)})
    for value in sorted(others, key=lambda value: abs(np.log(value / max(now, 1e-9)))):
        yield Change(key, value, "up" if value > now else "down")
