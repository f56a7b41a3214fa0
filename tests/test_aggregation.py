"""Secure aggregation: the server learns the sum of those who sent, all of it, and nothing else."""

from __future__ import annotations

import importlib
import math
import re

import numpy as np
import pytest
from flwr.common import bytes_to_ndarray, ndarray_to_bytes
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from scipy import stats

from wflmc.federated.aggregation import MaskedPost
from wflmc.federated.apps import Post
from wflmc.federated.device import Device
from wflmc.federated.lattice import MODULUS, lattice_of
from wflmc.federated.server import open_server, read_log, serve

from .conftest import count
from .secagg_tools import (
    DEVICES,
    QUORUM,
    STAGES,
    asks_of,
    bare,
    changed,
    devices_of,
    exchange_of,
    job_of,
    plain_sum,
    problem,
    silent,
)


@pytest.fixture(scope="module")
def setting():
    return problem()


@pytest.fixture(scope="module")
def one_round(setting):
    """A round with many chains, and all masked messages on the way: job, what was heard, messages by device."""
    job, seen = job_of(setting, chains=count(2000, 20000)), {}

    def listen(stage, reply, device):
        if stage == Stage.COLLECT_MASKED_VECTORS:
            seen[device] = reply
        return reply

    return job, exchange_of(job, devices_of(setting, job), fault=listen)(asks_of(job)), seen


def test_the_sum_is_the_plain_sum_up_to_rounding(setting, one_round):
    job, heard, _ = one_round
    quantum = lattice_of(job).quantum
    assert heard.sent.all()
    assert not heard.absent
    assert not heard.spoiled
    total = plain_sum(setting, job, heard.sent)
    error = heard.total - total
    spacing = np.spacing(np.abs(heard.total).max())  # the sum is handed on in float32
    assert np.abs(error).max() < DEVICES * quantum + spacing
    # A fraction f of a quantum is rounded with variance f(1 - f), 1/6 on average.
    expected = DEVICES * quantum**2 / 6
    assert np.mean(error**2) == pytest.approx(expected, rel=5 * math.sqrt(2 / error.size) + 0.01)
    assert expected < 1e-10 * job.plan.noise_power
    assert abs(error.mean()) < 5 * math.sqrt(expected / error.size) + spacing


def test_the_noise_of_the_sum_grows_with_the_senders(setting, one_round):
    job, heard, _ = one_round
    devices = devices_of(setting, job, masked=False, share=0.0)
    noise = heard.total - sum(devices[ask.device].answer(ask).astype(float) for ask in asks_of(job))
    wanted = job.plan.noise_power * DEVICES / QUORUM
    assert job.round_noise(0, heard.sent) == pytest.approx(wanted)
    assert noise.var() == pytest.approx(wanted, rel=5 * math.sqrt(2 / noise.size))


