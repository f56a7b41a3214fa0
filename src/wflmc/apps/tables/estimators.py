"""`PrivateClassifier` and `PrivateRegressor`: estimators that pay for every look.

They follow the conventions of scikit-learn: parameters stay as they are, and what a fit
finds is in attributes that end in an underscore.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Self, cast, overload

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from wflmc.apps.tables import selection
from wflmc.apps.tables.choosing import Advance, choose
from wflmc.apps.tables.model import FittedModel, Interval, PredictedTargets
from wflmc.apps.tables.protected import protected_chain
from wflmc.apps.tables.public import (
    PublicExamples,
    PublicRows,
    check_distinct,
    in_column_order,
    learn_public_rows,
    public_arrays,
    public_pair,
)
from wflmc.apps.tables.scaling import (
    SCALED_LIMIT,
    ClassShares,
    ReleaseTerms,
    Scaling,
    ScalingRelease,
    class_counts_fraction,
    count_kinds,
    release_class_shares,
    release_scaling,
)
from wflmc.apps.tables.settings import (
    Facts,
    Settings,
    initial_parameters,
    make_plan,
    private_posterior,
    promise_of,
    whiten,
)
from wflmc.channel import Link
from wflmc.evaluation.scores import mean_probabilities
from wflmc.evaluation.summary import prior_distance
from wflmc.planning import Plan
from wflmc.posterior.inputs import (
    Names,
    as_classes,
    class_names,
    with_intercept,
)
from wflmc.privacy import Ledger, Privacy
from wflmc.privacy.releases import Array, ReleaseChannel, ideal_link
from wflmc.sampling import Trace, sample
from wflmc.scenario import NotCovered
from wflmc.support.errors import InputError, renamed_keys, without_data
from wflmc.support.keys import digest, host_generator, named, secret_key

if TYPE_CHECKING:
    from sklearn.utils import Tags

LedgerPath = str | Path | None
"""The file that a ledger is kept in; None for none."""
Owners = NDArray[np.intp]
"""The number of each row's device, [N]."""
Losses = dict[str, float]
"""Privacy losses by what they were for."""

MAX_COMPARED_RESIDUAL = 2.0
"""Residuals are cut to this many spreads of the target, where candidates compete."""
MAX_RESIDUAL_WEIGHT = 4.0
"""The most that a count of large residuals weighs, over that of those of 1 spread."""
RESIDUAL_SIZES = 2.0 ** np.arange(-7, 3.5, 0.5)
"""Sizes of residuals that are told apart, in spreads of the target."""
RESIDUAL_KINDS = RESIDUAL_SIZES.size + 1
"""Kinds of residuals: below each of these sizes, and above all of them."""
TRIED_SPREADS = 2000
"""Normal laws that are compared with the received counts of residuals."""
NOISE_SCALE_LOSS = 1e4
"""Counts of residuals are worth a loss of this over N²: noise of 1 % of all rows."""
NOISE_SCALE_FRACTIONS = (0.01, 0.1)
"""The smallest and the largest part of a budget that a noise scale may take."""


class PrivacyWarning(UserWarning):
    """Something spends privacy again, or is not covered."""


@dataclass(frozen=True)
class Spent:
    """What a fit has cost every device, and on what.

    Args:
        epsilon: ε that was spent.
        delta: at this δ.
        unit: whose change is hidden: record or device.
        adjacency: replace or add-remove.
        accountant: by which ε was computed.
        promised: ε that was promised.
        loss: of each part; they add up.
    """

    epsilon: float
    delta: float
    unit: str
    adjacency: str
    accountant: str
    promised: float
    loss: dict[str, float]

    @property
    def by_part(self) -> dict[str, float]:
        """ε in proportion to the losses of the parts, by what they were for."""
        total = sum(self.loss.values())
        return {part: self.epsilon * loss / total for part, loss in self.loss.items()}

    def __str__(self) -> str:
        parts = [f"{part} {value:.3g}" for part, value in self.by_part.items()]
        listed_parts = ", ".join(parts)
        epsilon = f"ε = {self.epsilon:.4g} of {self.promised:g}"
        promise = f"{epsilon} at δ = {self.delta:g}"
        terms = f"unit = {self.unit}, adjacency = {self.adjacency}"
        return f"{promise} ({terms}): {listed_parts}"


@dataclass
class FitCount:
    """How often an estimator and its clones were fitted, all together."""

    fits: int = 0


