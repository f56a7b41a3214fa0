"""What tests of the ledger and of resuming share."""

from __future__ import annotations

import hashlib
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
    return path.read_text().splitlines() if path.exists() else []


def losses_of(path):
    """Rounds and losses: names differ between ledgers, whose secrets do."""
    return [(line["round"], line["loss"]) for line in map(json.loads, lines_of(path)[1:])]


def wflmc_spent(path):
    return np.sum([json.loads(line)["loss"] for line in lines_of(path)[1:]], axis=0)


def old_ledger(path, subject, devices, rows):
    """Write a ledger as it was before there were anchors, with bare names; the hash of its last line."""
    about = {"ledger": 1, "subject": subject, "devices": devices, "unit": "device"}
    lines = [{**about, "epsilon": 8.0, "delta": 0.01, "accountant": "exact"}]
    lines += [{"run": run, "noise": noise, "round": number, "loss": loss} for run, noise, number, loss in rows]
    chain, text = "", ""
    for line in lines:
        chain = hashlib.sha256((chain + json.dumps(line)).encode()).hexdigest()
        text += json.dumps({**line, "chain": chain}) + "\n"
    path.write_text(text)
    return chain
