"""The engine of studies: points are kept, found again and never mixed up."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from importlib import metadata

import jax
import pytest

import wflmc
from wflmc.apps.studies import cache, engines
from wflmc.apps.studies.cache import key_of
from wflmc.apps.studies.engines import StudyError, local, open_engine, perform
from wflmc.apps.studies.paper.fig6_fig7 import MultiSample, multi_sample_study
from wflmc.apps.studies.study import Point, Row, Study, run_study

from ..error_tools import raises_input_error


def toy(calls, identity=None, fail_at=-1.0):
    """Three points and a fourth that is the same everywhere; y tells how often it was computed."""

    def measure(point, progress):
        if point.x == fail_at:
            raise KeyboardInterrupt
        calls.append(point.x)
        progress(0.5)
        return {
            "toy": [
                Row("toy", scheme, point.x or 0.0, 1 / 3 + (point.x or 0.0), 0.1)
                for scheme in point.schemes
            ]
        }

    points = (Point(None, ("c",)), *(Point(x, ("b", "a")) for x in (3.0, 1.0, 2.0)))
    return Study("toy", points, ("a", "b", "c"), identity or {"seed": 0}, measure)


@pytest.fixture
def software():
    """What computes, worked out anew at every call."""

    def fingerprint():
        cache.software.cache_clear()
        return cache.software()

    yield fingerprint
    cache.software.cache_clear()


def run(study, folder, said=None):
    return run_study(
        study, folder, lambda _: None, (said if said is not None else []).append
    )


def files_in(folder):
    return sorted(folder.rglob("*.json"))


def test_points_are_kept_and_rows_are_in_order(tmp_path):
    calls, progress = [], []
    first = run_study(toy(calls), tmp_path, progress.append, pytest.fail)
    assert [(row.x, row.scheme) for row in first["toy"]] == [
        (x, s) for x in (1.0, 2.0, 3.0) for s in "abc"
    ]
    assert calls == [None, 3.0, 1.0, 2.0]
    assert progress == sorted(progress)
    assert progress[-1] == 4
    assert run(toy(calls), tmp_path) == first
    assert len(calls) == 4
    assert not list(tmp_path.rglob("*.part"))
    run(toy(calls), None)
    assert len(calls) == 8


def test_an_interrupted_study_goes_on(tmp_path):
    calls = []
    with pytest.raises(KeyboardInterrupt):
        run(toy(calls, fail_at=2.0), tmp_path)
    assert calls == [None, 3.0, 1.0]
    resumed = run(toy(calls), tmp_path)
    assert calls == [None, 3.0, 1.0, 2.0]
    assert resumed == run(toy([]), tmp_path / "undisturbed")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("333", "334"),
        lambda text: "[]",
        lambda text: json.dumps({"check": 0, "result": {"toy": 1}}),
        lambda text: "\0" * len(text),
    ],
)
def test_damaged_results_are_found_out(tmp_path, damage):
    calls, said = [], []
    whole = run(toy(calls), tmp_path)
    victim = files_in(tmp_path)[0]
    victim.write_text(damage(victim.read_text()))
    assert run(toy(calls), tmp_path, said) == whole
    assert len(calls) == 5
    assert "damaged" in said[0]
    assert run(toy(calls), tmp_path) == whole
    assert len(calls) == 5


def test_a_result_under_another_name_is_found_out(tmp_path):
    calls = []
    whole = run(toy(calls), tmp_path)
    first, second = files_in(tmp_path)[:2]
    first.write_bytes(second.read_bytes())
    assert run(toy(calls), tmp_path) == whole
    assert len(calls) == 5


def test_whatever_changes_a_result_changes_its_name(tmp_path, monkeypatch):
    calls = []
    run(toy(calls), tmp_path)
    run(toy(calls, {"seed": 1}), tmp_path)
    assert len(calls) == 8
    monkeypatch.setattr(cache, "software", lambda: {"wflmc": "another"})
    run(toy(calls), tmp_path)
    assert len(calls) == 12
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=3, examples=30)
    other = wflmc.gaussian_regression(jax.random.key(1), devices=3, examples=30)
    keys = {
        json.dumps(
            multi_sample_study(name, MultiSample(p, experiments=n, epsilon=e)).identity
        )
        for name in ("fig6",)
        for p in (posterior, other)
        for n in (2, 3)
        for e in (1.0, 2.0)
    }
    assert len(keys) == 8


def test_two_runs_share_a_cache(tmp_path):
    results, said = [], []
    threads = [
        threading.Thread(target=lambda: results.append(run(toy([]), tmp_path, said)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(result == results[0] for result in results)
    assert run(toy([]), tmp_path, said) == results[0]
    assert not said


def test_settings_of_jax_are_in_the_name(software):
    before = software()
    with jax.enable_x64(not jax.config.jax_enable_x64):
        assert software() != before
    assert software() == before


def test_a_cache_that_cannot_be_used_is_no_obstacle(tmp_path):
    said, calls = [], []
    whole = run(toy(calls), tmp_path / "good")
    (tmp_path / "file").write_text("")
    assert run(toy(calls), tmp_path / "file", said) == whole
    assert any("cannot be" in text for text in said)
    victim = files_in(tmp_path / "good")[0]
    victim.unlink()
    victim.mkdir()
    assert run(toy(calls), tmp_path / "good", said) == whole


def test_a_point_that_fails_does_not_stop_the_others(tmp_path):
    calls, said = [], []
    study = toy(calls)

    def measure(point, progress):
        if point.x == 3.0:
            raise wflmc.SamplingError("A chain is lost.")
        if point.x == 1.0:
            raise KeyError("a bug")
        return study.measure(point, progress)

    with pytest.raises(StudyError, match=r"2 of 4 .*\btoy\b"):
        run(study._replace(measure=measure), tmp_path, said)
    assert calls == [None, 2.0]
    assert len(files_in(tmp_path)) == 2
    assert "A chain is lost." in said[0]
    assert "Traceback" not in said[0]
    assert "KeyError: 'a bug'" in said[1]
    assert "Traceback" in said[1]
    run(study, tmp_path)
    assert calls == [None, 2.0, 3.0, 1.0]


@pytest.fixture(scope="module")
def cluster():
    """A worker on this machine, and a task that kills it twice is not tried a third time."""
    pytest.importorskip("distributed")
    from wflmc.apps.studies.cluster import SETTINGS

    with (
        pytest.MonkeyPatch.context() as patch,
        open_engine("dask", 1, pytest.fail) as engine,
    ):
        patch.setitem(SETTINGS, "distributed.scheduler.allowed-failures", 1)
        yield engine


def test_studies_are_the_same_on_a_cluster(cluster, tmp_path):
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=3, examples=30)
    study = multi_sample_study("fig7", MultiSample(posterior, experiments=2))
    study = study._replace(points=study.points[:1])
    there = run_study(study, tmp_path, lambda _: None, pytest.fail, cluster)
    assert there == run_study(study, None, lambda _: None, pytest.fail, local)
    assert len(files_in(tmp_path)) == 1


def test_workers_that_die(cluster, tmp_path):
    """A point whose result is lost with its worker is computed again; one that always kills its worker fails alone."""
    FAILS = 2
    KILLS = 4

    def work(task, progress):
        with (tmp_path / "begun").open("a") as file:
            file.write(f"{task}\n")
        if task == KILLS:
            os.kill(os.getpid(), signal.SIGKILL)
        if task == FAILS:
            raise ValueError("bad luck")
        return {"y": 1 / 3 + task}

    def begun():
        return [int(line) for line in (tmp_path / "begun").read_text().split()]

    results = cluster(work, range(5), lambda _: None)
    first, value = next(results)
    # Ten minutes at most: results stay at the worker, which dies, until they are
    # fetched.
    for _ in range(60000):
        if begun().count(KILLS) > 1:
            break
        time.sleep(0.01)
    outcomes = {first: value, **dict(results)}
    restarted = set(begun()[: begun().index(KILLS)]) - {first}
    assert restarted
    assert all(begun().count(task) > 1 for task in restarted)
    assert set(outcomes) == set(range(5))
    assert "died 2 times" in outcomes[KILLS].reason
    assert outcomes[FAILS].reason == "ValueError: bad luck"
    assert "Traceback" in outcomes[FAILS].traceback
    assert all(
        outcomes[task] == {"y": 1 / 3 + task}
        for task in outcomes
        if task not in (FAILS, KILLS)
    )


def test_a_worker_that_would_give_other_numbers_is_refused(software):
    cloudpickle = pytest.importorskip("cloudpickle")
    order = engines.make_work_order(
        cloudpickle.dumps(lambda task, progress: {"y": task + 1})
    )

    def ask(**changes):
        return perform({**order, **changes}, cloudpickle.dumps(2))

    assert ask() == {"y": 3}
    # A package of another version may not be able to read the work: it is refused before it tries.
    with pytest.raises(StudyError, match=r"numpy .*1\.0"):
        ask(software={**order["software"], "numpy": "1.0"}, work=b"what is this?")
    with pytest.raises(StudyError, match="future"):
        ask(software={**order["software"], "future": "1"})
    double = jax.config.jax_enable_x64
    try:
        with pytest.raises(StudyError, match=f"jax_enable_x64 {not double}"):
            ask(settings={**order["settings"], "jax_enable_x64": not double})
        assert jax.config.jax_enable_x64 is not double
    finally:
        jax.config.update("jax_enable_x64", double)


def test_a_worker_that_cannot_be_used_ends_the_work(cluster, monkeypatch, software):
    """It would fail all points that it gets hold of, and others would not get any."""
    monkeypatch.setattr(cache, "LIBRARIES", ("jax", "pytest"))
    software()
    with pytest.raises(
        StudyError,
        match=r"tcp://127\..*pytest",
    ):
        list(cluster(lambda task, progress: {"y": task}, range(3), lambda _: None))


def test_an_interrupt_waits_until_a_cluster_has_started_and_ends_it(monkeypatch):
    distributed = pytest.importorskip("distributed")
    happened = []

    class Starting:
        """In place of a cluster: Ctrl-C comes in the midst, and a thread asks whether it would hear it."""

        def __init__(self, **_):
            signal.raise_signal(signal.SIGINT)
            thread = threading.Thread(target=self.listen)
            thread.start()
            thread.join()

        def listen(self):
            deaf = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
            happened.append("started, deaf" if deaf else "started")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            happened.append("ended")

    monkeypatch.setattr(distributed, "LocalCluster", Starting)
    # Ctrl-C is ignored where tests run in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            open_engine("dask", 1, pytest.fail) as engine,
        ):
            list(engine(lambda task, progress: {}, [1], lambda _: None))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGINT, before)
    assert happened == ["started, deaf", "ended"]


def test_the_file_of_a_scheduler_is_waited_for(tmp_path, monkeypatch):
    pytest.importorskip("distributed")
    from wflmc.apps.studies import cluster

    monkeypatch.setattr(cluster, "MAX_FILE_WAIT", 0.0)
    said = []
    there = open_engine(f"dask:{tmp_path}/none.json", None, said.append)
    with (
        raises_input_error("--engine", tmp_path / "none.json"),
        there as engine,
    ):
        list(engine(lambda task, progress: {}, [1], lambda _: None))
    assert "not there yet" in said[0]


def test_what_computes_is_in_the_name(monkeypatch, tmp_path, software):
    """Threads of BLAS, flags of XLA, ArviZ and the sources decide numbers; what only shows them does not."""

    def fingerprint():
        software()
        return key_of({"seed": 0})

    def with_another_arviz(name):
        return "0.0" if name == "arviz" else version(name)

    seen = [fingerprint()]
    for name, value in (
        ("OPENBLAS_NUM_THREADS", "3"),
        ("OPENBLAS_NUM_THREADS", "4"),
        ("XLA_FLAGS", "--xla_x=1"),
    ):
        monkeypatch.setenv(name, value)
        seen.append(fingerprint())
    version = metadata.version
    monkeypatch.setattr(metadata, "version", with_another_arviz)
    seen.append(fingerprint())
    monkeypatch.setattr(cache, "ROOT", tmp_path)
    for name in ("cli", "studies"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.py").write_text("1")
    seen.append(fingerprint())
    (tmp_path / "studies" / "x.py").write_text("2")
    seen.append(fingerprint())
    assert len(set(seen)) == len(seen)
    (tmp_path / "cli" / "x.py").write_text("2")
    assert fingerprint() == seen[-1]
