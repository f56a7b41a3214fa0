"""What ε does not cover, in one list: what a run takes from private data, and what its folder shows of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from wflmc.data.sets import DATA_SETS
from wflmc.planning.notices import PRIVATE_DATA, oracle_notice
from wflmc.scenario.files import is_data_path
from wflmc.scenario.schema import Scenario
from wflmc.support.notices import Notice, NoticeCode

OWNER_ONLY = (
    "This folder is for the owner of the data: clip rates, the exact law, scores and, unless sampler.seed is secret, "
    "the key of the noise are in it, and epsilon covers none of these. wflmc publish writes a file that may be shown."
)
"""The first thing that a run folder says."""
SELECTED = (
    "Whoever chooses a point by its scores looks at the data that scored it, and epsilon does not cover the choice; "
    "wflmc tune chooses settings for a table without its data."
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


CONSTANTS = (
    "posterior.model", "posterior.preconditioner", "posterior.mu", "posterior.L", "posterior.initial_w2_sq",
    "sampler.burn_in", "the effect of link.downlink_snr_db",
)  # fmt: skip
"""Names of what a plan's numbers are made of."""
FROM_DATA = (
    "the principal directions of posterior.data", "posterior.examples", "posterior.classes", "posterior.partition",
    *CONSTANTS,
)  # fmt: skip
"""Names of all that is computed from data before the first round, whatever the policy."""


def not_covered(
    scenario: Scenario, scored: bool = False, by_model: Mapping[str, str] | None = None
) -> tuple[NotCovered, ...]:
    """List what ε does not cover; empty where nothing is promised.

    Args:
        scored: whether there is a test set.
        by_model: what a model of one's own takes as public, a sentence by name.
    """
    if scenario.privacy.epsilon is None:
        return ()
    section, sampler = scenario.posterior, scenario.sampler
    gaussian, exact = section.model == "gaussian", scenario.policy.objective == "exact"
    own = section.model not in ("gaussian", "softmax")
    read_off = (
        section.model == "softmax"
        and is_data_path(section.data)
        and section.classes is None
    )
    unnumbered = (
        not own and _is_csv(section.data) and not scenario.given("posterior.examples")
    )
    noisy_broadcast, clips = (
        scenario.link.downlink_snr_db < np.inf,
        scenario.policy.power != "noiseless",
    )
    projected = section.data in DATA_SETS and section.features == "principal"
    whitened, split = (
        section.preconditioner == "whiten",
        section.partition not in ("iid", "blocks"),
    )
    stop = "a label outside posterior.classes, a value that is not finite, a step beyond 2/L"
    published = [
        (
            FROM_DATA[0],
            projected,
            "Features are coordinates on principal directions of training images.",
        ),
        (
            "posterior.examples",
            unnumbered,
            "Which lines of the CSV are examples and not a header is read off; give it.",
        ),
        (
            "posterior.classes",
            read_off,
            "The set of labels is read off the data; give posterior.classes.",
        ),
        ("posterior.partition", split, "Labels decide who holds which example."),
        (
            "posterior.model",
            own,
            "A model of your own may take coordinates, starts and constants from its data.",
        ),
        (
            "posterior.preconditioner",
            whitened,
            "The features themselves whiten the chains.",
        ),
        (
            "posterior.mu",
            (gaussian or own) and not section.mu,
            "Step and plan use μ of the data; give posterior.mu.",
        ),
        (
            "posterior.L",
            not section.L,
            "Step and plan use L of the data; give posterior.L.",
        ),
        (
            "posterior.initial_w2_sq",
            not section.initial_w2_sq,
            "The plan uses W2² of the data; give this key.",
        ),
        (
            "sampler.burn_in",
            sampler.burn_in == "auto",
            "A pilot on the data has found the number of burn-in rounds.",
        ),
        (
            CONSTANTS[-1],
            noisy_broadcast and not exact,
            "The plan uses the devices' curvatures, by which noise acts.",
        ),
        ("policy.objective", exact, oracle_notice().text),
        (
            "sampler.seed",
            sampler.seed != "secret",
            "A seed below 2³² can be guessed; 'secret' draws a key instead.",
        ),
    ]
    shown = [
        (
            "clip rates",
            clips,
            "Clip rates, warnings and the diagnosis look at the data.",
        ),
        (
            "exact law",
            gaussian,
            "W2² and the exact law and ESS compare with the posterior itself.",
        ),
        (
            "chains",
            sampler.chains > 1,
            "R-hat, ESS and averages are of all chains, and epsilon covers one.",
        ),
        ("scores", scored, "Scores look at the test set, which nothing hides."),
        (
            "refusals",
            True,
            f"A run that is refused or stopped over its data ({stop}) tells that it was.",
        ),
    ]
    published += [(name, True, text) for name, text in (by_model or {}).items()]
    rows = [*((*row, True) for row in published), *((*row, False) for row in shown)]
    return tuple(
        NotCovered(name, text, rests) for name, holds, text, rests in rows if holds
    )


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