class _Target(NamedTuple):
    """What is public of a target.

    Args:
        classes: the labels; empty where targets are numbers.
        range: the least and the largest number; None where it has to be paid for.
        noise_scale: standard deviation of a number about its mean; None where it has to
            be paid for.
    """

    classes: Names = ()
    range: tuple[float, float] | None = None
    noise_scale: float | None = 0.0


@without_data
class _Columns(NamedTuple):
    """Everything that is scaled: features, and behind them a target that is a number.

    Args:
        rows: [N, d] or [N, d + 1].
        ranges: public ones, [d, 2] or [d + 1, 2]; nan where there are none.
        groups: where the target begins; empty where it is a class.
    """

    rows: Array
    ranges: Array
    groups: tuple[int, ...]


@without_data
class _ScaledRows(NamedTuple):
    """The private rows of a fit, scaled.

    Args:
        Z: features, [N, d].
        y: classes from 0, or scaled targets, [N].
        owner: the device of each row, [N].
        classes: the labels; empty where targets are numbers.
    """

    Z: Array
    y: np.ndarray
    owner: Owners
    classes: Names


@dataclass
class _Account:
    """What a fit has spent so far.

    Args:
        ledger: of all devices.
        losses: by what they were for.
        rounds: of the link that were used.
    """

    ledger: Ledger
    losses: Losses = field(default_factory=dict)
    rounds: int = 0

    def pay(self, part: str, release: ScalingRelease | ClassShares) -> None:
        """Charge the ledger for a release in the next rounds.

        Args:
            part: what it is for.
            release: that was received; nothing of it has left the fit yet.
        """
        self.ledger.charge(release.name, self.rounds, release.loss, release.noise)
        self.rounds += len(release.loss)
        self.losses[part] = float(release.loss.sum(0).max())


class _ChainRun(NamedTuple):
    """A chain that was run.

    Args:
        plan: of its rounds.
        trace: its draws, without anything that looks at the data.
        losses: of a release that whitens, and of the chain.
        prior_distance: how far the mean of the draws is from a public mean of the
            prior, in its standard deviations; None for a prior around zero.
    """

    plan: Plan
    trace: Trace
    losses: Losses
    prior_distance: float | None