def test_a_masked_message_alone_looks_like_nothing(setting, one_round):
    job, _, seen = one_round
    assert sorted(seen) == list(range(DEVICES))
    devices = devices_of(setting, job, masked=False)
    for ask in asks_of(job):
        content = seen[ask.device].content
        assert not any(len(record) for record in content.array_records.values())
        masked = bytes_to_ndarray(content.config_records[RECORD_KEY_CONFIGS][Key.MASKED_PARAMETERS][1]).ravel()
        bins = np.bincount((masked * 64 // MODULUS), minlength=64)
        assert stats.chisquare(bins).pvalue > 1e-6
        message = devices[ask.device].answer(ask).ravel()
        assert abs(np.corrcoef(masked, message)[0, 1]) < 5 / math.sqrt(message.size)
        low = masked % lattice_of(job).levels  # below the first multiple, where the bare message would lie
        assert abs(np.corrcoef(low, message)[0, 1]) < 5 / math.sqrt(message.size)


@pytest.mark.parametrize(
    ("leaves", "sends"),
    [
        ({"d2": 0}, [0, 1, 3, 4]),
        ({"d2": 1}, [0, 1, 3, 4]),
        ({"d2": 2}, [0, 1, 3, 4]),
        ({"d2": 3}, [0, 1, 2, 3, 4]),
        ({"d0": 0, "d2": 2}, [1, 3, 4]),
        ({"d1": 2, "d4": 2}, [0, 2, 3]),
        ({"d1": 2, "d4": 3}, [0, 2, 3, 4]),
    ],
)
def test_devices_that_leave_in_the_midst(setting, leaves, sends):
    job = job_of(setting)
    heard = exchange_of(job, devices_of(setting, job), fault=silent(**leaves))(asks_of(job))
    assert np.flatnonzero(heard.sent).tolist() == sends
    assert sorted(heard.absent) == [k for k in range(DEVICES) if k not in sends]
    assert all("late" in why and "asked for" in why for why in heard.absent.values())
    assert np.abs(heard.total - plain_sum(setting, job, heard.sent)).max() < (len(sends) + 1) * lattice_of(job).quantum


@pytest.mark.parametrize("stage", range(4))
def test_with_too_few_the_round_is_lost_and_nobody_pays(setting, stage):
    job, shares = job_of(setting), []
    gone = silent(d0=stage, d1=stage, d2=stage)

    def fault(at, reply, device):
        arrives = gone(at, reply, device)
        if at == Stage.UNMASK and arrives is not None:
            shares.append(arrives)
        return arrives

    heard = exchange_of(job, devices_of(setting, job), fault=fault)(asks_of(job))
    assert not heard.sent.any()
    assert not heard.total.any()
    assert not heard.spoiled
    assert len(shares) < QUORUM  # of every secret: one fewer than it takes
    assert not job.loss(0, heard.sent).any()
    assert "nothing was unmasked: 2 devices, of at least 3" in heard.absent[3]
    assert "late" in heard.absent[0]


def _of_another_round(reply):
    reply.content["about"]["round"] = 7
    return reply


@pytest.mark.parametrize(("stage", "spoil"), [(0, bare), (1, bare), (2, bare), (2, _of_another_round), (3, bare)])
def test_who_replies_badly_is_left_out(setting, caplog, stage, spoil):
    job = job_of(setting)

    def fault(at, reply, device):
        return spoil(reply) if device == 1 and at == STAGES[stage] else reply

    heard = exchange_of(job, devices_of(setting, job), fault=fault)(asks_of(job))
    inside = stage == 3  # its masked message was proper and has arrived
    assert heard.sent.tolist() == [True, inside, True, True, True]
    (record,) = caplog.records
    assert "Device 1: rejected" in record.message
    assert inside or heard.absent[1] in record.message
    assert np.abs(heard.total - plain_sum(setting, job, heard.sent)).max() < 6 * lattice_of(job).quantum


def _other_share(shares):
    return [share[:4] + bytes(len(share) - 4) for share in shares]


def _noise(parts):
    draws = np.random.default_rng(0).integers(MODULUS, size=bytes_to_ndarray(parts[1]).shape)
    return [parts[0], ndarray_to_bytes(draws)]


@pytest.mark.parametrize(
    ("stage", "spoil", "why"),
    [
        (3, changed(shares=_other_share), "do not fit|beyond"),
        (2, changed(masked_params=_noise), "beyond what clipped messages"),
    ],
)
def test_rubbish_in_proper_form_spoils_the_round_at_a_price(setting, stage, spoil, why):
    job = job_of(setting)

    def fault(at, reply, device):
        return spoil(reply) if device == 1 and at == STAGES[stage] else reply

    heard = exchange_of(job, devices_of(setting, job), fault=fault)(asks_of(job))
    assert heard.spoiled
    assert heard.sent.all()
    assert np.isnan(heard.total).all()
    assert all("paid for" in reason and re.search(why, reason) for reason in heard.absent.values())
    assert job.loss(0, heard.sent).all()


def test_a_job_says_which_exchange_it_needs(setting):
    for aggregated, kind in ((True, MaskedPost), (False, Post)):
        job = job_of(setting, aggregated=aggregated)
        assert type(exchange_of(job, devices_of(setting, job))) is kind


def test_chains_are_those_of_the_plain_post_up_to_rounding(setting, tmp_path, monkeypatch):
    def by_round(self, ask):
        generator = np.random.default_rng([ask.round, *self.secret])
        return (math.sqrt(self.terms.share) * generator.standard_normal(ask.theta.shape)).astype(np.float32)

    monkeypatch.setattr(Device, "_noise", by_round)  # else the last digit of θ would decide on the noise
    job, plan = job_of(setting), setting[2]
    leaves = silent(d3=2)
    masked, plain = open_server(job, tmp_path / "masked"), open_server(job, tmp_path / "plain")
    serve(masked, exchange_of(job, devices_of(setting, job), fault=leaves))
    serve(plain, exchange_of(job, devices_of(setting, job, masked=False), fault=leaves, plain=True))
    assert [line["sent"] for line in read_log(tmp_path / "masked")] == [DEVICES - 1] * plan.rounds
    assert [line["sent"] for line in read_log(tmp_path / "plain")] == [DEVICES - 1] * plan.rounds
    theirs, ours = (np.load(server.checkpoint.samples) for server in (plain, masked))
    # Steps contract, so that what rounding changes adds up to no more than this.
    scale = plan.scale * DEVICES / (DEVICES - 1)
    error = DEVICES * lattice_of(job).quantum + 1e-6
    assert np.abs(ours - theirs).max() < np.sum(np.abs(plan.kick) * scale / plan.gain) * error * math.sqrt(plan.dim)
    assert np.abs(ours - theirs).max() > 0
    np.testing.assert_array_equal(masked.ledger.spent, plain.ledger.spent)


def test_shares_in_malformed_replies_count_as_learnt(setting):
    job = job_of(setting)

    def fault(stage, reply, device):
        return changed(nids=lambda nodes: nodes[::-1])(reply) if stage == Stage.UNMASK and device > 1 else reply

    heard = exchange_of(job, devices_of(setting, job), fault=fault)(asks_of(job))
    assert heard.spoiled
    assert heard.sent.all()


def test_a_spoiled_round_moves_no_chain_but_is_paid_for(setting, tmp_path):
    job, rubbish = job_of(setting), changed(shares=lambda shares: [*shares[:-1], *_other_share(shares[-1:])])

    def fault(stage, reply, device):
        if device == 4 and stage in STAGES[2:]:  # the last share is of its key then, which others lack
            return None
        return rubbish(reply) if stage == Stage.UNMASK else reply

    server = open_server(job, tmp_path)
    serve(server, exchange_of(job, devices_of(setting, job), fault=fault))
    np.testing.assert_array_equal(server.checkpoint.load().theta, job.start)
    assert (server.ledger.spent > 0).tolist() == [True] * 4 + [False]
    absent = read_log(tmp_path)[0]["absent"]
    assert "late" in absent["4"]
    assert "paid for: shares for unmasking do not fit" in absent["0"]


def test_a_lost_round_moves_no_chain_and_costs_nobody(setting, tmp_path):
    job = job_of(setting, tolerate=0)
    devices = devices_of(setting, job)
    server = open_server(job, tmp_path)
    serve(server, exchange_of(job, devices, fault=silent(d3=3)))
    assert not server.ledger.spent.any()
    np.testing.assert_array_equal(server.checkpoint.load().theta, job.start)
    # What has left a device is in its own ledger all the same.
    assert all(device.ledger.spent > 0 for device in devices)


def test_a_round_that_was_paid_but_not_kept_stays_lost(setting, tmp_path):
    job = job_of(setting)
    server, everyone = open_server(job, tmp_path), np.ones(DEVICES, dtype=bool)
    server.ledger.charge(job.run, 0, job.loss(0, everyone)[None], job.noise_name)
    serve(server, exchange_of(job, devices_of(setting, job)))
    assert [line["sent"] for line in read_log(tmp_path)] == [0] + [DEVICES] * (job.plan.rounds - 1)
    assert server.ledger.rounds(job.run) == job.plan.rounds


def test_messages_are_rounded_in_double_precision(setting, monkeypatch):
    """In float32 what is left of a quantum would have four values, and rounding would not be at random."""
    mod = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
    seen, quantize = [], mod.quantize

    def listen(parameters, *rest):
        seen.extend(array.dtype for array in parameters)
        return quantize(parameters, *rest)

    monkeypatch.setattr(mod, "quantize", listen)
    job = job_of(setting)
    assert exchange_of(job, devices_of(setting, job))(asks_of(job)).sent.all()
    assert seen == [np.float64] * DEVICES
