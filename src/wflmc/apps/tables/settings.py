"""Settings of a fit, and what it does with them: its posterior, whitening and plan.

What is public of a table, a promise and a link are its `Facts`; with `Settings` they
decide the plan of a chain, and no row of the table does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.apps.tables.public import (
    PublicRows,
    parameters_at_shares,
)
from wflmc.channel import Link
from wflmc.planning import Plan, Policy, PowerPolicy, Sampler, plan
from wflmc.planning.policies import water_level
from wflmc.posterior import (
    GaussianPosterior,
    SoftmaxPosterior,
    gaussian_regression,
    softmax_regression,
)
from wflmc.privacy import Privacy
from wflmc.privacy.releases import Array, ideal_link
from wflmc.privacy.whitening import Release, release_whitening

Tabular = GaussianPosterior | SoftmaxPosterior
"""The posterior of a table: of a regression, or of classes."""
TabularT = TypeVar("TabularT", bound=Tabular)
WHITENING_FRACTION = 0.1
"""The part of what is left of a budget that whitening takes, where it is tried."""
WHITENING_ROUNDS = {True: 3, False: 16}
"""Rounds that the release takes over an ideal link, and over another one."""
MAX_STAND_IN_ROWS = 50_000
"""Rows of a stand-in; larger tables have one of so many rows."""
RARE_CLASS_RATIO = 0.5
"""A class is rare if it is less than this times as frequent as among equal classes."""
UNUSED_KEY = 0
"""Seed where an argument asks for a key, but nothing is drawn by it."""


@dataclass(frozen=True)
class Settings:
    """What is chosen of a fit, for scaled features, whose mean square is 1.

    Args:
        clip: of a row's gradient, or of a device's where devices are hidden as a whole.
        step_size: η of every round.
        burn_in: rounds that are discarded.
        samples: rounds that are kept.
        prior_std: standard deviation of each parameter under the prior.
        whiten: move in coordinates of unit second moments, by public rows or else by a
            release that is paid for, with the prior on these.
        burn_in_temperature: τ, the noise that a round of burn-in is filled up to over
            that of a kept round. Below 1 burn-in may spend what kept rounds leave.
    """

    clip: float
    step_size: float
    burn_in: int
    samples: int
    prior_std: float
    whiten: bool = False
    burn_in_temperature: float = 1.0


class PromiseTerms(Protocol):
    """What a promise is made of, as estimators and requests for fits have it."""

    @property
    def epsilon(self) -> float:
        """The ε that everything a fit does keeps to, scaling and choosing included."""

    @property
    def delta(self) -> float:
        """The δ of the promise, far below one over the number of hidden units."""

    @property
    def unit(self) -> str:
        """Whose change is hidden: record, one row; or device, all rows of a device."""

    @property
    def adjacency(self) -> str:
        """What neighbours differ by: replace, a value; or add-remove, its presence."""


def promise_of(terms: PromiseTerms) -> Privacy:
    """Return the promise of an estimator or of a request for a fit.

    Args:
        terms: ε, δ, the unit and the adjacency.

    Returns:
        The promise, whose clips are yet to be chosen: `make_plan` puts those of the
        settings in their place.

    Raises:
        InputError: one of the terms is not allowed, as of `Privacy`.
    """
    return Privacy(
        terms.epsilon,
        terms.delta,
        unit=terms.unit,
        adjacency=terms.adjacency,
        example_clip=1.0 if terms.unit == "record" else None,
    )


class Facts(NamedTuple):
    """What is public of a table, a promise and a link.

    Args:
        rows: N.
        features: d, without the intercept.
        classes: C; 0 for numbers.
        devices: K.
        promise: ε, δ, unit and adjacency; `make_plan` puts the clips of settings in it.
        spent: loss of every device before the first round of the chain.
        rounds_before: rounds of the link before it.
        link: None for an ideal one.
        shares: of every class among the rows, as they were released; empty where all
            classes count as equally frequent.
    """

    rows: int
    features: int
    classes: int
    devices: int
    promise: Privacy
    spent: float
    rounds_before: int = 0
    link: Link | None = None
    shares: tuple[float, ...] = ()
    public: PublicRows | None = None

    @property
    def prior_mean(self) -> Array | None:
        """θ₀[m] for scaled features and a constant; None for a prior around zero."""
        return None if self.public is None else self.public.prior_mean

    @property
    def class_shares(self) -> Array:
        """The share of every class among the rows, [C]; 1/C each if none are public."""
        if self.shares:
            return np.asarray(self.shares)
        return np.full(self.classes, 1 / max(1, self.classes))

    @property
    def has_rare_class(self) -> bool:
        """Whether a class is much less frequent than it would be among equal ones."""
        if not self.classes:
            return False
        return bool(self.class_shares.min() * self.classes < RARE_CLASS_RATIO)

    @property
    def row_norm(self) -> float:
        """The norm of a typical row of scaled features with the constant, √(d + 1)."""
        return float((self.features + 1) ** 0.5)

    @property
    def rows_ratio(self) -> float:
        """How many rows of the table there are for one of a stand-in, at least 1.

        Gradients of the table are so many times larger.
        """
        return max(1.0, self.rows / MAX_STAND_IN_ROWS)

    @property
    def by_record(self) -> bool:
        """Whether rows are hidden one by one, so that each gradient is clipped."""
        return bool(self.promise.unit == "record")

    @property
    def channel(self) -> Link:
        """The link, or an ideal one where there is none."""
        return ideal_link() if self.link is None else self.link


def initial_parameters(facts: Facts) -> Array:
    """Return where chains begin, in scaled features with a constant behind them.

    From there, a chain need not travel to the intercept of a rare class before it can
    learn anything else.

    Args:
        facts: of the table; its class shares are public.

    Returns:
        The mean of the prior where public rows have labels. Else zeros, [d + 1]; for
        classes, parameters by which the probabilities of every row are the classes'
        shares, class after class, [C (d + 1)].
    """
    if facts.prior_mean is not None:
        return facts.prior_mean
    if not facts.classes:
        return np.zeros(facts.features + 1)
    return parameters_at_shares(facts.class_shares, facts.features)


def private_posterior(
    facts: Facts,
    settings: Settings,
    X: Array,
    y: ArrayLike,
    owner: NDArray[np.intp] | None = None,
    classes: Sequence[int] | Sequence[str] | None = None,
) -> Tabular:
    """Build the posterior of scaled features, with constants that tell nothing of them.

    Its curvatures μ and L, which planning uses, are those of the prior and of the step
    size instead of those of the data.

    Args:
        facts: of the table.
        settings: the standard deviation of the prior, and the step size.
        X: scaled features, [N, d].
        y: targets or labels, [N].
        owner: the device of each row; by default nearly equal parts in their order.
        classes: the labels, where they are not 0 to C − 1.

    Returns:
        A Gaussian regression, or for classes a softmax regression.
    """
    make: Callable[..., Tabular] = gaussian_regression
    if facts.classes:
        class_names = facts.classes if classes is None else classes
        make = partial(softmax_regression, classes=class_names)
    posterior = make(
        jax.random.key(UNUSED_KEY),
        facts.devices,
        X=X,
        y=y,
        intercept=True,
        prior_std=settings.prior_std,
        prior_mean=facts.prior_mean,
        partition="blocks" if owner is None else owner,
    )
    return with_public_constants(posterior, settings)


def with_public_constants(posterior: TabularT, settings: Settings) -> TabularT:
    """Return a posterior whose constants are public.

    The step size was chosen without the data, and suits an L of 1/η.

    Args:
        posterior: of private rows.
        settings: by whose prior and step size the constants are replaced.

    Returns:
        The posterior with μ = 1/prior_std² and L = 1/η, or 1.01 μ if that is more.
    """
    curvature = settings.prior_std**-2
    largest_curvature = max(1 / settings.step_size, 1.01 * curvature)
    return replace(posterior, mu=curvature, L=largest_curvature)


class Whitened(NamedTuple):
    """A posterior, perhaps in other coordinates.

    Args:
        posterior: in the coordinates that chains move in.
        facts: of the table, after the release that these coordinates took.
        release: None where there was none.
    """

    posterior: Tabular
    facts: Facts
    release: Release | None


def whiten(
    key: jax.Array,
    facts: Facts,
    settings: Settings,
    posterior: Tabular,
    exact: bool = False,
) -> Whitened:
    """Whiten a posterior if that is among the settings: by public rows, or a release.

    Args:
        key: seeds the noise of the release.
        facts: of the table, before the release.
        settings: whether to whiten, and the prior.
        posterior: in scaled features.
        exact: draw noise that protects real data; as of `release_whitening`.

    Returns:
        The posterior in coordinates of unit second moments, with the cost of the
        release counted in its facts; or everything as it is. No ledger is charged here.
    """
    if not settings.whiten:
        return Whitened(posterior, facts, release=None)
    if facts.public is not None:
        whitened = posterior.whitened(facts.public.root, "whitened")
        whitened = with_public_constants(whitened, settings)
        return Whitened(whitened, facts, release=None)
    budget = float(facts.promise.budget(1)[0])
    budget_left = 1 - facts.spent / budget
    start = facts.rounds_before
    release = release_whitening(
        key,
        posterior,
        facts.channel,
        facts.promise,
        budget_fraction=WHITENING_FRACTION * budget_left,
        rounds=WHITENING_ROUNDS[facts.link is None],
        prior_on="whitened",
        start=start,
        exact=exact,
    )
    facts_after = facts._replace(
        spent=facts.spent + float(release.spent.max()),
        rounds_before=start + len(release.loss),
    )
    whitened = posterior.whitened(release.matrix, "whitened")
    return Whitened(with_public_constants(whitened, settings), facts_after, release)


def make_plan(facts: Facts, settings: Settings, posterior: Tabular) -> Plan:
    """Plan a chain: what is left of a budget as evenly as possible over its rounds.

    Equal power suits predictions, in whose average all draws count alike. What rounds
    at a cap leave goes to the others, in burn-in at a temperature below 1 to all of it.
    Nothing in the plan depends on the rows: what a certificate says of the data is left
    out.

    Args:
        facts: of the table, after all releases.
        settings: of the chain.
        posterior: as `private_posterior` or `whiten` returns it.

    Returns:
        The plan of one overdamped chain. It is planned for a start at zero; where the
        chain really starts, `initial_parameters`, changes no privacy loss.
    """
    promise = replace(facts.promise, clip=settings.clip, example_clip=None)
    if facts.by_record:  # clipped one by one, the rows of a device need no other clip
        largest_sum = settings.clip * float(posterior.sizes.max())
        promise = replace(facts.promise, clip=largest_sum, example_clip=settings.clip)
    power = PowerPolicy(water_level, wireless=facts.link is not None)
    sampler = Sampler(
        init="zero",
        start=facts.rounds_before,
        burn_in_temperature=settings.burn_in_temperature,
    )
    # The initial W2² enters the bound, which is left out below; any number will do, so
    # that it is not computed from the rows.
    spent = np.full(facts.devices, facts.spent)
    complete_plan = plan(
        posterior,
        facts.channel,
        promise,
        step_size=settings.step_size,
        burn_in=settings.burn_in,
        samples=settings.samples,
        sampler=sampler,
        policy=Policy(power=power),
        ledger=spent,
        initial_w2_sq=1.0,
    )
    # Notices, bound and objective may look at the data.
    certificate = replace(
        complete_plan.certificate, notices=(), bound=None, objective=np.nan
    )
    return replace(complete_plan, certificate=certificate)