class _ResidualScale(NamedTuple):
    """A scale of residuals that was paid for.

    Args:
        scale: standard deviation of targets about the mean over draws, in spreads of
            the target.
        loss: that it cost.
    """

    scale: float
    loss: float


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
    public: PublicExamples | None = None
    settings: Settings | str | None = None
    random_state: int | None = None
    # Without annotations these are no fields: scikit-learn would take fields for
    # parameters.
    progress = cast(Advance | None, None)
    """Called with how much of the work is done, where somebody waits."""
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
        target: _Target,
        path: LedgerPath,
    ) -> None:
        """Scale, choose settings, sample.

        Args:
            X: features, [N, d].
            outcomes: classes from 0, or targets, [N].
            devices: which device holds each row, [N].
            target: what is public of it.
            path: of the ledger.
        """
        promise = promise_of(self)
        columns = self._columns(X, outcomes, target)
        public = self._learn_public_rows(X, outcomes, target, columns.ranges)
        key = self._key()
        owner = _owners(devices, len(X), self.unit)
        device_count = int(owner.max()) + 1
        units = len(X) if self.unit == "record" else device_count
        account = _open_account(promise, device_count, path)
        _warn(self.epsilon, self.delta, units=units, fit_number=self._count_fit())

        scaling = self._scaling(key, promise, columns, owner, public, account)
        center = 0.0
        spread = 1.0
        y = outcomes
        if not target.classes:
            center = float(scaling.center[-1])
            spread = float(scaling.scale[-1])
            y = np.clip((outcomes - center) / spread, -SCALED_LIMIT, SCALED_LIMIT)
        features = X.shape[1]
        scaling = Scaling(scaling.center[:features], scaling.scale[:features])
        rows = _ScaledRows(scaling(X), y, owner, target.classes)
        if public is not None and public.is_labelled:
            shares = public.shares
        else:
            shares = self._release_class_shares(key, promise, rows, units, account)
        budget = float(promise.budget(1)[0])
        # Spent after the chain, on residuals about its mean; reserved before it.
        noise_loss = 0.0
        if target.noise_scale is None:
            noise_loss = budget * _noise_scale_fraction(units, budget)
        facts = Facts(
            rows=len(X),
            features=features,
            classes=len(target.classes),
            devices=device_count,
            promise=promise,
            spent=sum(account.losses.values()) + noise_loss,
            rounds_before=account.rounds,
            link=self.link,
            shares=shares,
            public=public,
        )
        account.losses |= self._sample(named(key, "chain"), facts, rows, account.ledger)
        residual_scale = 0.0
        if noise_loss:
            released = self._release_residuals(
                named(key, "residuals"),
                facts=facts,
                loss=noise_loss,
                rows=rows,
                ledger=account.ledger,
            )
            residual_scale = released.scale * spread
            account.losses["noise scale"] = released.loss
        self.model_ = FittedModel(
            theta=np.asarray(self.trace_.theta[0]),
            scaling=scaling,
            classes=len(target.classes),
            center=center,
            spread=spread,
            noise_scale=float(target.noise_scale or 0.0),
            residual_scale=float(residual_scale),
        )
        self.privacy_ = self._spent(promise, account)
        self.facts_ = facts

    def _key(self) -> jax.Array:
        """Return the key of everything that a fit draws."""
        if not isinstance(self.random_state, int | np.integer | None):
            raise InputError(
                "random_state",
                type(self.random_state).__name__,
                "None or a whole number",
            )
        if self.random_state is None:
            return secret_key()
        return jax.random.key(self.random_state)

    @property
    def _is_exact(self) -> bool:
        """Whether noise protects for real.

        It does not in a simulation of a seed or of a radio channel.
        """
        return self.random_state is None and self.link is None

    @property
    def _has_public_labels(self) -> bool:
        """Whether there are public rows with labels."""
        return self.public is not None and public_pair(self.public)[1] is not None

    def _columns(self, X: Array, outcomes: np.ndarray, target: _Target) -> _Columns:
        """Return the columns that are scaled, and what is public of them."""
        features = X.shape[1]
        ranges = np.full((features, 2), np.nan)
        if self.ranges is not None:
            ranges = np.asarray(self.ranges, dtype=float)
        if ranges.shape != (features, 2):
            requirement = f"[{features}, 2]: least and largest of every feature"
            raise InputError("ranges", f"shape {ranges.shape}", requirement)
        if target.classes:
            return _Columns(X, ranges, groups=())
        target_range = (np.nan, np.nan) if target.range is None else target.range
        return _Columns(
            rows=np.column_stack([X, outcomes]),
            ranges=np.vstack([ranges, target_range]),
            groups=(features,),
        )

    def _learn_public_rows(
        self, X: Array, outcomes: np.ndarray, target: _Target, ranges: Array
    ) -> PublicRows | None:
        """Return what public rows say; None where there are none.

        Args:
            X: private features, [N, d], which must not be the public ones.
            outcomes: private classes from 0, or targets, [N].
            target: what is public of it.
            ranges: that are declared, as `_columns` returns them.
        """
        if self.public is None:
            return None
        public_X, labels = public_pair(self.public)
        columns = getattr(self, "feature_names_in_", None)
        ordered = in_column_order(public_X, columns)
        features = X.shape[1]
        examples = public_arrays((ordered, labels), features, target.classes)
        check_distinct(*examples, X, outcomes)
        return learn_public_rows(*examples, len(target.classes), ranges)

    def _scaling(
        self,
        key: jax.Array,
        promise: Privacy,
        columns: _Columns,
        owner: Owners,
        public: PublicRows | None,
        account: _Account,
    ) -> Scaling:
        """Return scales of all columns, those that public rows have without a cost."""
        if public is None:
            return self._release_scaling(key, promise, columns, owner, account)
        scaled_columns = len(public.scaling.center)
        if scaled_columns == columns.rows.shape[1]:
            return public.scaling
        # The target of a regression is left, which public rows without labels lack.
        target = _Columns(
            rows=columns.rows[:, scaled_columns:],
            ranges=columns.ranges[scaled_columns:],
            groups=(),
        )
        paid = self._release_scaling(key, promise, target, owner, account)
        return Scaling(
            center=np.append(public.scaling.center, paid.center),
            scale=np.append(public.scaling.scale, paid.scale),
        )

    def _release_scaling(
        self,
        key: jax.Array,
        promise: Privacy,
        columns: _Columns,
        owner: Owners,
        account: _Account,
    ) -> Scaling:
        """Return scales of all columns, which are paid for."""
        terms = ReleaseTerms(promise, self.link, exact=self._is_exact)
        release = release_scaling(
            named(key, "scaling"),
            rows=columns.rows,
            owner=owner,
            terms=terms,
            ranges=columns.ranges,
            groups=columns.groups,
        )
        account.pay("scaling", release)
        return release.scaling

    def _release_class_shares(
        self,
        key: jax.Array,
        promise: Privacy,
        rows: _ScaledRows,
        units: int,
        account: _Account,
    ) -> tuple[float, ...]:
        """Return how frequent the classes are, which is paid for.

        Nothing where targets are numbers, or where counts would tell too little.
        """
        classes = len(rows.classes)
        if not classes:
            return ()
        budget = float(promise.budget(1)[0])
        budget_fraction = class_counts_fraction(units, classes, budget)
        if budget_fraction == 0:
            return ()
        terms = ReleaseTerms(
            promise, self.link, start=account.rounds, exact=self._is_exact
        )
        release = release_class_shares(
            named(key, "classes"),
            labels=rows.y,
            classes=classes,
            owner=rows.owner,
            terms=terms,
            budget_fraction=budget_fraction,
        )
        account.pay("class counts", release)
        return tuple(release.shares.tolist())

    def _sample(
        self, key: jax.Array, facts: Facts, rows: _ScaledRows, ledger: Ledger
    ) -> Losses:
        """Choose settings and run a chain with them; return what that cost."""
        if isinstance(self.settings, Settings):
            self.candidates_ = []
            self.settings_ = self.settings
        else:
            self.candidates_ = choose(facts, self.progress)
            self.settings_ = self.candidates_[0].settings
        if self.settings == "private":
            return self._select(key, facts, rows, ledger)
        run = self._run(key, self.settings_, facts=facts, rows=rows, ledger=ledger)
        self.plan_ = run.plan
        self.trace_ = run.trace
        self.prior_distance_ = run.prior_distance
        return run.losses

    def _run(
        self,
        key: jax.Array,
        settings: Settings,
        *,
        facts: Facts,
        rows: _ScaledRows,
        ledger: Ledger | None,
    ) -> _ChainRun:
        """Run a chain with some settings.

        Args:
            key: of its noise, in a simulation.
            settings: of the chain.
            facts: of the table, after the releases before the chain.
            rows: of the table.
            ledger: charged before anything is sent; None where that is paid for.
        """
        # Over an ideal link, where rows are hidden one by one, it does not matter who
        # holds them.
        is_pooled = facts.link is None and facts.by_record
        labels = np.asarray(rows.classes)[rows.y] if rows.classes else rows.y
        posterior = private_posterior(
            facts,
            settings=settings,
            X=rows.Z,
            y=labels,
            owner=None if is_pooled else rows.owner,
            classes=rows.classes or None,
        )
        whitened = whiten(
            named(key, "whitening"),
            facts=facts,
            settings=settings,
            posterior=posterior,
            exact=self._is_exact,
        )
        losses = {}
        release = whitened.release
        if release is not None:
            losses["whitening"] = whitened.facts.spent - facts.spent
            if ledger is not None:
                first_round = facts.rounds_before
                ledger.charge(release.name, first_round, release.loss, release.noise)
        plan = make_plan(whitened.facts, settings, whitened.posterior)
        losses["sampling"] = float(plan.spent.max())
        start = initial_parameters(facts)
        if self._is_exact:
            trace = protected_chain(whitened.posterior, plan, start, ledger)
        else:
            simulated = sample(
                key, whitened.posterior, [plan], ledger=ledger, initial=start[None]
            )
            trace = _without_secrets(simulated)
        # It follows from draws and from what is public.
        distance = prior_distance(trace, whitened.posterior)
        return _ChainRun(plan, trace, losses, distance)

    def _select(
        self, key: jax.Array, facts: Facts, rows: _ScaledRows, ledger: Ledger
    ) -> Losses:
        """Run the best candidates in competition; return what that cost."""
        finalists = self.candidates_[: 2 * int(selection.REPEATS)]
        budget = float(facts.promise.budget(1)[0])
        repeat_loss = selection.loss_of_repeat(facts.promise, facts.spent)
        chain_loss = (1 - selection.SCORE_FRACTION) * repeat_loss
        score_loss = selection.SCORE_FRACTION * repeat_loss
        repeat_facts = facts._replace(spent=budget - chain_loss)
        # All that is left counts as spent, before the first repeat.
        budget_left = np.full((1, facts.devices), budget - facts.spent)
        key_words = np.asarray(jax.random.key_data(key))
        ledger.charge(f"select-{digest(rows.Z, key_words)}", 0, budget_left)

        def repeat(number: int, candidate: int) -> tuple[_ChainRun, float]:
            """Run a candidate once, and score it under noise.

            Args:
                number: of the repeat, by which its noise differs from that of others.
                candidate: index among the finalists.
            """
            repeat_key = jax.random.fold_in(key, number)
            settings = finalists[candidate].settings
            run = self._run(
                repeat_key, settings, facts=repeat_facts, rows=rows, ledger=None
            )
            score = self._release_score(
                repeat_key,
                trace=run.trace,
                facts=facts,
                rows=rows,
                budget_fraction=score_loss / budget,
            )
            return run, score

        generator = host_generator(key, "repeats")
        selected = selection.select(generator, len(finalists), repeat)
        run = selected.run
        assert run is not None  # there is at least one repeat
        self.selected_ = selected._replace(run=None)
        self.plan_ = run.plan
        self.trace_ = run.trace
        self.prior_distance_ = run.prior_distance
        self.settings_ = finalists[selected.candidate].settings
        tuning_loss = budget - facts.spent - sum(run.losses.values())
        return {"tuning": tuning_loss, **run.losses}

    def _release_score(
        self,
        key: jax.Array,
        *,
        trace: Trace,
        facts: Facts,
        rows: _ScaledRows,
        budget_fraction: float,
    ) -> float:
        """Return how right a chain is on average, under noise.

        Args:
            key: seeds the noise.
            trace: of the chain.
            facts: of the table.
            rows: of the table.
            budget_fraction: part of every device's budget that the score costs.
        """
        release_channel = ReleaseChannel(
            key,
            link=ideal_link(),
            privacy=facts.promise,
            sizes=np.bincount(rows.owner),
            uses=1,
            rounds=range(1),
            settings=np.zeros(1),
            exact=self._is_exact,
        )
        row_scores = self._row_scores(trace, rows)
        device_scores = np.bincount(rows.owner, row_scores, facts.devices)
        # The score of a row is from 0 to 1: replaced or left out, a row moves the sum by
        # at most 1.
        received = release_channel.receive(
            1,
            device_scores[:, None].astype(float),
            reach=1.0,
            moved_by=1.0,
            budget_fraction=budget_fraction,
        )
        return float(received.mean[0])

    @abstractmethod
    def _row_scores(self, trace: Trace, rows: _ScaledRows) -> Array:
        """Return how right a chain is about every row, from 0 to 1, [N]."""

    def _release_residuals(
        self,
        key: jax.Array,
        *,
        facts: Facts,
        loss: float,
        rows: _ScaledRows,
        ledger: Ledger,
    ) -> _ResidualScale:
        """Release how many residuals have which size, and their scale by it.

        This is called after the chain has run: it uses its trace, and the rounds of the
        link behind those of its plan.

        Args:
            key: seeds the noise.
            facts: of the table.
            loss: that it may cost.
            rows: of the table.
            ledger: charged for it.
        """
        start = self.plan_.start + len(self.plan_.rounds)
        release_channel = ReleaseChannel(
            key,
            link=facts.channel,
            privacy=facts.promise,
            sizes=np.bincount(rows.owner),
            uses=RESIDUAL_KINDS,
            rounds=range(start, start + 1),
            settings=RESIDUAL_SIZES,
            exact=self._is_exact,
        )
        residuals = _residuals(self.trace_, rows)
        size = np.searchsorted(RESIDUAL_SIZES, np.abs(residuals))
        budget = float(facts.promise.budget(1)[0])
        received = count_kinds(
            release_channel,
            kind=size[:, None],
            kinds=RESIDUAL_KINDS,
            owner=rows.owner,
            budget_fraction=loss / budget,
        )
        losses = release_channel.losses[0]
        noise_name = release_channel.noise_name
        run_name = f"residuals-{digest(size, noise_name.encode())}"
        ledger.charge(run_name, start, losses, f"residuals-{noise_name}")
        variance = _residual_variance(received.shares[0])
        return _ResidualScale(float(variance**0.5), float(losses.max()))

    def _spent(self, promise: Privacy, account: _Account) -> Spent:
        """Return what the fit has cost."""
        # Tuning is by Rényi differential privacy, which has no one loss.
        epsilon = self.epsilon
        if "tuning" not in account.losses:
            epsilon = cast(float, promise.epsilon_spent(account.ledger.spent))
        return Spent(
            epsilon=epsilon,
            delta=self.delta,
            unit=promise.unit,
            adjacency=promise.adjacency,
            accountant=promise.accountant,
            promised=self.epsilon,
            loss=account.losses,
        )

    def _checked_features(self, X: ArrayLike) -> Array:
        """Return rows of as many features as in the fit."""
        check_is_fitted(self, "model_")
        return np.asarray(validate_data(self, X, reset=False, dtype=np.float64))

    def report_html_(
        self, X: ArrayLike = (), y: ArrayLike = (), devices: ArrayLike | None = None
    ) -> str:
        """Return the page of this fit, as one HTML file that opens offline.

        ε does not cover scores: they look at the rows that are passed here.

        Args:
            X: features of rows that were held out, [n, d]; none for a page without
                scores.
            y: their labels or targets, [n].
            devices: who holds them, [n]; one device by default.

        Returns:
            The text of the file.

        Raises:
            sklearn.exceptions.NotFittedError: before a fit.
        """
        from wflmc.apps.report.fit_page import render_fit
        from wflmc.apps.tables.folder import TableRows, describe

        check_is_fitted(self, "model_")
        has_rows = len(np.asarray(X)) > 0
        empty = np.zeros((0, self.n_features_in_))
        rows = self._checked_features(X) if has_rows else empty
        labels = np.zeros(len(rows)) if devices is None else np.asarray(devices)
        names, owner = np.unique(labels, return_inverse=True)
        held_out = TableRows(rows, np.asarray(y), owner.reshape(-1), names.tolist())
        return render_fit(describe(self, held_out), type(self).__name__)

    @property
    def not_covered_(self) -> tuple[NotCovered, ...]:
        """What ε does not cover of this estimator, one sentence each.

        Among it are a seed, from which the noise can be drawn again, and a simulated
        channel.
        """
        uncovered = [
            NotCovered(
                "refusals",
                "If a fit is refused because of its data, the refusal reveals that.",
                published=False,
            )
        ]
        if self.random_state is not None:
            text = "Whoever guesses the seed can draw the noise again: a simulation."
            uncovered.append(NotCovered("random_state", text))
        if self.link is not None:
            reason = "whose low-order bits may reveal rows"
            text = f"The noise of a simulated channel is float32, {reason}."
            uncovered.append(NotCovered("link", text))
        return tuple(uncovered)


