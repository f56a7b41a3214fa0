"""The folder of a fit: from a table to a model, its scores and its ledger; and from a model to predictions.

`model.npz` and `schema.json` are what predictions are made of. `fit.json` has scores on rows that were held out, which
ε does not cover.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.apps.tables.cells import parse_number
from wflmc.apps.tables.description import make_schema
from wflmc.apps.tables.encoding import (
    device_names,
    encode,
    outcomes,
    owners,
    unknown_categories,
)
from wflmc.apps.tables.estimators import (
    PrivacyWarning,
    PrivateClassifier,
    PrivateRegressor,
)
from wflmc.apps.tables.model import FittedModel
from wflmc.apps.tables.reading import as_frame
from wflmc.apps.tables.scaling import share_for
from wflmc.apps.tables.schema import Schema, read_schema
from wflmc.apps.tables.settings import Facts, promise_of, worth
from wflmc.channel import Link
from wflmc.evaluation import calibration, reliability
from wflmc.posterior.inputs import Names, as_classes
from wflmc.runs.documents import ClassScores, FitFile, FitPrivacy, read_document
from wflmc.scenario import NotCovered, plain, to_json
from wflmc.support.errors import InputError, without_data
from wflmc.support.storage import replacing, write_text
from wflmc.version import __version__

if TYPE_CHECKING:  # it is imported only where a table is used
    from pandas import DataFrame

MODEL, SCHEMA, FIT, LEDGER = "model.npz", "schema.json", "fit.json", "ledger.jsonl"
SHOWN = 10
"""Candidates that are kept."""
RESAMPLED = 200
"""Sets of labels that the floor of the calibration error is the mean of."""
RESAMPLED_OF_CLASS = 40
"""The same for each class."""


@without_data
class FitRequest(NamedTuple):
    """The arguments of `wflmc fit` and `wflmc tune`."""

    table: object
    """A file, or a frame of pandas or polars."""
    target: str
    epsilon: float
    delta: float
    task: str | None = None
    device: str | None = None
    devices: int | None = None
    id: str | None = None
    unit: str = "record"
    adjacency: str = "replace"
    link: Link | None = None
    declared: Mapping[str, object] | None = None
    missing: str | None = None
    """refuse or indicator; None: as declared, else refuse."""
    test: float = 0.25
    seed: int | None = None
    """None: secret."""
    private: bool = False
    """Whether settings are chosen by private selection."""


@without_data
class Held(NamedTuple):
    """Rows that were held out, or those that are fitted, as they were given."""

    X: NDArray[np.float64]
    y: np.ndarray
    owner: NDArray[np.intp]
    names: list[int] | list[str]
    """Of the devices."""


def _read(request: FitRequest) -> tuple[Schema, NDArray[np.float64], Held, Held]:
    """Return the schema of a table, public ranges[d, 2], and its rows as numbers: to fit, and held out."""
    if not 0 <= request.test < 1:
        raise InputError("--test", request.test, "a share from 0 to below 1")
    frame = as_frame(request.table)
    keys = {
        name: getattr(request, name)
        for name in ("task", "device", "id", "missing", "declared")
    }
    schema = make_schema(frame, target=request.target, **keys)
    X, ranges, _ = encode(frame, schema)
    y = outcomes(frame, schema)
    generator = np.random.default_rng(0)
    owner = owners(frame, schema, request.devices, generator)
    names = (
        list(range(owner.max() + 1))
        if schema.device is None
        else device_names(frame, schema)
    )
    test = np.isin(
        np.arange(len(X)), generator.permutation(len(X))[: int(request.test * len(X))]
    )
    _, owner[~test] = np.unique(
        owner[~test], return_inverse=True
    )  # a device whose rows are all held out has none
    if len(X) - test.sum() < 2:
        raise InputError(
            "TABLE", f"{len(X)} rows", "a table with at least two rows to fit"
        )
    fitted, held_out = (
        Held(X[part], y[part], owner[part], names) for part in (~test, test)
    )
    return schema, ranges, fitted, held_out


def facts_of(request: FitRequest) -> Facts:
    """Return what is public of a table, for `wflmc tune`."""
    schema, ranges, fitted, _ = _read(request)
    promise, (rows, features), devices = (
        promise_of(request),
        fitted.X.shape,
        int(fitted.owner.max()) + 1,
    )
    budget, units = (
        float(promise.budget(1)[0]),
        rows if request.unit == "record" else devices,
    )
    spent = budget * share_for(units, features, budget, bool(np.isnan(ranges).any()))
    return Facts(
        rows,
        features,
        len(schema.classes or []),
        devices,
        promise,
        spent,
        3,
        request.link,
    )


def fit_table(
    request: FitRequest, out: Path, progress: Callable[[int, int], None] | None = None
) -> FitFile:
    """Fit a table, a file of `wflmc fit` or a frame of pandas or polars, and write the folder of it.

    Raises:
        InputError: the table, a column or an option is not what it must be; nothing is written then.
    """
    began = time.perf_counter()
    if (out / FIT).exists() or (out / LEDGER).exists():
        raise InputError(
            "--out",
            str(out),
            "a new folder: fits of the same data add up, and this one holds another",
        )
    schema, ranges, fitted, held_out = _read(request)
    terms: Any = {
        name: getattr(request, name)
        for name in ("epsilon", "delta", "unit", "adjacency", "link")
    }
    terms |= {
        "ranges": ranges,
        "settings": "private" if request.private else None,
        "random_state": request.seed,
    }
    model: PrivateClassifier | PrivateRegressor = PrivateRegressor(
        target_range=schema.target_range, **terms
    )
    if schema.task == "classification":
        model = PrivateClassifier(classes=schema.classes, **terms)
    model.progress = progress
    out.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model.fit(fitted.X, fitted.y, fitted.owner, ledger=out / LEDGER)
    uncovered = [
        NotCovered(name, f"Read off the data: {name}.") for name in schema.taken
    ]
    if schema.device is not None:
        uncovered.append(
            NotCovered(
                "devices",
                "Which device holds a row, and how many rows each has, is public.",
            )
        )
    if request.private:
        uncovered.append(
            NotCovered(
                "seconds", "How long private selection took tells how often it ran."
            )
        )
    said = [
        str(item.message)
        for item in caught
        if issubclass(item.category, PrivacyWarning)
    ]  # others look at data
    document = describe(model, held_out, request.target)
    also = {
        "not_covered": [*uncovered, *document.not_covered],
        "warnings": [*said, *useless(document)],
    }
    document = document.model_copy(
        update={**also, "seconds": time.perf_counter() - began}
    )
    model.model_.save(out / MODEL)
    write_text(out / SCHEMA, schema.model_dump_json(indent=1))
    write_text(out / FIT, to_json(document.model_dump()))
    return document


def describe(
    estimator: PrivateClassifier | PrivateRegressor, held_out: Held, target: str = "y"
) -> FitFile:
    """Return what a fitted estimator chose, spent and reaches on rows that were held out, and what more is worth."""
    facts, spent = estimator.facts_, estimator.privacy_
    classes = (
        estimator.classes_.tolist()
        if isinstance(estimator, PrivateClassifier)
        else None
    )
    names = None if classes is None else tuple(classes)
    scores = {} if not len(held_out.X) else _scores(estimator.model_, held_out, names)
    looked = [
        NotCovered(
            "scores",
            "Scores look at held-out rows, which nothing hides.",
            published=False,
        )
    ]
    return FitFile(
        task="classification" if classes else "regression",
        target=target,
        **{name: getattr(facts, name) for name in ("rows", "features", "devices")},
        test_rows=len(held_out.X),
        classes=classes,
        **scores,
        epsilon_spent=spent.epsilon,
        epsilon_by_part=spent.by_part,
        privacy=FitPrivacy(
            **asdict(spent), left=max(0.0, spent.promised - spent.epsilon)
        ),
        settings=asdict(estimator.settings_),
        candidates=[one.plain for one in estimator.candidates_[:SHOWN]],
        worth={
            name: one.plain for name, one in worth(facts, estimator.settings_).items()
        },
        not_covered=[*(looked if scores else []), *estimator.not_covered_],
        warnings=[],
        seconds=0.0,
        version=__version__,
    )


def useless(fit: FitFile) -> list[str]:
    """Say where predictions are no better than a guess, or the probabilities of a class are off."""
    advice = "do not use them. More rows, a larger epsilon or public ranges would help"
    off = [
        f"The mean probability of {scores.label!r} is {scores.predicted_share:.3g}, but {scores.share:.3g} of the "
        "held-out rows have this label: do not take its probabilities at their word."
        for scores in fit.biased_classes
    ]
    if fit.nll is not None and fit.nll >= np.log(len(fit.classes or [0, 1])):
        return [
            f"Probabilities are no better than guessing on the held-out rows (nll {fit.nll:.3g}): {advice}.",
            *off,
        ]
    if fit.r2 is not None and fit.r2 <= 0:
        return [
            f"Predictions are no better than a constant on the held-out rows (R² {fit.r2:.3g}): {advice}."
        ]
    return off


def _scores(
    model: FittedModel, held_out: Held, classes: Names | None
) -> dict[str, Any]:
    """Return scores on rows that were held out, of classes or of numbers."""
    X, y = held_out.X, held_out.y
    if classes is None:
        mean, (low, high) = model.mean_and_spread(X)[0], model.interval(X)
        off, inside = y - mean, (y >= low) & (y <= high)
        return {
            "rmse": float(np.sqrt(np.mean(off**2))),
            "r2": float(1 - np.mean(off**2) / max(np.var(y), 1e-300)),
            "coverage_90": float(inside.mean()),
            "by_device": [
                *_by_device(
                    held_out, {"rmse": off**2, "coverage_90": inside.astype(float)}
                )
            ],
        }
    p = np.maximum(model.probabilities(X), 1e-12)
    p /= p.sum(1, keepdims=True)
    labels: Sequence[int | str] = classes
    truth = as_classes(y, classes)
    found = calibration(p, truth)
    drawn = (
        np.random.default_rng(0).random((RESAMPLED, len(p), 1))
        > np.cumsum(p, axis=1)[None, :, :-1]
    ).sum(-1)
    return {
        **{name: float(getattr(found, name)) for name in ("accuracy", "ece", "nll")},
        "ece_floor": float(
            np.mean([calibration(p, resampled).ece for resampled in drawn])
        ),
        "reliability": plain(reliability(found)),
        "by_class": [
            _class_scores(label, p[:, place], truth == place)
            for place, label in enumerate(labels)
        ],
        "by_device": [
            *_by_device(held_out, {"accuracy": (p.argmax(1) == truth).astype(float)})
        ],
    }


def _class_scores(
    label: int | str, probability: NDArray[np.float64], has_label: NDArray[np.bool_]
) -> ClassScores:
    """Return how well the probability of one class fits.

    Args:
        label: the class.
        probability: predicted for every held-out row, [n].
        has_label: which rows have this label, [n].
    """
    against_others = np.column_stack([1 - probability, probability])
    generator = np.random.default_rng(0)
    drawn = generator.random((RESAMPLED_OF_CLASS, len(probability))) < probability
    floors = [calibration(against_others, labels.astype(int)).ece for labels in drawn]
    return ClassScores(
        label=label,
        share=float(has_label.mean()),
        predicted_share=float(probability.mean()),
        ece=float(calibration(against_others, has_label.astype(int)).ece),
        ece_floor=float(np.mean(floors)),
    )


def _by_device(
    held_out: Held, values: dict[str, NDArray[np.float64]]
) -> Iterator[dict[str, float | str]]:
    """Yield the mean of values by device, those with most rows first."""
    owner = held_out.owner
    held = np.bincount(owner, minlength=len(held_out.names))
    for device in np.argsort(-held, kind="stable")[
        : min(4 * SHOWN, np.count_nonzero(held))
    ]:
        means = {
            name: float(each[owner == device].mean()) for name, each in values.items()
        }
        means |= {"rmse": means["rmse"] ** 0.5} if "rmse" in means else {}
        yield {"device": held_out.names[device], "rows": int(held[device]), **means}


def read_fit(folder: Path, option: str = "DIR") -> tuple[FitFile, Schema, FittedModel]:
    """Return what the folder of a fit holds."""
    if not (folder / FIT).is_file():
        raise InputError(
            option, str(folder), "a folder that `wflmc fit --out` has written"
        )
    document = read_document(folder / FIT, FitFile, option)
    schema = read_schema(folder / SCHEMA, option)
    model = FittedModel.load(folder / MODEL)
    features = sum(len(column.features) for column in schema.columns)
    if model.features != features or model.classes != len(schema.classes or []):
        raise InputError(
            option, str(folder), "a folder whose model and schema are those of one fit"
        )
    return document, schema, model


FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")
"""First characters by which spreadsheets take a cell of a CSV for a formula."""


def safe_for_spreadsheets(text: str) -> str:
    """Return a text that no spreadsheet runs as a formula: an apostrophe goes before one that looks like it.

    >>> safe_for_spreadsheets("=1+1"), safe_for_spreadsheets("-3.5"), safe_for_spreadsheets("patient 7")
    ("'=1+1", '-3.5', 'patient 7')
    """
    is_formula = text.startswith(FORMULA_SIGNS) and parse_number(text) is None
    return f"'{text}" if is_formula else text


def _write_predictions(predictions: DataFrame, out: Path) -> None:
    """Write a frame of predictions as .csv that spreadsheets may open."""
    texts = predictions.select_dtypes(exclude="number").columns
    safe = {
        name: [safe_for_spreadsheets(str(cell)) for cell in predictions[name]]
        for name in texts
    }
    table = predictions.assign(**safe).rename(columns=safe_for_spreadsheets)
    with replacing(out) as file:
        table.to_csv(file, index=False)


def predict_table(
    folder: Path, table: object, out: Path | None = None
) -> tuple[DataFrame, list[str]]:
    """Predict the rows of a table by the model of a fit.

    The model itself may be shown, but a prediction also tells about the row that it was made for: nothing hides new
    rows.

    Args:
        folder: the folder of a fit.
        table: a file or a frame with the columns of the fit.
        out: a .csv file to write predictions to. Texts that spreadsheets would run as formulas get an apostrophe there.

    Returns:
        The predictions as a frame, one row each, and warnings. Columns are the row's own id, `prediction` and
        `p_CLASS`; or `mean`, `lower` and `upper`, the ends of 90 % intervals.

    Raises:
        InputError: if the folder is not that of a fit, or a column of the table is not what it was at the fit.
    """
    import pandas as pd

    _, schema, model = read_fit(folder)
    frame = as_frame(table)
    X, _, _ = encode(frame, schema)
    columns: dict[str, np.ndarray] = {"row": np.arange(len(frame))}
    if schema.id is not None and schema.id in frame:
        columns = {schema.id: frame[schema.id].to_numpy()}
    if schema.task == "classification":
        p, classes = model.probabilities(X), np.asarray(schema.classes)
        columns |= {
            "prediction": classes[p.argmax(1)],
            **{f"p_{label}": p[:, at] for at, label in enumerate(classes)},
        }
    else:
        low, high = model.interval(X)
        columns |= {"mean": model.mean_and_spread(X)[0], "lower": low, "upper": high}
    predictions = pd.DataFrame(columns)
    if out is not None:
        _write_predictions(predictions, out)
    unknown = unknown_categories(frame, schema)
    return predictions, [
        f"Some rows of column {name!r} have a category that the model does not know."
        for name in unknown
    ]
