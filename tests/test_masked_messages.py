"""Replies in secure aggregation that are not what they should be."""

from __future__ import annotations

import copy
import re

import pytest
from flwr.app import ConfigRecord
from flwr.common import bytes_to_ndarray, ndarray_to_bytes

from wflmc.federated.lattice import MODULUS
from wflmc.federated.masked_messages import read_masked
from wflmc.federated.messages import RejectedError

from .secagg_tools import STAGES, asks_of, bare, changed, devices_of, exchange_of, job_of, problem


@pytest.fixture(scope="module")
def setting():
    return problem()


def _without_records(reply):
    reply.content["fitres.num_examples"] = ConfigRecord({"num_examples": 1})
    return reply


def _floats(parts):
    return [parts[0], ndarray_to_bytes(bytes_to_ndarray(parts[1]).astype(float))]


def _beyond(parts):
    return [parts[0], ndarray_to_bytes(bytes_to_ndarray(parts[1]) + MODULUS)]


MALFORMED = [
    *[(stage, bare, "no record") for stage in range(4)],
    (0, changed(pk1=lambda _: b"no key"), "no public key"),
    (0, changed(pk1=lambda _: "text"), "no public key"),
    (1, changed(dsts=lambda nodes: nodes[1:]), "for others"),
    (1, changed(dsts=lambda nodes: nodes + nodes[:1]), "for others"),
    (1, changed(ctxts=lambda texts: texts[1:]), "secrets where"),
    (1, changed(ctxts=lambda texts: [1] * len(texts)), "no list"),
    (2, changed(masked_params=lambda parts: parts[:1]), "not a weight"),
    (2, changed(masked_params=lambda parts: [parts[0], b"rubbish"]), "no array"),
    (2, changed(masked_params=lambda parts: [parts[0], parts[0]]), "of shape (1,)"),
    (2, changed(masked_params=lambda parts: [parts[0], b"0" * 10000]), "oversized"),
    (2, changed(masked_params=_floats), "float64"),
    (2, changed(masked_params=_beyond), "beyond the modulus"),
    (2, _without_records, "not the records"),
    (3, changed(nids=lambda nodes: nodes[1:]), "of others"),
    (3, changed(shares=lambda shares: [b""] * len(shares)), "secrets where"),
]


@pytest.fixture(scope="module")
def proper(setting):
    """Of every stage what device 1 was asked, and what it replied."""
    job, asked, found = job_of(setting), {}, {}

    def note(stage, configs, device):
        if device == 1:
            asked[stage] = dict(configs)

    def listen(stage, reply, device):
        if device == 1:
            found[stage] = asked[stage], copy.deepcopy(reply)
        return reply

    assert exchange_of(job, devices_of(setting, job), lie=note, fault=listen)(asks_of(job)).sent.all()
    return found


@pytest.mark.parametrize(("stage", "spoil", "why"), MALFORMED)
def test_malformed_replies_are_refused(setting, proper, stage, spoil, why):
    asked, reply = proper[STAGES[stage]]
    read_masked(reply, asked, (2, setting[2].dim))
    with pytest.raises(RejectedError, match=re.escape(why)):
        read_masked(spoil(copy.deepcopy(reply)), asked, (2, setting[2].dim))
