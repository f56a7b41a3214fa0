"""The choice of a fit's settings, without a look at the data: on public stand-ins.

Candidates are planned and run on stand-ins (`wflmc.apps.tables.stand_ins`) as they
would be on the table, under the same promise and over the same link, and the one with
the best predictions for further rows is taken. All of this is public and costs no
privacy.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import NamedTuple, Protocol, TypeAlias

import jax
import numpy as np

from wflmc.apps.tables.public import MAX_PRIOR_WEIGHT
from wflmc.apps.tables.settings import (
    MAX_STAND_IN_ROWS,
    Facts,
    Settings,
    Tabular,
    initial_parameters,
    make_plan,
    private_posterior,
    whiten,
    with_public_constants,
)
from wflmc.apps.tables.stand_ins import StandIn, trial_tables
from wflmc.evaluation.scores import expected_calibration
from wflmc.planning import Plan
from wflmc.posterior import SoftmaxPosterior
from wflmc.privacy.releases import Array
from wflmc.sampling import sample
from wflmc.support.keys import named

CLIPS = (0.2, 0.4, 0.8, 2.0)
"""Candidates for the clip, over the norm of a row.

2 clips next to nothing: a gradient is at most √2 times as long as its row.
"""
TRAVELS = (0.03, 0.1, 0.25, 0.5, 1.0)
"""Candidates for the step size, in units of the prediction.

They say how far clipped gradients of one row, over the whole chain, can carry the
prediction for that row.
"""
PRIORS = (6.0, 12.0)
"""Candidates for the standard deviation of the prior's predictions."""
PRIOR_WEIGHTS = (MAX_PRIOR_WEIGHT, 0.03, 0.01)
"""Candidates for a prior about a public mean: what it weighs, over all private rows."""
PUBLIC_CLIPS = (0.1, 0.2, 0.4, 0.8, 2.0)
"""As `CLIPS`, for chains that begin at a public mean, where gradients are shorter."""
PUBLIC_TRAVELS = (0.03, 0.1, 0.25, 0.5)
"""As `TRAVELS`, for chains that begin at a public mean."""
ROUNDS = (50, 100)
"""Candidates for the number of rounds."""
BURN_INS = (0.25, 0.5, 0.75)
"""Candidates for burn-in, as fractions of the rounds."""
TEMPERATURES = (0.3, 0.05)
"""Candidates for the temperature of burn-in, beside that of kept rounds, 1."""
COLD_STEP_FACTORS = (0.5, 1.0)
"""Changes of the step size that are tried with a colder burn-in.

On tables of scikit-learn, smaller clips with longer steps gained less than on
stand-ins.
"""
CAP_TOLERANCE = 1e-6
"""Power this much below the Langevin cap, relative to it, is at the cap."""
GRADIENT_GROWTH = 0.75
"""Power of its number of rows with which the norm of a device's gradient grows.

Gradients of a device's rows partly cancel; without that the power would be 1.
"""
MAX_GRADIENT_PER_ROW = 2**0.5
"""Largest norm of a row's softmax gradient, over the norm of the row."""
MAX_MOMENTS = 10**7
"""Numbers that devices would send for it, d² each, above which it is not tried."""
MAX_UNCLIPPED_LOSS_RATIO = 1.1
"""Price of settings that clip nothing, as a ratio to the least loss.

Where a class is rare they are taken up to this price: rows of a rare class have the
longest gradients, and clipping takes probability from their class alone.
"""
EQUAL_LOSS_RATIO = 1.01
"""A loss on the stand-ins of up to this many times the least one is as good."""
STAND_IN_NUMBERS = 2 * 10**5
"""Numbers of all stand-ins of one strength together, by which they are counted."""
GROUP_SIZES = {False: 20, True: 12}
"""Chains that run together, without and with whitening, or a multiple of it.

A program is compiled for every number of chains, and takes as long as some chains more.
The first candidates come in groups of 20 chains, those with a colder burn-in of 12.
"""
MAX_FILLED_NUMBERS = 10**6
"""Numbers of a stand-in up to which groups of chains are filled up to these sizes."""
MAX_STAND_INS = 6
"""Stand-ins of each strength, at most; there is at least one."""
MAX_ADVICE_STAND_INS = 2
"""The same where nothing is chosen, but advice is given on what more would be worth."""
LARGER_SNR_DB = 10
"""By how much the SNR is raised to say what that would be worth."""
SMALLEST_PROBABILITY = 1e-12
"""In the place of a predicted probability of zero, whose logarithm is taken."""


