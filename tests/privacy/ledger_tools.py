"""What tests of the ledger and of resuming share."""

from __future__ import annotations

import json

import numpy as np

import wflmc

PROMISE = wflmc.Privacy(8, 0.01, 30)


BUDGET = float(wflmc.privacy.budget(8, 0.01))


SCENARIO = """
[posterior]
devices = 10
examples = 400
[link]
snr_db = -5.0
[privacy]
epsilon = 8.0
delta = 0.01
[sampler]
burn_in = 50
samples = 50
chains = 10
"""


def lines_of(path):
    """Return the lines of a ledger file; none if there is no file."""
    return path.read_text().splitlines() if path.exists() else []


def losses_of(path):
    """Return round and loss of every entry of a ledger file, without names, which
    differ from ledger to ledger.
    """
    return [
        (line["round"], line["loss"]) for line in map(json.loads, lines_of(path)[1:])
    ]


def spent_in(path):
    """Return the privacy loss of each device, added over the entries of a ledger
    file.
    """
    return np.sum([json.loads(line)["loss"] for line in lines_of(path)[1:]], axis=0)
