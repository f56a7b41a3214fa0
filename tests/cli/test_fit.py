"""`wflmc fit`, `predict` and `tune`: from a table to predictions, and one sentence for every table that will not do."""

import json

import numpy as np
import pandas as pd
import pytest

from wflmc.apps.tables import choosing as chosen
from wflmc.apps.tables import folder
from wflmc.privacy import Ledger, Privacy

from ..conftest import FULL, count
from ..error_tools import missing_facts, names_key


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch):
    if not FULL:
        candidates = {
            "CLIPS": (0.4,),
            "TRAVELS": (0.25, 0.5),
            "PRIORS": (4.0,),
            "ROUNDS": (50,),
            "MAX_STAND_INS": 1,
            "MAX_MOMENTS": 0,
        }
        for name, values in candidates.items():
            monkeypatch.setattr(chosen, name, values)


def patients(rows: int = 300) -> pd.DataFrame:
    g = np.random.default_rng(0)
    frame = pd.DataFrame({
        "person": [f"p{row}" for row in range(rows)],
        "age": g.integers(20, 90, rows),
        "bmi": 25 + 5 * g.standard_normal(rows),
        "sex": g.choice(["f", "m"], rows),
        "constant": 7.0,
        "clinic": g.choice(["north", "south", "west"], rows),
    })  # fmt: skip
    risk = (frame["age"] - 55) / 10 + (frame["bmi"] - 25) / 3
    frame["state"] = np.where(risk + 0.7 * g.standard_normal(rows) > 0, "ill", "well")
    frame["cost"] = 1000 + 80 * risk + 40 * g.standard_normal(rows)
    return frame


FIT = [
    "--epsilon",
    "3",
    "--delta",
    "1e-5",
    "--device",
    "clinic",
    "--id",
    "person",
    "--seed",
    "0",
]


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "patients.csv"
    patients().drop(columns="cost").to_csv(path, index=False, sep=";")
    return path


def test_from_a_csv_to_predictions_and_a_page(call, table, tmp_path):
    model, out = tmp_path / "model", tmp_path / "predictions.csv"
    code, printed, _ = call(
        "fit", table, "--target", "state", *FIT, "--out", model, "--json"
    )
    assert code == 0
    document = json.loads(printed)
    assert {
        "accuracy",
        "ece",
        "nll",
        "epsilon_spent",
        "epsilon_by_part",
        "settings",
        "seconds",
    } <= set(document)
    assert document["accuracy"] > 0.7
    assert document["classes"] == ["ill", "well"]
    assert document["epsilon_spent"] <= 3
    assert sum(document["epsilon_by_part"].values()) == pytest.approx(
        document["epsilon_spent"]
    )
    assert document["privacy"]["adjacency"] == "replace"
    assert {"scores", "classes", "random_state", "categories of sex"} <= {
        item["name"] for item in document["not_covered"]
    }
    assert document == json.loads((model / "fit.json").read_text())
    # The ledger has the losses that fit.json speaks of, before anything was drawn from them.
    promise = Privacy(3.0, 1e-5, unit="record", example_clip=1.0)
    ledger = Ledger(promise, 3, path=model / "ledger.jsonl", read_only=True)
    assert promise.epsilon_spent(ledger.spent) == pytest.approx(
        document["epsilon_spent"]
    )
    assert ledger.spent.max() == pytest.approx(
        sum(document["privacy"]["loss"].values())
    )

    unseen = patients(50).drop(columns=["state", "cost", "clinic"])
    unseen.loc[3, "sex"] = "x"
    unseen.to_csv(tmp_path / "new.csv", index=False)
    code, _, errors = call("predict", model, tmp_path / "new.csv", "--out", out)
    assert code == 0
    assert not missing_facts(errors, ("column 'sex'", "category"))
    existing = tmp_path / "new.csv"
    refused = call("predict", model, existing, "--out", existing)
    assert names_key(refused[2], "--out", existing)
    predictions = pd.read_csv(out)
    assert list(predictions.columns) == ["person", "prediction", "p_ill", "p_well"]
    assert list(predictions["person"]) == list(unseen["person"])
    assert predictions[["p_ill", "p_well"]].sum(axis=1).to_numpy() == pytest.approx(1.0)
    assert np.array_equal(
        predictions["prediction"] == "ill", predictions["p_ill"] > predictions["p_well"]
    )

    assert call("report", model)[0] == 0
    page = (model / "report.html").read_text()
    assert all(
        words in page
        for words in (
            "What ε bought",
            "adjacency = replace",
            "north",
            "calibration error",
        )
    )
    code, _, errors = call("fit", table, "--target", "state", *FIT, "--out", model)
    assert code == 2
    assert names_key(errors, "--out", model)
    damaged_files_are_refused(call, model, tmp_path / "new.csv", tmp_path / "never.csv")
    formulas_are_written_as_text(call, model, unseen, tmp_path)


DAMAGE = {
    "schema.json": [
        "",
        "[]",
        "{}",
        '{"task": "regression", "columns": [{"name": ["x"], "kind": "numeric"}]}',
        "[" * 9999,
    ],
    "fit.json": ["", "null", "{}", '{"task": 7}'],
    "model.npz": ["", "PK", "\x93NUMPY"],
}


