"""Replies that are malformed, oversized, nan, replayed or late are rejected, logged and count as absent."""

from __future__ import annotations

import io
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip(
    "flwr", reason="Flower is not installed: pip install 'wflmc[flower]'"
)

import flwr.app as flwr

from wflmc.apps.federation.device import Device, client_app, open_device
from wflmc.apps.federation.flower_server import Transport, identify_devices
from wflmc.apps.federation.messages import (
    RoundRequest,
    printable_line,
    read_request,
    write_request,
)
from wflmc.apps.federation.server import Server, read_log, serve, trace_of
from wflmc.privacy import Ledger
from wflmc.support.errors import InputError, OverspendError

from ..error_tools import raises_input_error
from ..federation_tools import (
    FIRST,
    Federation,
    LocalGrid,
    app_of,
    largest_difference,
    make_federation,
    run_on_grid,
)

BAD = 2
"""The device whose replies go wrong."""
NODES = {FIRST + k: k for k in range(5)}
Change = Callable[[Any, dict[str, Any]], Any]


def with_array(values: Any) -> Change:
    """The same reply with another array."""

    def change(message: Any, memory: dict[str, Any]) -> Any:
        record = flwr.ArrayRecord(
            [np.asarray(values(message.content["signal"].to_numpy_ndarrays()[0]))]
        )
        return flwr.RecordDict({"signal": record, "about": message.content["about"]})

    return change


def with_about(**other: Any) -> Change:
    """The same reply with other words."""

    def change(message: Any, memory: dict[str, Any]) -> Any:
        words = flwr.ConfigRecord({**dict(message.content["about"]), **other})
        return flwr.RecordDict({"signal": message.content["signal"], "about": words})

    return change


def broken_bytes(message: Any, memory: dict[str, Any]) -> Any:
    (array,) = message.content["signal"].values()
    other = flwr.Array(
        dtype="float32", shape=(2, 5), stype="numpy.ndarray", data=array.data[:-7]
    )
    return flwr.RecordDict(
        {"signal": flwr.ArrayRecord({"0": other}), "about": message.content["about"]}
    )


def pickled(message: Any, memory: dict[str, Any]) -> Any:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    other = flwr.Array(
        dtype="float32", shape=(2, 5), stype="numpy.ndarray", data=buffer.getvalue()
    )
    return flwr.RecordDict(
        {"signal": flwr.ArrayRecord({"0": other}), "about": message.content["about"]}
    )


def archived(message: Any, memory: dict[str, Any]) -> Any:
    """NumPy reads it, but not as an array."""
    buffer = io.BytesIO()
    np.savez(buffer, a=np.zeros((2, 5), np.float32))
    other = flwr.Array(
        dtype="float32", shape=(2, 5), stype="numpy.ndarray", data=buffer.getvalue()
    )
    return flwr.RecordDict(
        {"signal": flwr.ArrayRecord({"0": other}), "about": message.content["about"]}
    )


def lying(message: Any, memory: dict[str, Any]) -> Any:
    """A header that promises a terabyte."""
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (500000, 500000)}"
    header += b" " * (117 - len(header)) + b"\n"
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(40)
    other = flwr.Array(dtype="float32", shape=(2, 5), stype="numpy.ndarray", data=data)
    return flwr.RecordDict(
        {"signal": flwr.ArrayRecord({"0": other}), "about": message.content["about"]}
    )


def replayed(message: Any, memory: dict[str, Any]) -> Any:
    """The reply of the first round, again and again."""
    return memory.setdefault("first", message.content)


