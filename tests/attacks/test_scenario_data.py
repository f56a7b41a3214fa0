"""ε hides a record only if that record changes nothing but itself: not how the other records of its file are read.

A sum over examples has the sensitivity of one example only as long as a neighbouring data file differs in one example.
The attacker writes one row of the file such that other rows are read as something else: as a header, with another
target column, with labels of another kind, inside a quotation, on another device. Either the file is refused, or every
other row keeps its features and its label to the last bit. What is not declared but read off the data is listed
as not covered by ε.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest

from wflmc.scenario import build_posterior, load_data, not_covered, validate
from wflmc.support.errors import InputError

from ..error_tools import raises_input_error

ROWS = 12
PLACES = (0, 5, ROWS - 1)
"""Rows that the attacker may write: the first, one between others, and the last."""


class Model(NamedTuple):
    """A declared model, and labels that its data may have."""

    keys: dict[str, Any]
    labels: tuple[Any, ...]


MODELS = {
    "gaussian": Model({"model": "gaussian"}, (0.25, -1.5, 3.0)),
    "numbered": Model({"model": "softmax", "classes": 3}, (0, 1, 2)),
    "named": Model({"model": "softmax", "classes": ["n", "x", "y"]}, ("n", "x", "y")),
}
CELLS = (
    "", "nan", "inf", "-inf", "1e999", "1_000", "１", "٣", "0x10", "1,5", "y", "n", "2", "2.0", "02", "-1", "0.5", "NA",
    "True", "None", '"', '""', "'", "a\x00b", "a\u2028b", "a\x1cb", " y ", "1" * 400, "y" * 5000, "1e-400", "+.5e+3",
)  # fmt: skip
LINES = (
    "", " ", ",", ",,", ",,,", "y,0.1,0.2", "0.1,y,0.2", "0.1,0.2,y", "a,b,y", "y,a,b", "b,y,a", "a,b,c", "y,y,y",
    '0.1,0.2,"y', '"0.1,0.2,y', '0.1,"0.2,y', '"a","b","y"', '0.1,0.2,"y" ', '0.1,0.2,"y\ny"', "0.1,0.2,1\n0.3,0.4,1",
    "0.1;0.2;1", "0.1\t0.2\t1", "# 0.1,0.2,1", "\ufeff0.1,0.2,1", "0.1,0.2,1,", "0.1,0.2", "0.1,0.2,1\r0.3,0.4,1",
)  # fmt: skip
NUMBERS = (
    np.nan,
    np.inf,
    1e300,
    1e39,
    2**53 + 1,
    2**63,
    2**70,
    -(2**63),
    True,
    "1",
    "y",
    b"1",
    None,
    1j,
    [1.0],
    0.1,
)
"""Values of a feature or a label in an .npz file, by which NumPy chooses another type for the whole array."""


def rows_of(model: Model) -> tuple[list[list[float]], list[Any]]:
    generator = np.random.default_rng(3)
    labels = [model.labels[i % len(model.labels)] for i in range(ROWS)]
    return generator.standard_normal((ROWS, 2)).tolist(), labels


def scenario_of(path, **keys: Any):
    content = {"data": str(path), "devices": 3, "partition": "blocks", **keys}
    return validate({"posterior": content, "privacy": {"epsilon": 1.0, "delta": 0.1}})


def listed(scenario) -> list[str]:
    return [item.name for item in not_covered(scenario)]


def read(scenario):
    """Return features [N, 2] and outcomes [N] as the devices hold them, in the order of the file."""
    posterior, _ = build_posterior(scenario)
    return posterior.real_rows(posterior.features), posterior.real_rows(
        posterior.outcomes
    )


def outcome(scenario, place: int, expected) -> str:
    """Return what becomes of a file in which one row was written by the attacker."""
    try:
        features, labels = read(scenario)
    except InputError:
        return "refused"
    others = np.arange(ROWS) != place
    if features.shape != expected[0].shape:
        return "others changed"
    same = np.array_equal(features[others], expected[0][others]) and np.array_equal(
        labels[others], expected[1][others]
    )
    return "others unchanged" if same else "others changed"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("header", [None, "a,b,y"])
@pytest.mark.parametrize("examples", [ROWS, None])
def test_a_line_of_a_csv_changes_no_other(tmp_path, name, header, examples):
    """Where the number of examples is declared; else a line may count as a header, or as none, and this is listed."""
    model = MODELS[name]
    features, labels = rows_of(model)
    lines = [
        f"{a!r},{b!r},{label}" for (a, b), label in zip(features, labels, strict=True)
    ]
    path = tmp_path / "d.csv"
    scenario = scenario_of(
        path, **model.keys, **({} if examples is None else {"examples": examples})
    )

    def write(rows):
        path.write_text(
            "\n".join(([] if header is None else [header]) + rows) + "\n",
            encoding="utf-8",
            newline="",
        )

    write(lines)
    expected = read(scenario)
    np.testing.assert_array_equal(expected[0], features)
    cells = [f"0.1,0.2,{cell}" for cell in CELLS] + [
        f"{cell},0.2,{labels[0]}" for cell in CELLS
    ]
    counts = Counter()
    for place in PLACES:
        for nasty in (*cells, *LINES):
            write([*lines[:place], nasty, *lines[place + 1 :]])
            counts[outcome(scenario, place, expected)] += 1
    assert ("posterior.examples" in listed(scenario)) == (examples is None)
    assert examples is None or counts["others changed"] == 0
    assert counts.total() == len(PLACES) * (2 * len(CELLS) + len(LINES))
    # Some of the rows tried are fine, so that the test sees both outcomes.
    assert counts["others unchanged"] >= 10


@pytest.mark.parametrize("name", MODELS)
def test_a_row_of_an_archive_changes_no_other(tmp_path, name):
    model = MODELS[name]
    features, labels = rows_of(model)
    path = tmp_path / "d.npz"
    np.savez(path, X=features, y=labels)
    scenario = scenario_of(path, **model.keys)
    expected = read(scenario)
    counts = Counter()
    for place in PLACES:
        for value in NUMBERS:
            X = [list(row) for row in features]
            X[place][0] = value
            y = list(labels)
            y[place] = value
            for arrays in ({"X": X, "y": labels}, {"X": features, "y": y}):
                try:
                    stored = {key: np.array(rows) for key, rows in arrays.items()}
                except ValueError:  # rows of different length are no array at all
                    stored = {
                        key: np.array(rows, object) for key, rows in arrays.items()
                    }
                np.savez(path, **stored)
                counts[outcome(scenario, place, expected)] += 1
    assert counts["others changed"] == 0
    assert counts.total() == 2 * len(PLACES) * len(NUMBERS)
    assert counts["others unchanged"] >= 10


def test_the_number_of_examples_decides_whether_there_is_a_header(tmp_path):
    """With it, a row that looks like a header is a row, and is refused."""
    path = tmp_path / "d.csv"
    path.write_text("y,0.5,0.25\n1.0,2.0,3.0\n4.0,5.0,6.0\n")
    guessed, _ = load_data(path)
    np.testing.assert_array_equal(guessed.y, [1.0, 4.0])
    with raises_input_error("data", "line 1"):
        load_data(path, examples=3)
    path.write_text("1.0,2.0,y\n3.0,4.0,n\n5.0,6.0,y\n")
    with raises_input_error("data", "posterior.examples"):
        load_data(path, "inferred")
    declared, _ = load_data(path, "text", examples=3)
    assert declared.y.tolist() == ["y", "n", "y"]
    # As pandas writes columns without names.
    path.write_text("0,1,y\n1.0,2.0,0\n3.0,4.0,1\n")
    numbered, names = load_data(path, "inferred")
    assert (numbered.y.tolist(), names) == ([0.0, 1.0], ("0", "1"))


def test_a_quotation_ends_with_its_line(tmp_path):
    """Else an open quote makes one label of all rows behind it."""
    path = tmp_path / "d.csv"
    path.write_text('1.0,2.0,a\n3.0,4.0,"b\n5.0,6.0,a\n7.0,8.0,b\n')
    with pytest.raises(InputError) as caught:
        build_posterior(scenario_of(path, model="softmax"))
    assert caught.value.scenario_key == "posterior.data"


def test_declared_labels_are_read_by_their_declaration(tmp_path):
    """Numbers may be names: that all labels look like numbers decides nothing once the classes are declared."""
    path = tmp_path / "d.csv"
    path.write_text("".join(f"{i / 7},{i % 5},{i % 3}\n" for i in range(ROWS)))
    numbered = read(scenario_of(path, model="softmax", classes=3))[1]
    named = read(scenario_of(path, model="softmax", classes=["2", "1", "0"]))[1]
    np.testing.assert_array_equal(numbered, np.arange(ROWS) % 3)
    assert named.tolist() == [str(i % 3) for i in range(ROWS)]
    inferred = scenario_of(path, model="softmax")
    np.testing.assert_array_equal(read(inferred)[1], numbered)
    assert "posterior.classes" in listed(inferred)


@pytest.mark.parametrize("name", MODELS)
def test_a_row_of_a_device_changes_no_other(tmp_path, name):
    """What a device reads from its own data.npz, with the classes that the federation has declared."""
    pytest.importorskip(
        "flwr", reason="Flower is not installed: pip install 'wflmc[flower]'"
    )
    from wflmc.apps.federation.device import read_posterior

    model = MODELS[name]
    features, labels = rows_of(model)
    model_keys: dict[str, Any] = {"intercept": False, "prior_std": 1.0}
    if model.keys["model"] == "softmax":
        model_keys["classes"] = list(model.labels)
    (tmp_path / "model.json").write_text(
        json.dumps({"model": model_keys, "whitening": None, "prior_on": "parameters"})
    )
    path = tmp_path / "data.npz"
    np.savez(path, X=features, y=labels)
    expected = read_posterior(tmp_path)
    counts = Counter()
    for value in NUMBERS:
        y = [*labels[:5], value, *labels[6:]]
        try:
            stored = np.array(y)
        except ValueError:
            stored = np.array(y, object)
        np.savez(path, X=features, y=stored)
        try:
            posterior = read_posterior(tmp_path)
        except InputError:
            counts["refused"] += 1
            continue
        others = np.arange(ROWS) != 5
        assert np.array_equal(posterior.features, expected.features)
        assert np.array_equal(
            posterior.outcomes[:, others], expected.outcomes[:, others]
        )
        counts["others unchanged"] += 1
    assert counts.total() == len(NUMBERS)
    assert counts["others unchanged"] >= 1
