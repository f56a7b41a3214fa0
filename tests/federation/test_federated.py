"""The federation: equal to the simulator, true to who really sent, stopped and resumed without paying twice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip(
    "flwr", reason="Flower is not installed: pip install 'wflmc[flower]'"
)

import wflmc
from wflmc.apps.federation.device import Device, devices_in, open_device
from wflmc.apps.federation.job import Job, make_job, write_federation
from wflmc.apps.federation.messages import Reception, RoundRequest, Terms
from wflmc.apps.federation.server import (
    Server,
    open_server,
    read_log,
    rescale,
    serve,
    trace_of,
)
from wflmc.privacy import lattice
from wflmc.sampling.checkpoint import Checkpoint
from wflmc.support.errors import OverspendError

from ..conftest import FULL
from ..error_tools import raises_input_error
from ..federation_tools import (
    ROUNDING,
    SCENARIO,
    Federation,
    app_of,
    expected_chain,
    largest_difference,
    make_federation,
    run_on_grid,
)
from ..plan_tools import with_context

KINETIC = {
    "sampler.dynamics": "kinetic",
    "sampler.step_size": 0.02,
    "policy.power": "equal",
}
SYSTEMS: dict[str, dict[str, Any]] = {
    "gaussian": {},
    "unlike devices": {
        "privacy.clip": [10.0, 20.0, 30.0, 40.0, 50.0],
        "link.snr_db": [20.0, 21.0, 22.0, 23.0, 24.0],
    },
    "kinetic, badly known channels": {
        **KINETIC,
        "link.csi_error": 0.1,
        "link.downlink_snr_db": 20.0,
    },
    "records, paid whitening": {
        "privacy.unit": "record",
        "privacy.example_clip": 5.0,
        "posterior.preconditioner": "private-whiten",
        "posterior.intercept": True,
    },
    "unbiased schedule": {"policy.schedule": "unbiased"},
    "unclipped": {"policy.power": "noiseless"},
    "labels": {
        "posterior.model": "softmax",
        "posterior.dim": 2,
        "sampler.init": "zero",
        "posterior.intercept": True,
    },
}
QUICK_SYSTEMS = (
    "unlike devices",
    "kinetic, badly known channels",
    "records, paid whitening",
)


@pytest.mark.skipif(os.name != "posix", reason="other systems have other permissions")
def test_data_are_their_owner_s_alone_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while they are written, and where a crash has left a file of theirs that others may read."""
    folder = tmp_path / "federation"
    modes = {}
    write = np.savez

    def savez(file: Any, *arrays: Any, **named: Any) -> None:
        path = Path(file if isinstance(file, str | Path) else file.name)
        path.touch()
        modes[path.name] = path.stat().st_mode & 0o777
        write(file, *arrays, **named)

    umask = os.umask(0o022)
    try:
        monkeypatch.setattr(np, "savez", savez)
        federation = make_federation(folder)
        (folder / "device-0" / "data.npz.part").touch(mode=0o644)
        write_federation(folder, federation.scenario, federation.inputs, federation.job)
    finally:
        os.umask(umask)
    assert modes == {
        "plan.npz.part": 0o600,
        "job.npz.part": 0o600,
        "data.npz.part": 0o600,
    }
    folders = [folder, folder / "server", *(folder / f"device-{k}" for k in range(5))]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    private = [*folder.rglob("*.npz"), *folder.rglob("secret")]
    assert len(private) == 12
    assert {path.stat().st_mode & 0o777 for path in private} == {0o600}