class Advance(Protocol):
    """Reports how far a choice of settings is."""

    def __call__(self, parts_done: int, parts: int, /) -> None:
        """Report that `parts_done` of all `parts` are done."""


class Expected(NamedTuple):
    """A candidate, and what it reaches on the stand-ins.

    Args:
        settings: of the candidate.
        nll: mean of −log p(label); for numbers, the mean square error over the target's
            variance.
        accuracy: None for numbers.
        ece: calibration error of the probabilities; None for numbers.
        rank: by which candidates are compared: the geometric mean of the losses, in
            which a tenth less counts alike on a stand-in that is easy and on one that
            is hard.
        cap_fraction: the most power of a round over the Langevin cap, beyond which
            rounds at temperature 1 do not go.
    """

    settings: Settings
    nll: float
    accuracy: float | None
    ece: float | None
    rank: float
    cap_fraction: float

    @property
    def scores(self) -> dict[str, float]:
        """The scores by name: nll, accuracy and ece; relative_mse for numbers."""
        if self.accuracy is None or self.ece is None:
            return {"relative_mse": self.nll}
        return {"nll": self.nll, "accuracy": self.accuracy, "ece": self.ece}

    @property
    def plain(self) -> dict[str, float]:
        """Settings, scores and rank in one dictionary, as JSON has them."""
        return {**asdict(self.settings), **self.scores, "rank": self.rank}


def candidates(facts: Facts) -> Iterator[Settings]:
    """Yield settings to choose from, without whitening.

    They are all combinations of `ROUNDS`, `PRIORS`, `CLIPS`, `TRAVELS` and `BURN_INS`,
    in units that suit the size of the table.

    Args:
        facts: of the table; where devices are hidden as a whole, the clip is that of
            the gradient of all rows of a device.

    Yields:
        Settings, in the same order for every table.
    """
    norm = facts.row_norm
    gradient_norm = norm
    if not facts.by_record:
        rows_per_device = facts.rows / facts.devices
        gradient_norm = norm * rows_per_device**GRADIENT_GROWTH
    axes = _candidate_axes(facts)
    grid = product(ROUNDS, axes.prior_stds, axes.clips, axes.travels, BURN_INS)
    for rounds, prior_std, clip, travel, burn_in_fraction in grid:
        limit = clip * gradient_norm
        burn_in = int(burn_in_fraction * rounds)
        settings = Settings(
            clip=limit,
            step_size=travel / (limit * norm * rounds * facts.rows_ratio),
            burn_in=burn_in,
            samples=rounds - burn_in,
            prior_std=prior_std,
            whiten=axes.whiten,
        )
        # Else the pull of a narrow prior would throw chains beyond its mean.
        if settings.step_size <= settings.prior_std**2:
            yield settings


class _CandidateAxes(NamedTuple):
    """What candidates are combinations of, beside rounds and burn-in.

    Args:
        prior_stds: standard deviations of the prior.
        clips: see `CLIPS`.
        travels: see `TRAVELS`.
        whiten: whether the first candidates move in whitened coordinates.
    """

    prior_stds: list[float]
    clips: tuple[float, ...]
    travels: tuple[float, ...]
    whiten: bool


def _candidate_axes(facts: Facts) -> _CandidateAxes:
    """Return what candidates are made of, with and without a public mean."""
    public = facts.public
    if public is None or not public.is_labelled:
        prior_stds = [spread / facts.row_norm for spread in PRIORS]
        return _CandidateAxes(prior_stds, CLIPS, TRAVELS, whiten=False)
    prior_stds = [public.prior_std(facts.rows, weight) for weight in PRIOR_WEIGHTS]
    return _CandidateAxes(prior_stds, PUBLIC_CLIPS, PUBLIC_TRAVELS, public.whitens)


def neighbouring_settings(settings: Settings) -> list[Settings]:
    """Return settings with half, equal and twice the clip and the step size.

    Args:
        settings: in the middle of these.

    Returns:
        The combinations; everything else is as it was. Longer steps than the prior's
        variance are left out, by which chains would run away from its mean.
    """
    neighbours = [
        replace(
            settings,
            clip=settings.clip * clip_factor,
            step_size=settings.step_size * step_factor,
        )
        for clip_factor, step_factor in product((0.5, 1.0, 2.0), repeat=2)
    ]
    longest = max(settings.step_size, settings.prior_std**2)
    return [near for near in neighbours if near.step_size <= longest]


