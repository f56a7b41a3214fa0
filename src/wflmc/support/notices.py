"""Notices: what users should know about a plan, a run or an evaluation.

A notice has a code, by which programs decide, and a text, which people read. Nothing is
ever decided by the text.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class NoticeCode(StrEnum):
    """The codes of all notices of this package; other packages may have more."""

    ABOVE_BOUND = "above-bound"
    """Chains are measured above the bound of their plan."""
    ABSENT_DEVICES = "absent-devices"
    """Devices of a federation were absent from some of their rounds."""
    BUDGET_EXCEEDED = "budget-exceeded"
    """The policy ignores privacy budgets, and devices spend more than theirs."""
    CHAINS_DISAGREE = "chains-disagree"
    """R-hat is too large."""
    CHAINS_MAY_BE_LOST = "chains-may-be-lost"
    """The noise of one round exceeds what clipped gradients can undo."""
    CLIPPED_EXAMPLES = "clipped-examples"
    """Examples are clipped, which bound and exact law ignore."""
    CLIPPED_GRADIENTS = "clipped-gradients"
    """Gradients of devices are clipped, which bound and exact law ignore."""
    CLIPPING_KEEPS_AWAY = "clipping-keeps-away"
    """Chains are measured far from the exact law."""
    COLD_DRAWS = "cold-draws"
    """Burn-in at a low temperature leaves the first draws too narrow."""
    CONSTANT_TOO_LARGE = "constant-too-large"
    """The scenario's μ is above that of the data."""
    CONSTANT_TOO_SMALL = "constant-too-small"
    """The scenario's L is below that of the data."""
    DATA_CONSTANTS = "data-constants"
    """The plan is computed from private data, which ε does not cover."""
    DELTA_TOO_LARGE = "delta-too-large"
    """δ is above one over the number of units."""
    DEVICE_NOISE = "device-noise"
    """Devices add the noise, and each message is hidden by its own share alone."""
    EMPTY_CLASSES = "empty-classes"
    """Classes have no example."""
    EMULATED_CHANNEL = "emulated-channel"
    """The channel of a federation is emulated at its server."""
    ESTIMATED_CONSTANTS = "estimated-constants"
    """The constants of the bound are estimated."""
    ESTIMATED_START = "estimated-start"
    """The distance of the start is estimated."""
    EXAMPLE_CLIP_CHOSEN = "example-clip-chosen"
    """The planner has chosen the clipping threshold of examples."""
    EXCESS_NOISE = "excess-noise"
    """Kept rounds have more noise than sampling needs."""
    EXPANDING_ROUNDS = "expanding-rounds"
    """Some rounds stretch errors."""
    FEATURES_NOT_SCALED = "features-not-scaled"
    """Features have unlike or large scales; this is read off the data."""
    FROZEN_PARAMETERS = "frozen-parameters"
    """Parameters never moved in a chain."""
    FUNCTION_DISAGREES = "function-disagrees"
    """R-hat of a function of the parameters is too large."""
    GAINS_IN_DECIBELS = "gains-in-decibels"
    """Channel gains look like decibels."""
    HIDDEN_DIRECTIONS = "hidden-directions"
    """Noise hides directions of the features from the whitening release."""
    LATE_MESSAGES = "late-messages"
    """Late or rejected messages are in the ledgers of their devices alone."""
    LOOSE_CURVATURE = "loose-curvature"
    """Steps are above what a bound on the curvature allows."""
    MINI_BATCHES = "mini-batches"
    """Gradients of mini-batches are noisier than the bound assumes."""
    NO_EFFECT = "no-effect"
    """A key of the scenario has no effect."""
    NO_PROTECTION = "no-protection"
    """The noise of a federation is simulated and protects nobody."""
    NOT_CLIPPED = "not-clipped"
    """The scheme does not clip, and no finite ε is true."""
    NOTHING_GAINED = "nothing-gained"
    """The objective is far above the distance of the start."""
    OPTIMALITY_GAP = "optimality-gap"
    """The power is proven optimal only to a gap."""
    ORACLE = "oracle"
    """The objective `exact` depends on private data."""
    SIMULATED = "simulated"
    """All devices are simulated in one process, which protects nobody."""
    SPARE_NOISE = "spare-noise"
    """Devices add more noise than needed, to tolerate absences."""
    STEPS_NOT_IMPROVED = "steps-not-improved"
    """Planned step sizes are the constant ones."""
    UNSUITABLE_FRICTION = "unsuitable-friction"
    """Friction makes kinetic chains swing or creep."""


@dataclass(frozen=True)
class Notice:
    """Something that users should know, or a warning."""

    code: str
    """What it is about: a `NoticeCode`, or a code of another package."""
    text: str
    """One or a few whole sentences."""

    def __str__(self) -> str:
        """Return the text."""
        return self.text


def texts(notices: Iterable[Notice]) -> tuple[str, ...]:
    """Return the texts of notices, in their order, for people to read.

    Each is one or a few complete sentences.
    """
    return tuple(notice.text for notice in notices)


def codes(notices: Iterable[Notice]) -> tuple[str, ...]:
    """Return the codes of notices, in their order, for programs to decide by.

    A code is a plain text here, also where it is a member of `NoticeCode`; a code may
    occur several times.
    """
    return tuple(str(notice.code) for notice in notices)
