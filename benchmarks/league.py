"""Choose the settings of `wflmc reproduce league`, without any test image.

    python -m benchmarks.league [WAY] ... [DATA] ... [EPSILON] ...

The ways: on 5,000 of the private training images (`training`), which ε does not cover;
and on the other data set, which is public and whitened by its own moments (`other`, and
`descent` for the rival). DATA are names of the private data with their public images,
such as `mnist-rendered`. What is not said stands for all there are. Some twenty minutes
on an H200, and more than a day on 2 cores.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc import Link, Plan, sample
from wflmc.apps.studies.league import (
    CHOSEN,
    EPSILONS,
    KINETIC,
    LEAGUE_DATA,
    OTHER_DATA_SET,
    OVERDAMPED,
    PRIOR_STD,
    LeagueSettings,
    descent_plan,
    league_features,
    league_plan,
    league_posterior,
    link_of,
    public_fit,
    scores_of,
)
from wflmc.data.images import RIDGE, public_image_features
from wflmc.data.sets import Features
from wflmc.posterior import SoftmaxPosterior

HELD_OUT = 5000
"""Training images by whose NLL settings are chosen, as many of each class."""
LENGTHS = ((200, 40), (600, 100), (1500, 200))
"""Rounds, and how many of them are kept."""
SHORTER_LENGTHS = LENGTHS[:2]
"""Of descent, and with rendered digits: searches with more rounds chose none of
them."""
STEPS = {OVERDAMPED: (120.0, 250.0, 500.0), KINETIC: (12.0, 40.0)}
"""η N, and h² N of kinetic dynamics, on the grid."""
EXAMPLE_CLIPS = {
    0.3: (0.06, 0.12, 0.25),
    1.0: (0.12, 0.25, 0.5),
    3.0: (0.2, 0.4, 0.75),
    10.0: (0.4, 0.75, 1.3),
}
"""c on the grid, by ε."""
DEVICE_CLIP = 100.0
"""ℓ on the grid."""
COLD_TEMPERATURES = (0.05, 0.02, 0.2, 1.0)
"""τ on the grid, and those that the best candidates are tried with as well."""
PRIOR_STDS = (5.0, 3.0, 10.0)
"""The same for s, where the prior has a mean. A second search with 0.5, 1, 2 and 3
chose 2 and 3, and nothing better."""
FACTORS = (0.7, 1.4)
"""By which steps and clips of the best candidates are changed."""
DEVICE_CLIP_FACTORS = (0.5, 4.0)
FINAL_STEPS = (1.0, 0.5)
"""Step of the kept rounds over that of the first."""
REFINED_AT_END = 2
"""Candidates whose neighbours are tried last."""
FINALISTS = 4
"""Candidates that are compared at the end by several chains each. The NLL of a chain has
a standard deviation of .002 to .004, which is more than the best candidates differ by."""
CHAINS_PER_CALL = 12
"""Candidates that are sampled together, or chains of a finalist: always as many, so that
one compiled program serves all of a length."""


WAYS = {
    "training": tuple(LEAGUE_DATA),
    "other": tuple(OTHER_DATA_SET),
    "descent": tuple(OTHER_DATA_SET),
}
"""For which data settings are chosen, by the way of choosing."""


class Score(NamedTuple):
    """What a candidate reaches on held-out training images."""

    nll: float
    """The mean over chains."""
    standard_error: float
    """Of that mean; nan for one chain."""
    settings: LeagueSettings


@dataclass(frozen=True)
class SearchSpace:
    """What is searched besides steps, clips and rounds.

    Args:
        descent: search for the rival.
        dynamics: of the grid.
        lengths: rounds of the grid, and how many of them are kept.
        temperatures: τ of the grid, and those of neighbours.
        prior_stds: s of the grid, and those of neighbours.
        public_fit: from s to the prior's mean, [m] or None.
    """

    descent: bool = False
    dynamics: tuple[str, ...] = (OVERDAMPED, KINETIC)
    lengths: tuple[tuple[int, int], ...] = LENGTHS
    temperatures: tuple[float, ...] = COLD_TEMPERATURES
    prior_stds: tuple[float, ...] = (PRIOR_STD,)
    public_fit: Callable[[float], NDArray[np.float64] | None] = lambda prior_std: None

    def grid(self, epsilon: float) -> Iterator[LeagueSettings]:
        """Yield the candidates that come first.

        Args:
            epsilon: ε.
        """
        for dynamics in self.dynamics:
            for step, example_clip, (rounds, kept_rounds) in product(
                STEPS[dynamics], EXAMPLE_CLIPS[epsilon], self.lengths
            ):
                yield LeagueSettings(
                    dynamics=dynamics,
                    step=step,
                    example_clip=example_clip,
                    device_clip=DEVICE_CLIP,
                    rounds=rounds,
                    kept_rounds=kept_rounds,
                    burn_in_temperature=self.temperatures[0],
                    prior_std=self.prior_stds[0],
                )

    def neighbours(self, settings: LeagueSettings) -> Iterator[LeagueSettings]:
        """Yield settings that differ from given ones in one of them.

        Args:
            settings: of which every setting but the dynamics and the rounds is changed.
        """
        for factor in FACTORS:
            step = rounded(factor * settings.step)
            example_clip = rounded(factor * settings.example_clip)
            yield settings._replace(step=step)
            yield settings._replace(example_clip=example_clip)
        for factor in DEVICE_CLIP_FACTORS:
            yield settings._replace(device_clip=rounded(factor * settings.device_clip))
        for final_step in FINAL_STEPS:
            yield settings._replace(final_step=final_step)
        for temperature in self.temperatures:
            yield settings._replace(burn_in_temperature=temperature)
        for prior_std in self.prior_stds:
            yield settings._replace(prior_std=prior_std)


class Search:
    """Candidates for the settings, with their NLL on held-out training images.

    Args:
        features: of public data, or of private data where ε is not to cover the choice;
            the test set is not looked at.
        space: what is searched.
    """

    def __init__(self, features: Features, space: SearchSpace | None = None) -> None:
        learn, held_out = held_out_split(features.y)
        self.space = space or SearchSpace()
        self.learn = Features(features.X[learn], features.y[learn])
        self.rows = features.X[held_out]
        self.labels = features.y[held_out]
        self._posteriors: dict[float, SoftmaxPosterior] = {}
        self.nll: dict[float, dict[LeagueSettings, float]] = {}
        """Of one chain, by ε and settings."""
        self.finalists: dict[float, list[Score]] = {}
        """By ε, the best first."""

    def run(
        self,
        epsilons: Iterable[float],
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Try a grid, the neighbours of its best of every length, and those of the best.

        In the end the best of all are compared by several chains, each over a channel
        of its own.

        Args:
            epsilons: for each of which settings are sought.
            report: takes a line about the best candidate so far, after each stage.
        """
        self.nll = {epsilon: {} for epsilon in epsilons}
        self._score({epsilon: list(self.space.grid(epsilon)) for epsilon in self.nll})
        self._report_best("the grid", report)
        best_of_lengths = {
            epsilon: [
                self.ranking(epsilon, rounds)[0][1] for rounds, _ in self.space.lengths
            ]
            for epsilon in self.nll
        }
        self._score(self._neighbours(best_of_lengths))
        self._report_best("neighbours", report)
        best = {
            epsilon: [
                settings for _, settings in self.ranking(epsilon)[:REFINED_AT_END]
            ]
            for epsilon in self.nll
        }
        self._score(self._neighbours(best))
        self._report_best("all candidates", report)
        for epsilon in self.nll:
            of_epsilon = [
                self._compared(epsilon, settings)
                for _, settings in self.ranking(epsilon)[:FINALISTS]
            ]
            self.finalists[epsilon] = sorted(of_epsilon)

    def ranking(
        self, epsilon: float, rounds: int | None = None
    ) -> list[tuple[float, LeagueSettings]]:
        """Return the candidates of an ε with their NLL, best first.

        Args:
            epsilon: one of those that were sought for.
            rounds: of the candidates; None for any number.
        """
        return sorted(
            (nll, settings)
            for settings, nll in self.nll[epsilon].items()
            if rounds in (None, settings.rounds)
        )

    def _report_best(self, stage: str, report: Callable[[str], None]) -> None:
        """Report the best candidate for every ε, by one chain."""
        for epsilon in self.nll:
            nll, settings = self.ranking(epsilon)[0]
            report(f"best of {stage} at ε = {epsilon:g}: NLL {nll:.5f}  {settings}")

    def _neighbours(
        self, chosen: dict[float, list[LeagueSettings]]
    ) -> dict[float, list[LeagueSettings]]:
        """Return candidates that differ in one setting and have not been tried, by ε."""
        return {
            epsilon: [
                neighbour
                for neighbour in dict.fromkeys(
                    neighbour
                    for settings in of_epsilon
                    for neighbour in self.space.neighbours(settings)
                )
                if neighbour not in self.nll[epsilon]
            ]
            for epsilon, of_epsilon in chosen.items()
        }

    def _score(self, candidates: dict[float, list[LeagueSettings]]) -> None:
        """Sample candidates of the same kind together, and keep their NLL."""
        of_kind: dict[tuple[str, int, float], list[tuple[float, LeagueSettings]]] = {}
        for epsilon, settings_of_epsilon in candidates.items():
            for settings in settings_of_epsilon:
                kind = (settings.dynamics, settings.rounds, settings.prior_std)
                of_kind.setdefault(kind, []).append((epsilon, settings))
        for of_one_kind in of_kind.values():
            for first in range(0, len(of_one_kind), CHAINS_PER_CALL):
                some = of_one_kind[first : first + CHAINS_PER_CALL]
                plans = [
                    self._plan(epsilon, settings, link_of(0))
                    for epsilon, settings in some
                ]
                plans += [plans[0]] * (CHAINS_PER_CALL - len(plans))
                # All candidates have the same noise.
                nll = self._sampled_nll(some[0][1], plans, [0] * len(plans))
                for (epsilon, settings), of_chain in zip(some, nll, strict=False):
                    self.nll[epsilon][settings] = float(of_chain)

    def _compared(self, epsilon: float, settings: LeagueSettings) -> Score:
        """Return the mean NLL of several chains over as many channels."""
        numbers = list(range(CHAINS_PER_CALL))
        plans = [self._plan(epsilon, settings, link_of(seed)) for seed in numbers]
        nll = self._sampled_nll(settings, plans, numbers)
        standard_error = float(nll.std(ddof=1) / len(nll) ** 0.5)
        return Score(float(nll.mean()), standard_error, settings)

    def _posterior(self, prior_std: float) -> SoftmaxPosterior:
        """Return the posterior of the images that are learnt from."""
        if prior_std not in self._posteriors:
            prior_mean = self.space.public_fit(prior_std)
            posterior = league_posterior(self.learn, prior_std, prior_mean)
            self._posteriors[prior_std] = posterior
        return self._posteriors[prior_std]

    def _plan(self, epsilon: float, settings: LeagueSettings, link: Link) -> Plan:
        """Return the plan of a candidate."""
        posterior = self._posterior(settings.prior_std)
        if self.space.descent:
            return descent_plan(posterior, settings, epsilon, link=link)
        return league_plan(posterior, settings, epsilon, "add-remove", link=link)

    def _sampled_nll(
        self, settings: LeagueSettings, plans: list[Plan], numbers: list[int]
    ) -> NDArray[np.float64]:
        """Return the NLL of a chain of each plan; infinite for one that diverged.

        Args:
            settings: of the first chain, whose prior all of them have.
            plans: of the same dynamics and rounds.
            numbers: of the chains, which decide their noise.
        """
        posterior = self._posterior(settings.prior_std)
        trace = sample(
            jax.random.key(3),
            posterior,
            plans,
            numbers=numbers,
            predictions=self.rows,
        )
        is_point_estimate = [self.space.descent] * len(plans)
        scores = scores_of(trace, posterior, self.rows, self.labels, is_point_estimate)
        # A chain that diverged has no predictions, and comes last.
        return np.nan_to_num(scores.nll, nan=np.inf)


