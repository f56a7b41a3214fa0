"""What ε does not cover.

It is what a run takes from private data outside its rounds, and what its folder shows
of them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wflmc.data.sets import DATA_SETS
from wflmc.planning.notices import PRIVATE_DATA, oracle_notice
from wflmc.scenario.files import is_data_path
from wflmc.scenario.schema import PosteriorSection, Scenario
from wflmc.support.notices import Notice, NoticeCode

OWNER_ONLY = (
    "This folder is for the owner of the data: clip rates, the exact law, scores and, "
    "unless sampler.seed is secret, the key of the noise are in it, and epsilon covers "
    "none of these. wflmc publish writes a file that may be shown."
)
"""The first thing that a run folder says."""
SELECTED = (
    "Whoever chooses a point by its scores looks at the data that scored it, and "
    "epsilon does not cover the choice; wflmc tune chooses settings for a table "
    "without its data."
)
"""Said of every sweep that samples under a promise."""


@dataclass(frozen=True)
class NotCovered:
    """Something that depends on private data and that ε does not account for."""

    name: str
    """The scenario key that decides it, or what it is."""
    text: str
    """One sentence."""
    published: bool = True
    """Whether a published file rests on it; else the run folder alone shows it."""


BROADCAST_EFFECT = "the effect of link.downlink_snr_db"
DIRECTIONS = "the principal directions of posterior.data"
EXACT_OBJECTIVE = "policy.objective"
"""The name of the objective "exact", which takes a plan's powers from the data."""
CONSTANTS = (
    "posterior.model",
    "posterior.preconditioner",
    "posterior.mu",
    "posterior.L",
    "posterior.initial_w2_sq",
    "sampler.burn_in",
    BROADCAST_EFFECT,
)
"""Names of the sources of a plan's numbers, for any policy."""
FROM_DATA = (
    DIRECTIONS,
    "posterior.examples",
    "posterior.classes",
    "posterior.partition",
    *CONSTANTS,
)
"""Names of all that is computed from data before the first round, for any policy."""
REFUSALS = (
    "A run that is refused or stopped over its data (a label outside "
    "posterior.classes, a value that is not finite, a step beyond 2/L) tells that it "
    "was."
)


class _Item(NamedTuple):
    """A possible entry of the list, and whether it applies to a scenario."""

    name: str
    applies: bool
    text: str


def not_covered(
    scenario: Scenario, scored: bool = False, by_model: Mapping[str, str] | None = None
) -> tuple[NotCovered, ...]:
    """List what ε does not cover; empty where nothing is promised.

    Args:
        scenario: of a run.
        scored: whether there is a test set.
        by_model: what a custom model takes as public, a sentence by name.

    Returns:
        First what a published file rests on, then what the run folder alone shows.
    """
    if scenario.privacy.epsilon is None:
        return ()
    published = [*_data_items(scenario), *_constant_items(scenario)]
    published += [_Item(name, True, text) for name, text in (by_model or {}).items()]
    shown = _shown_items(scenario, scored)
    entries = [NotCovered(item.name, item.text) for item in published if item.applies]
    entries += [
        NotCovered(item.name, item.text, published=False)
        for item in shown
        if item.applies
    ]
    return tuple(entries)


def _is_custom(section: PosteriorSection) -> bool:
    return section.model not in ("gaussian", "softmax")


def _data_items(scenario: Scenario) -> list[_Item]:
    """Return what may decide which examples a model has, and who holds them."""
    section = scenario.posterior
    has_images = section.data in DATA_SETS
    is_projected = has_images and section.features == "principal"
    is_csv = _is_csv(section.data) and not _is_custom(section)
    is_softmax = section.model == "softmax"
    finds_classes = is_softmax and is_data_path(section.data)
    return [
        _Item(
            DIRECTIONS,
            is_projected,
            "Features are coordinates on principal directions of training images.",
        ),
        _Item(
            "posterior.examples",
            is_csv and not scenario.is_set("posterior.examples"),
            "Which lines of the CSV are examples and not a header is read off; give "
            "it.",
        ),
        _Item(
            "posterior.classes",
            finds_classes and section.classes is None,
            "The set of labels is read off the data; give posterior.classes.",
        ),
        _Item(
            "posterior.partition",
            section.partition not in ("iid", "blocks"),
            "Labels decide who holds which example.",
        ),
    ]


def _constant_items(scenario: Scenario) -> list[_Item]:
    """Return what may decide the constants of a plan and its noise."""
    section = scenario.posterior
    sampler = scenario.sampler
    is_custom = _is_custom(section)
    has_own_mu = is_custom or section.model == "gaussian"
    is_exact = scenario.policy.objective == "exact"
    has_noisy_broadcast = bool(scenario.link.downlink_snr_db < np.inf)
    return [
        _Item(
            "posterior.model",
            is_custom,
            "A model of your own may take coordinates, starts and constants from its "
            "data.",
        ),
        _Item(
            "posterior.preconditioner",
            section.preconditioner == "whiten",
            "The features themselves whiten the chains.",
        ),
        _Item(
            "posterior.mu",
            has_own_mu and not section.mu,
            "Step and plan use μ of the data; give posterior.mu.",
        ),
        _Item(
            "posterior.L",
            not section.L,
            "Step and plan use L of the data; give posterior.L.",
        ),
        _Item(
            "posterior.initial_w2_sq",
            not section.initial_w2_sq,
            "The plan uses W2² of the data; give this key.",
        ),
        _Item(
            "sampler.burn_in",
            sampler.burn_in == "auto",
            "A pilot on the data has found the number of burn-in rounds.",
        ),
        _Item(
            BROADCAST_EFFECT,
            has_noisy_broadcast and not is_exact,
            "The plan uses the devices' curvatures, by which noise acts.",
        ),
        _Item(EXACT_OBJECTIVE, is_exact, oracle_notice().text),
        _Item(
            "sampler.seed",
            sampler.seed != "secret",
            "A seed below 2³² can be guessed; 'secret' draws a key instead.",
        ),
    ]


def _shown_items(scenario: Scenario, scored: bool) -> list[_Item]:
    """Return what the folder of a run may show of the data, but no published file."""
    return [
        _Item(
            "clip rates",
            scenario.policy.power != "noiseless",
            "Clip rates, warnings and the diagnosis look at the data.",
        ),
        _Item(
            "exact law",
            scenario.posterior.model == "gaussian",
            "W2² and the exact law and ESS compare with the posterior itself.",
        ),
        _Item(
            "chains",
            scenario.sampler.chains > 1,
            "R-hat, ESS and averages are of all chains, and epsilon covers one.",
        ),
        _Item("scores", scored, "Scores look at the test set, which nothing hides."),
        _Item("refusals", True, REFUSALS),
    ]


def _is_csv(data: str) -> bool:
    return is_data_path(data) and not data.lower().endswith(".npz")


def data_notices(
    items: Iterable[NotCovered], source: str = PRIVATE_DATA
) -> tuple[Notice, ...]:
    """Return a notice about what a plan takes from the data; none if that is nothing.

    Args:
        items: what ε does not cover.
        source: what the data are, as the end of a sentence.
    """
    names = [item.name for item in items if item.name in FROM_DATA]
    if not names:
        return ()
    subject = f"{names[0]} is"
    if len(names) > 1:
        subject = f"{', '.join(names[:-1])} and {names[-1]} are"
    return (Notice(NoticeCode.DATA_CONSTANTS, f"{subject} computed from {source}."),)
