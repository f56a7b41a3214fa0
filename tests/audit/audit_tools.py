"""What tests of the audit share."""

from __future__ import annotations

import jax

import wflmc
from tests.plan_tools import grouped
from wflmc import channel

from ..conftest import FULL

KEY = jax.random.key(7)
TRIALS = 40_000


def planned(posterior, privacy=None, rounds=20, **keywords):
    """Return a plan of this many rounds, half of them burn-in; the default link is
    static, at 40 dB.
    """
    link = keywords.pop("link", wflmc.Link(channel.static(0.01), snr_db=40))
    promise = privacy or wflmc.Privacy(8, 0.01, 30)
    step_size = 0.4 / (posterior.mu + posterior.L)
    return wflmc.plan(
        posterior,
        link,
        promise,
        **grouped(
            step_size=step_size, burn_in=rounds // 2, samples=rounds // 2, **keywords
        ),
    )


def flagged_names(report):
    """Return the names of the attacks that contradict the claim."""
    return {test.name for test in report.flagged}


SCHEMES = {
    "record": {"privacy": wflmc.Privacy(8, 0.01, 30, unit="record", example_clip=9)},
    "record beyond the device's clip": {
        "privacy": wflmc.Privacy(8, 0.01, 30, unit="record", example_clip=90)
    },
    "device or silence": {
        "privacy": wflmc.Privacy(8, 0.01, 30, adjacency="add-remove")
    },
    "example or an empty one": {
        "privacy": wflmc.Privacy(
            8, 0.01, 30, unit="record", example_clip=45, adjacency="add-remove"
        )
    },
    "noiseless-dp": {"power": "noiseless-dp"},
    "unlike devices": {
        "privacy": wflmc.Privacy(
            [1, 2, 4, 8, 8, 8], [0.01] * 5 + [0.05], [10, 20, 30, 40, 50, 60]
        ),
        "link": wflmc.Link(channel.rayleigh(0.01), snr_db=20),
    },
    "channels known badly": {
        "link": wflmc.Link(channel.static(0.01), snr_db=40, csi_error=0.2)
    },
    "silent rounds": {"link": wflmc.Link(channel.rayleigh(1e-4), snr_db=10)},
}


RECORD = SCHEMES["record"]["privacy"]
SOFTMAX = [
    (6, RECORD, 20),
    (120, None, 20),
    *([(6, None, 20), (120, RECORD, 20)] if FULL else []),
]
LONG = [(120, None, 600), (120, RECORD, 1000), (6, RECORD, 300), (6, None, 1000)]


def softmax_of(examples, promise, rounds):
    """Return a softmax posterior of six devices and its plan, over a static channel at
    60 dB.
    """
    posterior = wflmc.softmax_regression(
        jax.random.key(0), devices=6, examples=examples, dim=2, classes=3
    )
    return posterior, planned(
        posterior, promise, rounds, link=wflmc.Link(channel.static(1.0), snr_db=60)
    )