def with_colder_burn_in(reached: Expected) -> list[Settings]:
    """Return settings with a colder burn-in, in chains of as many rounds.

    Where power stays below the Langevin cap at temperature 1, a colder burn-in changes
    nothing, and is left out.

    Args:
        reached: settings whose burn-in is at temperature 1, and how near to the cap
            their plan comes.

    Returns:
        All combinations of those `COLD_STEP_FACTORS` at which the cap binds, of
        `TEMPERATURES` and of `BURN_INS`.
    """
    settings = reached.settings
    rounds = settings.burn_in + settings.samples
    cold = []
    for step_factor in COLD_STEP_FACTORS:
        # The cap is proportional to the step size; what budgets allow is not.
        if reached.cap_fraction / step_factor < 1 - CAP_TOLERANCE:
            continue
        for temperature, burn_in_fraction in product(TEMPERATURES, BURN_INS):
            burn_in = int(burn_in_fraction * rounds)
            candidate = replace(
                settings,
                step_size=settings.step_size * step_factor,
                burn_in=burn_in,
                samples=rounds - burn_in,
                burn_in_temperature=temperature,
            )
            cold.append(candidate)
    return cold


class _PlanCase(NamedTuple):
    """Everything by which the plans of one call of `expect` differ.

    Stand-ins have rows, features and devices in equal numbers, and no plan looks at the
    rows: settings have one plan for all of them. Only a release that whitens may leave
    each with a budget and a scale of its own.
    """

    settings: Settings
    spent: float
    """Loss before the first round of the chain."""
    rounds_before: int
    """Of the link."""
    prior_power: float
    """Mean square of a parameter under the prior, by which downlink noise scales."""


class _SharedPlans:
    """Plans of candidates over the stand-ins of one table, each made once."""

    def __init__(self) -> None:
        self._plans: dict[_PlanCase, Plan] = {}

    def plan_of(self, facts: Facts, settings: Settings, posterior: Tabular) -> Plan:
        """Return the plan of settings on a stand-in, made on the first call.

        Args:
            facts: of the table, after the release that whitening took.
            settings: of the candidate.
            posterior: of the stand-in.

        Returns:
            The plan, the same object for all stand-ins that it serves.
        """
        case = _PlanCase(
            settings=settings,
            spent=facts.spent,
            rounds_before=facts.rounds_before,
            prior_power=float(posterior.prior_power),
        )
        if case not in self._plans:
            suitable = with_public_constants(posterior, settings)
            self._plans[case] = make_plan(facts, settings, suitable)
        return self._plans[case]

    def cap_fractions(self) -> dict[Settings, float]:
        """Return the most power of a round over the Langevin cap, by settings.

        It is 2η over the variance that the channel's noise puts on the update.
        """
        fractions: dict[Settings, float] = {}
        for case, chain_plan in self._plans.items():
            channel_noise = chain_plan.noise_variance - chain_plan.server_noise
            fraction = float(np.max(chain_plan.langevin_noise / channel_noise))
            fractions[case.settings] = max(fraction, fractions.get(case.settings, 0.0))
        return fractions


ChainGroup: TypeAlias = Mapping[Settings, Sequence[int]]
"""Chains that are run together, and the indices of the candidates that each serves."""


def expect(
    facts: Facts,
    settings: Sequence[Settings],
    progress: Advance | None = None,
    max_stand_ins: int = MAX_STAND_INS,
) -> list[Expected]:
    """Run settings on stand-ins, and score their predictions.

    On a stand-in of fewer rows, steps are longer by as much: it moves as the table
    would, with more noise. Everything is public, and the same for the same arguments.

    Args:
        facts: of the table.
        settings: to try.
        progress: called after every part that is done.
        max_stand_ins: the most stand-ins of each strength; tables of many numbers have
            fewer.

    Returns:
        What the settings reach on average over the stand-ins, in their order.
    """
    scaled = [_for_stand_in(facts, candidate) for candidate in settings]
    groups = _chain_groups(scaled)
    affordable = STAND_IN_NUMBERS // (facts.rows * facts.features)
    stand_ins = int(np.clip(affordable, 1, max_stand_ins))
    tables = trial_tables(facts, stand_ins)
    scores = np.zeros((len(tables), len(settings), 3))
    shared_plans = _SharedPlans()
    parts_done = 0
    for seed, draw_table in enumerate(tables):
        experiment = _Experiment(
            facts=facts._replace(
                rows=min(facts.rows, MAX_STAND_IN_ROWS),
                devices=min(facts.devices, MAX_STAND_IN_ROWS),
            ),
            table=draw_table(seed),
            key=jax.random.key(seed),
            shared_plans=shared_plans,
        )
        for group in groups:
            experiment.score(group, candidates=scaled, scores=scores[seed])
            parts_done += 1
            if progress is not None:
                progress(parts_done, len(tables) * len(groups))
    fraction_of_chain = shared_plans.cap_fractions()
    return _averaged(
        settings,
        scores,
        has_classes=facts.classes > 0,
        cap_fractions=[fraction_of_chain[_chain_of(candidate)] for candidate in scaled],
    )