def rounded(value: float) -> float:
    """Return a number to two digits, which settings are stated with."""
    return float(f"{value:.2g}")


def public_features(name: str) -> Features:
    """Return the training images of a public data set, whitened by themselves.

    Args:
        name: of the data set.
    """
    features = public_image_features(name, (name,), RIDGE, intercept=True)
    return Features(features.X, features.y)


def held_out_split(
    labels: NDArray[np.intp],
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the places of training images to learn from, and of those to choose by.

    Args:
        labels: of the training images; as many of each class are held out.
    """
    generator = np.random.default_rng(0)
    of_classes = [
        generator.choice(np.flatnonzero(labels == label), HELD_OUT // 10, replace=False)
        for label in range(10)
    ]
    held_out = np.sort(np.concatenate(of_classes))
    return np.setdiff1d(np.arange(len(labels)), held_out), held_out


def search_of(way: str, name: str) -> Search:
    """Return the search for settings of a way and some data.

    Args:
        way: as in `CHOSEN`.
        name: of `LEAGUE_DATA`.
    """
    if way == "other":
        return Search(public_features(OTHER_DATA_SET[name]))
    if way == "descent":
        space = SearchSpace(descent=True, lengths=SHORTER_LENGTHS, temperatures=(1.0,))
        return Search(public_features(OTHER_DATA_SET[name]), space)
    data = LEAGUE_DATA[name]
    has_rendered_digits = "rendered-digits" in data.whiten_from
    space = SearchSpace(
        lengths=SHORTER_LENGTHS if has_rendered_digits else LENGTHS,
        prior_stds=PRIOR_STDS if data.prior_from else (PRIOR_STD,),
        public_fit=cache(partial(public_fit, name)),
    )
    return Search(league_features(name), space)


def main(arguments: list[str]) -> None:
    """Print what is chosen, its NLL on held-out images, and whether the study has it.

    Args:
        arguments: ways, names of data and ε, as `CHOSEN` has them.
    """
    words = {*WAYS, *LEAGUE_DATA}
    epsilons = [float(word) for word in arguments if word not in words]
    for way, names in WAYS.items():
        for name in names:
            if _is_asked_for(way, WAYS, arguments) and _is_asked_for(
                name, LEAGUE_DATA, arguments
            ):
                search = search_of(way, name)
                search.run(epsilons or EPSILONS, partial(print, flush=True))
                show(way, name, search)


def _is_asked_for(word: str, words: Iterable[str], arguments: list[str]) -> bool:
    """Return whether arguments have a word, or none of its kind."""
    of_kind = [argument for argument in arguments if argument in words]
    return not of_kind or word in of_kind


def show(way: str, name: str, search: Search) -> None:
    """Print the finalists for each ε, and the best candidates by one chain.

    Args:
        way: in which settings were chosen, as in `CHOSEN`.
        name: of `LEAGUE_DATA`.
        search: that is finished.
    """
    for epsilon, finalists in search.finalists.items():
        study_has = CHOSEN.get((way, name, epsilon)) == finalists[0].settings
        verdict = "as in the study" if study_has else "not as in the study"
        count = len(search.nll[epsilon])
        print(f"{way}, {name}, ε = {epsilon:g}: {count} candidates, best {verdict}")
        for score in finalists:
            one_chain = search.nll[epsilon][score.settings]
            print(
                f"  NLL {score.nll:.5f} ± {score.standard_error:.5f} "
                f"(one chain {one_chain:.5f})  {score.settings}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
