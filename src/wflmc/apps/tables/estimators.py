"""`PrivateClassifier` and `PrivateRegressor`: scikit-learn estimators whose every look at the data is paid for."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, cast, overload

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from wflmc.apps.tables import selection
from wflmc.apps.tables.model import FittedModel
from wflmc.apps.tables.protected import protected_chain
from wflmc.apps.tables.scaling import (
    LIMIT,
    Scaling,
    class_counts_part,
    count_kinds,
    release_class_shares,
    release_scaling,
)
from wflmc.apps.tables.settings import (
    Advance,
    Facts,
    Settings,
    choose,
    initial_parameters,
    make_plan,
    private_posterior,
    promise_of,
    whiten,
)
from wflmc.channel import Link
from wflmc.evaluation.scores import mean_probabilities
from wflmc.planning import Plan
from wflmc.posterior.inputs import Names, as_classes, class_names, with_intercept
from wflmc.privacy import Ledger
from wflmc.privacy.releases import Array, ReleaseChannel, ideal_link
from wflmc.sampling import Trace, sample
from wflmc.scenario import NotCovered
from wflmc.support.errors import InputError
from wflmc.support.keys import digest, host_generator, named, secret_key

if TYPE_CHECKING:
    from sklearn.utils import Tags

LedgerPath = str | Path | None
"""The file that a ledger is kept in; None for none."""
Owners = NDArray[np.intp]
Parts = dict[str, float]
"""Losses by what they were for."""

FARTHEST = 2.0
"""Residuals are clipped to this many spreads of the target, where candidates are compared."""
LARGE = 4.0
"""The most that a count of large residuals weighs over one of those of the size of their spread."""
SIZES = 2.0 ** np.arange(-7, 3.5, 0.5)
"""Sizes of residuals that are told apart, in spreads of the target."""


class PrivacyWarning(UserWarning):
    """Something spends privacy again, or is not covered."""


@dataclass(frozen=True)
class Spent:
    """What a fit has cost every device, and on what."""

    epsilon: float
    delta: float
    unit: str
    adjacency: str
    accountant: str
    promised: float
    """ε."""
    loss: dict[str, float]
    """Of each part; they add up."""

    @property
    def by_part(self) -> dict[str, float]:
        """ε in proportion to the losses of the parts."""
        total = sum(self.loss.values())
        return {part: self.epsilon * loss / total for part, loss in self.loss.items()}

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {value:.3g}" for part, value in self.by_part.items())
        hidden = f"unit = {self.unit}, adjacency = {self.adjacency}"
        return f"ε = {self.epsilon:.4g} of {self.promised:g} at δ = {self.delta:g} ({hidden}): {parts}"


@dataclass
class FitCount:
    """How often an estimator and its clones were fitted, all together."""

    fits: int = 0


@dataclass(eq=False, repr=False)
class _Private(ABC, BaseEstimator):  # type: ignore[misc]
    """What classifier and regressor share."""

    epsilon: float = 3.0
    delta: float = 1e-5
    _: KW_ONLY
    unit: str = "record"
    adjacency: str = "replace"
    link: Link | None = None
    ranges: ArrayLike | None = None
    settings: Settings | str | None = None
    random_state: int | None = None
    progress = cast(Advance | None, None)
    """Called with the share of the work that is done, where somebody waits."""
    _fit_count = cast(FitCount | None, None)
    """Shared with clones; None before the first fit or clone."""

    def __sklearn_clone__(self) -> Self:
        """Return a clone that counts its fits together with this estimator's.

        Cross-validation and searches fit clones, and every one of them spends.
        """
        copy = cast(Self, super().__sklearn_clone__())
        self._fit_count = self._fit_count or FitCount()
        copy._fit_count = self._fit_count
        return copy

    def _count_fit(self) -> int:
        """Return which fit of this estimator and its clones begins now, from 1."""
        self._fit_count = self._fit_count or FitCount()
        self._fit_count.fits += 1
        return self._fit_count.fits

    def __sklearn_tags__(self) -> "Tags":
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.random_state is None
        return tags

    def _fit(
        self,
        X: Array,
        outcomes: np.ndarray,
        devices: ArrayLike | None,
        classes: Names,
        path: LedgerPath,
    ) -> None:
        """Scale, choose settings, sample; `outcomes` are classes from 0, or targets."""
        promise = promise_of(self)
        if not isinstance(self.random_state, int | np.integer | None):
            raise InputError(
                "random_state",
                type(self.random_state).__name__,
                "None or a whole number",
            )
        owner = _owners(devices, len(X), self.unit)
        size, count = X.shape[1], int(owner.max()) + 1
        budget, units = (
            float(promise.budget(1)[0]),
            len(X) if self.unit == "record" else count,
        )
        key = (
            secret_key()
            if self.random_state is None
            else jax.random.key(self.random_state)
        )
        ledger = Ledger(promise, count, path=path)
        before = float(ledger.spent.max())
        ranges, rows, groups = self._columns(X, outcomes, bool(classes))
        _warn(self.epsilon, self.delta, units=units, fit_number=self._count_fit())
        release = release_scaling(
            named(key, "scaling"),
            rows,
            owner,
            promise,
            link=self.link,
            ranges=ranges,
            groups=groups,
            exact=self._real,
        )
        ledger.charge(release.name, 0, release.loss, release.noise)
        scaling = Scaling(release.scaling.center[:size], release.scaling.scale[:size])
        center, spread = (
            (0.0, 1.0) if classes else (float(part[size]) for part in release.scaling)
        )
        rounds_before = len(release.loss)
        loss = {"earlier fits": before} if before else {}
        loss["scaling"] = float(release.loss.sum(0).max())
        shares: tuple[float, ...] = ()
        part = class_counts_part(units, len(classes), budget) if classes else 0.0
        if part > 0:
            counts = release_class_shares(
                named(key, "classes"),
                outcomes,
                len(classes),
                owner,
                promise,
                part,
                link=self.link,
                start=rounds_before,
                exact=self._real,
            )
            ledger.charge(counts.name, rounds_before, counts.loss, counts.noise)
            rounds_before += len(counts.loss)
            loss["class counts"] = float(counts.loss.sum(0).max())
            shares = tuple(counts.shares.tolist())
        public_noise = getattr(self, "noise_scale", 0.0)
        # The loss kept for a noise scale that is not public: for counts with a noise of 1 % of all, within limits.
        held = (
            0.0
            if public_noise is not None
            else budget * float(np.clip(1e4 / (units**2 * budget), 0.01, 0.1))
        )
        spent = sum(loss.values()) + held
        facts = Facts(
            len(X),
            size,
            len(classes),
            count,
            promise,
            spent,
            rounds_before,
            self.link,
            shares,
        )
        Z, y = (
            scaling(X),
            outcomes
            if classes
            else np.clip((outcomes - center) / spread, -LIMIT, LIMIT),
        )
        losses = self._sample(named(key, "chain"), facts, Z, y, owner, classes, ledger)
        loss |= losses
        noise = float(public_noise or 0.0)
        if held:
            noise, loss["noise scale"] = self._release_noise(
                named(key, "residuals"), facts, held, Z, y, owner, ledger
            )
            noise *= spread
        self.model_ = FittedModel(
            np.asarray(self.trace_.theta[0]),
            scaling,
            len(classes),
            center,
            spread,
            noise,
        )
        # Tuning is by Rényi differential privacy, which has no one loss.
        epsilon = (
            self.epsilon
            if "tuning" in loss
            else cast(float, promise.epsilon_spent(ledger.spent))
        )
        kind = {
            name: getattr(promise, name) for name in ("unit", "adjacency", "accountant")
        }
        self.privacy_ = Spent(
            epsilon, self.delta, promised=self.epsilon, loss=loss, **kind
        )
        self.facts_ = facts

    @property
    def _real(self) -> bool:
        """Whether noise protects for real: not in a simulation of a seed or of a radio channel."""
        return self.random_state is None and self.link is None

    def _columns(
        self, X: Array, outcomes: np.ndarray, classify: bool
    ) -> tuple[Array, Array, tuple[int, ...]]:
        """Return public ranges and rows of all columns that are scaled, and where the target's begins."""
        size = X.shape[1]
        ranges = (
            np.full((size, 2), np.nan)
            if self.ranges is None
            else np.asarray(self.ranges, dtype=float)
        )
        if ranges.shape != (size, 2):
            raise InputError(
                "ranges",
                f"shape {ranges.shape}",
                f"[{size}, 2]: least and largest of every feature",
            )
        if classify:
            return ranges, X, ()
        target = (np.nan, np.nan) if self.target_range is None else self.target_range
        return np.vstack([ranges, target]), np.column_stack([X, outcomes]), (size,)

    def _sample(
        self,
        key: jax.Array,
        facts: Facts,
        Z: Array,
        y: np.ndarray,
        owner: Owners,
        classes: Names,
        ledger: Ledger,
    ) -> Parts:
        """Choose settings and run a chain with them; return what that cost."""
        given = self.settings if isinstance(self.settings, Settings) else None
        self.candidates_ = [] if given else choose(facts, self.progress)
        self.settings_ = given or self.candidates_[0].settings
        # Over an ideal link, where rows are hidden one by one, it does not matter who holds them.
        held_by = None if facts.link is None and facts.by_record else owner
        labels = np.asarray(classes)[y] if classes else y
        start = initial_parameters(facts)

        def run(
            settings: Settings, facts: Facts, key: jax.Array, ledger: Ledger | None
        ) -> tuple[Plan, Trace, Parts]:
            posterior = private_posterior(
                facts, settings, Z, labels, held_by, classes or None
            )
            posterior, after, release = whiten(
                named(key, "whitening"), facts, settings, posterior, self._real
            )
            if release is not None and ledger is not None:
                ledger.charge(
                    release.name, facts.rounds_before, release.loss, release.noise
                )
            made = make_plan(after, settings, posterior)
            cost = {} if release is None else {"whitening": after.spent - facts.spent}
            cost["sampling"] = float(made.spent.max())
            if self._real:
                return made, protected_chain(posterior, made, start, ledger), cost
            trace = sample(key, posterior, [made], ledger=ledger, initial=start[None])
            unknown = (
                np.full_like(trace.clip_rate, np.nan),
                np.full_like(trace.burn_in_clip_rate, np.nan),
            )
            # Neither the key of the noise nor clip rates, which look at the data, stay with a fitted estimator.
            return (
                made,
                replace(
                    trace, key=None, clip_rate=unknown[0], burn_in_clip_rate=unknown[1]
                ),
                cost,
            )

        if self.settings != "private":
            self.plan_, self.trace_, cost = run(self.settings_, facts, key, ledger)
            return cost
        best = [one.settings for one in self.candidates_[: 2 * int(selection.REPEATS)]]
        budget, repeat_loss = (
            float(facts.promise.budget(1)[0]),
            selection.loss_of_repeat(facts.promise, facts.spent),
        )
        sampled, scored = (
            (1 - selection.SCORED) * repeat_loss,
            selection.SCORED * repeat_loss,
        )
        alone = facts._replace(spent=budget - sampled)
        # All that is left counts as spent, before the first repeat.
        left = np.full((1, facts.devices), budget - facts.spent)
        ledger.charge(
            f"select-{digest(Z, np.asarray(jax.random.key_data(key)))}", 0, left
        )

        def repeat(
            number: int, candidate: int
        ) -> tuple[tuple[Plan, Trace, Parts], float]:
            own = jax.random.fold_in(key, number)
            made = run(best[candidate], alone, own, None)
            release_channel = ReleaseChannel(
                own,
                ideal_link(),
                facts.promise,
                np.bincount(owner),
                uses=1,
                rounds=range(1),
                settings=np.zeros(1),
                exact=self._real,
            )
            sums = np.bincount(owner, self._right(made[1], Z, y), facts.devices)[
                :, None
            ].astype(float)
            received = release_channel.receive(
                1, sums, reach=1.0, moved_by=1.0, budget_fraction=scored / budget
            )
            return made, float(received.mean[0])

        self.selected_ = selection.select(
            host_generator(key, "repeats"), len(best), repeat
        )
        (self.plan_, self.trace_, cost), self.settings_ = (
            self.selected_.run,
            best[self.selected_.candidate],
        )
        self.selected_ = self.selected_._replace(run=None)
        return {"tuning": budget - facts.spent - sum(cost.values()), **cost}

    @abstractmethod
    def _right(self, trace: Trace, Z: Array, y: np.ndarray) -> Array:
        """Return how right a chain is about every row, from 0 to 1, [N]."""

    def _release_noise(
        self,
        key: jax.Array,
        facts: Facts,
        loss: float,
        Z: Array,
        y: Array,
        owner: Owners,
        ledger: Ledger,
    ) -> tuple[float, float]:
        """Release how many residuals have which size; return the noise scale by it, in spreads, and what it cost."""
        start = self.plan_.start + len(self.plan_.rounds)
        release_channel = ReleaseChannel(
            key,
            facts.channel,
            facts.promise,
            np.bincount(owner),
            uses=SIZES.size + 1,
            rounds=range(start, start + 1),
            settings=SIZES,
            exact=self._real,
        )
        size = np.searchsorted(SIZES, np.abs(_residuals(self.trace_, Z, y)))
        share = loss / float(facts.promise.budget(1)[0])
        received, _ = count_kinds(
            release_channel, size[:, None], SIZES.size + 1, owner, share
        )
        losses = release_channel.losses[0]
        ledger.charge(
            f"residuals-{digest(size, release_channel.noise_name.encode())}",
            start,
            losses,
            f"residuals-{release_channel.noise_name}",
        )
        # The nearest normal law. Large residuals count more: they decide how wide intervals must be, whatever the law.
        spreads = np.geomspace(SIZES[0], SIZES[-1], 2000)[:, None]
        law = np.diff(2 * ndtr(SIZES / spreads) - 1, axis=1, prepend=0.0, append=1.0)
        weight = np.minimum(np.append(SIZES, SIZES[-1]) / spreads, LARGE)
        variance = (
            float(spreads[((weight * (law - received[0])) ** 2).sum(1).argmin(), 0])
            ** 2
        )
        # What draws disagree in comes on top for a prediction. Residuals about their mean have part of it already, half
        # by coverage on tables of a few hundred rows. The mean square of a scaled feature is about 1.
        disagree = float(self.trace_.theta[0].astype(float).var(0).sum())
        return float(max(variance - disagree / 2, 0.1 * variance) ** 0.5), float(
            losses.max()
        )

    def _given(self, X: ArrayLike) -> Array:
        """Return rows of features as in the fit, checked."""
        check_is_fitted(self, "model_")
        return np.asarray(validate_data(self, X, reset=False, dtype=np.float64))

    def report_html_(
        self, X: ArrayLike = (), y: ArrayLike = (), devices: ArrayLike | None = None
    ) -> str:
        """Return the page of this fit, one HTML file; with scores on rows X, y that were held out, if any are given."""
        from wflmc.apps.report.fit_page import render_fit
        from wflmc.apps.tables.folder import Held, describe

        rows = (
            self._given(X) if len(np.asarray(X)) else np.zeros((0, self.n_features_in_))
        )
        names, owner = np.unique(
            np.zeros(len(rows)) if devices is None else np.asarray(devices),
            return_inverse=True,
        )
        held_out = Held(rows, np.asarray(y), owner.reshape(-1), names.tolist())
        return render_fit(describe(self, held_out), type(self).__name__)

    @property
    def not_covered_(self) -> tuple[NotCovered, ...]:
        """What ε does not cover of this estimator."""
        found = [
            NotCovered(
                "refusals",
                "A fit that is refused over its data tells that it was.",
                published=False,
            )
        ]
        if self.random_state is not None:
            found.append(
                NotCovered(
                    "random_state",
                    "A seed can be guessed, and the noise with it: a simulation.",
                )
            )
        if self.link is not None:
            found.append(
                NotCovered(
                    "link",
                    "The noise of a simulated channel is float32: low-order bits may tell.",
                )
            )
        if getattr(self, "classes", ()) is None:
            found.append(
                NotCovered(
                    "classes", "The set of labels is read off the data; give classes."
                )
            )
        return tuple(found)