def _for_stand_in(facts: Facts, settings: Settings) -> Settings:
    """Return settings for a stand-in, which may have fewer rows than the table.

    Steps are longer by as much; a prior that weighs as much as some of the rows is
    wider, so that it weighs as much as that fraction of the stand-in's.
    """
    scaled = replace(settings, step_size=settings.step_size * facts.rows_ratio)
    if facts.prior_mean is None:
        return scaled
    return replace(scaled, prior_std=settings.prior_std * facts.rows_ratio**0.5)


def _chain_of(candidate: Settings) -> Settings:
    """Return the settings of the chain that serves a candidate.

    At temperature 1 burn-in changes nothing of a chain, so that one without burn-in
    serves all candidates that differ in burn-in alone.
    """
    if candidate.burn_in_temperature < 1:
        return candidate
    rounds = candidate.burn_in + candidate.samples
    return replace(candidate, burn_in=0, samples=rounds)


def _chain_groups(settings: Sequence[Settings]) -> list[ChainGroup]:
    """Return chains of candidates, in groups of one length, prior and coordinates."""
    groups: dict[tuple[int, float, bool], dict[Settings, list[int]]] = {}
    for index, candidate in enumerate(settings):
        chain = _chain_of(candidate)
        rounds = chain.burn_in + chain.samples
        alike = groups.setdefault((rounds, chain.prior_std, chain.whiten), {})
        alike.setdefault(chain, []).append(index)
    return list(groups.values())


@dataclass(frozen=True)
class _Experiment:
    """A stand-in that chains are run on.

    Args:
        facts: of the table, with as many rows and devices as the stand-in has.
        table: the stand-in.
        key: of the chains.
        shared_plans: of the candidates, on all stand-ins.
    """

    facts: Facts
    table: StandIn
    key: jax.Array
    shared_plans: _SharedPlans

    def score(
        self, group: ChainGroup, candidates: Sequence[Settings], scores: Array
    ) -> None:
        """Run the chains of a group, and write the scores of their candidates.

        Args:
            group: of the chains.
            candidates: the settings of all candidates.
            scores: of all candidates, [candidate, 3], in which the rows of those that
                the group serves are replaced.
        """
        first_chain = next(iter(group))
        facts = self.facts
        table = self.table
        posterior = private_posterior(facts, first_chain, X=table.X, y=table.y)
        whitened = whiten(
            named(self.key, "whitening"),
            facts=facts,
            settings=first_chain,
            posterior=posterior,
        )
        plans = [
            _all_kept(
                self.shared_plans.plan_of(whitened.facts, chain, whitened.posterior)
            )
            for chain in group
        ]
        chains = self._chains_to_run(len(plans), whiten=first_chain.whiten)
        plans += [plans[0]] * (chains - len(plans))
        start = np.tile(initial_parameters(facts), (len(plans), 1))
        trace = sample(self.key, whitened.posterior, plans, initial=start)
        draws = np.asarray(trace.theta)
        chain_of: dict[int, int] = {}
        for chain_index, candidate_indices in enumerate(group.values()):
            chain_of |= dict.fromkeys(candidate_indices, chain_index)
        burn_in_of = {index: candidates[index].burn_in for index in chain_of}
        burn_ins = sorted(set(burn_in_of.values()))
        averages = _averages_after(posterior, draws, burn_ins, table)
        for burn_in, predicted in zip(burn_ins, averages, strict=True):
            scored = [index for index in chain_of if burn_in_of[index] == burn_in]
            chain_indices = [chain_of[index] for index in scored]
            scores[scored] = _scores(predicted[chain_indices], table)

    def _chains_to_run(self, chains: int, *, whiten: bool) -> int:
        """Return how many chains to run for a group of `chains`.

        Args:
            chains: in the group.
            whiten: whether they move in whitened coordinates.

        Returns:
            A multiple of the group's size, `GROUP_SIZES`, or `chains` where stand-ins
            are so large that further chains take longer than compiling.
        """
        if self.facts.rows * self.facts.features > MAX_FILLED_NUMBERS:
            return chains
        size = GROUP_SIZES[whiten]
        return math.ceil(chains / size) * size