@pytest.mark.parametrize("name", SYSTEMS if FULL else QUICK_SYSTEMS)
def test_federated_chain_is_the_simulators(tmp_path: Path, name: str) -> None:
    federation = make_federation(tmp_path, SYSTEMS[name])
    server = federation.server()
    run_on_grid(server, devices_in(tmp_path))
    federated = trace_of(server, federation.inputs.posterior)
    simulated = federation.simulated()
    moved = float(np.abs(np.diff(simulated.theta, axis=1)).max())
    assert largest_difference(federated, simulated) < ROUNDING < moved
    if server.ledger is not None:
        np.testing.assert_allclose(
            server.ledger.spent, federation.job.plan.spent, rtol=1e-12
        )
        # Every device has recorded the same for itself, including an earlier release.
        for k in range(5):
            device_ledger = open_device(tmp_path / f"device-{k}").ledger
            assert device_ledger is not None
            assert device_ledger.spent[0] >= (
                federation.job.plan.spent + federation.inputs.spent
            )[k] * (1 - 1e-9)


@pytest.mark.parametrize("name", ["gaussian", "labels"] if FULL else ["labels"])
def test_devices_know_the_mean_of_the_prior(tmp_path: Path, name: str) -> None:
    """It is public, and comes with the terms of every device; also where they whiten."""
    public = tmp_path / "public.npz"
    generator = np.random.default_rng(5)
    width = 2 if name == "labels" else 5
    X = generator.standard_normal((40, width))
    np.savez(public, X=X, y=np.arange(40) % 10)
    changes = {
        **SYSTEMS[name],
        "posterior.prior_from": str(public),
        "posterior.preconditioner": "whiten",
        "sampler.init": "prior-mean",
    }
    federation = make_federation(tmp_path, changes)
    assert np.abs(federation.inputs.posterior.prior_mean).max() > 0.01
    server = federation.server()
    run_on_grid(server, devices_in(tmp_path))
    federated = trace_of(server, federation.inputs.posterior)
    simulated = federation.simulated()
    assert largest_difference(federated, simulated) < ROUNDING


