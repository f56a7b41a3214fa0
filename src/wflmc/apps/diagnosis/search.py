"""The search for changes that help: plans with one key changed, judged by a forecast.

A change is accepted only after a plan with it was made and the forecast of its chains
(`wflmc.evaluation.clipped_law`) was better.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.apps.diagnosis.best_first import GOOD_W2_SQ, BestFirst, ChangeTrial
from wflmc.apps.diagnosis.least_distance import least_distance, unclipped_distance
from wflmc.apps.diagnosis.replanning import Replanner
from wflmc.apps.diagnosis.values import Change, Expectation, SettingValue
from wflmc.dynamics import Array
from wflmc.evaluation.clipped_law import (
    ChainForecast,
    ForecastModel,
    forecast,
    model_of,
)
from wflmc.planning import Plan
from wflmc.planning.build import TrialPlan
from wflmc.posterior import Posterior
from wflmc.posterior.regression import Regression
from wflmc.support.errors import InputError

LARGEST_FRACTION_LEFT = 0.8
"""A change helps if it lowers the cost to at most this fraction."""
LARGEST_FRACTION_FOR_A_PRICE = 0.3
"""A change that costs privacy or power must lower the cost to this fraction of what
any free change reaches."""
MAX_GROWTH_FOR_DRAWS = 1.1
"""Factor by which W2² may grow for the sake of more independent draws."""
MAX_SUGGESTED_ROUNDS = 1000
"""More rounds than these are only suggested up to twice as many as there are."""
MIN_SUGGESTED_ROUNDS = 8
"""Fewer rounds than these are not suggested."""
MAX_TRIAL_SIZE = 2**19
"""Rounds times devices above which no other plans are made."""

KEY_GROUP = {
    "sampler.samples": "sampler.burn_in",
    "privacy.example_clip": "privacy.clip",
}
"""Keys of which one diagnosis changes only one: it would not raise the one and lower
the other."""
AGAINST_NOISE = (
    "privacy.clip",
    "privacy.example_clip",
    "policy.max_round_noise",
    "sampler.step_size",
    "sampler.burn_in",
)
FREE_KEYS = {
    "noise": (*AGAINST_NOISE, "sampler.samples", "policy.power"),
    "cold": ("sampler.burn_in_temperature",),
    "clipping": AGAINST_NOISE,
    "start": (
        "sampler.step_size",
        "sampler.burn_in",
        "sampler.init",
        "privacy.clip",
        "privacy.example_clip",
    ),
    "step": ("sampler.step_size",),
    "draws": ("sampler.step_size", "sampler.samples"),
}
"""Keys that may help against each kind of cause and cost neither privacy nor power, the
preferred ones first."""
PAID_KEYS = {"noise": ("link.snr_db", "privacy.epsilon", "privacy.unit")}
"""Keys that may help and do cost it."""
QUICK_POLICY: Mapping[str, SettingValue] = {
    "policy.objective": "worst",
    "policy.csi": "full",
}
"""Settings of plans that are made in milliseconds."""

SMALLEST_PRESENT = 1e-9
"""Stands for a present value of 0, whose logarithm is not finite."""
STEP_FACTORS = 2.0 ** np.array([1, -1, 2, -2, 3, -3, 4, -4])
"""By which the step size, and numbers of rounds, are multiplied."""
CLIP_FACTORS = np.geomspace(0.5, 8, 9)
"""Clipping thresholds of devices, over the typical norm of their gradients."""
EXAMPLE_CLIP_FACTORS = np.array([2.0, 3.0, 5.0])
"""Clipping thresholds of examples, over the typical norm of their gradients."""
EPSILON_FACTORS = np.array([2.0, 4.0])
"""By which ε is multiplied."""
SNR_STEPS_DB = (5, 10, 20, 30, 40)
"""What is added to the SNR."""
NOISE_LIMITS = (2.0, 1.0)
"""Values of `policy.max_round_noise` for plans that have no limit."""


class BestChanges(NamedTuple):
    """The answer of a search."""

    change: Change | None
    """The change that helps most; None where none does."""
    instead: Change | None
    """Where that one costs privacy or power, the best that does not."""


NO_CHANGES = BestChanges(change=None, instead=None)


@dataclass(frozen=True, eq=False)
class Diagnosed:
    """A plan, what it was made for, and the forecast of its chains."""

    plan: Plan
    posterior: Posterior | None
    """None where the data are not to be looked at."""
    model: ForecastModel
    """What the forecast takes the posterior for."""
    forecast: ChainForecast
    """Of the chains of the plan."""

    @property
    def is_too_large(self) -> bool:
        """Whether other plans of its size would take too long.

        Rounds times devices are compared with MAX_TRIAL_SIZE; no changes are tried for
        a larger plan.
        """
        return len(self.plan.rounds) * self.plan.devices > MAX_TRIAL_SIZE


class ChangeSearch:
    """Tries one key at a time, on top of the changes that were accepted before.

    Args:
        diagnosed: the plan to improve.
        replanner: makes it again.
    """

    def __init__(self, diagnosed: Diagnosed, replanner: Replanner) -> None:
        self.diagnosed = diagnosed
        self.replanner = replanner.settled_by(diagnosed.plan)
        self.base = diagnosed.forecast
        """Forecast of the plan with all changes that were accepted."""
        self.accepted: dict[str, SettingValue] = {}
        self.named_groups: set[str] = set()
        """Keys that causes before have named, by their group."""
        self.forecasts: dict[tuple[tuple[str, SettingValue], ...], ChainForecast] = {}
        """Of all plans that were forecast, by their settings."""
        self.forecasts_by_digest: dict[str, ChainForecast] = {}
        """The same, by what the plans make devices and server do."""
        policy = replanner.request.policy
        is_slow = policy.objective in ("exact", "transcript") or policy.csi == "causal"
        self.trial_policy = QUICK_POLICY if is_slow else {}
        # Plans are compared with one of the same policy: the base is made again by it.
        if is_slow and not diagnosed.is_too_large:
            self._renew_base()

    def best(self, kind: str) -> BestChanges:
        """Search the change that helps most against a kind of cause, and accept it.

        Keys that an earlier search has named are not tried again. Later searches start
        from the plan with the accepted change.

        Args:
            kind: of FREE_KEYS.

        Returns:
            The change, and a free alternative where it costs privacy or power. There is
            none where the plan is too large. Where W2² is good already, there is one
            only against draws that are too few, or too narrow by cold burn-in.
        """
        needs_large_error = kind not in ("draws", "cold")
        is_good_already = needs_large_error and self.base.scaled_w2_sq < GOOD_W2_SQ
        if is_good_already or self.diagnosed.is_too_large:
            return NO_CHANGES
        best = self._best_of(kind)
        if best.change is None:
            return best
        for named in (best.change, best.instead):
            if named is not None:
                self.named_groups.add(KEY_GROUP.get(named.key, named.key))
        change = best.change._replace(follows_another=bool(self.accepted))
        self.accepted |= change.values
        self._renew_base()
        return best._replace(change=change)

    def _renew_base(self) -> None:
        """Forecast the plan with all changes that were accepted, if there is one."""
        with suppress(InputError):
            self.base = self._forecast(self._settings({}), None)

    def _best_of(self, kind: str) -> BestChanges:
        """Return the best free change, or one that costs privacy or power.

        One that costs is returned only where no free one helps, or where it brings the
        cost below LARGEST_FRACTION_FOR_A_PRICE of the free one's, which is then the
        alternative.
        """
        free = self._preferred(FREE_KEYS[kind], kind)
        if free is not None and free.cost_after <= GOOD_W2_SQ:
            return BestChanges(free, None)
        highest = np.inf
        if free is not None:
            highest = LARGEST_FRACTION_FOR_A_PRICE * free.cost_after
        paid = self._preferred(PAID_KEYS.get(kind, ()), kind, highest)
        if paid is None:
            return BestChanges(free, None)
        return BestChanges(paid, free)

    def _preferred(
        self,
        keys: Iterable[str],
        kind: str,
        highest: float = np.inf,
    ) -> Change | None:
        """Return the first key's smallest change that is nearly as good as the best.

        Args:
            keys: to change, the preferred ones first.
            kind: of the cause.
            highest: there is no result unless it brings the cost below this.
        """
        ceiling = np.inf
        if kind != "draws":
            ceiling = LARGEST_FRACTION_LEFT * self.base.scaled_w2_sq
        search = BestFirst(ceiling=ceiling, highest=highest)
        for key in keys:
            if KEY_GROUP.get(key, key) in self.named_groups:
                continue
            trials = []
            for change in self._candidates(key):
                trials.append(self._trial(change, kind))
            search.add_key([trial for trial in trials if trial is not None])
            if search.is_over:
                break
        return search.result()

    def _trial(self, change: Change, kind: str) -> ChangeTrial | None:
        """Return what a change is tried by; None where there is no such plan."""
        settings = self._settings(change.values)
        with suppress(InputError):
            trial = self.replanner.trial(settings)
            model = self._model_from(settings)
            # Bounds are on W2², and the cost of too few draws is 1/ESS.
            bound = 0.0
            if kind != "draws" and model is not None:
                bound = least_distance(trial, model)
            return ChangeTrial(change, bound, self._steps(change, kind, trial))
        return None

    def _steps(
        self,
        change: Change,
        kind: str,
        trial: TrialPlan,
    ) -> Generator[float, None, Change | None]:
        """Try a change step by step, as `ChangeTrial` takes it.

        The plan is made first, its forecast is then bounded from below, and at last the
        forecast is made.
        """
        settings = self._settings(change.values)
        with suppress(InputError):
            plan = trial.plan()
            model = self._model_from(settings)
            if kind != "draws" and model is not None:
                yield unclipped_distance(plan, model)
            changed = self._forecast(settings, plan)
            return self._helpful(change, kind, changed)
        return None

    def _helpful(
        self, change: Change, kind: str, changed: ChainForecast
    ) -> Change | None:
        """Return a change with what is expected of it; None where it does not help.

        A change that helps leaves less than LARGEST_FRACTION_LEFT of the cost, and does
        not pay for it elsewhere. Against too few draws, W2² must not grow by
        MAX_GROWTH_FOR_DRAWS or more, unless it stays below half of GOOD_W2_SQ. Against
        another cause, W2² over the total variance must fall as well, and so must its
        sum with 1/ESS, unless the cause is burn-in that is too cold.
        """
        base = self.base
        if kind == "draws":
            before = base.inverse_ess
            after = changed.inverse_ess
            limit = max(
                MAX_GROWTH_FOR_DRAWS * base.scaled_w2_sq,
                GOOD_W2_SQ / 2,
            )
            helps = changed.scaled_w2_sq < limit
        else:
            before = base.scaled_w2_sq
            after = changed.scaled_w2_sq
            total_before = base.w2_sq + base.inverse_ess
            total_after = changed.w2_sq + changed.inverse_ess
            helps = changed.w2_sq < base.w2_sq
            # Cold burn-in makes 1/ESS too small: draws have little of the start's
            # variance in common.
            if kind != "cold":
                helps = helps and total_after < total_before
        if not helps or after >= LARGEST_FRACTION_LEFT * before:
            return None
        is_exact = base.exact and changed.exact
        return change._replace(expected=Expectation(before, after, is_exact))

    def _settings(self, changes: Mapping[str, SettingValue]) -> dict[str, SettingValue]:
        """Return all settings that differ from the plan's, with further changes."""
        return {**self.trial_policy, **self.accepted, **changes}

    def _model_from(self, settings: Mapping[str, SettingValue]) -> ForecastModel | None:
        """Return the model of forecasts; None where it depends on the plan."""
        start = self.diagnosed.plan.init
        has_same_start = settings.get("sampler.init", start) == start
        return self.diagnosed.model if has_same_start else None

    def _forecast(
        self,
        settings: Mapping[str, SettingValue],
        plan: Plan | None,
    ) -> ChainForecast:
        """Return the forecast of a plan, made once for plans that act alike.

        Args:
            settings: of the plan.
            plan: made of them; None where it need be made first.
        """
        name = tuple(sorted(settings.items()))
        if name not in self.forecasts:
            forecast_plan = plan or self.replanner.trial(settings).plan()
            self.forecasts[name] = self._forecast_of(forecast_plan)
        return self.forecasts[name]

    def _forecast_of(self, plan: Plan) -> ChainForecast:
        """Return the forecast of a plan: that of an earlier one which acts as it does.

        A limit on noise that no round reaches, for instance, changes nothing.
        """
        digest = plan.digest
        if digest not in self.forecasts_by_digest:
            model = self.diagnosed.model
            if plan.init != self.diagnosed.plan.init:
                model = model_of(plan, self.diagnosed.posterior)
            self.forecasts_by_digest[digest] = forecast(plan, model)
        return self.forecasts_by_digest[digest]

    def _candidates(self, key: str) -> Sequence[Change]:
        """Return what to try for a key, the smallest changes first.

        Values are relative to those of the diagnosed plan, which are the present ones:
        keys that earlier causes have named are not tried again.
        """
        section = key.partition(".")[0]
        if section == "sampler":
            return self._sampler_candidates(key)
        if section == "privacy":
            return self._privacy_candidates(key)
        plan = self.diagnosed.plan
        power = self.replanner.request.policy.power
        snr_db = self.replanner.request.link.snr_db
        if key == "link.snr_db" and np.ndim(snr_db) == 0:
            present_snr_db = float(np.asarray(snr_db))
            return [Change(key, present_snr_db + step, "up") for step in SNR_STEPS_DB]
        if key == "policy.max_round_noise" and plan.certificate.noise_limit == np.inf:
            return [Change(key, limit, "down") for limit in NOISE_LIMITS]
        if key == "policy.power" and power != "optimized":
            return [Change(key, "optimized", "to")]
        return []

    def _sampler_candidates(self, key: str) -> Sequence[Change]:
        plan = self.diagnosed.plan
        if key == "sampler.step_size" and is_uniform(plan.step_size):
            step_size = plan.step_size[0]
            values = step_size * STEP_FACTORS
            limit = plan.dynamics.largest_step(plan.mu, plan.L)
            return changes_to(key, step_size, values[values < limit])
        if key in ("sampler.burn_in", "sampler.samples"):
            rounds = plan.burn_in
            if key == "sampler.samples":
                rounds = len(plan.rounds) - plan.burn_in
            first = max(rounds, MIN_SUGGESTED_ROUNDS)
            values = np.rint(first * STEP_FACTORS).astype(int)
            largest = max(MAX_SUGGESTED_ROUNDS, 2 * rounds)
            in_range = (values >= MIN_SUGGESTED_ROUNDS) & (values <= largest)
            return changes_to(key, rounds, values[in_range])
        if key == "sampler.init" and plan.init == "prior":
            posterior = self.diagnosed.posterior
            has_mean = isinstance(posterior, Regression) and (
                posterior.prior_mean is not None
            )
            return [Change(key, "prior-mean" if has_mean else "zero", "to")]
        if key == "sampler.burn_in_temperature":
            return self._temperature_candidates()
        return []

    def _temperature_candidates(self) -> Sequence[Change]:
        """Return the paper's temperature of burn-in, and one halfway to it.

        The paper's is preferred, but may be too warm for steps that were planned for a
        lower one.
        """
        key = "sampler.burn_in_temperature"
        present = self.replanner.request.sampler.burn_in_temperature
        values = [1.0, rounded((1 + present) / 2)]
        return [Change(key, value, "up") for value in values if value > present]

    def _privacy_candidates(self, key: str) -> Sequence[Change]:
        if key == "privacy.clip":
            return self._clip_candidates()
        if key == "privacy.epsilon":
            return self._epsilon_candidates()
        example_norms = self.diagnosed.model.examples
        if example_norms is None:
            return []
        if key == "privacy.example_clip":
            return self._example_clip_candidates(example_norms)
        if key == "privacy.unit":
            return self._unit_candidates(example_norms)
        return []

    def _clip_candidates(self) -> Sequence[Change]:
        """Return other clipping thresholds of devices, where all have the same."""
        plan = self.diagnosed.plan
        if not plan.clips or not is_uniform(plan.clip):
            return []
        model = self.diagnosed.model
        squares = model.cost.gradients_at_mode**2
        norms_sq = squares.sum(-1) / model.direction_fraction
        typical = float(np.sqrt(norms_sq.mean()))
        return changes_to("privacy.clip", plan.clip[0], typical * CLIP_FACTORS)

    def _epsilon_candidates(self) -> Sequence[Change]:
        """Return larger ε, where all devices have the same."""
        epsilon = self.diagnosed.plan.privacy.epsilon
        if epsilon is None or np.ndim(epsilon) > 0:
            return []
        present = float(np.asarray(epsilon))
        return changes_to("privacy.epsilon", present, present * EPSILON_FACTORS)

    def _example_clip_candidates(self, example_norms: Array) -> Sequence[Change]:
        """Return other clipping thresholds of examples, where all have the same."""
        plan = self.diagnosed.plan
        if plan.privacy.unit != "record" or not is_uniform(plan.example_clip):
            return []
        values = example_clips(self.diagnosed.posterior, example_norms)
        return changes_to("privacy.example_clip", plan.example_clip[0], values)

    def _unit_candidates(self, example_norms: Array) -> Sequence[Change]:
        """Return promises for examples in place of those for devices."""
        privacy = self.diagnosed.plan.privacy
        if privacy.unit == "record" or privacy.epsilon is None:
            return []
        changes = []
        for clip in np.quantile(example_norms, [0.9, 0.75]):
            accompanying = {"privacy.example_clip": rounded(clip)}
            changes.append(Change("privacy.unit", "record", "to", accompanying))
        return changes


