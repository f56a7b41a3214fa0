"""The folder of a fit: from a table to a model, and from a model to predictions.

`model.npz` and `schema.json` are what predictions are made of, and `ledger.jsonl` is
what was spent. `fit.json` has scores on rows that were held out, which ε does not
cover.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.apps.tables.cells import parse_number
from wflmc.apps.tables.choosing import value_of_more
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
from wflmc.apps.tables.public import (
    PublicExamples,
    check_distinct,
    learn_public_rows,
    public_arrays,
)
from wflmc.apps.tables.reading import as_frame
from wflmc.apps.tables.scaling import scaling_fraction
from wflmc.apps.tables.schema import Missing, Schema, Task, read_schema
from wflmc.apps.tables.settings import Facts, promise_of
from wflmc.channel import Link
from wflmc.evaluation import calibration, reliability
from wflmc.posterior.inputs import Names, as_classes, class_names
from wflmc.runs.documents import (
    Bins,
    ClassScores,
    FitFile,
    FitPrivacy,
    PublicPart,
    read_document,
)
from wflmc.runs.folder import PRIOR_FILE
from wflmc.scenario import NotCovered, plain, to_json
from wflmc.support.errors import InputError, renamed_keys, without_data
from wflmc.support.storage import replacing, write_text
from wflmc.version import __version__

if TYPE_CHECKING:  # it is imported only where a table is used
    from pandas import DataFrame

MODEL = "model.npz"
"""The file of a fit with its draws and scales."""
SCHEMA = "schema.json"
"""The file of a fit that says how a table is encoded."""
FIT = "fit.json"
"""The file of a fit with settings, privacy and scores."""
LEDGER = "ledger.jsonl"
"""The file of a fit with what was spent."""
MAX_SHOWN_CANDIDATES = 10
"""Candidates that fit.json has."""
MAX_SHOWN_DEVICES = 40
"""Devices whose scores fit.json has."""
RESAMPLED_LABELS = 200
"""Sets of labels that the floor of the calibration error is the mean of."""
RESAMPLED_LABELS_OF_CLASS = 40
"""The same for each class."""
RELEASES_BEFORE_CHAIN = 3
"""Rounds of the link that releases may take before a chain, for `wflmc tune`."""
SPLIT_SEED = 0
"""Seed by which rows are dealt out and held out: it must not depend on the data."""
SCORES_SEED = 0
"""Seed by which labels are drawn for floors of the calibration error."""
SMALLEST_PROBABILITY = 1e-12
"""In the place of a predicted probability of zero, whose logarithm is taken."""
SMALLEST_VARIANCE = 1e-300
"""In the place of a variance of zero, which is divided by."""
FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")
"""First characters by which spreadsheets take a cell of a CSV for a formula."""


@without_data
class FitRequest(NamedTuple):
    """The arguments of `wflmc fit` and `wflmc tune`.

    Args:
        table: a file, or a frame of pandas or polars.
        target: the column to predict.
        epsilon: of the promise, for everything that is done.
        delta: of the promise.
        task: classification or regression; None: as the target suggests.
        device: the column that says which device holds a row.
        devices: else the number of devices, among which rows are dealt out.
        id: the column of unique names of rows.
        unit: whose change is hidden: record or device.
        adjacency: replace or add-remove.
        link: the channel; None for an ideal one.
        declared: part of a schema as plain data.
        missing: refuse or indicator; None: as declared, else refuse.
        test: fraction of the rows that is held out.
        seed: None: secret.
        private: whether settings are chosen by private selection.
        public: a file, or a frame, of public rows with the same columns; it may lack
            the target, and needs no device and no id.
    """

    table: object
    target: str
    epsilon: float
    delta: float
    task: Task | None = None
    device: str | None = None
    devices: int | None = None
    id: str | None = None
    unit: str = "record"
    adjacency: str = "replace"
    link: Link | None = None
    declared: Mapping[str, object] | None = None
    missing: Missing | None = None
    test: float = 0.25
    seed: int | None = None
    private: bool = False
    public: object = None


@without_data
class TableRows(NamedTuple):
    """Rows that were held out, or those that are fitted, in their own units.

    Args:
        X: features, [n, d].
        y: labels or targets, [n].
        owner: the index of each row's device among `names`, [n].
        names: of the devices; among rows to fit, of those that have any.
    """

    X: NDArray[np.float64]
    y: np.ndarray
    owner: NDArray[np.intp]
    names: Sequence[int | str]


@without_data
class _SplitTable(NamedTuple):
    """A table as numbers.

    Args:
        schema: by which it was encoded.
        ranges: of the features where public, [d, 2]; nan elsewhere, and never measured.
        fitted: rows to fit.
        held_out: other rows.
        public: features and targets of public rows; None without any.
        unknown: columns of held-out rows with categories that public rows lack.
    """

    schema: Schema
    ranges: NDArray[np.float64]
    fitted: TableRows
    held_out: TableRows
    public: PublicExamples | None
    unknown: list[str]


def _read_table(request: FitRequest) -> _SplitTable:
    """Return the table of a request as numbers, split by a seed that never changes.

    One generator assigns rows to devices, where no column does, and then draws the
    rows that are held out: in another order the same table would be split otherwise.
    """
    if not 0 <= request.test < 1:
        raise InputError("--test", request.test, "a fraction of at least 0, below 1")
    frame = as_frame(request.table)
    public_frame = None
    if request.public is not None:
        with renamed_keys({"table": "public"}):
            public_frame = as_frame(request.public)
    schema = make_schema(
        frame,
        target=request.target,
        task=request.task,
        device=request.device,
        id=request.id,
        missing=request.missing,
        declared=request.declared,
        public=public_frame,
    )
    encoded = encode(frame, schema)
    y = outcomes(frame, schema)
    public = None
    if public_frame is not None:
        public_X = encode(public_frame, schema).X
        is_labelled = schema.target in public_frame.columns
        public_y = outcomes(public_frame, schema) if is_labelled else None
        # All rows count here; the fit compares those without the held-out ones.
        check_distinct(public_X, public_y, encoded.X, y)
        public = (public_X, public_y)
    generator = np.random.default_rng(SPLIT_SEED)
    owner = owners(frame, schema, devices=request.devices, generator=generator)
    names: Sequence[int | str] = range(owner.max() + 1)
    if schema.device is not None:
        names = device_names(frame, schema)
    rows = len(encoded.X)
    held_out_rows = generator.permutation(rows)[: int(request.test * rows)]
    is_held_out = np.isin(np.arange(rows), held_out_rows)
    if rows - is_held_out.sum() < 2:
        requirement = "a table with at least two rows to fit"
        raise InputError("TABLE", f"{rows} rows", requirement)
    held_out = TableRows(
        encoded.X[is_held_out], y[is_held_out], owner[is_held_out], names
    )
    # A device whose rows are all held out takes no part in the fit, for which the
    # others are numbered without gaps.
    is_fitted = ~is_held_out
    fitting_devices, fitted_owner = np.unique(owner[is_fitted], return_inverse=True)
    fitted_names = np.asarray(names)[fitting_devices].tolist()
    fitted = TableRows(encoded.X[is_fitted], y[is_fitted], fitted_owner, fitted_names)
    unknown: list[str] = []
    if public is not None:
        unknown = unknown_categories(frame[is_held_out], schema)
    return _SplitTable(schema, encoded.ranges, fitted, held_out, public, unknown)


def facts_of(request: FitRequest) -> Facts:
    """Return what is public of a table, for `wflmc tune`.

    Nothing is spent. The facts have the table's size, columns and classes; the latter
    count as equally frequent. What a fit spends before its chain is estimated: scales
    of the features are counted, releases of class counts, of the scale of a target and
    of its noise are not.

    Args:
        request: as for a fit.

    Returns:
        The facts, close to those that a fit of these rows begins its chain with.

    Raises:
        InputError: the table, a column or an option is not what it must be.
    """
    table = _read_table(request)
    promise = promise_of(request)
    rows, features = table.fitted.X.shape
    classes = table.schema.classes or []
    devices = int(table.fitted.owner.max()) + 1
    facts = Facts(
        rows=rows,
        features=features,
        classes=len(classes),
        devices=devices,
        promise=promise,
        spent=0.0,
        link=request.link,
    )
    if table.public is not None:
        names: Names = class_names((), classes) if classes else ()
        examples = public_arrays(table.public, features, names)
        ranges = table.ranges
        if not classes:
            target_range = table.schema.target_range or (np.nan, np.nan)
            ranges = np.vstack([ranges, target_range])
        public = learn_public_rows(*examples, len(classes), ranges)
        return facts._replace(public=public, shares=public.shares)
    budget = float(promise.budget(1)[0])
    units = rows if request.unit == "record" else devices
    budget_fraction = scaling_fraction(
        units,
        columns=features,
        budget=budget,
        finds_ranges=bool(np.isnan(table.ranges).any()),
    )
    return facts._replace(
        spent=budget * budget_fraction, rounds_before=RELEASES_BEFORE_CHAIN
    )


def fit_table(
    request: FitRequest, out: Path, progress: Callable[[int, int], None] | None = None
) -> FitFile:
    """Fit a table, and write the folder of the fit.

    Everything that looks at the rows to fit is paid for from one ε, and the ledger in
    the folder is charged before a result is kept. Rows that are held out score the
    predictions, outside ε.

    Args:
        request: the table and the options of `wflmc fit`.
        out: the folder, made if it does not exist.
        progress: called with the parts that are done and their number, while settings
            are chosen.

    Returns:
        What fit.json has.

    Raises:
        InputError: the table, a column or an option is not what it must be, or the
            folder holds a fit; no fit is written then. Of a fit that private selection
            refuses after other parts were paid for, the ledger remains.
    """
    began = time.perf_counter()
    if (out / FIT).exists() or (out / LEDGER).exists():
        reason = "this one holds a fit already, and what fits spend adds up"
        raise InputError("--out", str(out), f"a new folder: {reason}")
    table = _read_table(request)
    source = _source_of(request.public)
    model = _estimator(request, table)
    model.progress = progress
    out.mkdir(parents=True, exist_ok=True)
    fitted = table.fitted
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model.fit(fitted.X, fitted.y, fitted.owner, ledger=out / LEDGER)
    privacy_warnings = [
        str(warning.message)
        for warning in caught
        if issubclass(warning.category, PrivacyWarning)  # others look at data
    ]
    described = describe(model, table.held_out, request.target)
    uncovered = _not_covered(request, table.schema)
    document = described.model_copy(
        update={
            "not_covered": [*uncovered, *described.not_covered],
            "warnings": [
                *privacy_warnings,
                *prediction_warnings(described),
                *_unknown_warnings(table.unknown),
            ],
            "seconds": time.perf_counter() - began,
        }
    )
    public = document.public
    if public is not None:
        public = public.model_copy(update=source._asdict())
        document = document.model_copy(update={"public": public})
        _save_prior(out / PRIOR_FILE, model, source)
    model.model_.save(out / MODEL)
    write_text(out / SCHEMA, table.schema.model_dump_json(indent=1))
    write_text(out / FIT, to_json(document.model_dump()))
    return document


class _Source(NamedTuple):
    """A file of public rows.

    Args:
        source: its name; None for a frame.
        sha256: of its content.
    """

    source: str | None
    sha256: str | None


def _source_of(table: object) -> _Source:
    """Return the file that public rows were read from."""
    if not isinstance(table, str | Path):
        return _Source(None, None)
    path = Path(table).expanduser()
    return _Source(path.name, hashlib.sha256(path.read_bytes()).hexdigest())


def _save_prior(
    path: Path, model: PrivateClassifier | PrivateRegressor, source: _Source
) -> None:
    """Write the prior by labelled public rows, as run folders have it.

    The mean is that of parameters for scaled features with a constant. With `prior_on`
    "whitened" the deviation is that of W⁻ᵀθ, with W the array `root`.
    """
    public = model.facts_.public
    if public is None or public.prior_mean is None:
        return
    settings = model.settings_
    with replacing(path) as file:
        np.savez(
            file,
            mean=public.prior_mean,
            std=settings.prior_std,
            prior_on="whitened" if settings.whiten else "parameters",
            root=public.root,
            rows=len(public.Z),
            source=source.source or "",
            sha256=source.sha256 or "",
        )


def _estimator(
    request: FitRequest, table: _SplitTable
) -> PrivateClassifier | PrivateRegressor:
    """Return the estimator of a request, not yet fitted."""
    schema = table.schema
    settings = "private" if request.private else None
    if schema.task == "classification":
        return PrivateClassifier(
            epsilon=request.epsilon,
            delta=request.delta,
            unit=request.unit,
            adjacency=request.adjacency,
            link=request.link,
            classes=schema.classes,
            ranges=table.ranges,
            public=table.public,
            settings=settings,
            random_state=request.seed,
        )
    return PrivateRegressor(
        epsilon=request.epsilon,
        delta=request.delta,
        unit=request.unit,
        adjacency=request.adjacency,
        link=request.link,
        target_range=schema.target_range,
        ranges=table.ranges,
        public=table.public,
        settings=settings,
        random_state=request.seed,
    )


def _not_covered(request: FitRequest, schema: Schema) -> list[NotCovered]:
    """Return what ε does not cover of a table, besides what it lacks of a fit."""
    uncovered = [
        NotCovered(name, f"Read off the data: {name}.") for name in schema.taken
    ]
    if schema.device is not None:
        text = "Which device holds a row, and how many rows each has, is public."
        uncovered.append(NotCovered("devices", text))
    if request.private:
        text = "The duration of private selection reveals how often it ran."
        uncovered.append(NotCovered("seconds", text))
    return uncovered


def describe(
    estimator: PrivateClassifier | PrivateRegressor,
    held_out: TableRows,
    target: str = "y",
) -> FitFile:
    """Describe a fitted estimator: what it chose, spent and reaches.

    What more of something would be worth is estimated on public stand-ins, which takes
    seconds.

    Args:
        estimator: after its fit.
        held_out: rows that score its predictions; with none of them there are no
            scores.
        target: the name of the column that is predicted.

    Returns:
        The content of fit.json, without warnings and with 0 seconds.
    """
    facts = estimator.facts_
    spent = estimator.privacy_
    classes: Names | None = None
    if isinstance(estimator, PrivateClassifier):
        classes = tuple(estimator.classes_.tolist())
    scores = _HeldOutScores()
    uncovered = list(estimator.not_covered_)
    if len(held_out.X):
        scores = _scores(estimator.model_, held_out, classes)
        text = "Scores, and warnings, are from held-out rows, which nothing protects."
        uncovered.insert(0, NotCovered("scores", text, published=False))
    shown_candidates = estimator.candidates_[:MAX_SHOWN_CANDIDATES]
    expected = value_of_more(facts, estimator.settings_)
    left = max(0.0, spent.promised - spent.epsilon)
    public = None
    if facts.public is not None:
        public = PublicPart(
            rows=len(facts.public.Z),
            labelled=facts.public.is_labelled,
            digest=facts.public.name,
        )
    return FitFile(
        task="classification" if classes else "regression",
        target=target,
        rows=facts.rows,
        features=facts.features,
        devices=facts.devices,
        test_rows=len(held_out.X),
        classes=None if classes is None else list(classes),
        accuracy=scores.accuracy,
        ece=scores.ece,
        ece_floor=scores.ece_floor,
        nll=scores.nll,
        rmse=scores.rmse,
        r2=scores.r2,
        coverage_90=scores.coverage_90,
        reliability=scores.reliability,
        by_class=list(scores.by_class),
        by_device=list(scores.by_device),
        epsilon_spent=spent.epsilon,
        epsilon_by_part=spent.by_part,
        privacy=FitPrivacy(**asdict(spent), left=left),
        settings=asdict(estimator.settings_),
        candidates=[candidate.plain for candidate in shown_candidates],
        worth={name: case.plain for name, case in expected.items()},
        public=public,
        prior_distance=estimator.prior_distance_,
        not_covered=uncovered,
        warnings=[],
        seconds=0.0,
        version=__version__,
    )


def prediction_warnings(fit: FitFile) -> list[str]:
    """Return warnings about predictions that should not be used as they are.

    Args:
        fit: with scores on rows that were held out; without scores there is no warning.

    Returns:
        A sentence where predictions are no better than a guess or a constant, and one
        for each class whose mean probability is off.
    """
    advice = "do not use them. More rows, a larger epsilon or public ranges would help"
    if fit.public is not None:
        advice = (
            "do not use them. Check that public rows have the units of the table and "
            "labels that mean the same, or fit without them"
        )
    biased = [_bias_warning(scores) for scores in fit.biased_classes]
    classes = len(fit.classes or [0, 1])
    if fit.nll is not None and fit.nll >= np.log(classes):
        problem = "Probabilities are no better than guessing on the held-out rows"
        return [f"{problem} (nll {fit.nll:.3g}): {advice}.", *biased]
    if fit.r2 is not None and fit.r2 <= 0:
        problem = "Predictions are no better than a constant on the held-out rows"
        return [f"{problem} (R² {fit.r2:.3g}): {advice}."]
    return biased


def _unknown_warnings(columns: Sequence[str]) -> list[str]:
    """Return warnings about columns with categories that no public row has.

    Args:
        columns: in which some held-out rows have such categories.
    """
    problem = "categories that no public row has, which count as unknown"
    return [
        f"Some held-out rows of column {name!r} have {problem}." for name in columns
    ]


def _bias_warning(scores: ClassScores) -> str:
    """Return the warning about a class whose mean probability is off."""
    mean = f"The mean probability of {scores.label!r} is {scores.predicted_share:.3g}"
    truth = f"{scores.share:.3g} of the held-out rows have this label"
    return f"{mean}, but {truth}: do not rely on its probabilities."


class _HeldOutScores(NamedTuple):
    """Scores on rows that were held out, as fit.json has them.

    None, or empty, are those of the other task, and all where no rows were held out.
    """

    accuracy: float | None = None
    ece: float | None = None
    ece_floor: float | None = None
    nll: float | None = None
    rmse: float | None = None
    r2: float | None = None
    coverage_90: float | None = None
    reliability: Bins | None = None
    by_class: Sequence[ClassScores] = ()
    by_device: Sequence[dict[str, int | float | str]] = ()


def _scores(
    model: FittedModel, held_out: TableRows, classes: Names | None
) -> _HeldOutScores:
    """Return scores of classes, or of numbers."""
    if classes is None:
        return _regression_scores(model, held_out)
    return _classification_scores(model, held_out, classes)


def _regression_scores(model: FittedModel, held_out: TableRows) -> _HeldOutScores:
    """Return scores of numbers."""
    y = held_out.y
    mean = model.mean_and_spread(held_out.X).mean
    interval = model.interval(held_out.X)
    squared_errors = (y - mean) ** 2
    is_inside = (y >= interval.lower) & (y <= interval.upper)
    by_device = _by_device(
        held_out,
        values={"rmse": squared_errors, "coverage_90": is_inside.astype(float)},
    )
    for row in by_device:
        row["rmse"] = float(row["rmse"]) ** 0.5
    variance = max(np.var(y), SMALLEST_VARIANCE)
    return _HeldOutScores(
        rmse=float(np.sqrt(np.mean(squared_errors))),
        r2=float(1 - np.mean(squared_errors) / variance),
        coverage_90=float(is_inside.mean()),
        by_device=by_device,
    )


def _classification_scores(
    model: FittedModel, held_out: TableRows, classes: Names
) -> _HeldOutScores:
    """Return scores of classes."""
    predicted = model.probabilities(held_out.X)
    p = np.maximum(predicted, SMALLEST_PROBABILITY)
    p /= p.sum(1, keepdims=True)
    truth = as_classes(held_out.y, classes)
    scores = calibration(p, truth)
    # The floor: the calibration error where labels have the predicted probabilities.
    generator = np.random.default_rng(SCORES_SEED)
    uniform = generator.random((RESAMPLED_LABELS, len(p), 1))
    steps = np.cumsum(p, axis=1)[None, :, :-1]
    drawn_labels = (uniform > steps).sum(-1)
    floors = [calibration(p, drawn).ece for drawn in drawn_labels]
    is_right = p.argmax(1) == truth
    labels: Sequence[int | str] = classes
    by_class = [
        _class_scores(label, p[:, index], truth == index)
        for index, label in enumerate(labels)
    ]
    by_device = _by_device(held_out, values={"accuracy": is_right.astype(float)})
    return _HeldOutScores(
        accuracy=float(scores.accuracy),
        ece=float(scores.ece),
        ece_floor=float(np.mean(floors)),
        nll=float(scores.nll),
        reliability=plain(reliability(scores)),
        by_class=by_class,
        by_device=by_device,
    )


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
    generator = np.random.default_rng(SCORES_SEED)
    uniform = generator.random((RESAMPLED_LABELS_OF_CLASS, len(probability)))
    drawn_labels = uniform < probability
    scores_of_draws = [
        calibration(against_others, labels) for labels in drawn_labels.astype(int)
    ]
    floor = np.mean([scores.ece for scores in scores_of_draws])
    scores = calibration(against_others, has_label.astype(int))
    return ClassScores(
        label=label,
        share=float(has_label.mean()),
        predicted_share=float(probability.mean()),
        ece=float(scores.ece),
        ece_floor=float(floor),
    )


def _by_device(
    held_out: TableRows, values: Mapping[str, NDArray[np.float64]]
) -> list[dict[str, int | float | str]]:
    """Return the mean of values by device, those with most rows first.

    Args:
        held_out: rows.
        values: of every row, [n] each, by name.
    """
    owner = held_out.owner
    row_counts = np.bincount(owner, minlength=len(held_out.names))
    shown = min(MAX_SHOWN_DEVICES, np.count_nonzero(row_counts))
    table = []
    for device in np.argsort(-row_counts, kind="stable")[:shown]:
        row: dict[str, int | float | str] = {
            "device": held_out.names[device],
            "rows": int(row_counts[device]),
        }
        for name, row_values in values.items():
            row[name] = float(row_values[owner == device].mean())
        table.append(row)
    return table


class Fit(NamedTuple):
    """What the folder of a fit holds.

    Args:
        document: fit.json.
        schema: how a table is encoded.
        model: by which rows are predicted.
    """

    document: FitFile
    schema: Schema
    model: FittedModel


def read_fit(folder: Path, option: str = "DIR") -> Fit:
    """Read the folder of a fit.

    Files are checked, one by one and against each other, so that the folder may come
    from anywhere.

    Args:
        folder: that `wflmc fit --out` has written.
        option: the option that names it, for errors.

    Returns:
        The fit.

    Raises:
        InputError: a file is absent or damaged, or model and schema do not fit each
            other.
    """
    if not (folder / FIT).is_file():
        requirement = "a folder that `wflmc fit --out` has written"
        raise InputError(option, str(folder), requirement)
    document = read_document(folder / FIT, FitFile, option)
    schema = read_schema(folder / SCHEMA, option)
    model = FittedModel.load(folder / MODEL)
    features = sum(len(column.features) for column in schema.columns)
    if model.features != features or model.classes != len(schema.classes or []):
        requirement = "a folder whose model and schema are those of one fit"
        raise InputError(option, str(folder), requirement)
    return Fit(document, schema, model)


def safe_for_spreadsheets(text: str) -> str:
    """Return a text that no spreadsheet runs as a formula.

    Args:
        text: a cell of a CSV file.

    Returns:
        The text, with an apostrophe before it if it begins as a formula does and is no
        number.

    >>> safe_for_spreadsheets("=1+1"), safe_for_spreadsheets("-3.5")
    ("'=1+1", '-3.5')
    >>> safe_for_spreadsheets("patient 7")
    'patient 7'
    """
    is_formula = text.startswith(FORMULA_SIGNS) and parse_number(text) is None
    return f"'{text}" if is_formula else text


def _write_predictions(predictions: DataFrame, out: Path) -> None:
    """Write a frame of predictions as a CSV file that spreadsheets may open."""
    texts = predictions.select_dtypes(exclude="number").columns
    safe = {
        name: [safe_for_spreadsheets(str(cell)) for cell in predictions[name]]
        for name in texts
    }
    table = predictions.assign(**safe).rename(columns=safe_for_spreadsheets)
    with replacing(out) as file:
        table.to_csv(file, index=False)


class TablePredictions(NamedTuple):
    """Predictions of the rows of a table.

    Args:
        predictions: a frame with one row for each of the table's.
        warnings: sentences about rows that the model does not know.
    """

    predictions: DataFrame
    warnings: list[str]


def predict_table(
    folder: Path, table: object, out: Path | None = None
) -> TablePredictions:
    """Predict the rows of a table by the model of a fit.

    The model itself may be shown, but a prediction also tells about the row that it was
    made for: nothing hides new rows.

    Args:
        folder: the folder of a fit.
        table: a file or a frame with the columns of the fit.
        out: a .csv file to write predictions to. Texts that spreadsheets would run as
            formulas get an apostrophe there.

    Returns:
        The predictions as a frame, one row each, and warnings. The first column is that
        of the ids where the fit and the table have one, else `row`, numbers from 0.
        Then come `prediction` and a `p_CLASS` for each class; or, in a regression,
        `mean`, `lower` and `upper`, the ends of 90 % intervals.

    Raises:
        InputError: if the folder is not that of a fit, or a column of the table is not
            what it was at the fit.
    """
    import pandas as pd

    fit = read_fit(folder)
    schema = fit.schema
    frame = as_frame(table)
    X = encode(frame, schema).X
    columns: dict[str, np.ndarray] = {"row": np.arange(len(frame))}
    if schema.id is not None and schema.id in frame:
        columns = {schema.id: frame[schema.id].to_numpy()}
    columns |= _prediction_columns(fit, X)
    predictions = pd.DataFrame(columns)
    if out is not None:
        _write_predictions(predictions, out)
    unknown = unknown_categories(frame, schema)
    problem = "have a category that the model does not know"
    notes = [f"Some rows of column {name!r} {problem}." for name in unknown]
    return TablePredictions(predictions, notes)


def _prediction_columns(fit: Fit, X: NDArray[np.float64]) -> dict[str, np.ndarray]:
    """Return the predictions of encoded rows[n, d], by the names of their columns."""
    model = fit.model
    if fit.schema.task == "regression":
        lower, upper = model.interval(X)
        mean = model.mean_and_spread(X).mean
        return {"mean": mean, "lower": lower, "upper": upper}
    p = model.probabilities(X)
    classes = np.asarray(fit.schema.classes)
    columns = {"prediction": classes[p.argmax(1)]}
    for index, label in enumerate(classes):
        columns[f"p_{label}"] = p[:, index]
    return columns