def test_a_model_of_ones_own_with_mini_batches(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    X = generator.normal(size=(60, 3))
    y = X @ np.array([1.0, -1.0, 0.5]) + generator.normal(size=60)

    def log_likelihood(w: Any, example: Any) -> Any:
        return -0.5 * (example["y"] - example["x"] @ w) ** 2

    posterior = wflmc.posterior_from(
        log_likelihood, lambda w: -0.5 * jnp.sum(w**2), {"x": X, "y": y}, devices=3, initial=np.zeros(3), batch=5,
        mu=1.0, L=100.0,
    )  # fmt: skip
    link = wflmc.Link(wflmc.channel.rayleigh(0.1))
    privacy = wflmc.Privacy(epsilon=20, delta=0.01, clip=20)
    plan = wflmc.plan(
        posterior,
        link,
        privacy,
        step_size=0.003,
        burn_in=2,
        samples=4,
        initial_w2_sq=3.0,
    )
    key = jax.random.key(5)
    job = make_job(key, posterior, link, plan, chains=2)
    devices = [Device(posterior.device(k), job.terms(k)) for k in range(3)]
    server = open_server(job, tmp_path)
    run_on_grid(server, app_of(devices))
    assert (
        largest_difference(
            trace_of(server, posterior), wflmc.sample(key, posterior, plan, chains=2)
        )
        < ROUNDING
    )


def absent_in(pattern: np.ndarray, devices: list[Device]) -> Any:
    """An exchange in which pattern[round, device] says who sends."""

    def exchange(asks: list[RoundRequest]) -> Reception:
        first = asks[0] if asks else None
        shape = (2, 5) if first is None else first.theta.shape
        total = np.zeros(shape, np.float32)
        sent = np.zeros(pattern.shape[1], bool)
        absent = {}
        for ask in asks:
            if pattern[ask.round, ask.device]:
                total += np.float32(ask.channel_gain) * devices[ask.device].answer(ask)
                sent[ask.device] = True
            else:
                absent[ask.device] = "late"
        return Reception(total, sent, absent)

    return exchange


def test_update_and_ledger_follow_those_who_sent(tmp_path: Path) -> None:
    federation = make_federation(tmp_path)
    pattern = np.random.default_rng(3).random((7, 5)) < 0.6
    pattern[2] = False  # nobody at all
    devices = federation.devices()
    server = federation.server()
    serve(server, absent_in(pattern, devices))
    sent = pattern & (federation.job.plan.weight > 0)
    expected = expected_chain(federation.job, federation.inputs.posterior, sent)
    actual = np.asarray(trace_of(server).theta).swapaxes(0, 1)
    np.testing.assert_allclose(actual, expected[3:], atol=ROUNDING)
    assert (
        np.abs(
            expected
            - expected_chain(
                federation.job,
                federation.inputs.posterior,
                federation.job.plan.weight > 0,
            )
        ).max()
        > 0.01
    )
    assert server.ledger is not None
    np.testing.assert_allclose(
        server.ledger.spent, (federation.job.plan.loss * sent).sum(0), rtol=1e-12
    )
    log = read_log(server.folder)
    assert [line["sent"] for line in log] == sent.sum(1).tolist()
    assert log[0]["absent"] == {
        str(k): "late"
        for k in np.flatnonzero(~pattern[0] & (federation.job.plan.weight[0] > 0))
    }


def test_all_present_is_what_the_formulas_say(tmp_path: Path) -> None:
    federation = make_federation(tmp_path)
    server = federation.server()
    run_on_grid(server, federation.app())
    expected = expected_chain(
        federation.job, federation.inputs.posterior, federation.job.plan.weight > 0
    )[3:]
    np.testing.assert_allclose(
        np.asarray(trace_of(server).theta).swapaxes(0, 1), expected, atol=ROUNDING
    )


@pytest.mark.parametrize("changes", [{}, KINETIC])
def test_the_server_adds_less_noise_where_the_channel_adds_more(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    job = make_federation(tmp_path, changes).job
    plan = job.plan.with_rounds(server_noise=3 * job.plan.noise_variance)
    job = replace(job, plan=plan)
    for count in range(1, plan.devices + 1):
        sent = np.arange(plan.devices) < count
        scale, noise = rescale(job, 1, sent)
        assert scale == pytest.approx(plan.scale[1] * plan.active_devices[1] / count)
        channel = plan.noise_power * (plan.kick[1] * scale / plan.gain[1]) ** 2
        assert channel + float(noise) == pytest.approx(
            max(channel, plan.noise_variance[1]), rel=1e-5
        )


def test_the_server_adds_what_the_shares_that_came_leave_open() -> None:
    job = _jobs()[2]
    job = replace(
        job, plan=job.plan.with_rounds(server_noise=3 * job.plan.noise_variance)
    )
    plan = job.plan
    for count in (3, 4, 5):
        scale, noise = rescale(job, 1, np.arange(5) < count)
        received_variance = (
            count / 3 * plan.noise_power * (plan.kick[1] * scale / plan.gain[1]) ** 2
        )
        assert received_variance + float(noise) == pytest.approx(
            plan.noise_variance[1], rel=1e-5
        )


class CrashError(Exception):
    """A server that dies."""


@contextmanager
def crash(server: Server, round_index: int, moment: str) -> Iterator[None]:
    """Let the server die in a round, before or after it pays for it or keeps it."""
    when, _, step = moment.partition(" ")
    owner, name = (
        (server.ledger, "charge") if step == "paying" else (Checkpoint, "save")
    )
    original = getattr(owner, name)
    calls = []

    def dying(*args: Any, **keywords: Any) -> None:
        calls.append(args)
        if len(calls) == round_index + 1 and when == "before":
            raise CrashError
        original(*args, **keywords)
        if len(calls) == round_index + 1:
            raise CrashError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, dying)
        with pytest.raises(CrashError):
            yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Federation, Server]:
    """A federation that nothing has disturbed."""
    federation = make_federation(tmp_path_factory.mktemp("whole"))
    server = federation.server()
    run_on_grid(server, federation.app())
    return federation, server