def example_clips(posterior: Posterior | None, norms: Array) -> Array:
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
            return typical_norm * EXAMPLE_CLIP_FACTORS
    return np.quantile(norms, [0.5, 0.75, 0.9, 0.99])


def is_uniform(values: NDArray[Any]) -> bool:
    """Return whether all numbers of an array are the same.

    A setting with one value for all rounds or devices can be changed by one number, and
    only such settings are. The array has any shape, and must not be empty; nan equals
    nothing, itself included.
    """
    return bool(np.all(values == values.flat[0]))


def rounded(value: Any) -> float | int:
    """Return a number of two significant digits, as one of Python's.

    Whole numbers are returned as they are: numbers of rounds are not rounded. Scenario
    files and JSON have the result as it is, where NumPy's numbers would not do.
    """
    if isinstance(value, int | np.integer):
        return int(value)
    return float(f"{value:.2g}")


def changes_to(key: str, present: float, values: ArrayLike) -> list[Change]:
    """Return changes of a key to numbers, the nearest to the present one first.

    Distances are those of logarithms. A value that is the present one to two digits is
    no change.

    Args:
        key: of a scenario.
        present: its present value.
        values: to try, positive, [n]; they are rounded to two digits.

    Returns:
        A change for every different value, with its direction.
    """
    candidates = {rounded(value) for value in np.asarray(values)}
    candidates.discard(rounded(present))

    def distance(value: float) -> float:
        return abs(np.log(value / max(present, SMALLEST_PRESENT)))

    by_distance = sorted(sorted(candidates), key=distance)
    return [
        Change(key, value, "up" if value > present else "down") for value in by_distance
    ]
