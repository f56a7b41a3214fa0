"""Choose the settings of `wflmc reproduce league`, without any test image: `python -m
benchmarks.league`.

For each private data set: on the other one, which is public and whitened by its own
moments; and on 5,000 of the private training images, which ε does not cover. An hour or
more on 2 cores, three minutes on an accelerator.
"""

from functools import partial

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc import sample
from wflmc.apps.studies.league import (
    CHOSEN,
    EPSILONS,
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
CANDIDATES = tuple(
    LeagueSettings(dynamics, step, clip)
    for dynamics, steps in (
        ("overdamped", (200, 350, 500, 700, 1000)),
        ("kinetic", (15, 30, 60, 100)),
    )
    for step in steps
    for clip in (0.15, 0.3, 0.4, 0.5, 0.65, 0.8, 1.2)
)
"""What settings are chosen from."""


def public_features(name: str) -> Features:
    """Return the training images of a public data set, whitened by themselves."""
    images = load(name)
    return Features(
        image_whitening(name)(cached_features(images.train_images), True),
        images.train_labels.astype(int),
    )


def choose(
    features: Features, epsilon: float, descent: bool = False
) -> list[tuple[float, LeagueSettings]]:
    """Return candidates with their NLL on held-out training images, best first; the
    test set is not looked at.

    Args:
        features: of public data, or of private data where ε is not to cover the choice.
        descent: choose for the rival.
    """
    train, held = held_out_split(features.y)
    posterior, link = (
        league_posterior(Features(features.X[train], features.y[train])),
        link_of(0),
    )
    rows, labels, found = features.X[held], features.y[held], []
    for kind in (OVERDAMPED,) if descent else (OVERDAMPED, KINETIC):
        some = [candidate for candidate in CANDIDATES if candidate.dynamics == kind]
        make = descent_plan if descent else partial(league_plan, adjacency="add-remove")
        plans = [make(posterior, each, epsilon, link=link) for each in some]
        trace = sample(
            jax.random.key(3),
            posterior,
            plans,
            numbers=[0] * len(plans),
            predictions=rows,
        )
        scores = scores_of(trace, posterior, rows, labels, [descent] * len(plans))
        found += [
            (float(nll), each) for nll, each in zip(scores.nll, some, strict=True)
        ]
    return sorted(found)


def held_out_split(
    labels: NDArray[np.intp],
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the places of training images to learn from, and of those to choose by, as
    many of each class.
    """
    generator = np.random.default_rng(0)
    each = [
        generator.choice(np.flatnonzero(labels == label), HELD_OUT // 10, replace=False)
        for label in range(10)
    ]
    held = np.sort(np.concatenate(each))
    return np.setdiff1d(np.arange(len(labels)), held), held


def main() -> None:
    """Print what is chosen, its NLL on held-out images, and whether the study has it."""
    for private, public in PUBLIC_DATA_SET.items():
        features = public_features(public)
        for epsilon in EPSILONS:
            show("other", private, epsilon, choose(features, epsilon))
            show("descent", private, epsilon, choose(features, epsilon, descent=True))
        features = league_features(private)
        for epsilon in (1.0, 3.0):
            show("training", private, epsilon, choose(features, epsilon))


def show(where: str, private: str, epsilon: float, found: list) -> None:
    """Print one choice."""
    nll, best = found[0]
    known = (
        "as in the study"
        if CHOSEN[where, private, epsilon] == best
        else f"the study has {CHOSEN[where, private, epsilon]}"
    )
    print(
        f"{where:9} {private:14} ε = {epsilon:<4g} NLL {nll:.4f} {best}: {known}",
        flush=True,
    )


if __name__ == "__main__":
    main()