FAULTS: dict[str, tuple[Change, str]] = {
    "nan": (
        with_array(lambda x: np.where(x == x, np.nan, x).astype(np.float32)),
        "not finite",
    ),
    "infinite": (with_array(lambda x: np.full_like(x, np.inf)), "not finite"),
    "too strong": (
        with_array(lambda x: (x * 1e6).astype(np.float32)),
        "oversized: norm",
    ),
    "too many numbers": (
        with_array(lambda x: np.zeros((2, 50000), np.float32)),
        "oversized",
    ),
    "one number more": (
        with_array(lambda x: np.zeros((2, 6), np.float32)),
        "malformed",
    ),
    "transposed": (with_array(lambda x: x.T.copy()), "malformed"),
    "doubles": (with_array(lambda x: x.astype(np.float64)), "malformed"),
    "texts": (with_array(lambda x: np.array(["a", "b"])), "malformed"),
    "broken bytes": (broken_bytes, "malformed"),
    "pickled objects": (pickled, "malformed"),
    "an archive": (archived, "malformed"),
    "a header that lies": (lying, "malformed"),
    "the other byte order": (with_array(lambda x: x.astype(">f4")), "malformed"),
    "one record more": (
        lambda message, memory: flwr.RecordDict(
            {**dict(message.content), "x": flwr.ConfigRecord({"a": 1})}
        ),
        "malformed",
    ),
    "no records": (lambda message, memory: flwr.RecordDict(), "malformed"),
    "other records": (
        lambda message, memory: flwr.RecordDict({"x": flwr.ConfigRecord({"a": 1})}),
        "malformed",
    ),
    "wrong kind": (
        lambda message, memory: flwr.RecordDict(
            {"signal": flwr.ConfigRecord({"a": 1}), "about": message.content["about"]}
        ),
        "malformed",
    ),
    "replayed": (replayed, "replayed"),
    "another round": (with_about(round=0), "replayed"),
    "another run": (with_about(run="0" * 32), "replayed"),
    "for another device": (with_about(device=1), "replayed"),
    "another nonce": (with_about(nonce="0" * 32), "replayed"),
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Three rounds; every test has servers and devices of its own."""
    changes = {"sampler.burn_in": 1, "sampler.samples": 2}
    return make_federation(tmp_path_factory.mktemp("federation"), changes)


@pytest.fixture(scope="module")
def without(federation: Federation) -> Server:
    """The chain where the device is silent from the second round on."""
    server = federation.server("without")
    run_on_grid(
        server, federation.app(), fault=from_the_second_on(lambda message: None)
    )
    return server


def from_the_second_on(change: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
    """A fault of the bad device's replies but the first."""
    replies: list[Any] = []

    def fault(message: Any, device: int) -> Any:
        if device != BAD:
            return message
        replies.append(message)
        return message if len(replies) == 1 else change(message)

    return fault


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_reply_counts_as_absent(
    federation: Federation, without: Server, name: str
) -> None:
    change, words = FAULTS[name]
    memory: dict[str, Any] = {}

    def spoil(message: Any) -> Any:
        message.content = change(message, memory)
        return message

    def remember(message: Any, device: int) -> Any:
        if device == BAD:
            memory.setdefault("first", message.content)
        return fault(message, device)

    fault = from_the_second_on(spoil)
    server = federation.server(name.replace(" ", "-"))
    run_on_grid(server, federation.app(), fault=remember)
    assert largest_difference(trace_of(server), trace_of(without)) == 0
    assert server.ledger is not None
    assert without.ledger is not None
    np.testing.assert_array_equal(server.ledger.spent, without.ledger.spent)
    reasons = [line["absent"].get(str(BAD), "") for line in read_log(server.folder)]
    requested = federation.job.plan.weight[:, BAD] > 0
    assert requested[0]
    assert requested[1:].any()
    assert reasons[0] == ""
    given_reasons = [
        reason for reason, was in zip(reasons[1:], requested[1:], strict=True) if was
    ]
    assert all(reason.startswith(f"rejected, {words}") for reason in given_reasons)


def test_a_device_that_fails_is_absent_and_tells_nothing(
    federation: Federation,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(ask: RoundRequest) -> Any:
        raise ArithmeticError("a secret of the data: 42")

    devices = federation.devices()
    monkeypatch.setattr(devices[BAD], "answer", fail)
    server = federation.server("failing")
    run_on_grid(server, app_of(devices))
    reasons = {line["absent"].get(str(BAD)) for line in read_log(server.folder)} - {
        None
    }
    assert reasons
    assert all(
        "could not answer" in str(reason) and "42" not in str(reason)
        for reason in reasons
    )
    assert "a secret of the data: 42" in caplog.text  # in the device's own log


def test_a_reply_that_flower_cannot_put_together_is_absent(
    federation: Federation,
) -> None:
    spoiled: set[str] = set()

    class Spoiled(LocalGrid):
        def push_messages(self, messages: Any) -> Any:
            letters = list(messages)
            idents = super().push_messages(letters)
            pairs = zip(idents, letters, strict=True)
            spoiled.update(
                ident for ident, m in pairs if m.metadata.dst_node_id == FIRST + BAD
            )
            return idents

        def pull_messages(self, message_ids: Any) -> Any:
            expected = list(message_ids)
            if spoiled & set(expected):
                raise KeyError("a class that nobody knows")
            return super().pull_messages(expected)

    server = federation.server("spoiled")
    serve(
        server,
        Transport(Spoiled(federation.app(), 5), federation.job, NODES, deadline=0.0),
    )
    requested = federation.job.plan.weight > 0
    log = read_log(server.folder)
    assert [set(line["absent"]) for line in log] == [
        {str(BAD)} if row[BAD] else set() for row in requested
    ]
    assert {line["absent"].get(str(BAD), "")[:19] for line in log} <= {
        "rejected, malformed",
        "",
    }


def test_late_answers_are_not_read(federation: Federation) -> None:
    """What comes after the deadline is never asked for again, in this round or the next."""
    held: dict[str, Any] = {}

    class Slow(LocalGrid):
        def pull_messages(self, message_ids: Any) -> Any:
            ready = super().pull_messages(message_ids)
            now = [m for m in ready if m.metadata.src_node_id != FIRST + BAD]
            held.update(
                {m.metadata.reply_to_message_id: m for m in ready if m not in now}
            )
            return now

    server = federation.server("slow")
    serve(
        server,
        Transport(
            Slow(federation.app(), 5), federation.job, NODES, deadline=0.02, poll=0.001
        ),
    )
    requests = int((federation.job.plan.weight[:, BAD] > 0).sum())
    assert len(held) == requests
    assert (
        sum(
            "late" in line["absent"].get(str(BAD), "")
            for line in read_log(server.folder)
        )
        == requests
    )
    assert server.ledger is not None
    assert server.ledger.spent[BAD] == 0


def test_nodes_of_an_engine_say_who_they_are(federation: Federation) -> None:
    grid = LocalGrid(federation.app(), 5)
    assert (
        identify_devices(Transport(grid, federation.job, {}, deadline=0.0), wait=0.0)
        == NODES
    )


def test_a_node_behind_no_registered_key_is_not_asked(federation: Federation) -> None:
    nodes = {node: k for node, k in NODES.items() if k != BAD}
    server = federation.server("unregistered")
    serve(
        server,
        Transport(LocalGrid(federation.app(), 5), federation.job, nodes, deadline=0.0),
    )
    reasons = {line["absent"].get(str(BAD)) for line in read_log(server.folder)} - {
        None
    }
    assert reasons == {"not connected"}


@pytest.fixture
def device(tmp_path: Path, federation: Federation) -> tuple[Device, RoundRequest]:
    """A device with a fresh ledger, and a request that it answers."""
    shutil.copytree(federation.folder / "device-0", tmp_path / "device-0")
    plan = federation.job.plan
    round_index = int(np.argmax(plan.weight[:, 0] > 0))
    return open_device(tmp_path / "device-0"), request_of_round(federation, round_index)


def request_of_round(federation: Federation, round_index: int) -> RoundRequest:
    """What the plan asks of device 0 in a round."""
    return RoundRequest(
        0,
        round_index,
        federation.job.position,
        float(federation.job.gain[round_index, 0]),
        float(federation.job.channel_estimates[round_index, 0]),
    )


def test_a_device_refuses_what_it_has_not_agreed_to(
    device: tuple[Device, RoundRequest],
) -> None:
    alone, ask = device
    assert np.linalg.norm(
        alone.answer(ask), axis=1
    ).max() <= ask.precoder * alone.terms.clip * (1 + 1e-5)
    assert alone.ledger is not None
    spent = alone.ledger.spent.copy()
    for bad in (
        ask._replace(device=1),
        ask._replace(round=len(alone.terms.gain)),
        ask._replace(round=-1),
        ask._replace(theta=ask.theta[:1]),
        ask._replace(theta=ask.theta.astype(float)),
        ask._replace(theta=np.full_like(ask.theta, np.nan)),
        ask._replace(gain=0.0),
        ask._replace(gain=float("nan")),
        ask._replace(channel_estimate=0.0),
        ask._replace(gain=1.001 * ask.gain),
        ask._replace(channel_estimate=1e-3 * ask.channel_estimate),
        ask._replace(channel_estimate=1.001 * ask.channel_estimate),
    ):
        with pytest.raises(InputError):
            alone.answer(bad)
    np.testing.assert_array_equal(alone.ledger.spent, spent)


def test_a_device_is_not_talked_into_sending_more_than_it_pays_for(
    tmp_path: Path,
) -> None:
    """Nothing fades on an ideal link: α r/|ĥ| with a small |ĥ| would drown the device's own noise."""
    federation = make_federation(
        tmp_path, {"policy.power": "noiseless-dp"}, noise="devices"
    )
    alone = open_device(tmp_path / "device-0")
    ask = RoundRequest(
        0, 0, federation.job.position, float(federation.job.plan.gain[0]), 1.0
    )
    for known in (1e-8, 0.999, 1e8):
        with raises_input_error("known", value=known):
            alone.answer(ask._replace(channel_estimate=known))
    assert alone.ledger is not None
    assert alone.ledger.spent[0] == 0


def test_a_request_of_another_run_is_refused(federation: Federation) -> None:
    ask = request_of_round(federation, 0)
    content = write_request(ask, federation.job.run, "once")
    assert read_request(content, federation.job.run)[1] == "once"
    with raises_input_error("request", federation.job.run, "another"):
        read_request(content, "another")


def test_other_data_get_other_noise_and_pay_again(tmp_path: Path) -> None:
    """Else a device whose data change between two equal requests would show the difference bare."""
    federation = make_federation(
        tmp_path, {"policy.power": "noiseless-dp"}, noise="devices"
    )
    terms = federation.job.terms(0)
    first = open_device(tmp_path / "device-0")
    other = Device(
        federation.inputs.posterior.device(1), terms, first.ledger, first.secret
    )
    ask = RoundRequest(
        0, 0, federation.job.position, float(federation.job.plan.gain[0]), 1.0
    )
    # So do another secret and another run, for which the same round asks the same.
    guess = Device(federation.inputs.posterior.device(0), terms, None, b"a guess")
    later = Device(
        federation.inputs.posterior.device(0),
        replace(terms, run="another"),
        first.ledger,
        first.secret,
    )
    noise = []
    for device, k in ((first, 0), (other, 1), (guess, 0), (later, 0)):
        quiet = Device(federation.inputs.posterior.device(k), replace(terms, share=0.0))
        noise.append(device.answer(ask) - quiet.answer(ask))
    for another in noise[1:]:
        assert np.abs(noise[0] - another).max() > 0.1 * np.sqrt(terms.share)
    assert first.ledger is not None
    assert len(first.ledger.entries) == 3


def test_texts_of_others_are_no_commands_to_a_terminal() -> None:
    assert (
        printable_line("\x1b[2J bad\nline \x07\u202e" + "x" * 1000)
        == "?[2J bad line ??" + "x" * 184
    )


def test_a_device_keeps_to_its_own_budget_and_answers_the_same_again_for_nothing(
    federation: Federation, device: tuple[Device, RoundRequest]
) -> None:
    alone, ask = device
    first = alone.answer(ask)
    assert alone.ledger is not None
    spent = float(alone.ledger.spent[0])
    assert spent == pytest.approx(
        2 * (ask.gain * alone.terms.clip) ** 2 / alone.terms.noise_power
    )
    np.testing.assert_array_equal(alone.answer(ask), first)
    assert alone.ledger.spent[0] == spent
    later = request_of_round(
        federation, int(np.flatnonzero(federation.job.gain[:, 0])[1])
    )
    alone.answer(later)  # another question costs again
    assert alone.ledger.spent[0] == pytest.approx(
        federation.job.plan.loss[[ask.round, later.round], 0].sum()
    )
    book = Ledger(alone.terms.promise, 1)
    book.charge("another run", 0, [book.budget])
    with pytest.raises(OverspendError):
        Device(federation.inputs.posterior.device(0), alone.terms, book).answer(ask)
    assert book.spent[0] <= book.budget[0] * (1 + 1e-9)


def test_a_round_with_the_noise_of_the_channel_is_answered_once(
    device: tuple[Device, RoundRequest],
) -> None:
    """A server that was set back to a copy of its folder would hide two questions by the same noise."""
    alone, ask = device
    alone.answer(ask)
    assert alone.ledger is not None
    spent = float(alone.ledger.spent[0])
    with raises_input_error("request", "round 1"):
        alone.answer(ask._replace(theta=ask.theta + np.float32(1)))
    assert alone.ledger.spent[0] == spent


def test_processes_that_are_asked_at_the_same_time_answer_one_question(
    federation: Federation, device: tuple[Device, RoundRequest]
) -> None:
    """Two runs at the same SuperNode are two processes with one ledger."""
    alone, ask = device
    assert alone.ledger is not None
    line = threading.Barrier(8)
    terms = alone.terms
    path = alone.ledger.path

    def answer(number: int) -> bool:
        book = Ledger(terms.promise, 1, enforced=terms.enforced, path=path)
        other = Device(federation.inputs.posterior.device(0), terms, book)
        line.wait()
        try:
            return (
                other.answer(ask._replace(theta=ask.theta + np.float32(number))).size
                > 0
            )
        except InputError:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(answer, range(8))) == 1


def test_an_answer_is_kept_before_it_is_paid_for_and_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise is drawn from entropy: what is lost with a process cannot be drawn again."""
    federation = make_federation(
        tmp_path, {"policy.power": "noiseless-dp"}, noise="devices"
    )
    folder = tmp_path / "device-0"
    terms = federation.job.terms(0)
    ask = request_of_round(federation, 0)

    def fresh() -> Device:
        return Device(
            federation.inputs.posterior.device(0),
            terms,
            Ledger(terms.promise, 1, path=folder / "ledger.jsonl"),
        )

    device = fresh()
    with monkeypatch.context() as patch:
        patch.setattr(
            device, "_charge", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            device.answer(ask)
    assert (folder / "answer.npz").stat().st_mode & 0o077 == 0
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(lambda device: device.answer(ask), [fresh() for _ in range(4)])
        )
    with np.load(folder / "answer.npz") as saved:
        assert all(np.array_equal(saved["signal"], answer) for answer in answers)
    book = fresh().ledger
    assert book is not None
    assert len(book.entries) == 1
    fresh().answer(request_of_round(federation, 1))
    # The answer is no longer kept: a new draw, charged anew.
    assert not np.array_equal(fresh().answer(ask), answers[0])
    book = fresh().ledger
    assert book is not None
    assert [number for _, number in book.entries] == [0, 1, 0]


def test_what_is_wrong_with_its_data_is_told_to_the_device_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def find(context: object) -> Device:
        raise InputError(
            "data",
            "features with a Hessian eigenvalue of 1234",
            "scaled to moderate size",
        )

    grid = LocalGrid(client_app(find), 1)
    for kind in ("query.hello", "query.gradient"):
        (ident,) = grid.push_messages(
            [flwr.Message(flwr.RecordDict(), FIRST, kind, ttl=1.0, group_id="0")]
        )
        (answer,) = grid.pull_messages([ident])
        assert "its own log says why" in answer.error.reason
        assert "1234" not in answer.error.reason
    assert "1234" in caplog.text


def test_shares_of_noise_add_up_and_are_not_repeated(tmp_path: Path) -> None:
    changes = {
        "policy.power": "noiseless-dp",
        "sampler.chains": 400,
        "posterior.devices": 4,
    }
    federation = make_federation(tmp_path, changes, noise="devices", tolerate=1)
    job = federation.job
    assert job.device_noise[0] == pytest.approx(job.plan.noise_power / 3)
    total, clean = np.zeros((400, 5)), np.zeros((400, 5))
    for k in range(4):
        opened = open_device(tmp_path / f"device-{k}")
        ask = RoundRequest(k, 0, job.position, float(job.plan.gain[0]), 1.0)
        sent = opened.answer(ask)
        np.testing.assert_array_equal(sent, opened.answer(ask))
        other = opened.answer(ask._replace(gain=ask.gain * 0.999))
        quiet = Device(
            federation.inputs.posterior.device(k), replace(job.terms(k), share=0.0)
        )
        noise = sent - quiet.answer(ask)
        # The noise of another request is another draw: they are not correlated.
        again = other - quiet.answer(ask._replace(gain=ask.gain * 0.999))
        assert abs(np.corrcoef(noise.ravel(), again.ravel())[0, 1]) < 4 / np.sqrt(
            noise.size
        )
        total += sent
        clean += quiet.answer(ask)
    variance = np.var(total - clean)
    expected = job.plan.noise_power * 4 / 3
    assert abs(variance / expected - 1) < 4 * np.sqrt(2 / total.size)
    # Alone each message has a third of N0 to hide behind: three times the loss of the sum.
    np.testing.assert_allclose(job.loss(0, np.ones(4, bool)), 3 * job.plan.loss[0])
    assert job.terms(0).factor == 3