@pytest.mark.parametrize(
    "moment", ["before paying", "after paying", "before keeping", "after keeping"]
)
def test_a_server_that_dies_goes_on_without_paying_twice(
    whole: tuple[Federation, Server], tmp_path: Path, moment: str
) -> None:
    federation, undisturbed = whole
    devices = federation.devices()
    server = open_server(federation.job, tmp_path)
    with crash(server, 3, moment):
        run_on_grid(server, app_of(devices))
    again = open_server(federation.job, tmp_path)
    assert again.checkpoint.load().rounds == (4 if moment == "after keeping" else 3)
    run_on_grid(again, app_of(devices))
    assert largest_difference(trace_of(again), trace_of(undisturbed)) == 0
    assert again.ledger is not None
    assert undisturbed.ledger is not None
    assert again.ledger.rounds(federation.job.run) == 7 == len(again.ledger.entries)
    assert [line["round"] for line in read_log(again.folder)] == list(range(7))
    np.testing.assert_array_equal(again.ledger.spent, undisturbed.ledger.spent)
    # Nor have devices paid for a round that was requested again.
    for k, device in enumerate(devices):
        assert device.ledger is not None
        sent_rounds = np.flatnonzero(federation.job.plan.weight[:, k] > 0).tolist()
        assert [number for _, number in device.ledger.entries] == sent_rounds


def test_noise_of_the_channel_is_as_wide_as_planned_and_paid_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lattice, "token_bytes", np.random.default_rng(5).bytes)
    federation = make_federation(tmp_path, {"sampler.chains": 400}, noise="channel")
    plan = federation.job.plan
    totals = []
    server = federation.server()
    devices = federation.devices()
    states = [federation.job.position]

    def exchange(asks: list[RoundRequest]) -> Reception:
        states.append(np.asarray(asks[0].theta))
        reception = absent_in(np.ones((7, 5), bool), devices)(asks)
        totals.append(reception.total)
        return reception

    with crash(server, 2, "after paying"):
        serve(server, exchange)
    serve(federation.server(), exchange)
    again = federation.server().ledger
    assert again is not None
    np.testing.assert_allclose(again.spent, plan.spent, rtol=1e-12)
    # Devices have answered the repeated round at no cost.
    for k, device in enumerate(devices):
        assert device.ledger is not None
        assert device.ledger.spent[0] == pytest.approx(plan.spent[k])
    np.testing.assert_array_equal(totals[2], totals[3])
    factor = plan.step_size[0] * plan.scale[0] / plan.gain[0]
    noise = (states[1] - states[2]) / factor - totals[0]
    assert abs(np.var(noise) / plan.noise_power - 1) < 4 * np.sqrt(2 / noise.size)
    assert abs(np.mean(noise)) < 4 * np.sqrt(plan.noise_power / noise.size)


def test_a_round_that_is_paid_for_is_lost_where_a_sender_is_gone(
    tmp_path: Path,
) -> None:
    """A smaller set under the same noise would give its difference away, and nobody waits for ever."""
    federation = make_federation(tmp_path)
    devices = federation.devices()
    pattern = np.ones((7, 5), bool)
    server = federation.server()
    with crash(server, 0, "after paying"):
        serve(server, absent_in(pattern, devices))
    assert federation.server().checkpoint.load().rounds == 0
    pattern[0, 3] = False
    again = federation.server()
    serve(again, absent_in(pattern, devices))
    sent = federation.job.plan.weight > 0
    assert again.ledger is not None
    # The lost round is paid for.
    np.testing.assert_array_equal(
        again.ledger.spent, (federation.job.plan.loss * sent).sum(0)
    )
    sent[0] = False
    expected = expected_chain(federation.job, federation.inputs.posterior, sent)[3:]
    np.testing.assert_allclose(
        np.asarray(trace_of(again).theta).swapaxes(0, 1), expected, atol=ROUNDING
    )
    first = read_log(again.folder)[0]
    assert first["sent"] == 0
    assert first["absent"]["3"] == "late"
    assert "only repeated with all" in first["absent"]["0"]


