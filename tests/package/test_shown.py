"""What values and errors show: sizes and settings, never the data of a device or a key."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc import channel
from wflmc.apps.audit.target import attack_target
from wflmc.data.sets import Features, Images
from wflmc.scenario import build, validate
from wflmc.scenario.files import load_data
from wflmc.support.errors import InputError, Shown, fields_in_words, in_words

from ..error_tools import raises_input_error
from .test_package import modules

SEED = 987654321
MARKS = ("123456", "1.2345", "1.23e+05", "1.235e+05", "4242", "9876")
"""Of the data and of the seed, in any of the ways in which numbers are written."""

X = np.random.default_rng(0).normal(size=(24, 2))
X[::3] *= 123456.789
Y = np.full(24, 4242.0)
LABELS = np.arange(24) % 2
KEY = jax.random.key(SEED)
LINK = wflmc.Link(channel.static(1.0), snr_db=40)
PROMISE = wflmc.Privacy(8, 0.01, 30)
GAUSSIAN = wflmc.gaussian_regression(KEY, devices=4, X=X, y=Y)
SOFTMAX = wflmc.softmax_regression(KEY, devices=4, X=X, y=LABELS)
OWN = wflmc.posterior_from(
    lambda t, e: -((e[1] - t @ e[0]) ** 2),
    lambda t: -t @ t,
    (X, Y),
    initial=np.zeros(2),
    devices=4,
    mu=1.0,
    L=1e12,
)
PLAN = wflmc.plan(
    GAUSSIAN, LINK, PROMISE, step_size=0.1 / GAUSSIAN.L, burn_in=2, samples=5
)
TRACE = wflmc.Trace(
    X[:10].reshape(2, 5, 2),
    np.zeros((2, 5)),
    np.zeros(2),
    None,
    (PLAN,),
    key=tuple(jax.random.key_data(KEY).tolist()),
)
SETTING = validate(
    {"posterior": {"devices": 2, "examples": 8}, "link": {"fading": "static"}}
)

VALUES = {
    "gaussian": GAUSSIAN,
    "softmax": SOFTMAX,
    "own": OWN,
    "whitened": GAUSSIAN.whitened(),
    "coordinates": SOFTMAX.whitened().coordinates,
    "one device": OWN.device(0),
    "on the accelerator": SOFTMAX.on_accelerator(1, 2.0**20),
    "link": LINK,
    "privacy": wflmc.Privacy(np.full(4, 8.0), 0.01, 30),
    "plan": PLAN,
    "trace": TRACE,  # samples are not the data, but nobody wants them on the screen
    "evaluation": wflmc.evaluate(TRACE, GAUSSIAN),
    "chain": GAUSSIAN.chain(PLAN.motion),
    "response": GAUSSIAN.response(PLAN.motion, 2),
    "target": attack_target(PLAN, None, None, None),
    "data set": Features(X, Y),
    "features": Features(X, LABELS, X, LABELS),
    "images": Images(X, LABELS, X, LABELS),
    "inputs": build(SETTING)._replace(posterior=GAUSSIAN, test=(X, LABELS)),
}


def unmarked(text):
    assert not [mark for mark in MARKS if mark in text], text


@pytest.mark.parametrize("name", VALUES)
def test_no_value_shows_data(name):
    value = VALUES[name]
    for text in (
        repr(value),
        str(value),
        f"{value}",
        repr([value]),
        repr({"it": value}),
    ):
        unmarked(text)
    if isinstance(value, Shown):
        assert "\n" not in repr(value)
        assert len(repr(value)) < 250
        page = value._repr_html_()
        unmarked(page)
        assert page.startswith(
            f"<table><caption>{type(value).__name__}</caption><tr><th>"
        )


def test_what_they_show():
    assert repr(GAUSSIAN).startswith(
        "GaussianPosterior(4 devices, 24 examples, 2 parameters, mu="
    )
    assert (
        repr(OWN.device(0))
        == "CustomPosterior(1 device, 6 examples, 2 parameters, mu=1, L=1e+12)"
    )
    assert repr(LINK) == "Link(fading=static, power=1, snr_db=40, seed=0)"
    by_device = wflmc.Privacy(
        [1, 2.5], 0.01, np.float32(30), unit="record", example_clip=np.int64(3)
    )
    shown = "Privacy(epsilon=1…2.5, delta=0.01, clip=30, accountant=exact, unit=record, example_clip=3, "
    assert repr(by_device) == shown + "adjacency=replace)"
    assert repr(PLAN).startswith(
        "Plan(4 devices, 2 parameters, 7 rounds, 2 burn-in rounds, step_size="
    )
    assert repr(TRACE).startswith("Trace(2 chains, 5 draws, 2 parameters, clip_rate=")
    assert "<th>devices</th><td>4</td>" in PLAN._repr_html_()
    named = channel.Fading("<b>", LINK.fading.draw)
    assert "&lt;b&gt;" in wflmc.Link(named)._repr_html_()
    assert "W2²" in str(VALUES["evaluation"])


def test_posteriors_show_themselves_while_they_are_traced():
    seen = []
    jax.jit(lambda posterior: (seen.append(repr(posterior)), posterior.mu)[1])(GAUSSIAN)
    assert seen == ["GaussianPosterior(…)"]
    empty = jax.tree.map(lambda _: None, SOFTMAX)
    assert (repr(empty), empty._repr_html_()) == (
        "SoftmaxPosterior(…)", "<table><caption>SoftmaxPosterior</caption></table>",
    )  # fmt: skip


def test_nothing_of_a_federation_shows_data_or_keys(tmp_path):
    pytest.importorskip(
        "flwr", reason="Flower is not installed: pip install 'wflmc[flower]'"
    )
    from wflmc.apps.federation.device import Device
    from wflmc.apps.federation.job import make_job
    from wflmc.apps.federation.messages import Reception, RoundRequest
    from wflmc.apps.federation.server import open_server

    job = make_job(KEY, GAUSSIAN, LINK, PLAN)
    assert SEED in job.key
    device = Device(GAUSSIAN.device(1), job.terms(1), secret=b"4242")
    ask = RoundRequest(0, 0, X, 1.0, 1.0, batch=job.key)
    for value in (
        job,
        open_server(job, tmp_path),
        device,
        job.terms(1),
        ask,
        Reception(X, LABELS > 0, {}),
    ):
        unmarked(repr(value) + str(value) + str(vars(device).get("_posterior")))


IDS = np.full(24, 12345678912)


def near(theta, example):
    return -((theta - example) ** 2)


def small(theta):
    return -(theta**2)


CALLS = {
    "devices": lambda: wflmc.softmax_regression(KEY, devices=X, X=X, y=LABELS),
    "devices as a list": lambda: wflmc.gaussian_regression(KEY, devices=X[0].tolist() * 3, X=X, y=Y),
    "key": lambda: wflmc.gaussian_regression(X, devices=4),
    "posterior as a key": lambda: wflmc.sample(GAUSSIAN, KEY, PLAN),
    "labels": lambda: wflmc.softmax_regression(KEY, devices=4, X=X, y=Y),
    "classes": lambda: wflmc.softmax_regression(KEY, devices=4, X=X, y=LABELS, classes=Y),
    "width of the prior": lambda: wflmc.gaussian_regression(KEY, devices=4, X=X, y=Y, prior_std=X),
    "nan": lambda: wflmc.gaussian_regression(KEY, devices=4, X=np.where(X > 1, np.nan, X), y=Y),
    "texts": lambda: wflmc.gaussian_regression(KEY, devices=4, X=X.astype(str), y=Y),
    "features to predict": lambda: SOFTMAX.predict(TRACE.theta, np.column_stack([X, X])),
    "scores": lambda: wflmc.evaluation.calibration(np.full((24, 2), 0.5), Y.astype(int)),
    "step size": lambda: wflmc.plan(GAUSSIAN, LINK, PROMISE, step_size=X, burn_in=2, samples=5),
    "samples": lambda: wflmc.plan(GAUSSIAN, LINK, PROMISE, step_size=1e-9, burn_in=2, samples=X),
    "ledger": lambda: wflmc.plan(GAUSSIAN, LINK, PROMISE, step_size=1e-13, burn_in=2, samples=5, ledger=X),
    "chains": lambda: wflmc.sample(KEY, GAUSSIAN, PLAN, chains=X),
    "initial": lambda: wflmc.sample(KEY, GAUSSIAN, PLAN, chains=2, initial=X),
    "epsilon": lambda: wflmc.Privacy(-X, 0.01, 30),
    "SNR": lambda: wflmc.Link(channel.static(1.0), snr_db=X),
    "fading": lambda: wflmc.Link(X),
    "owners": lambda: wflmc.posterior_from(near, small, Y, initial=1.0, devices=IDS, mu=1.0, L=2.0),
    "whole numbers": lambda: wflmc.posterior_from(near, small, IDS, initial=1.0, devices=2),
    "lists": lambda: wflmc.posterior_from(near, small, (X, Y.tolist()), initial=1.0, devices=2),
    "batch": lambda: wflmc.posterior_from(near, small, Y, initial=1.0, devices=2, batch=Y),
    "audit": lambda: wflmc.audit.audit_pair(KEY, PLAN, GAUSSIAN, GAUSSIAN, device=0, delta=X),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_no_error_shows_data(name):
    with pytest.raises(InputError) as caught:
        CALLS[name]()
    error = caught.value
    for text in (
        str(error),
        repr(error),
        repr(error.value),
        str(pickle.loads(pickle.dumps(error))),
    ):
        unmarked(text)


def test_no_error_shows_a_cell_of_a_file(tmp_path):
    path = tmp_path / "private.csv"
    path.write_text("a,y\n1,2\n123456.789 mg,4242\n")
    with raises_input_error("data", "line 3", "column 1") as caught:
        load_data(path)
    unmarked(str(caught.value).replace(str(path), ""))


def test_values_in_words():
    assert (
        in_words(np.float64(0.5))
        == in_words(np.array(0.5))
        == in_words(jnp.float32(0.5))
        == 0.5
    )
    assert in_words([0.1, "a"]) == [0.1, "a"]
    for value, words in {
        "a list of 4 values": [1.0] * 4,
        "a tuple of 2 values": (X, Y),
        "a dict of 1 value": {"x": 1},
        "a function": unmarked,
        "an OddThing": type("OddThing", (), {"__repr__": lambda self: str(X)})(),
        "an array of type float32 and shape (2, 3)": jnp.zeros((2, 3)),
        "an array of type key<fry> and shape ()": KEY,
    }.items():
        assert str(in_words(words)) == value
        assert (
            str(InputError("x", words, "else")) == f"x is {value}, but it must be else."
        )


PRIVATE = {
    "features",
    "labels",
    "target",
    "X",
    "y",
    "hessian",
    "linear",
    "data",
    "posterior",
}


def test_values_that_hold_data_do_not_show_their_fields():
    """Named tuples and dataclasses that are added later, too: their own repr would print all arrays."""
    checked = set()
    for module in map(importlib.import_module, modules()):
        for kind in vars(module).values():
            fields = getattr(kind, "_fields", None) or (
                dataclasses.is_dataclass(kind)
                and [field.name for field in dataclasses.fields(kind)]
            )
            if (
                not inspect.isclass(kind)
                or not fields
                or not kind.__module__.startswith("wflmc.")
            ):
                continue
            if kind.__module__ == "wflmc.apps.report.figure":
                continue  # lines of a picture, which are there to be shown
            types = {
                name: str(kind.__annotations__.get(name))
                for name in PRIVATE & set(fields)
            }
            held = [
                name
                for name, text in types.items()
                if re.search(r"\b(NDArray|ndarray|Array)\b", text)
            ]
            if held:
                assert kind.__repr__ in (Shown.__repr__, fields_in_words), (
                    f"{kind.__qualname__} shows {held}"
                )
                checked.add(kind.__name__)
    assert checked >= {"GaussianPosterior", "SoftmaxPosterior", "Features"}
