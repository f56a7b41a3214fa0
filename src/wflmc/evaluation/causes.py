"""One diagnosis of a plan or a run: what keeps its samples from the posterior, worst first, and what would help.

Causes are ranked by what each of them costs in a forecast of the chains (`wflmc.evaluation.clipped_law`). A change is
named only after a plan with it was made and its forecast was better. The diagnosis uses the plan, the chains and their
diagnostics, not test scores: settings chosen by these would be fitted to the test set.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from wflmc.channel import Link
from wflmc.dynamics import Array
from wflmc.evaluation.clipped_law import Forecast, Model, forecast, model_of
from wflmc.evaluation.summary import Evaluation
from wflmc.planning import Plan, plan, plan_arguments
from wflmc.planning.solvers.closed_form import LIMITS, POLICY, POWER
from wflmc.posterior import GaussianPosterior, Posterior, SoftmaxPosterior
from wflmc.privacy import Privacy
from wflmc.support.errors import InputError

GOOD = 0.05
"""W2² in posterior variances below which samples count as good, and a change as large enough."""
FEW_DRAWS = 0.1
"""1/ESS of one chain above which its draws are too few."""
BETTER, CHEAPER = 0.8, 0.3
"""A change must lower the forecast to this part; one that costs privacy or power, to this part of any that does not."""
NARROW_PRIOR = 3.0
"""How much farther from 0 than the prior expects the data may put parameters."""
MOST_PARAMETERS = 20_000
"""Beyond this there is no forecast: the mode alone takes longer to find than most chains take to run."""
MOST_ROUNDS = 1000
"""A larger number of rounds is only suggested up to twice as many."""
LARGEST_TRIAL = 2**19
"""Rounds times devices above which no other plans are made."""
DRAWS = "too few draws"
SHOWN = 2
"""Causes for which changes are tried and that are shown; lists have them all."""
ALIKE = {"sampler.samples": "sampler.burn_in", "privacy.example_clip": "privacy.clip"}
"""Keys of which one diagnosis changes only one: it would not raise the one and lower the other."""

QUIETER = ("privacy.clip", "privacy.example_clip", "policy.max_round_noise", "sampler.step_size", "sampler.burn_in")
FREE = {
    "noise": (*QUIETER, "sampler.samples", "policy.power"),
    "clipping": QUIETER,
    "start": ("sampler.step_size", "sampler.burn_in", "sampler.init", "privacy.clip", "privacy.example_clip"),
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
NAMES = {
    ("clipping", "privacy.clip", "up"): "clip too small",
    ("clipping", "privacy.example_clip", "up"): "clip too small",
    ("start", "sampler.step_size", "up"): "step size too small",
    ("start", "sampler.burn_in", "up"): "burn-in too short",
}
"""Names of causes by the change that helps against them."""
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

    @property
    def document(self) -> dict[str, Any]:
        """Return what JSON has of it."""
        expected = self.expected and {"before": self.expected[0], "after": self.expected[1], "exact": self.exact}
        changed = {"key": self.key, "value": self.value, "direction": self.direction}
        return {**changed, "with": dict(self.others), "expected": expected}

    def __str__(self) -> str:
        texts = {key: value if isinstance(value, str) else f"{value:g}" for key, value in self.values.items()}
        return " with ".join(f"{key} = {text}" for key, text in texts.items())


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
        text += f" {'Then try' if self.change.then else 'Try'} {self.change}{WEAKER.get(self.change.key, '')}"
        if self.change.expected is not None:
            quantity = "1/ESS of a chain" if self.cause == DRAWS else "W2² in posterior variances"
            numbers = "expected {} falls from {:.2g} to {:.2g}".format(quantity, *self.change.expected)
            text += f": {numbers if self.change.exact else 'better samples in a forecast'}"
        return f"{text}." if self.instead is None else f"{text}. Without it, {self.instead} helps."

    @property
    def document(self) -> dict[str, Any]:
        """Return what JSON has of it."""
        changes = {name: each and each.document for name, each in (("change", self.change), ("instead", self.instead))}
        return {"cause": self.cause, "evidence": self.evidence, "cost": self.cost, **changes, "text": str(self)}


class Asked(NamedTuple):
    """What a plan was made with: the arguments of `plan`."""

    posterior: Posterior
    link: Link
    privacy: Privacy
    keywords: Mapping[str, Any]

    def replan(self, changes: Mapping[str, Any]) -> Plan:
        """Make the plan with other values of some keys; raises InputError where that is not possible."""
        link, privacy, sampler, policy = (
            {key.partition(".")[2]: value for key, value in changes.items() if key.startswith(section)}
            for section in ("link.", "privacy.", "sampler.", "policy.")
        )
        other, promise = dataclasses.replace(self.link, **link), dataclasses.replace(self.privacy, **privacy)
        return plan(self.posterior, other, promise, **plan_arguments({**self.keywords, **sampler, **policy}))


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
    asked = Asked(posterior, link, privacy, keywords)
    return find_causes(asked.replan({}), posterior, asked, evaluation)


def find_causes(
    plan: Plan, posterior: Posterior | None, asked: Asked | None = None, evaluation: Evaluation | None = None
) -> tuple[Cause, ...]:
    """Return the causes of a plan that is made already, as `advise` does.

    Args:
        posterior: None where the data are not to be looked at.
        asked: None where no changes are to be tried.
        evaluation: of a trace of the plan.
    """
    if plan.dim > MOST_PARAMETERS:
        evidence = f"no forecast is made for {plan.dim:,} parameters, which would take long"
        return (Cause("not diagnosed", evidence, 0.0, None),)
    model = model_of(plan, posterior)
    now, ideal = forecast(plan, model), forecast(plan, model, clipping=False, excess=False, start=False)
    search = None if asked is None else _Search(plan, posterior, model, now, asked)
    # A warning about the data themselves, such as features of unlike scale, would come first here.
    causes = _narrow_prior(model, posterior)
    for kind, cost in _costs(plan, model, now, ideal):
        change, instead = search.best(kind) if search and len(causes) < SHOWN else (None, None)
        name, evidence = _evidence(kind, cost, plan, model, now, evaluation)
        if change is not None:
            name = NAMES.get((kind, change.key, change.direction), name)
        causes.append(Cause(name, evidence, cost, change, instead))
    return tuple(causes)


def _costs(plan: Plan, model: Model, now: Forecast, ideal: Forecast) -> list[tuple[str, float]]:
    """Return what each cause costs, the largest first; too few draws come last."""
    costs: dict[str, float] = {}
    if now.alike >= GOOD:
        for kind, part in (("noise", "excess"), ("clipping", "clipping"), ("start", "start")):
            alike = forecast(plan, model, **{part: False}).alike
            costs[kind] = 0.0 if alike == now.alike else now.alike - alike  # both may be infinite
        costs["step"] = ideal.alike
    large = sorted((each for each in costs.items() if each[1] >= 0.1 * now.alike), key=lambda each: -each[1])
    several = len(plan.rounds) - plan.burn_in > 1
    if several and ideal.error > FEW_DRAWS and now.alike < 1:  # else they are too bad to ask for more of them
        large.append(("draws", ideal.error))
    return large


def _evidence(
    kind: str, cost: float, plan: Plan, model: Model, now: Forecast, evaluation: Evaluation | None
) -> tuple[str, str]:
    """Return the usual name of a cause, and what shows it."""
    rhat = None if evaluation is None else evaluation.rhat_max
    measured = "" if rhat is None else f" (R-hat is {rhat:.3g})"
    match kind:
        case "noise":
            if plan.noise_ratio > 1.05:
                times = f"{plan.noise_ratio:.3g} times what Langevin sampling needs after burn-in"
                name, by = _noise_limit(plan)
                return name, f"{times}, limited by {by}"
            most = float((plan.noise_variance / plan.langevin_noise).max())
            return "noise of burn-in", f"up to {most:.3g} times what Langevin sampling needs in early rounds"
        case "clipping":
            left = forecast(plan, model, excess=False, start=False).shortened
            return "clipped gradients", f"{_clipped(plan, now, evaluation)}; at the posterior {left:.0%} would be left"
        case "start":
            off = f"{cost**0.5:.2g} posterior standard deviations from where they should be{measured}"
            return "start not forgotten", f"after {plan.burn_in} rounds chains are {off}"
        case "step":
            return "step size too large", f"step_size = {plan.step_size[-1]:.3g} alone spreads samples too widely"
    draws = f"{len(plan.rounds) - plan.burn_in} draws of a chain"
    return DRAWS, f"{draws} are worth {1 / cost:.2g} independent ones{measured}"


def _noise_limit(plan: Plan) -> tuple[str, str]:
    """Return the usual name of excess noise, and what keeps kept rounds from less."""
    limit = plan.limit[plan.burn_in :]
    if np.mean(limit == LIMITS.index(POWER)) > 0.5:
        return "channel noise", "power"
    if np.mean(limit == LIMITS.index(POLICY)) > 0.5:
        return "channel noise", "the policy"
    return "privacy noise", "privacy"


def _clipped(plan: Plan, now: Forecast, evaluation: Evaluation | None) -> str:
    """Return how many gradients of devices or examples were clipped, or are expected to be."""
    if np.isfinite(plan.example_clip).any():
        rate = None if evaluation is None else evaluation.example_clip_rate
        return "examples are clipped" if rate is None else f"{rate:.0%} of examples were clipped"
    rate = None if evaluation is None else evaluation.clip_rate["samples"]
    expected = f"{now.clipped:.0%} of gradients are expected to be clipped"
    return expected if rate is None else f"{rate:.0%} of gradients were clipped"


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

    def __init__(self, plan: Plan, posterior: Posterior | None, model: Model, now: Forecast, asked: Asked) -> None:
        self.plan, self.posterior, self.model, self.base, self.asked = plan, posterior, model, now, asked
        self.accepted: dict[str, Any] = {}
        self.quick: dict[str, str] = {}
        self.named: set[str] = set()
        """Keys that causes before have named."""
        policy = plan_arguments(asked.keywords)["policy"]
        if not _uniform(plan.step_size):  # planning them takes some seventy plans
            settled = {"step_size": plan.step_size, "step_schedule": "constant"}
            self.asked = asked._replace(keywords={**asked.keywords, **settled})
        if policy.objective in ("exact", "transcript") or policy.csi == "causal":
            # These plans are slow: the search is among quick ones.
            self.quick, self.base = QUICK, self._forecast(QUICK) or now

    def best(self, kind: str) -> tuple[Change | None, Change | None]:
        """Return the change that helps most against a cause, of a key that no cause before it has named.

        Where it costs privacy or power, also the best that does not.
        """
        enough = kind != "draws" and self.base.alike < GOOD  # by the change before
        if enough or len(self.plan.rounds) * self.plan.devices > LARGEST_TRIAL:
            return None, None
        change, instead = self._preferred(FREE[kind], kind), None
        if change is None or change.after > GOOD:
            paid = self._preferred(PAID.get(kind, ()), kind)
            if paid is not None and (change is None or paid.after < CHEAPER * change.after):
                change, instead = paid, change
        if change is not None:
            self.named |= {ALIKE.get(each.key, each.key) for each in (change, instead) if each is not None}
            change = change._replace(then=bool(self.accepted))
            self.accepted |= change.values
            self.base = self._forecast({}) or self.base
        return change, instead

    def _preferred(self, keys: Iterable[str], kind: str) -> Change | None:
        """Return the first key's smallest change that brings nearly as much as the best one."""
        free = (key for key in keys if ALIKE.get(key, key) not in self.named)
        return _nearly_best((_nearly_best(self._helpful(key, kind), 1.25) for key in free), 2)

    def _helpful(self, key: str, kind: str) -> Iterator[Change]:
        """Yield the changes of a key that help, with what is expected of them, the smallest first."""
        now = self.base
        for change in self._changes(key):
            if (then := self._forecast(change.values)) is None:
                continue
            if kind == "draws":
                before, after, helps = now.error, then.error, then.alike < max(1.1 * now.alike, GOOD / 2)
            else:
                before, after, helps = now.alike, then.alike, then.w2_sq < now.w2_sq
                helps = helps and then.w2_sq + then.error < now.w2_sq + now.error
            if helps and after < BETTER * before:
                yield change._replace(expected=(before, after), exact=now.exact and then.exact)

    def _forecast(self, changes: Mapping[str, Any]) -> Forecast | None:
        """Return the forecast of the plan with further changes; None where it cannot be made."""
        with suppress(InputError):
            plan = self.asked.replan({**self.quick, **self.accepted, **changes})
            return forecast(plan, self.model if plan.init == self.plan.init else model_of(plan, self.posterior))
        return None

    def _changes(self, key: str) -> Iterable[Change]:
        """Return what to try for a key, the smallest changes first."""
        plan, factors, examples = self.plan, 2.0 ** np.array([1, -1, 2, -2, 3, -3, 4, -4]), self.model.examples
        epsilon, unit, snr_db = plan.privacy.epsilon, plan.privacy.unit, self.asked.link.snr_db
        match key:
            case "sampler.step_size" if _uniform(plan.step_size):
                values = plan.step_size[0] * factors
                return _numbers(key, plan.step_size[0], values[values < plan.dynamics.largest_step(plan.mu, plan.L)])
            case "sampler.burn_in" | "sampler.samples":
                now = plan.burn_in if key.endswith("burn_in") else len(plan.rounds) - plan.burn_in
                values = np.rint(max(now, 8) * factors).astype(int)
                return _numbers(key, now, values[(values >= 8) & (values <= max(MOST_ROUNDS, 2 * now))])
            case "privacy.clip" if plan.clips and _uniform(plan.clip):
                typical = float(np.sqrt((self.model.cost.pull**2).sum(-1).mean()))
                return _numbers(key, plan.clip[0], typical * np.geomspace(0.5, 8, 9))
            case "privacy.example_clip" if unit == "record" and examples is not None and _uniform(plan.example_clip):
                return _numbers(key, plan.example_clip[0], _example_clips(self.posterior, examples))
            case "privacy.unit" if unit == "device" and epsilon is not None and examples is not None:
                clips = np.quantile(examples, [0.9, 0.75])
                return [Change(key, "record", "to", {"privacy.example_clip": _rounded(clip)}) for clip in clips]
            case "privacy.epsilon" if epsilon is not None and np.ndim(epsilon) == 0:
                return _numbers(key, float(np.asarray(epsilon)), np.asarray(epsilon) * np.array([2.0, 4.0]))
            case "link.snr_db" if np.ndim(snr_db) == 0:
                return [Change(key, float(np.asarray(snr_db)) + more, "up") for more in (5, 10, 20, 30, 40)]
            case "policy.max_round_noise" if plan.certificate.noise_limit == np.inf:
                return [Change(key, limit, "down") for limit in (2.0, 1.0)]
            case "policy.power":
                return [Change(key, "optimized", "to")]
            case "sampler.init" if plan.init == "prior":
                return [Change(key, "zero", "to")]
        return []


