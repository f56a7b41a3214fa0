"""Labels that are not 0, 1, 2, …: as many classes as there are labels, and results in the words of the data."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import wflmc
from wflmc.apps.baselines import sbfl
from wflmc.evaluation import predictive_scores

from ..cli_tools import strict
from ..error_tools import names_key, raises_input_error
from ..report.report_tools import Page

KEY = jax.random.key(0)
NAMES = {
    "from one": [1, 2, 3],
    "with gaps": [-1, 4, 7],
    "text": ["cat", "dog", "owl"],
    "floats": [1.0, 2.0, 3.0],
}
SCENARIO = """
[posterior]
model = "softmax"
data = "{data}"
devices = 4
[link]
power = 1.0
[privacy]
epsilon = 50.0
delta = 1e-2
[sampler]
burn_in = 6
samples = 5
chains = 3
"""


@pytest.fixture(scope="module")
def data():
    """Features and classes 0, 1, 2."""
    generator = np.random.default_rng(0)
    X = generator.standard_normal((60, 2))
    return X, np.argmax(
        X @ generator.standard_normal((2, 3)) + generator.gumbel(size=(60, 3)), axis=1
    )


@pytest.fixture(scope="module")
def counted(data):
    """The posterior and a trace of the same data with labels from 0."""
    posterior = wflmc.softmax_regression(KEY, 4, X=data[0], y=data[1])
    link = wflmc.Link(wflmc.channel.static(1.0))
    step = 1 / (posterior.mu + posterior.L)
    plan = wflmc.plan(
        posterior, link, wflmc.Privacy(50, 0.01), step_size=step, burn_in=6, samples=5
    )
    return posterior, wflmc.sample(KEY, posterior, plan, 3)


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_as_many_classes_as_labels(data, counted, names):
    """The same posterior as with labels from 0, and the same scores for labels as they are."""
    (X, classes), (reference, trace) = data, counted
    y = np.array(names)[classes]
    posterior = wflmc.softmax_regression(KEY, 4, X=X, y=y)
    assert posterior.classes == 3
    assert list(posterior.class_names) == names
    assert posterior.digest == reference.digest
    assert posterior.L == reference.L
    scores = wflmc.evaluate(trace, posterior, test=(X, y)).scores
    expected = wflmc.evaluate(trace, reference, test=(X, classes)).scores
    np.testing.assert_array_equal(scores.nll, expected.nll)


def test_scores_of_sbfl(data, counted):
    (X, classes), (reference, _) = data, counted
    links = [wflmc.Link(wflmc.channel.static(1.0))]
    posterior = wflmc.softmax_regression(KEY, 4, X=X, y=classes + 1)
    theta = sbfl(KEY, posterior, links, rounds=8)[:, None]
    scores = predictive_scores(posterior, theta, X, classes + 1)
    np.testing.assert_array_equal(
        scores.nll, predictive_scores(reference, theta, X, classes).nll
    )


@pytest.mark.parametrize(
    "names", [[1, 2, 3], ["cat", "dog", "owl"]], ids=["numbers", "text"]
)
def test_arviz_has_the_labels_of_the_data(data, counted, names):
    (X, classes), (reference, trace) = data, counted
    y = np.array(names)[classes]
    posterior = wflmc.softmax_regression(KEY, 4, X=X, y=y, partition="blocks")
    groups = trace.to_arviz(posterior, features=X)
    np.testing.assert_array_equal(groups.observed_data["y"], y)
    drawn = trace.to_arviz(reference, features=X).predictions["y"].values
    np.testing.assert_array_equal(groups.predictions["y"], np.array(names)[drawn])


def test_declared_classes():
    """A class that was declared stays, also without an example; labels outside are refused, not counted anew."""
    X = np.ones((4, 2))
    number = wflmc.softmax_regression(KEY, 2, X=X, y=[0, 2, 2, 0], classes=4)
    assert (number.classes, number.class_names) == (4, (0, 1, 2, 3))
    named = wflmc.softmax_regression(
        KEY, 2, X=X, y=["no", "yes", "no", "no"], classes=["yes", "no", "maybe"]
    )
    np.testing.assert_array_equal(np.sort(named.labels.ravel()), [0, 1, 1, 1])
    assert set(named.observed[0]) == {"yes", "no"}
    assert wflmc.softmax_regression(
        KEY, 2, X=X, y=[True, False, True, True]
    ).class_names == (0, 1)
    assert wflmc.softmax_regression(
        KEY, 2, X=X, y=np.array(list("abab"), dtype=object)
    ).class_names == ("a", "b")


@pytest.mark.parametrize(
    ("y", "classes", "key", "facts"),
    [
        ([1, 2, 3], 3, "data", ("y[2]", "0, 1, 2")),
        ([1, 2, 9], [1, 2, 3], "data", ("y[2]", "1, 2, 3")),
        (["a", "b", "c"], ["a", "b"], "data", ("y[2]", "a, b")),
        (["1", "2", "1"], [1, 2], "data", ("y[0]", "1, 2")),
        ([1, 2, 1], [1, 2, 2], "classes", ("[1, 2, 2]",)),
        ([0, 1, 0], 1, "classes", (1,)),
        ([0, 1, 0], [0, 0.5], "classes", ("classes[1]",)),
        ([1, 2, 2.5], None, "data", ("y[2]",)),
        ([1, 2, np.nan], None, "data", ("y[2]",)),
        (np.array(["a", None, "b"]), None, "data", ("type object",)),
        (["a", "a", "a"], None, "data", ("one class",)),
        ([[1, 2, 3]], None, "data", ("(1, 3)",)),
    ],
)
def test_refused(y, classes, key, facts):
    with raises_input_error(key, *facts):
        wflmc.softmax_regression(KEY, 2, X=np.ones((3, 2)), y=y, classes=classes)


def test_too_many_classes_are_no_classes():
    with raises_input_error("data", 1001, 1000):
        wflmc.softmax_regression(KEY, 2, X=np.ones((1001, 1)), y=np.arange(1001))


def test_files(call, tmp_path, data):
    """An .npz with labels from 1 and a .csv with text: the classes that are there, in plan.json and in the report."""
    X, classes = data
    y = classes + 1
    np.savez(tmp_path / "d.npz", X=X, y=y, X_test=X, y_test=y)
    np.savez(tmp_path / "e.npz", X=X, y=classes, X_test=X, y_test=classes)
    text = [
        f"{a},{b},{['cat', 'dog', 'owl'][c]}"
        for (a, b), c in zip(X, classes, strict=True)
    ]
    (tmp_path / "d.csv").write_text("\n".join(text))
    (tmp_path / "h.csv").write_text("\n".join(["a,b,y", *text]))
    path = tmp_path / "s.toml"
    documents = {}
    for name in ("d.npz", "e.npz", "d.csv", "h.csv"):
        path.write_text(SCENARIO.format(data=name))
        code, out, err = call("plan", path, "--json", "--no-compare")
        assert code == 0, err
        documents[name] = strict(out)
        assert documents[name]["constants"]["dim"] == 6
    assert documents["d.npz"]["classes"] == [1, 2, 3]
    assert (
        documents["d.csv"]["classes"]
        == documents["h.csv"]["classes"]
        == ["cat", "dog", "owl"]
    )
    path.write_text(SCENARIO.format(data="d.npz"))
    summary = strict(call("run", path, "--out", tmp_path / "o", "--json")[1])
    expected = strict(call("run", path, "--set", "posterior.data=e.npz", "--json")[1])
    assert summary["accuracy"] == expected["accuracy"]
    assert call("report", tmp_path / "o")[0] == 0
    page = Page((tmp_path / "o" / "report.html").read_text()).text
    assert "3 classes (1, 2, 3)" in page
    assert "(class 3, feature 1)" in page


@pytest.mark.parametrize(
    ("rows", "line", "column"),
    [
        (["1,2,a", "1,3,4", "2,2,b"], 1, 3),
        (["1,2,a", "1,x,b", "2,2,b"], 2, 2),
        (["1,2,a", "1,3,", "2,2,b"], 1, 3),
    ],
)
def test_bad_columns_of_labels(call, tmp_path, rows, line, column):
    (tmp_path / "d.csv").write_text("\n".join(rows))
    (tmp_path / "s.toml").write_text(SCENARIO.format(data="d.csv"))
    code, _, err = call("plan", tmp_path / "s.toml")
    assert code == 2
    assert names_key(err, "posterior.data", f"line {line}", f"column {column}")


def test_labels_of_a_test_set_that_nobody_has_seen(call, tmp_path, data):
    X, classes = data
    np.savez(tmp_path / "d.npz", X=X, y=classes + 1, X_test=X, y_test=classes)
    (tmp_path / "s.toml").write_text(SCENARIO.format(data="d.npz"))
    code, _, err = call("plan", tmp_path / "s.toml")
    assert code == 2
    assert names_key(err, "posterior.data", "y_test", "y[0]", "1, 2, 3")


def test_devices_of_a_federation_know_the_labels(tmp_path, data):
    """Each has its part with labels as in the data, and the model of all classes, whatever labels it has itself."""
    pytest.importorskip(
        "flwr", reason="Flower is not installed: pip install 'wflmc[flower]'"
    )
    from wflmc.apps.federation.device import devices_in, open_device
    from wflmc.apps.federation.server import trace_of

    from ..federation_tools import ROUNDING, make_federation, run_on_grid

    X, classes = data
    np.savez(tmp_path / "d.npz", X=X, y=np.array(["cat", "dog", "owl"])[classes])
    changes = {
        "model": "softmax",
        "data": str(tmp_path / "d.npz"),
        "examples": 60,
        "dim": 2,
        "partition": "by-label",
    }
    federated = make_federation(
        tmp_path / "f", {f"posterior.{key}": value for key, value in changes.items()}
    )
    held = [
        set(np.load(tmp_path / "f" / f"device-{k}" / "data.npz")["y"].tolist())
        for k in range(5)
    ]
    assert set.union(*held) == {"cat", "dog", "owl"}
    assert held[0] == {"cat"}
    server = federated.server()
    run_on_grid(server, devices_in(tmp_path / "f"))
    np.testing.assert_allclose(
        trace_of(server).theta, federated.simulated().theta, atol=ROUNDING
    )
    np.savez(tmp_path / "f" / "device-0" / "data.npz", X=X, y=classes)
    open_device.cache_clear()
    with raises_input_error("data", "y[0]", "cat", "dog", "owl"):
        open_device(tmp_path / "f" / "device-0")
