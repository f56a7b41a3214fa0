"""Choose the settings of `wflmc reproduce league`, without any test image.

    python -m benchmarks.league [training] [other] [descent]

For each private data set: on 5,000 of the private training images (`training`), which ε
does not cover; and on the other data set, which is public and whitened by its own
moments (`other`, and `descent` for the rival). Without an argument all three. Five
minutes on an H200, and some ten hours on 2 cores.
"""

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc import Plan, sample
from wflmc.apps.studies.league import (
    CHOSEN,
    EPSILONS,
    EPSILONS_WITH_ALL_ROWS,
    KINETIC,
    OVERDAMPED,
    PUBLIC_DATA_SET,
    LeagueSettings,
    descent_plan,
    league_features,
    league_plan,
    league_posterior,
    link_of,
    scores_of,
)
from wflmc.data.images import image_whitening
from wflmc.data.scattering import cached_features
from wflmc.data.sets import Features, load

HELD_OUT = 5000
"""Training images by whose NLL settings are chosen, as many of each class."""
LENGTHS = ((200, 40), (600, 100), (1500, 200))
"""Rounds, and how many of them are kept."""
DESCENT_LENGTHS = LENGTHS[:2]
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
TEMPERATURE = 0.05
"""τ on the grid."""
TEMPERATURES = (0.02, 0.2, 1.0)
"""τ that the best candidates are tried with as well."""
FACTORS = (0.7, 1.4)
"""By which steps and clips of the best candidates are changed."""
DEVICE_CLIP_FACTORS = (0.5, 4.0)
FINAL_STEPS = (1.0, 0.5)
"""Step of the kept rounds over that of the first."""
REFINED_AT_END = 2
"""Candidates whose neighbours are tried last."""
CHAINS_PER_CALL = 12
"""Candidates that are sampled together, always as many, so that one compiled program
serves all of a length."""


class Search:
    """Candidates for the settings, with their NLL on held-out training images.

    Args:
        features: of public data, or of private data where ε is not to cover the choice;
            the test set is not looked at.
        descent: search for the rival.
    """

    def __init__(self, features: Features, descent: bool = False) -> None:
        learn, held_out = held_out_split(features.y)
        self.posterior = league_posterior(
            Features(features.X[learn], features.y[learn])
        )
        self.rows = features.X[held_out]
        self.labels = features.y[held_out]
        self.descent = descent
        self.nll: dict[float, dict[LeagueSettings, float]] = {}
        """By ε and settings."""

    def run(self, epsilons: Iterable[float]) -> None:
        """Try a grid, the neighbours of its best of every length, and those of the best.

        Args:
            epsilons: for each of which settings are sought.
        """
        self.nll = {epsilon: {} for epsilon in epsilons}
        self._score({epsilon: list(self._grid(epsilon)) for epsilon in self.nll})
        best_of_lengths = {
            epsilon: [
                self.ranking(epsilon, rounds)[0][1] for rounds, _ in self._lengths
            ]
            for epsilon in self.nll
        }
        self._score(self._neighbours(best_of_lengths))
        best = {
            epsilon: [
                settings for _, settings in self.ranking(epsilon)[:REFINED_AT_END]
            ]
            for epsilon in self.nll
        }
        self._score(self._neighbours(best))

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

    @property
    def _lengths(self) -> tuple[tuple[int, int], ...]:
        return DESCENT_LENGTHS if self.descent else LENGTHS

    def _grid(self, epsilon: float) -> Iterator[LeagueSettings]:
        """Yield the candidates that come first."""
        for dynamics in (OVERDAMPED,) if self.descent else (OVERDAMPED, KINETIC):
            for step, example_clip, (rounds, kept_rounds) in product(
                STEPS[dynamics], EXAMPLE_CLIPS[epsilon], self._lengths
            ):
                yield LeagueSettings(
                    dynamics=dynamics,
                    step=step,
                    example_clip=example_clip,
                    device_clip=DEVICE_CLIP,
                    rounds=rounds,
                    kept_rounds=kept_rounds,
                    burn_in_temperature=1.0 if self.descent else TEMPERATURE,
                )

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
                    for neighbour in neighbours(settings, self.descent)
                )
                if neighbour not in self.nll[epsilon]
            ]
            for epsilon, of_epsilon in chosen.items()
        }

    def _score(self, candidates: dict[float, list[LeagueSettings]]) -> None:
        """Sample candidates of the same dynamics and rounds together, and keep NLLs."""
        of_kind: dict[tuple[str, int], list[tuple[float, LeagueSettings]]] = {}
        for epsilon, settings_of_epsilon in candidates.items():
            for settings in settings_of_epsilon:
                kind = (settings.dynamics, settings.rounds)
                of_kind.setdefault(kind, []).append((epsilon, settings))
        for of_one_kind in of_kind.values():
            for first in range(0, len(of_one_kind), CHAINS_PER_CALL):
                self._score_call(of_one_kind[first : first + CHAINS_PER_CALL])

    def _score_call(self, candidates: list[tuple[float, LeagueSettings]]) -> None:
        """Sample one chain of each candidate, and keep its NLL."""
        make_plan = (
            descent_plan
            if self.descent
            else partial(league_plan, adjacency="add-remove")
        )
        plans: list[Plan] = [
            make_plan(self.posterior, settings, epsilon, link=link_of(0))
            for epsilon, settings in candidates
        ]
        plans += [plans[0]] * (CHAINS_PER_CALL - len(plans))
        trace = sample(
            jax.random.key(3),
            self.posterior,
            plans,
            numbers=[0] * len(plans),
            predictions=self.rows,
        )
        is_point_estimate = [self.descent] * len(plans)
        scores = scores_of(
            trace, self.posterior, self.rows, self.labels, is_point_estimate
        )
        # A chain that diverged has no predictions, and comes last.
        finite_nll = np.nan_to_num(scores.nll, nan=np.inf)
        for (epsilon, settings), nll in zip(candidates, finite_nll, strict=False):
            self.nll[epsilon][settings] = float(nll)