@dataclass(eq=False, repr=False, kw_only=True)
class PrivateClassifier(ClassifierMixin, _Private):  # type: ignore[misc]
    """Multinomial logistic regression, sampled under (ε, δ) differential privacy.

    A fit scales the features (by public ranges or a release that is paid for), pays for
    how frequent the classes are, chooses its settings on a public stand-in with such
    classes, and runs one chain of Langevin Monte Carlo on clipped gradients.
    Probabilities are averages over draws. A fitted estimator holds no records and not
    the key of its noise.

    Args:
        epsilon, delta: the promise to every row or device, for everything that `fit`
            does.
        unit: whose change is hidden: record, one row; or device, all rows of one.
        adjacency: replace or add-remove, see `wflmc.Privacy`.
        link: the channel between devices and server; None for an ideal one.
        classes: the labels that there are, which is public; read off y where it is
            None, which ε does not cover.
        ranges: least and largest value of every feature, [d, 2], where public; nan
            where not: it is then paid for.
        public: (X, y) of rows whose people are promised nothing, with the features and
            labels of the private ones; y = None without labels. They scale and whiten
            features, labelled ones are the mean of the prior and the start of the
            chain, and settings are chosen on tables that are drawn from them. All of
            this is free, and ε goes into sampling; ranges of features are not needed.
            Which rows are public must not be decided by the private ones.
        settings: None to choose on a stand-in; "private" to choose by private selection
            among the best of these; or `Settings`.
        random_state: None draws noise from the operating system's entropy; a number
            makes it a simulation.

    Examples:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> settings = Settings(  # not chosen
        ...     clip=1.0, step_size=0.01, burn_in=25, samples=25, prior_std=2.0
        ... )
        >>> model = PrivateClassifier(
        ...     epsilon=8, classes=[0, 1, 2], settings=settings, random_state=0
        ... )
        >>> model.fit(X, y).predict_proba(X[:2]).shape
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
        """Fit the model under (ε, δ) differential privacy.

        Every further fit, of this estimator or of a clone, spends again, and a
        `PrivacyWarning` says so. Nothing leaves the fit before the ledger is charged.

        Args:
            X: features, [N, d], finite.
            y: labels, [N].
            devices: which device holds each row, [N], by any names; one device by
                default.
            ledger: a file to keep the ledger in, which a further fit continues.

        Returns:
            The estimator, with `privacy_`, `settings_`, `candidates_`, `plan_`,
            `trace_` and `model_`.

        Raises:
            InputError: a parameter is not allowed, or a label is none of the classes.
            ValueError: X is not finite, or X and y differ in their number of rows.
            OverspendError: the ledger does not leave enough.
        """
        features, labels = validate_data(self, X, y, dtype=np.float64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # some depend on the data
            check_classification_targets(labels)
        names = self._class_names(labels)
        self.classes_ = np.asarray(names)
        outcomes = as_classes(labels, names)
        self._fit(features, outcomes, devices, _Target(classes=names), ledger)
        return self

    def _class_names(self, labels: np.ndarray) -> Names:
        """Return the labels that there are: as declared, of public rows, or of y."""
        if not self._has_public_labels:
            return class_names(labels, self.classes)
        assert self.public is not None  # it has labels
        with renamed_keys({"data": "public"}):
            _, public_labels = public_pair(self.public)
            return class_names(np.asarray(public_labels), self.classes)

    def predict_proba(self, X: ArrayLike) -> Array:
        """Predict the probability of every class.

        A model spends no more privacy however often it predicts, but nothing hides the
        new rows.

        Args:
            X: features, [n, d], finite.

        Returns:
            Probabilities averaged over draws, [n, C], in the order of `classes_`.

        Raises:
            sklearn.exceptions.NotFittedError: before a fit.
        """
        rows = self._checked_features(X)
        return self.model_.probabilities(rows)

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Predict the likeliest class.

        Args:
            X: features, [n, d], finite.

        Returns:
            Labels, [n]; of equally likely classes the first in `classes_`.

        Raises:
            sklearn.exceptions.NotFittedError: before a fit.
        """
        likeliest = self.predict_proba(X).argmax(1)
        return self.classes_[likeliest]

    @property
    def not_covered_(self) -> tuple[NotCovered, ...]:
        """What ε does not cover of this estimator, one sentence each.

        Labels that are read off the data count; see the same property of
        `PrivateRegressor` for the others.
        """
        uncovered = super().not_covered_
        if self.classes is not None or self._has_public_labels:
            return uncovered
        text = "The set of labels is read off the data; give classes."
        return (*uncovered, NotCovered("classes", text))

    def _row_scores(self, trace: Trace, rows: _ScaledRows) -> Array:
        theta = np.asarray(trace.theta[0])
        design = with_intercept(rows.Z)
        probabilities = mean_probabilities(theta, design, len(self.classes_))
        return (probabilities.argmax(1) == rows.y).astype(float)