def test_a_checkpoint_that_lacks_rounds_is_refused(tmp_path: Path) -> None:
    """From the start again, with other senders, the same noise would be under other sums."""
    federation = make_federation(tmp_path)
    run_on_grid(federation.server(), federation.app())
    (tmp_path / "server" / "progress.npz").unlink()
    with raises_input_error("ledger", "7 rounds", "0 rounds"):
        federation.server()


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    federation = make_federation(tmp_path)
    server = federation.server()
    refused = []

    def exchange(asks: list[RoundRequest]) -> Reception:
        with raises_input_error("job", f"process {os.getpid()}"):
            serve(federation.server(), exchange)
        refused.append(len(asks))
        return Reception(np.zeros((2, 5), np.float32), np.zeros(5, bool), {})

    serve(server, exchange)
    assert len(refused) == 7


def test_a_log_that_was_cut_short_is_read(tmp_path: Path) -> None:
    federation = make_federation(tmp_path)
    run_on_grid(federation.server(), federation.app())
    log = tmp_path / "server" / "rounds.jsonl"
    log.write_text(log.read_text()[:-9])
    assert [line["round"] for line in read_log(tmp_path / "server")] == list(range(6))


def test_a_trace_does_not_give_the_noise_away(tmp_path: Path) -> None:
    federation = make_federation(tmp_path)
    server = federation.server()
    run_on_grid(server, federation.app())
    assert trace_of(server).key is None


def test_a_round_that_is_paid_for_is_asked_of_nobody_else(tmp_path: Path) -> None:
    """Another set of senders under the same noise would give its difference away."""
    federation = make_federation(tmp_path)
    devices = federation.devices()
    pattern = np.ones((7, 5), bool)
    pattern[0, 1] = False
    server = federation.server()
    with crash(server, 0, "after paying"):
        serve(server, absent_in(pattern, devices))
    again = federation.server()
    serve(again, absent_in(np.ones((7, 5), bool), devices))
    sent = federation.job.plan.weight > 0
    sent[0, 1] = False
    assert again.ledger is not None
    np.testing.assert_allclose(
        again.ledger.spent, (federation.job.plan.loss * sent).sum(0), rtol=1e-12
    )
    expected = expected_chain(federation.job, federation.inputs.posterior, sent)[3:]
    np.testing.assert_allclose(
        np.asarray(trace_of(again).theta).swapaxes(0, 1), expected, atol=ROUNDING
    )