def neighbours(settings: LeagueSettings, descent: bool) -> Iterator[LeagueSettings]:
    """Yield settings that differ from given ones in one of them.

    Args:
        settings: of which every setting but the dynamics and the rounds is changed.
        descent: leave out the temperature, which descent does not have.
    """
    for factor in FACTORS:
        yield settings._replace(step=rounded(factor * settings.step))
        yield settings._replace(example_clip=rounded(factor * settings.example_clip))
    for factor in DEVICE_CLIP_FACTORS:
        yield settings._replace(device_clip=rounded(factor * settings.device_clip))
    for final_step in FINAL_STEPS:
        yield settings._replace(final_step=final_step)
    if not descent:
        for temperature in (TEMPERATURE, *TEMPERATURES):
            yield settings._replace(burn_in_temperature=temperature)


def rounded(value: float) -> float:
    """Return a number to two digits, which settings are stated with."""
    return float(f"{value:.2g}")


def public_features(name: str) -> Features:
    """Return the training images of a public data set, whitened by themselves.

    Args:
        name: of the data set.
    """
    images = load(name)
    whitened = image_whitening(name)(cached_features(images.train_images), True)
    return Features(whitened, images.train_labels.astype(int))


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


def main(ways: list[str]) -> None:
    """Print what is chosen, its NLL on held-out images, and whether the study has it.

    Args:
        ways: some of training, other and descent; empty for all.
    """
    asked_for = ways or ["training", "other", "descent"]
    for private, public in PUBLIC_DATA_SET.items():
        if "training" in asked_for:
            search = Search(league_features(private))
            search.run(EPSILONS_WITH_ALL_ROWS)
            show("training", private, search)
        if "other" in asked_for:
            search = Search(public_features(public))
            search.run(EPSILONS)
            show("other", private, search)
        if "descent" in asked_for:
            search = Search(public_features(public), descent=True)
            search.run(EPSILONS)
            show("descent", private, search)


def show(where: str, private: str, search: Search) -> None:
    """Print the best candidates for each ε.

    Args:
        where: settings were chosen, as in `CHOSEN`.
        private: the private data set.
        search: that is finished.
    """
    for epsilon in search.nll:
        ranking = search.ranking(epsilon)
        study_has = CHOSEN.get((where, private, epsilon)) == ranking[0][1]
        verdict = "as in the study" if study_has else "not as in the study"
        print(
            f"{where}, {private}, ε = {epsilon:g}: "
            f"{len(ranking)} candidates, the best {verdict}",
            flush=True,
        )
        for nll, settings in ranking[:6]:
            print(f"  NLL {nll:.4f}  {settings}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