def _all_kept(plan: Plan) -> Plan:
    """Return a plan of the same transmissions that discards no draws.

    Chains of plans with different burn-in then run together.
    """
    return replace(plan, context=replace(plan.context, burn_in=0))


def _averages_after(
    posterior: Tabular, draws: np.ndarray, burn_ins: Sequence[int], table: StandIn
) -> list[Array]:
    """Return predictions for further rows, averaged over the draws after burn-in.

    No draw is predicted with twice: averages over more draws are made of those over
    fewer.

    Args:
        posterior: of the stand-in, in the coordinates of its features.
        draws: of all rounds, [chain, round, m].
        burn_ins: the rounds that may be discarded, in increasing order.
        table: the stand-in.

    Returns:
        For every burn-in the prediction of each chain, [chain, n, C] for classes and
        [chain, n] for numbers.
    """
    rounds = draws.shape[1]
    ends = [*burn_ins[1:], rounds]
    total: Array | float = 0.0
    averages = []
    for first, end in reversed(list(zip(burn_ins, ends, strict=True))):
        total = total + (end - first) * _predicted(
            posterior, draws[:, first:end], table
        )
        averages.append(total / (rounds - first))
    return averages[::-1]


def _predicted(posterior: Tabular, draws: np.ndarray, table: StandIn) -> Array:
    """Return the mean prediction of some draws, as `_averages_after` does."""
    if isinstance(posterior, SoftmaxPosterior):
        return posterior.predict(draws, table.X_test).astype(float)
    return draws.astype(float).mean(1) @ posterior.design_matrix(table.X_test).T


def _averaged(
    settings: Sequence[Settings],
    scores: Array,
    *,
    has_classes: bool,
    cap_fractions: Sequence[float],
) -> list[Expected]:
    """Return candidates with their scores[stand-in, candidate, 3] averaged."""
    means = scores.mean(0)
    ranks = np.exp(np.log(scores[..., 0]).mean(0))
    expected = []
    for index, candidate in enumerate(settings):
        nll, accuracy, ece = map(float, means[index])
        reached = Expected(
            settings=candidate,
            nll=nll,
            accuracy=accuracy if has_classes else None,
            ece=ece if has_classes else None,
            rank=float(ranks[index]),
            cap_fraction=cap_fractions[index],
        )
        expected.append(reached)
    return expected


def _scores(predicted: Array, table: StandIn) -> Array:
    """Return scores of predictions for further rows, expected over their outcomes.

    Args:
        predicted: by every chain, [chain, n, C] for classes and [chain, n] for numbers.
        table: the stand-in.

    Returns:
        The loss, the accuracy and the calibration error of every chain, [chain, 3]; the
        last two are 0 for numbers.
    """
    if predicted.ndim == 3:
        probabilities = np.maximum(predicted, SMALLEST_PROBABILITY)
        probabilities /= probabilities.sum(2, keepdims=True)
        reached = expected_calibration(probabilities, table.expected)
        return np.stack([reached.nll, reached.accuracy, reached.ece], axis=1)
    loss = np.mean((predicted - table.expected) ** 2, axis=1) + table.noise
    return np.stack([loss, *np.zeros((2, len(loss)))], axis=1)


_chosen: dict[Facts, list[Expected]] = {}
"""Choices of this process: they are the same for the same facts, and take seconds."""