def test_a_ledger_that_lacks_rounds_is_refused(tmp_path: Path) -> None:
    federation = make_federation(tmp_path)
    run_on_grid(federation.server(), federation.app())
    lines = (tmp_path / "server" / "ledger.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "server" / "ledger.jsonl").write_text("".join(lines[:-1]))
    with raises_input_error("ledger", "7 lines", "counts 8"):
        federation.server()
    for name in ("ledger.jsonl", "ledger.jsonl.head"):
        (tmp_path / "server" / name).unlink()
    with raises_input_error("ledger", "0 rounds", "7 rounds"):
        federation.server()


def test_a_job_that_overspends_is_refused_before_anything_is_asked(
    tmp_path: Path,
) -> None:
    federation = make_federation(tmp_path)
    three = wflmc.apps.federation.job.make_job(
        jax.random.key(0),
        federation.inputs.posterior,
        federation.inputs.link,
        federation.job.plan,
        chains=3,
        releases=3,
    )
    if np.all(3 * federation.job.plan.spent <= federation.inputs.privacy.budget(5)):
        pytest.fail("the plan does not reach its budget: the test shows nothing")
    with pytest.raises(OverspendError):
        open_server(three, tmp_path / "three")


def test_jobs_and_terms_survive_their_files_and_have_a_lattice(tmp_path: Path) -> None:
    for name, changes in SYSTEMS.items():
        federation = make_federation(tmp_path / name.replace(" ", "-"), changes)
        again = Job.load(federation.folder / "server")
        assert again.run == federation.job.run
        np.testing.assert_array_equal(again.plan.loss, federation.job.plan.loss)
        assert Terms.load(
            federation.folder / "device-3" / "terms.json"
        ) == federation.job.terms(3)
        fine = replace(federation.job, noise="channel").lattice
        assert (fine is None) == (not federation.job.plan.clips)
        # Hardly wider than planned.
        assert (
            fine is None
            or 1 < fine.variance / federation.job.plan.noise_power < 1 + 1e-5
        )
    with raises_input_error("job", tmp_path / "job.npz"):
        Job.load(tmp_path)


def test_a_federation_that_an_earlier_version_prepared_does_not_go_on(
    tmp_path: Path,
) -> None:
    make_federation(tmp_path)
    job, terms = tmp_path / "server" / "job.json", tmp_path / "device-0" / "terms.json"
    job.write_text(json.dumps({**json.loads(job.read_text()), "job.aggregated": True}))
    with raises_input_error("job", tmp_path / "server"):
        Job.load(tmp_path / "server")
    earlier = {
        name: value
        for name, value in json.loads(terms.read_text()).items()
        if name not in ("gain", "known")
    }
    terms.write_text(json.dumps(earlier))
    with raises_input_error("terms", terms, "gain"):
        Terms.load(terms)


def test_the_servers_folder_has_none_of_the_data(tmp_path: Path) -> None:
    federation = make_federation(tmp_path)
    features = federation.inputs.posterior.features
    for name in ("job.npz", "plan.npz"):
        with np.load(tmp_path / "server" / name) as saved:
            arrays = [
                saved[name] for name in saved.files if saved[name].dtype.kind in "fiu"
            ]
        assert arrays
        assert not np.isin(
            np.ravel(features), np.concatenate([np.ravel(array) for array in arrays])
        ).any()
    # Nor can others read the key of the noise.
    assert (tmp_path / "server" / "job.npz").stat().st_mode & 0o077 == 0
    with np.load(tmp_path / "device-2" / "data.npz") as saved:
        assert np.array_equal(saved["X"], features[2])


@given(
    st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=7, max_size=7)
)
@settings(max_examples=30, deadline=None)
def test_whoever_sends_nobody_spends_more_than_planned(
    pattern: list[list[bool]],
) -> None:
    sent = np.array(pattern)
    for job in _jobs():
        planned = job.planned_loss
        total = np.zeros(5)
        for round_index in range(7):
            senders = sent[round_index] & (job.plan.weight[round_index] > 0)
            loss = job.loss(round_index, senders)
            assert np.all(loss[~senders] == 0)
            assert np.all(loss <= planned[round_index] * (1 + 1e-12))
            total += loss
        assert np.all(total <= job.plan.privacy.budget(5) * (1 + 1e-9))


def test_devices_know_their_channels_as_badly_as_the_plan_says(tmp_path: Path) -> None:
    federation = make_federation(tmp_path, {"link.csi_error": 0.2})
    plan = federation.job.plan
    truth = np.abs(federation.inputs.link.gains(7, 5))
    assert plan.received is not None
    assert np.abs(plan.received - 1).max() > 0.05
    np.testing.assert_allclose(
        federation.job.channel_estimates * plan.received, truth, rtol=1e-6
    )
    asks: list[RoundRequest] = []

    def exchange(requests: list[RoundRequest]) -> Reception:
        asks.extend(requests)
        return Reception(np.zeros((2, 5), np.float32), np.zeros(5, bool), {})

    serve(federation.server(), exchange)
    for ask in asks:
        assert ask.channel_gain == pytest.approx(truth[ask.round, ask.device], rel=1e-6)
        assert (
            ask.channel_estimate
            == federation.job.channel_estimates[ask.round, ask.device]
        )


def test_chains_that_are_given_away_cost_each_in_every_ledger(tmp_path: Path) -> None:
    federation = make_federation(tmp_path, {"link.csi_error": 0.1}, releases=3)
    server = federation.server()
    run_on_grid(server, devices_in(tmp_path))
    assert server.ledger is not None
    np.testing.assert_allclose(
        server.ledger.spent, 3 * federation.job.plan.spent, rtol=1e-12
    )
    assert np.max(server.ledger.spent / server.ledger.budget) == pytest.approx(1)
    for k in range(5):
        device_ledger = open_device(tmp_path / f"device-{k}").ledger
        assert device_ledger is not None
        assert device_ledger.spent[0] == pytest.approx(server.ledger.spent[k])