@dataclass(eq=False, repr=False, kw_only=True)
class PrivateClassifier(ClassifierMixin, _Private):  # type: ignore[misc]
    """Multinomial logistic regression, sampled under (ε, δ) differential privacy.

    A fit scales the features (by public ranges or a release that is paid for), pays for how frequent the classes are,
    chooses its settings on a public stand-in with such classes, and runs one chain of Langevin Monte Carlo on clipped
    gradients. Probabilities are averages over draws. A fitted estimator holds no records and not the key of its noise.

    Args:
        epsilon, delta: the promise to every row or device, for everything that `fit` does.
        unit: whose change is hidden: record, one row; or device, all rows of one.
        adjacency: replace or add-remove, see `wflmc.Privacy`.
        link: the channel between devices and server; None for an ideal one.
        classes: the labels that there are, which is public; read off y where it is None, which ε does not cover.
        ranges: least and largest value of every feature, [d, 2], where public; nan where not: it is then paid for.
        settings: None to choose on a stand-in; "private" to choose by private selection among the best of these; or
            `Settings`.
        random_state: None draws noise from the operating system's entropy; a number makes it a simulation.

    Examples:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> given = Settings(clip=1.0, step_size=0.01, burn_in=25, samples=25, prior_std=2.0)  # not chosen
        >>> model = PrivateClassifier(epsilon=8, classes=[0, 1, 2], settings=given, random_state=0).fit(X, y)
        >>> model.predict_proba(X[:2]).shape
        (2, 3)
    """

    classes: int | Sequence[int] | Sequence[str] | None = None

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        devices: ArrayLike | None = None,
        *,
        ledger: LedgerPath = None,
    ) -> Self:
        """Fit to rows X[N, d] and labels y[N]; every further fit spends again.

        Args:
            devices: which device holds each row, [N], by any names; one device by default.
            ledger: a file to keep the ledger in.
        """
        features, labels = validate_data(self, X, y, dtype=np.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # some depend on the data
            check_classification_targets(labels)
        names = class_names(labels, self.classes)
        self.classes_ = np.asarray(names)
        self._fit(features, as_classes(labels, names), devices, names, ledger)
        return self

    def predict_proba(self, X: ArrayLike) -> Array:
        """Return the probability of every class, [n, C]."""
        rows = self._given(X)
        return self.model_.probabilities(rows)

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Return the likeliest class, by name, [n]."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def _right(self, trace: Trace, Z: Array, y: np.ndarray) -> Array:
        p = mean_probabilities(
            np.asarray(trace.theta[0]), with_intercept(Z), len(self.classes_)
        )
        return (p.argmax(1) == y).astype(float)


@dataclass(eq=False, repr=False, kw_only=True)
class PrivateRegressor(RegressorMixin, _Private):  # type: ignore[misc]
    """Bayesian linear regression, sampled under (ε, δ) differential privacy, with intervals that are calibrated.

    As `PrivateClassifier`. The spread of the residuals, which intervals need, is public (`noise_scale`) or paid for.

    Args:
        target_range: least and largest target, where public; paid for where None.
        noise_scale: standard deviation of a target about its mean, where public; paid for where None.
        epsilon, delta, unit, adjacency, link, ranges, settings, random_state: see `PrivateClassifier`.
    """

    target_range: tuple[float, float] | None = None
    noise_scale: float | None = None

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        devices: ArrayLike | None = None,
        *,
        ledger: LedgerPath = None,
    ) -> Self:
        """Fit to rows X[N, d] and targets y[N]; arguments as of `PrivateClassifier.fit`."""
        features, targets = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        self._fit(features, targets.astype(float), devices, (), ledger)
        return self

    @overload
    def predict(self, X: ArrayLike, return_std: Literal[False] = False) -> Array: ...

    @overload
    def predict(
        self, X: ArrayLike, return_std: Literal[True]
    ) -> tuple[Array, Array]: ...

    def predict(
        self,
        X: ArrayLike,
        return_std: bool = False,
    ) -> Array | tuple[Array, Array]:
        """Return the mean target of every row, [n], and with `return_std` the standard deviation of a new one too."""
        rows = self._given(X)
        mean, spread = self.model_.mean_and_spread(rows)
        return (mean, spread) if return_std else mean

    def predict_interval(self, X: ArrayLike, level: float = 0.9) -> tuple[Array, Array]:
        """Return the ends of intervals that a new target lies in with probability `level`, [n] each."""
        rows = self._given(X)
        return self.model_.interval(rows, level)

    def _right(self, trace: Trace, Z: Array, y: np.ndarray) -> Array:
        return 1 - np.minimum((_residuals(trace, Z, y) / FARTHEST) ** 2, 1.0)