def damaged_files_are_refused(call, model, table, out):
    for name, contents in DAMAGE.items():
        whole = (model / name).read_bytes()
        for content in (
            *(text.encode() for text in contents),
            whole[: len(whole) // 2],
        ):
            (model / name).write_bytes(content)
            commands = [("predict", model, table, "--out", out), ("report", model)]
            for command in commands if name == "fit.json" else commands[:1]:
                code, _, errors = call(*command)
                assert (code, "Traceback" in errors, out.exists()) == (
                    2,
                    False,
                    False,
                ), (name, content)
        (model / name).write_bytes(whole)


def formulas_are_written_as_text(call, model, unseen, folder):
    unseen.assign(
        person=["=cmd|' /C calc'!A0", "@x", "-3.5", *unseen["person"][3:]]
    ).to_csv(folder / "f.csv", index=False)
    assert (
        call("predict", model, folder / "f.csv", "--out", folder / "safe.csv")[0] == 0
    )
    assert pd.read_csv(folder / "safe.csv", dtype=str)["person"][:3].tolist() == [
        "'=cmd|' /C calc'!A0",
        "'@x",
        "-3.5",
    ]


def test_numbers_are_predicted_with_intervals(call, tmp_path, monkeypatch):
    if not FULL:
        monkeypatch.setattr(folder, "value_of_more", lambda *_: {})
    frame = patients(count(600, 2000)).drop(columns=["state", "clinic"])
    frame.to_parquet(tmp_path / "patients.parquet")
    model, out = tmp_path / "model", tmp_path / "predictions.csv"
    options = [
        "--epsilon",
        "3",
        "--delta",
        "1e-5",
        "--devices",
        "5",
        "--id",
        "person",
        "--seed",
        "1",
        "--json",
    ]
    code, printed, _ = call(
        "fit",
        tmp_path / "patients.parquet",
        "--target",
        "cost",
        *options,
        "--out",
        model,
    )
    assert code == 0
    document = json.loads(printed)
    assert document["task"] == "regression"
    assert document["devices"] == 5
    assert 0.75 < document["coverage_90"] <= 1  # of 150 rows; tests/tables looks closer
    parts = {"scaling", "sampling", "noise scale"}
    # With many rows, whitening is worth its price.
    assert set(document["epsilon_by_part"]) - {"whitening"} == parts
    assert call("predict", model, tmp_path / "patients.parquet", "--out", out)[0] == 0
    predictions = pd.read_csv(out)
    assert list(predictions.columns) == ["person", "mean", "lower", "upper"]
    assert np.all(predictions["lower"] < predictions["upper"])
    assert np.corrcoef(predictions["mean"], frame["cost"])[0, 1] > 0.7
    assert call("report", model)[0] == 0


def test_tune_shows_candidates_and_says_that_choosing_is_free(call, table):
    options = [
        "--epsilon",
        "3",
        "--delta",
        "1e-5",
        "--device",
        "clinic",
        "--id",
        "person",
    ]
    code, printed, _ = call("tune", table, "--target", "state", *options, "--json")
    assert code == 0
    document = json.loads(printed)
    assert document["facts"] == {"rows": 225, "features": 5, "classes": 2, "devices": 3}
    first, *others = (candidate["rank"] for candidate in document["candidates"])
    assert others == sorted(others)
    # Of settings that are as good, the one with most draws is chosen.
    assert first <= 1.01 * others[0]
    assert document["privacy"]["adjacency"] == "replace"
    assert "costs no privacy" in document["cost"]
    assert {
        "as it is",
        "twice epsilon",
        "twice the rows and devices",
        "twice the rounds",
    } == set(document["worth"])


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({}, ["--target", "nothing"], "--target = 'nothing'"),
        ({"bmi": np.nan}, [], "column 'bmi' has missing"),
        ({"person": "p0"}, [], "id 'person' has repeated"),
        ({"state": "ill"}, [], "target 'state' has one"),
        ({}, ["--epsilon", "-1"], "--epsilon = -1"),
        ({}, ["--unit", "person"], "--unit = 'person'"),
        ({}, ["--test", "1"], "--test = 1"),
        ({}, ["--seed", "x"], "--seed = 'x'"),
        ({}, ["--task", "clustering"], "--task = 'clustering'"),
        ({}, ["--schema", "nothing.json"], "--schema = 'nothing.json'"),
        ({"bmi": "9" * 400}, [], "column 'bmi' has infinite"),
    ],
)
def test_a_table_that_will_not_do_is_one_sentence_and_nothing_is_written(
    call, tmp_path, change, options, words
):
    frame = patients(40).drop(columns="cost").assign(**change)
    frame.to_csv(tmp_path / "bad.csv", index=False)
    arguments = ["--target", "state", *FIT, "--out", tmp_path / "model", *options]
    code, printed, errors = call("fit", tmp_path / "bad.csv", *arguments)
    assert code == 2
    assert printed == ""
    assert words in errors
    assert len(errors.strip().splitlines()) == 1
    assert not (tmp_path / "model").exists()


def test_a_folder_that_is_no_fit_is_refused(call, table, tmp_path):
    code, _, errors = call("predict", tmp_path, table, "--out", tmp_path / "p.csv")
    assert code == 2
    assert "wflmc fit --out" in errors
    assert call("predict", tmp_path, table, "--out", tmp_path / "p.txt")[0] == 2
