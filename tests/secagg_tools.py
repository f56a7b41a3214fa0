"""A federation with secure aggregation in one process, whose server and replies tests can meddle with."""

from __future__ import annotations

import os
from dataclasses import replace

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")

import jax
import numpy as np
from flwr.app import Message, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage

import wflmc
from wflmc import channel
from wflmc.federated.aggregation import exchange_for
from wflmc.federated.apps import Post, client_app
from wflmc.federated.device import Device
from wflmc.federated.grid import FIRST, LocalGrid
from wflmc.federated.job import make_job
from wflmc.federated.server import _asks
from wflmc.privacy import Ledger

STAGES = (Stage.SETUP, Stage.SHARE_KEYS, Stage.COLLECT_MASKED_VECTORS, Stage.UNMASK)
DEVICES, TOLERATE = 5, 2
QUORUM = DEVICES - TOLERATE


def problem():
    """Posterior, link and plan of five devices and a promise of ε = 8 over four rounds."""
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=DEVICES, examples=20 * DEVICES, dim=4)
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=25)
    step = 0.4 / (posterior.mu + posterior.L)
    promise = wflmc.Privacy(8, 0.01, 30)
    plan = wflmc.plan(posterior, link, promise, power="noiseless-dp", step_size=step, burn_in=2, samples=2)
    return posterior, link, plan


def job_of(setting, chains=2, tolerate=TOLERATE, **changes):
    posterior, link, plan = setting
    wanted = {"noise": "devices", "aggregated": True, **changes}
    return make_job(jax.random.key(1), posterior, link, plan, chains=chains, tolerate=tolerate, **wanted)


def devices_of(setting, job, **changes):
    """Devices with a secret each; changes of their terms make others of the same secrets."""
    found = []
    for k in range(DEVICES):
        terms = replace(job.terms(k), **changes)
        ledger = Ledger(terms.promise, 1, enforced=terms.enforced)
        found.append(Device(setting[0].device(k), terms, ledger, b"secret of %d" % k))
    return found


class Meddled(LocalGrid):
    """A grid whose server may lie to devices, and whose replies may not arrive as they were sent.

    Args:
        lie: (stage, configs of a request, device), which changes the configs in place.
        fault: (stage, reply, device) to what arrives of the reply.
    """

    def __init__(self, devices, lie=None, fault=None):
        super().__init__(client_app(lambda context: devices[context.node_config["partition-id"]]), DEVICES, self._spoil)
        self.lie, self.meddle, self.stage = lie, fault, None

    def push_messages(self, messages):
        return [self._pass(message) for message in messages]

    def _pass(self, message):
        configs = message.content.get(RECORD_KEY_CONFIGS)
        self.stage = None if configs is None else configs[Key.STAGE]
        if self.lie is not None and configs is not None:
            # What is changed must not be shared with the other letters.
            message.content[RECORD_KEY_CONFIGS] = type(configs)(dict(configs))
            self.lie(self.stage, message.content[RECORD_KEY_CONFIGS], message.metadata.dst_node_id - FIRST)
        return self._deliver(message)

    def _spoil(self, reply, device):
        return reply if self.meddle is None else self.meddle(self.stage, reply, device)


def exchange_of(job, devices, lie=None, fault=None, plain=False):
    grid = Meddled(devices, lie, fault)
    nodes = {FIRST + k: k for k in range(DEVICES)}
    if plain:
        return Post(grid, job, nodes, deadline=0.0, wait=0.0)
    return exchange_for(grid, job, nodes, deadline=0.0, wait=0.0)


def asks_of(job, at=0):
    """What the server asks in a round, of all chains at the start."""
    keys = jax.random.split(jax.random.key(3), job.chains)
    return _asks(job, at, job.start, keys, np.ones(DEVICES, dtype=bool))


def silent(**from_stage):
    """A fault: device k gives no sign from a stage on, silent(d2=1, d4=3), and none to the plain post."""
    leaves = {int(name[1:]): stage for name, stage in from_stage.items()}

    def fault(stage, reply, device):
        gone = device in leaves and (stage is None or STAGES.index(stage) >= leaves[device])
        return None if gone else reply

    return fault


def plain_sum(setting, job, sent, at=0):
    """Σ (x_k + n_k) in float64, by the same devices with the same secrets."""
    devices = devices_of(setting, job, masked=False)
    return sum(devices[ask.device].answer(ask).astype(float) for ask in asks_of(job, at) if sent[ask.device])


def bare(reply):
    """A reply without any record."""
    return Message(RecordDict(), reply_to=_like(reply))


def _like(reply):
    """A message that a new reply can take its address from."""
    other = Message(RecordDict(), reply.metadata.src_node_id, reply.metadata.message_type)
    other.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    return other


def changed(**changes):
    """A fault of one reply: entries of its record of the protocol become functions of themselves."""

    def spoil(reply):
        record = reply.content.config_records[RECORD_KEY_CONFIGS]
        for name, value in changes.items():
            record[name] = value(record[name])
        return reply

    return spoil