def _example_clips(posterior: Posterior | None, norms: Array) -> Array:
    """Return clipping thresholds of one example's gradient to try.

    Args:
        posterior: the model; None where the data are not to be looked at.
        norms: of the examples' gradients at the posterior, [N].

    Returns:
        Multiples of the typical norm, which depends on no example, where the model
        knows it; else quantiles of `norms`, which ε does not cover.
    """
    if posterior is not None:
        with suppress(InputError):
            typical_norm = float(np.max(posterior.typical_example_norm()))
            return typical_norm * np.array([2.0, 3.0, 5.0])
    return np.quantile(norms, [0.5, 0.75, 0.9, 0.99])


def _nearly_best(changes: Iterable[Change | None], slack: float) -> Change | None:
    """Return the first change that brings nearly as much as the best; one that is good enough ends the search."""
    helpful: list[Change] = []
    for change in filter(None, changes):
        helpful.append(change)
        if change.after <= GOOD:
            break
    enough = max(GOOD, slack * min((change.after for change in helpful), default=0.0))
    return next((change for change in helpful if change.after <= enough), None)


def _uniform(values: Any) -> bool:
    return bool(np.all(values == values.flat[0]))


def _rounded(value: Any) -> float | int:
    """Return a plain number of two digits; whole numbers as they are."""
    return int(value) if isinstance(value, int | np.integer) else float(f"{value:.2g}")


def _numbers(key: str, now: float, values: Iterable[Any]) -> list[Change]:
    """Return changes to numbers, the nearest to the present one first."""
    others = sorted({_rounded(value) for value in values} - {_rounded(now)})
    others.sort(key=lambda value: abs(np.log(value / max(now, 1e-9))))
    return [Change(key, value, "up" if value > now else "down") for value in others]