def _residuals(trace: Trace, Z: Array, y: np.ndarray) -> Array:
    """Return residuals of scaled targets about the mean prediction, [N]."""
    return y - with_intercept(Z) @ np.asarray(trace.theta[0], dtype=float).mean(0)


def _owners(devices: ArrayLike | None, rows: int, unit: str) -> Owners:
    """Return the number of each row's device, [N]."""
    if devices is None:
        if unit == "device":
            raise InputError(
                "devices",
                None,
                "given with unit = 'device': which device holds each row",
            )
        return np.zeros(rows, dtype=np.intp)
    given = np.asarray(devices)
    if given.shape != (rows,):
        raise InputError(
            "devices", f"shape {given.shape}", f"one for each of {rows} rows"
        )
    return np.asarray(np.unique(given, return_inverse=True)[1], dtype=np.intp).reshape(
        -1
    )


def _warn(epsilon: float, delta: float, *, units: int, fit_number: int) -> None:
    """Warn of a δ at which anybody may be shown in full, and of every further fit."""
    if delta > 1 / units:
        why = f"a method that shows one of {units} in full would keep the promise"
        warnings.warn(
            f"delta = {delta:g} is above 1/{units}: {why}", PrivacyWarning, stacklevel=4
        )
    if fit_number > 1:
        text = (
            f"fit number {fit_number} of this estimator and its clones spends up to "
            f"ε = {epsilon:g} again; of the same data, losses add up"
        )
        warnings.warn(text, PrivacyWarning, stacklevel=4)
