"""What a device refuses of a server that wants to see more than a sum."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from flwr.app import Message
from flwr.common.secure_aggregation.secaggplus_constants import Key, Stage

from wflmc.errors import InputError
from wflmc.federated.device import Device
from wflmc.federated.grid import FIRST
from wflmc.federated.lattice import lattice_of
from wflmc.federated.messages import request
from wflmc.privacy import Ledger

from .secagg_tools import DEVICES, STAGES, Meddled, asks_of, devices_of, exchange_of, job_of, problem, silent


@pytest.fixture(scope="module")
def setting():
    return problem()


def _both(configs):
    """Ask for both secrets of a device that has sent."""
    configs[Key.DEAD_NODE_ID_LIST] = [FIRST + 3]


def _shortened(configs):
    for name in [name for name in configs if name not in (Key.STAGE, str(FIRST + 1), str(FIRST + 2))]:
        del configs[name]


def _sources(change):
    def lie(configs):
        pairs = list(zip(configs[Key.SOURCE_LIST], configs[Key.CIPHERTEXT_LIST], strict=True))
        configs[Key.SOURCE_LIST], configs[Key.CIPHERTEXT_LIST] = map(list, zip(*change(pairs), strict=True))

    return lie


def _set(**values):
    return lambda configs: configs.update(values)


def _active(*nodes):
    return _set(active_nids=[FIRST + k for k in nodes], dead_nids=[])


LIES = [
    (0, _set(threshold=2), "threshold = 2"),
    (0, _set(threshold=1), "no sum of fewer"),
    (0, _set(threshold=9), "threshold = 9"),
    (0, _set(share_num=3), "one for every sender"),
    (0, _set(share_num=5.0), "of type int"),
    (0, _set(sample_num=8, share_num=8), "between 5 and 8"),
    (0, _set(max_weight=0.01), "every message counts once"),
    (0, _set(mod_range=1 << 24), "mod_range"),
    (0, _set(clipping_range=1e9), "than the noise"),
    (0, _set(clipping_range=float("nan")), "finite values"),
    (0, _set(target_range=1 << 31), "sums below"),
    (0, _set(target_range=4), "than the noise"),
    (1, _shortened, "2 devices"),
    (1, _set(**{str(FIRST + 9): [b"another", b"key"]}), "at most 5"),
    (2, _sources(lambda pairs: pairs[:1]), "2 devices"),
    (2, _sources(lambda pairs: [pairs[0]] * 4), "each once"),
    (3, _both, "each once"),
    (3, _active(1), "1 devices"),
    (3, _active(1, 1, 1), "each once"),
    (3, _active(0, 2, 3), "this one among them"),
    (3, _active(1, 2, 9), "devices of this exchange"),
]


@pytest.mark.parametrize(("stage", "lie", "why"), LIES)
def test_a_device_refuses_what_would_show_its_message(setting, caplog, stage, lie, why):
    job = job_of(setting)

    def told(at, configs, device):
        if device == 1 and at == STAGES[stage]:
            lie(configs)

    # Nobody needs to answer to the end for this.
    exchange_of(job, devices_of(setting, job), lie=told, fault=silent(d2=stage + 1, d3=stage + 1, d4=stage + 1))(
        asks_of(job)
    )
    refused = [record.message for record in caplog.records if record.message.startswith("Device 1: error 2")]
    assert len(refused) == 1
    assert "refused by the device" in refused[0]
    assert why in refused[0]


def test_a_range_too_small_for_the_message_is_refused(setting, caplog):
    job = job_of(setting)

    def told(at, configs, device):
        if at == Stage.SETUP:
            configs[Key.CLIPPING_RANGE] = 0.9 * lattice_of(job).reach

    assert not exchange_of(job, devices_of(setting, job), lie=told)(asks_of(job)).sent.any()
    assert caplog.text.count("holds the message") == 2 * DEVICES  # in the logs of devices and of the server


def test_a_masked_device_never_answers_in_the_clear(setting):
    masked, plain = job_of(setting), job_of(setting, aggregated=False)
    devices = devices_of(setting, masked)
    heard = exchange_of(masked, devices, plain=True)(asks_of(masked))
    assert not heard.sent.any()
    assert all("without a mask" in why for why in heard.absent.values())
    assert not any(device.ledger.spent.any() for device in devices)
    others = devices_of(setting, masked, masked=False)
    heard = exchange_of(masked, others)(asks_of(masked))
    assert not heard.sent.any()
    assert all("masked = False" in why or "lost" in why for why in heard.absent.values())
    assert exchange_of(plain, devices_of(setting, plain), plain=True)(asks_of(plain)).sent.all()


def test_a_message_without_a_stage_gets_no_answer(setting):
    job = job_of(setting)
    grid = Meddled(devices_of(setting, job))
    ask = asks_of(job)[0]
    (reply,) = grid.send_and_receive([Message(request(ask, job.run, "x"), FIRST, "train", ttl=1.0)])
    assert reply.has_error()


def test_the_same_request_is_answered_once(setting):
    """Else the difference of two sums, one without a device, would be that device's message."""
    job = job_of(setting)
    devices = devices_of(setting, job)
    assert exchange_of(job, devices)(asks_of(job)).sent.all()
    heard = exchange_of(job, devices, fault=silent(d0=0))(asks_of(job))
    assert not heard.sent.any()
    assert "not been answered" in heard.absent[1]
    assert exchange_of(job, devices)(asks_of(job, at=1)).sent.all()
    with pytest.raises(InputError, match="masked = True"):
        devices[0].answer(asks_of(job, at=2)[0])


def test_processes_that_are_asked_at_the_same_time_answer_once(setting, tmp_path):
    """Two runs at the same SuperNode are two processes with one ledger."""
    job = job_of(setting)
    own, ask = devices_of(setting, job)[0], asks_of(job)[0]
    line = threading.Barrier(8)

    def answer(_):
        book = Ledger(own.terms.promise, 1, enforced=own.terms.enforced, path=tmp_path / "ledger.jsonl")
        device = Device(setting[0].device(0), own.terms, book, own.secret)
        line.wait()
        try:
            return device.answer(ask, masked=True) is not None
        except InputError:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(answer, range(8))) == 1