@dataclass(eq=False, repr=False, kw_only=True)
class PrivateRegressor(RegressorMixin, _Private):  # type: ignore[misc]
    """Bayesian linear regression, sampled under (ε, δ) differential privacy.

    As `PrivateClassifier`, with intervals that are calibrated. The spread of the
    residuals, which intervals need, is public (`noise_scale`) or paid for.

    Args:
        target_range: least and largest target, where public; paid for where None.
        noise_scale: standard deviation of a target about its mean, where public; paid
            for where None.
        public: as of `PrivateClassifier`; ε also pays for the spread of the residuals,
            so that intervals hold if public rows are unlike the private ones.
        epsilon, delta, unit, adjacency, link, ranges, settings, random_state: see
            `PrivateClassifier`.
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
        """Fit the model under (ε, δ) differential privacy.

        Every further fit, of this estimator or of a clone, spends again, and a
        `PrivacyWarning` says so. Nothing leaves the fit before the ledger is charged.

        Args:
            X: features, [N, d], finite.
            y: targets, [N], finite.
            devices: which device holds each row, [N], by any names; one device by
                default.
            ledger: a file to keep the ledger in, which a further fit continues.

        Returns:
            The estimator, with `privacy_`, `settings_`, `candidates_`, `plan_`,
            `trace_` and `model_`.

        Raises:
            InputError: a parameter is not allowed.
            ValueError: X or y is not finite, or they differ in their number of rows.
            OverspendError: the ledger does not leave enough.
        """
        features, targets = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        target = _Target(range=self.target_range, noise_scale=self.noise_scale)
        self._fit(features, targets.astype(float), devices, target, ledger)
        return self

    @overload
    def predict(self, X: ArrayLike, return_std: Literal[False] = False) -> Array: ...

    @overload
    def predict(self, X: ArrayLike, return_std: Literal[True]) -> PredictedTargets: ...

    def predict(
        self,
        X: ArrayLike,
        return_std: bool = False,
    ) -> Array | PredictedTargets:
        """Predict the target of every row.

        Args:
            X: features, [n, d], finite.
            return_std: whether to return the standard deviation of a new target too, as
                regressors of scikit-learn do.

        Returns:
            The mean over draws, [n]; with `return_std` the pair of it and the standard
            deviation, [n] each.

        Raises:
            sklearn.exceptions.NotFittedError: before a fit.
        """
        rows = self._checked_features(X)
        predicted = self.model_.mean_and_spread(rows)
        return predicted if return_std else predicted.mean

    def predict_interval(self, X: ArrayLike, level: float = 0.9) -> Interval:
        """Predict intervals that new targets lie in with a probability.

        Args:
            X: features, [n, d], finite.
            level: the probability, above 0 and below 1.

        Returns:
            The lower and the upper end of an interval for each row, [n] each.

        Raises:
            InputError: the level is out of range.
            sklearn.exceptions.NotFittedError: before a fit.
        """
        rows = self._checked_features(X)
        return self.model_.interval(rows, level)

    def _row_scores(self, trace: Trace, rows: _ScaledRows) -> Array:
        relative = _residuals(trace, rows) / MAX_COMPARED_RESIDUAL
        return 1 - np.minimum(relative**2, 1.0)


def _open_account(promise: Privacy, devices: int, path: LedgerPath) -> _Account:
    """Return the account of a fit, with what a continued ledger has spent."""
    ledger = Ledger(promise, devices, path=path)
    spent_before = float(ledger.spent.max())
    losses = {"earlier fits": spent_before} if spent_before else {}
    return _Account(ledger, losses)


def _without_secrets(trace: Trace) -> Trace:
    """Return a trace without the key of its noise and without clip rates.

    Neither stays with a fitted estimator: clip rates look at the data.
    """
    return replace(
        trace,
        key=None,
        clip_rate=np.full_like(trace.clip_rate, np.nan),
        burn_in_clip_rate=np.full_like(trace.burn_in_clip_rate, np.nan),
    )


def _residuals(trace: Trace, rows: _ScaledRows) -> Array:
    """Return residuals of scaled targets about the mean prediction, [N]."""
    mean_parameters = np.asarray(trace.theta[0], dtype=float).mean(0)
    return rows.y - with_intercept(rows.Z) @ mean_parameters


def _noise_scale_fraction(units: int, budget: float) -> float:
    """Return the part of a budget that is kept for a noise scale.

    Args:
        units: N, rows that are hidden one by one, or devices.
        budget: the loss that is allowed in all.
    """
    fraction = NOISE_SCALE_LOSS / (units**2 * budget)
    return float(np.clip(fraction, *NOISE_SCALE_FRACTIONS))


def _residual_variance(shares: Array) -> float:
    """Return the variance of the normal law that is nearest to received shares.

    Large residuals count more: they decide how wide intervals must be, whatever the
    law.

    Args:
        shares: of residuals of each size, `RESIDUAL_SIZES` and above, under noise.
    """
    sizes = RESIDUAL_SIZES
    spreads = np.geomspace(sizes[0], sizes[-1], TRIED_SPREADS)[:, None]
    cumulated = 2 * ndtr(sizes / spreads) - 1
    law = np.diff(cumulated, axis=1, prepend=0.0, append=1.0)
    weight = np.minimum(np.append(sizes, sizes[-1]) / spreads, MAX_RESIDUAL_WEIGHT)
    distance = ((weight * (law - shares)) ** 2).sum(1)
    return float(spreads[distance.argmin(), 0]) ** 2


def _owners(devices: ArrayLike | None, rows: int, unit: str) -> Owners:
    """Return the number of each row's device, [N]."""
    if devices is None:
        if unit == "device":
            requirement = "given with unit = 'device': which device holds each row"
            raise InputError("devices", None, requirement)
        return np.zeros(rows, dtype=np.intp)
    labels = np.asarray(devices)
    if labels.shape != (rows,):
        requirement = f"one for each of {rows} rows"
        raise InputError("devices", f"shape {labels.shape}", requirement)
    _, numbers = np.unique(labels, return_inverse=True)
    return np.asarray(numbers, dtype=np.intp).reshape(-1)


def _warn(epsilon: float, delta: float, *, units: int, fit_number: int) -> None:
    """Warn of a δ at which any row may be shown in full, and of every further fit.

    `_fit` calls this: at stacklevel 4 a warning names the line that called `fit`.
    """
    if delta > 1 / units:
        reason = f"a method that shows one of {units} in full would keep the promise"
        text = f"delta = {delta:g} is above 1/{units}: {reason}"
        warnings.warn(text, PrivacyWarning, stacklevel=4)
    if fit_number > 1:
        text = (
            f"fit number {fit_number} of this estimator and its clones spends up to "
            f"ε = {epsilon:g} again; of the same data, losses add up"
        )
        warnings.warn(text, PrivacyWarning, stacklevel=4)