def choose(facts: Facts, progress: Advance | None = None) -> list[Expected]:
    """Choose settings on stand-ins.

    The candidates of `candidates` are tried, and settings near the best of them with
    whitening, unless the devices would send too many numbers for it (`MAX_MOMENTS`).
    Near the best of all these a colder burn-in is tried, where Langevin's noise limits
    power (`with_colder_burn_in`). Where a class is rare and rows are hidden one by one, settings
    that clip nothing are preferred, up to a price (`MAX_UNCLIPPED_LOSS_RATIO`). Where
    losses are within `EQUAL_LOSS_RATIO` of each other, the average over most draws is
    taken. For equal facts and an ideal link the choice is made once.

    Args:
        facts: of the table.
        progress: called after every part of the first candidates that is done.

    Returns:
        All candidates and what each is expected to reach: the one to take, then the
        others by rank.
    """
    # Arrays of a link do not tell whether it is the same.
    is_repeatable = facts.link is None
    if is_repeatable and facts in _chosen:
        return list(_chosen[facts])
    ranked = _sorted(expect(facts, list(candidates(facts)), progress))
    # Labelled public rows have said already which coordinates suit.
    is_free = facts.public is not None
    is_affordable = is_free or facts.features**2 * facts.devices <= MAX_MOMENTS
    if is_affordable and facts.prior_mean is None:
        best = _eligible(facts, ranked)[0]
        whitened = neighbouring_settings(replace(best.settings, whiten=True))
        ranked = _sorted(ranked + expect(facts, whitened))
    cold = with_colder_burn_in(_eligible(facts, ranked)[0])
    if cold:
        ranked = _sorted(ranked + expect(facts, cold))
    eligible = _eligible(facts, ranked)
    highest_rank = EQUAL_LOSS_RATIO * eligible[0].rank
    as_good = [candidate for candidate in eligible if candidate.rank <= highest_rank]
    steadiest = max(as_good, key=lambda candidate: candidate.settings.samples)
    ranked.sort(key=lambda candidate: candidate is not steadiest)
    if is_repeatable:
        _chosen[facts] = list(ranked)
    return ranked


def _sorted(expected: list[Expected]) -> list[Expected]:
    """Return candidates by their rank, the best first."""
    return sorted(expected, key=lambda candidate: candidate.rank)


def _eligible(facts: Facts, ranked: list[Expected]) -> list[Expected]:
    """Return the candidates to choose from.

    They are all, or where a class is rare those that clip nothing.
    """
    if not (facts.has_rare_class and facts.by_record):
        return ranked
    least_loss = min(candidate.nll for candidate in ranked)
    highest_loss = MAX_UNCLIPPED_LOSS_RATIO * least_loss
    longest_gradient = MAX_GRADIENT_PER_ROW * facts.row_norm
    unclipped = [
        candidate
        for candidate in ranked
        if candidate.settings.clip >= longest_gradient and candidate.nll <= highest_loss
    ]
    return unclipped or ranked


def value_of_more(facts: Facts, chosen: Settings) -> dict[str, Expected]:
    """Estimate what more of something would be worth, on stand-ins of that size.

    Args:
        facts: of the table.
        chosen: the settings of its fit; for each case the best of those near them is
            taken.

    Returns:
        What would be reached as it is, with twice ε, twice the rows and devices, an SNR
        that is 10 dB higher (where there is a link), and twice the rounds, by name.
    """
    tried = neighbouring_settings(chosen)
    cases = {"as it is": facts}
    twice_epsilon = 2 * np.asarray(facts.promise.epsilon, dtype=float)
    larger_promise = replace(facts.promise, epsilon=twice_epsilon)
    cases["twice epsilon"] = facts._replace(promise=larger_promise)
    cases["twice the rows and devices"] = facts._replace(
        rows=2 * facts.rows, devices=2 * facts.devices
    )
    if facts.link is not None:
        snr_db = np.asarray(facts.link.snr_db) + LARGER_SNR_DB
        louder_link = replace(facts.link, snr_db=snr_db)
        cases[f"{LARGER_SNR_DB} dB more"] = facts._replace(link=louder_link)
    best = {name: _best(case, tried) for name, case in cases.items()}
    longer = [
        replace(
            settings,
            step_size=settings.step_size / 2,
            burn_in=2 * settings.burn_in,
            samples=2 * settings.samples,
        )
        for settings in tried
    ]
    best["twice the rounds"] = _best(facts, longer)
    return best


def _best(facts: Facts, tried: Sequence[Settings]) -> Expected:
    """Return the best of some settings, on few stand-ins."""
    max_stand_ins = min(MAX_ADVICE_STAND_INS, MAX_STAND_INS)
    return _sorted(expect(facts, tried, max_stand_ins=max_stand_ins))[0]