def test_another_federation_with_the_same_noise_is_refused_by_their_ledger(
    tmp_path: Path,
) -> None:
    federation = make_federation(
        tmp_path, {"privacy.epsilon": None, "privacy.delta": None}
    )
    run_on_grid(federation.server(), federation.app())
    plan = federation.job.plan.with_rounds(gain=federation.job.plan.gain * 0.9)
    other = replace(federation.job, plan=plan)
    assert other.run != federation.job.run
    devices = [
        Device(federation.inputs.posterior.device(k), other.terms(k)) for k in range(5)
    ]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "ledger.path").write_text("../server/ledger.jsonl")
    server = open_server(other, tmp_path / "other")
    with raises_input_error("seed", "round 1"):
        serve(server, absent_in(np.ones((7, 5), bool), devices))
    assert server.checkpoint.load().rounds == 0
    fresh = replace(other, key=other.key + np.uint32(1))
    devices = [
        Device(federation.inputs.posterior.device(k), fresh.terms(k)) for k in range(5)
    ]
    (tmp_path / "fresh").mkdir()
    (tmp_path / "fresh" / "ledger.path").write_text("../server/ledger.jsonl")
    server = open_server(fresh, tmp_path / "fresh")
    serve(server, absent_in(np.ones((7, 5), bool), devices))
    assert server.checkpoint.load().rounds == 7


def test_jobs_that_differ_in_anything_have_other_names(tmp_path: Path) -> None:
    job = make_federation(tmp_path).job
    others = [
        replace(job, releases=2),
        replace(job, noise="devices"),
        replace(job, tolerate=1),
        replace(job, batch=True),
        replace(job, position=job.position + np.float32(1)),
        replace(job, key=job.key + np.uint32(1)),
        replace(job, channel_estimates=job.channel_estimates * 2),
        replace(job, power=job.power * 2),
        replace(job, plan=with_context(job.plan, noise_power=2.0)),
    ]
    assert len({job.run, *(other.run for other in others)}) == 1 + len(others)


@pytest.mark.parametrize("how", [{}, {"tolerate": 2}, {"tolerate": 1, "releases": 2}])
def test_a_plan_uses_its_budget_whoever_adds_the_noise(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    federation = make_federation(
        tmp_path, {"policy.power": "noiseless-dp"}, noise="devices", **how
    )
    used = federation.job.planned_loss.sum(0) / federation.inputs.privacy.budget(5)
    np.testing.assert_allclose(used, 1, rtol=1e-6)
    assert not np.any(federation.job.plan.ledger)


def test_noise_of_a_sum_is_that_of_all_shares_in_it_and_a_message_has_one() -> None:
    job = _jobs()[2]  # two of five may be absent
    for count in (3, 4, 5):
        sent = np.arange(5) < count
        assert job.round_noise(0, sent) == pytest.approx(
            job.plan.noise_power * count / 3
        )
        np.testing.assert_allclose(
            job.loss(0, sent), np.where(sent, job.plan.loss[0] * 3, 0.0)
        )


_MADE: list[Job] = []


def _jobs() -> list[Job]:
    """One of every kind of noise, made once."""
    if not _MADE:
        from wflmc.apps.federation.job import federated_plan
        from wflmc.scenario import build, validate

        for options in ({}, {"noise": "devices"}, {"noise": "devices", "tolerate": 2}):
            power = "noiseless-dp" if options else "optimized"
            scenario = validate({**SCENARIO, "policy": {"power": power}})
            inputs = build(scenario)
            plan = federated_plan(scenario, inputs, **options)
            _MADE.append(
                make_job(
                    jax.random.key(0), inputs.posterior, inputs.link, plan, **options
                )
            )
    return _MADE
